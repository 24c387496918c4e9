"""Tells that arrays hold records of earlier ones: folds, samples and parts of the same data add up as one dataset.

A fingerprint of arrays changes when rows are left out, as the folds of a cross-validation do. So keyed digests of the
rows of every array that came by are kept beside the dataset ledger, readable by their owner only, and arrays that share
a row get one name. Where arrays that were apart until then are joined by others, their entries are joined too.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from filelock import Timeout

from evenhand import durable, untrusted
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import Survey, fingerprint, survey
from evenhand.errors import EvenhandError, StorageError
from evenhand.runs.dataset_ledger import DatasetLedger, state_folder
from evenhand.runs.folder import as_json


def origin_of(data: Data) -> str:
    """Return the name under which runs on these records add up, with those on all arrays that share a row with them.

    Rows are the same if all their inputs are equal as float32. People who are equal in all columns count as one person:
    budgets are then added up too often, never too seldom. Rows that were scaled or encoded in another way are others.

    The digests are durable on return. The name is a secret, see ``fingerprint``.

    Examples:
      >>> import os, tempfile, torch
      >>> from evenhand.data import wrap
      >>> os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
      >>> people, others = torch.rand(90, 3), torch.rand(90, 3)
      >>> first, second, third = (wrap(rows, [0] * len(rows)) for rows in (people[:60], people[30:], others))
      >>> origin_of(first) == origin_of(second), origin_of(first) == origin_of(third)
      (True, False)
    """
    if data.origin is not None:
        return fingerprint(data)
    folder = state_folder() / "records"
    try:
        durable.make_folder(folder.parent, private=True, parents=True)
        durable.make_folder(folder, private=True)
        with durable.lock(folder / ".lock").acquire(timeout=30):
            durable.clean(folder)
            return _named(data, folder)
    except Timeout:
        raise EvenhandError(
            f"Another process has been writing to {folder} for half a minute: try again; nothing was spent."
        ) from None
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror}), so runs on parts of the same data could not be added up. "
            "Set EVENHAND_STATE to a folder of yours.",
            code=error.errno,
        ) from None


def _named(data: Data, folder: Path) -> str:
    rows = survey(replace(data), _key(folder))  # a copy: the run keeps a survey with a key of its own
    known = {file: Survey.read(file) for file in sorted(folder.glob("*.npz"))}
    near = {file: seen for file, seen in known.items() if np.isin(rows.inputs, seen.inputs).any()}
    alone = DatasetLedger(fingerprint(data)).current.secret  # under it runs on these very arrays are counted elsewhere
    names = sorted({_name(file) for file in near}) or [alone]
    for other in {*names, alone} - {names[0]}:
        DatasetLedger(names[0]).join(DatasetLedger(other))
    together = np.concatenate([seen.inputs for seen in near.values()]) if near else rows.inputs[:0]
    if not np.isin(rows.inputs, together).all():
        file = folder / f"{len(known):06d}.npz"
        durable.write(file.with_suffix(".json"), as_json({"origin": names[0]}), durable.PRIVATE)
        durable.write(file, rows.to_bytes(), durable.PRIVATE)
    return names[0]


def _name(file: Path) -> str:
    origin = untrusted.read_json(file.with_suffix(".json"), {"origin": str})["origin"]
    return DatasetLedger(str(origin)).current.secret


def _key(folder: Path) -> bytes:
    """Return the key of all digests here; it is made once."""
    file = folder / "key"
    if not file.exists():
        durable.write(file, os.urandom(32), durable.PRIVATE)
    return untrusted.read_bytes(file)
