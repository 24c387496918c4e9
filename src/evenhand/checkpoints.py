"""Checkpoints: a crash leaves the old or the new one, and reading one never executes anything.

The last one is what a resume takes. A few earlier ones, spread over the run, are kept for the case that budgets are
lowered below what is spent: then the run can only go back to one of them.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenhand.accounting.plan import Plan
from evenhand.errors import PlanMismatchError, UsageError
from evenhand.runs import Folder, write_json

KEPT = 5
"""Checkpoints that stay on disk, the last one included."""


@dataclass(frozen=True)
class Mark:
    """A checkpoint that is there: steps in its weights, the ledger's head when it was written, its file."""

    position: int
    head: str
    file: Path


def save(folder: Folder, state: Mapping[str, Any]) -> None:
    """Write tensors and numbers only, with the ledger's head, so that a shortened ledger shows."""
    file = folder.checkpoint_file
    beside = file.with_suffix(".part")
    beside.unlink(missing_ok=True)  # what a crash left may be a second name of a kept checkpoint
    torch.save(dict(state), beside)
    beside.chmod(0o600)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(beside, file)
    write_json(file.with_suffix(".json"), {key: state[key] for key in ("ledger_head", "position")})
    if state["position"]:
        _keep(folder, Mark(state["position"], state["ledger_head"], file))
        _thin(folder)


def load(folder: Folder, plan: Plan) -> dict[str, Any] | None:
    """The last checkpoint of this plan or of one it continues, None if there is none; no other plan can resume it."""
    if not folder.checkpoint_file.exists():
        return None
    state = read(folder.checkpoint_file)
    if state["plan"] not in (plan.digest, *(stage.plan for stage in plan.earlier)):
        raise PlanMismatchError("The checkpoint was written under another plan: a changed plan cannot resume a run.")
    return state


def read(file: Path) -> dict[str, Any]:
    """What a checkpoint holds; one that is damaged, or that holds anything but tensors and plain values, is refused."""
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        raise UsageError("The checkpoint of this run is damaged or is not one of ours: it was not loaded.") from None
    return state


def marks(folder: Folder) -> list[Mark]:
    """The checkpoints that are there, the latest first; one whose marker cannot be read is passed over."""
    found = {}
    for marker in folder.markers():
        try:
            written = json.loads(marker.read_bytes())
            mark = Mark(int(written["position"]), str(written["ledger_head"]), marker.with_suffix(".pt"))
        except (ValueError, KeyError, TypeError):
            continue
        if mark.file.exists():
            found[mark.head] = mark
    return sorted(found.values(), key=lambda mark: mark.position, reverse=True)


def take(folder: Folder, chosen: Mark, others: Sequence[Mark]) -> None:
    """Put another run's checkpoints into a new folder: ``chosen`` is the one to go on from."""
    for mark in (chosen, *others):
        _keep(folder, mark)
    _link(chosen.file, folder.checkpoint_file)
    write_json(folder.checkpoint_file.with_suffix(".json"), _marker(chosen))


def spread(positions: Sequence[int], most: int = KEPT) -> list[int]:
    """Which positions to keep: the last, and of the others those that leave the smallest gaps from the start on.

    Examples:
      >>> spread([10, 20, 30, 40, 41, 50])
      [10, 20, 30, 40, 50]
    """
    kept = sorted(positions)
    while len(kept) > most:
        gaps = [after - before for before, after in zip([0, *kept], kept[1:], strict=False)]
        kept.pop(gaps.index(min(gaps)))
    return kept


def _keep(folder: Folder, mark: Mark) -> None:
    """The file first and its marker after it: without a marker a file counts for nothing."""
    folder.kept.mkdir(mode=0o700, exist_ok=True)
    file = folder.kept / f"{mark.position:09d}.pt"
    file.with_suffix(".json").unlink(missing_ok=True)
    _link(mark.file, file)
    write_json(file.with_suffix(".json"), _marker(mark))


def _thin(folder: Folder) -> None:
    there = {int(file.stem): file for file in folder.kept.glob("*.pt")}
    for position in there.keys() - set(spread(list(there))):
        there[position].with_suffix(".json").unlink(missing_ok=True)
        there[position].unlink()


def _link(file: Path, to: Path) -> None:
    """A second name for the same bytes, which are never written again; a copy where the disk has no second names."""
    beside = to.with_suffix(".part")
    beside.unlink(missing_ok=True)
    try:
        os.link(file, beside)
    except OSError:
        shutil.copy2(file, beside)
    os.replace(beside, to)


def _marker(mark: Mark) -> dict[str, Any]:
    return {"ledger_head": mark.head, "position": mark.position}
