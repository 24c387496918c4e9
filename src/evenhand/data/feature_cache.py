"""Replaces the inputs of records by features, computed once before training and stored for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from evenhand import durable
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import fingerprint
from evenhand.data.record_seeds import Quiet
from evenhand.data.sources.base import cache_folder
from evenhand.errors import DataError, UsageError, VerificationError

Extract: TypeAlias = Callable[[str, Tensor], Tensor]
LARGEST = 2**29
"""Bytes of inputs that are fetched at a time."""


def featured(data: Data, name: str, extract: Extract, *, keep: bool = False, provenance: str = "") -> Data:
    """Return these records with ``extract(name, inputs)`` as inputs; targets, groups and owners stay.

    The features of a record must depend on that record and on nothing private besides; then the guarantee is that of
    training on them. The fingerprint stays that of the raw records, so runs on other features of them add up.

    Args:
      data: records with one tensor of inputs.
      name: of the features.
      extract: makes one row of features per row of inputs.
      keep: keep the features in the user's cache, where only the user may read them: they are as private as the data.
      provenance: the public network that makes them, its licence and pre-training data, for the statement.

    Examples:
      >>> from evenhand.data.dataset import wrap
      >>> raw = wrap(torch.ones(3, 2), [0, 1, 1])
      >>> summed = featured(raw, "sum", lambda name, inputs: inputs.sum(1, keepdim=True))
      >>> summed.facts.inputs, summed.fetch(torch.arange(2))[0].tolist(), fingerprint(summed) == fingerprint(raw)
      ('(1,) float32', [[2.0], [2.0]], True)
    """
    if data.persons is not None:
        raise UsageError("Features are computed of records: compute them first, then name the persons.")
    if not isinstance(data.fetch(torch.arange(1))[0], Tensor):
        raise DataError("Features need one tensor of inputs per record: these data have several or none.")
    targets = torch.cat([codes for _, codes in _parts(data)])
    file = _file(data, name, extract) if keep else None
    features = _cached(file) if file is not None else None
    if features is None or len(features) != len(data):
        rows = [extract(name, inputs).detach().to("cpu", torch.float32) for inputs, _ in _parts(data)]
        features = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous()
        if len(features) != len(data):
            raise DataError(
                f"The features {name!r} have {len(features)} rows for {len(data)} records: give one per record."
            )
        if file is not None:
            _keep(file, features)
    computed = features
    return replace(
        data,
        facts=replace(data.facts, inputs=f"{tuple(computed.shape[1:])} float32", features=provenance),
        fetch=Quiet(lambda some: (computed[some], targets[some])),
        origin=fingerprint(data),
    )


def _parts(data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of all records in their order, about `LARGEST` bytes at a time."""
    record = data.fetch(torch.arange(1))[0]
    count = max(1, LARGEST // (record.numel() * record.element_size() or 1))
    for rows in torch.split(torch.arange(len(data)), count):
        yield data.fetch(rows)


def _file(data: Data, name: str, extract: Extract) -> Path:
    """Return the path of the cached features, named by a hash of the inputs, the features' name and the code."""
    digest = hashlib.sha256(f"{name} {len(data)} {data.facts.inputs}".encode())
    for inputs, _ in _parts(data):
        digest.update(inputs.contiguous().view(torch.uint8).numpy().data)
    for code in sorted(Path(inspect.getfile(extract)).parent.glob("*.py")):
        digest.update(code.read_bytes())
    return cache_folder() / "features" / f"{digest.hexdigest()}.safetensors"


def _cached(file: Path) -> Tensor | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file).get("features")
    except (OSError, SafetensorError):
        return None


def _keep(file: Path, features: Tensor) -> None:
    """Write the features as a safetensors file, without a copy in memory; if that fails, there is no cache."""
    size = features.numel() * features.element_size()
    header = json.dumps({"features": {"dtype": "F32", "shape": list(features.shape), "data_offsets": [0, size]}})
    header += " " * (-len(header) % 8)
    with contextlib.suppress(OSError, VerificationError):
        durable.make_folder(file.parent, private=True, parents=True)
        durable.clean(file.parent)
        with durable.writing(file, durable.PRIVATE) as out:
            out.write(len(header).to_bytes(8, "little") + header.encode())
            out.write(features.view(-1).view(torch.uint8).numpy().data)
