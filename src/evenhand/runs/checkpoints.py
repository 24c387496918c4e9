"""Checkpoints: a crash leaves the old or the new one, and reading one never executes anything.

The last one is what a resume takes. A few earlier ones, spread over the run, are kept for the case that budgets are
lowered below what is spent: then the run can only go back to one of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenhand import durable, untrusted
from evenhand.accounting.plan import Plan
from evenhand.errors import EvenhandError, PlanMismatchError, UsageError, VerificationError
from evenhand.runs.folder import Folder, as_json, write_json

KEPT = 5
"""Checkpoints that stay on disk, the last one included."""
_SHAPE: untrusted.Shape = {"plan": str, "position": int, "ledger_head": str}
"""What every checkpoint holds beside the states of model and optimizer; see ``untrusted.fits``."""
_STATES = ("model", "optimizer", "memory")
_OTHERS = (EOFError, ValueError, TypeError, LookupError, AttributeError, OSError, AssertionError, NotImplementedError)
"""What unpickling of bytes that are no checkpoint can end in."""


@dataclass(frozen=True)
class Mark:
    """A checkpoint on disk: the number of steps in its weights, the ledger's head when it was written, its file."""

    position: int
    head: str
    file: Path


def save(folder: Folder, state: Mapping[str, Any], *, keep: bool = True) -> None:
    """Write tensors and numbers only, with the ledger's head, so that a shortened ledger shows; durable on return.

    The last checkpoint is replaced. With ``keep`` this one may stay when later ones are written.
    """
    file = folder.checkpoint_file
    with durable.writing(file, durable.PRIVATE) as written:
        sink = durable.Deferred(written)
        torch.save(dict(state), sink)  # type: ignore[arg-type] # it only writes
        sink.settle()
    write_json(file.with_suffix(".json"), {key: state[key] for key in ("ledger_head", "position")})
    if keep and state["position"]:
        _keep(folder, Mark(state["position"], state["ledger_head"], file))
        _thin(folder)


def load(folder: Folder, plan: Plan) -> dict[str, Any] | None:
    """Return the last checkpoint, or None if there is none.

    It must belong to this plan or to one that this plan continues: else PlanMismatchError is raised.
    """
    if not folder.checkpoint_file.exists():
        return None
    state = read(folder.checkpoint_file)
    if state["plan"] not in (plan.digest, *(stage.plan for stage in plan.earlier)):
        raise PlanMismatchError("The checkpoint was written under another plan: a changed plan cannot resume a run.")
    return state


def repair_marker(folder: Folder) -> None:
    """Write the last checkpoint's marker again if a crash left one of an earlier step, or none; durable on return."""
    if not folder.checkpoint_file.exists():
        return
    state = read(folder.checkpoint_file)
    right = {key: state[key] for key in ("ledger_head", "position")}
    marker = folder.checkpoint_file.with_suffix(".json")
    if not marker.exists() or marker.read_bytes() != as_json(right):
        write_json(marker, right)


def read(file: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file; refuse a damaged one, and any but tensors and plain values."""
    try:
        with untrusted.opened(file, largest=None) as opened:
            untrusted.check_stored(opened, file.name)
            state = torch.load(opened, weights_only=True)
    except (EvenhandError, pickle.UnpicklingError, RuntimeError, MemoryError, *_OTHERS):
        state = None
    if not untrusted.fits(state, _SHAPE) or not all(isinstance(state[name], dict) for name in _STATES):
        raise UsageError(
            f"The checkpoint {file.name} of this run is damaged or is not one of ours: it was not loaded. What was "
            "charged stays charged. If you have a copy of the run folder's private part, put the file back and resume."
        )
    return dict(state)


def marks(folder: Folder) -> list[Mark]:
    """Return the checkpoints on disk, the latest first, without those whose marker cannot be read."""
    by_head = {}
    for marker in folder.markers():
        try:
            written = untrusted.read_json(marker, {"position": int, "ledger_head": str}, largest=untrusted.SMALL)
            mark = Mark(written["position"], written["ledger_head"], marker.with_suffix(".pt"))
        except VerificationError:
            continue
        if mark.file.exists():
            by_head[mark.head] = mark
    return sorted(by_head.values(), key=lambda mark: mark.position, reverse=True)


def take(folder: Folder, chosen: Mark, others: Sequence[Mark]) -> None:
    """Link another run's checkpoints into a new folder; ``chosen`` is the one to go on from."""
    for mark in (chosen, *others):
        _keep(folder, mark)
    durable.link(chosen.file, folder.checkpoint_file)
    write_json(folder.checkpoint_file.with_suffix(".json"), _marker(chosen))


def spread(positions: Sequence[int], most: int = KEPT) -> list[int]:
    """Return the positions to keep: the last, and of the others those that leave the smallest gaps from the start on.

    Examples:
      >>> spread([10, 20, 30, 40, 41, 50])
      [10, 20, 30, 40, 50]
    """
    selection = sorted(positions)
    while len(selection) > most:
        gaps = [after - before for before, after in zip([0, *selection], selection[1:], strict=False)]
        selection.pop(gaps.index(min(gaps)))
    return selection


def _keep(folder: Folder, mark: Mark) -> None:
    """Link a checkpoint among the kept ones: the file first, then its marker, without which a file does not count."""
    durable.make_folder(folder.kept, private=True)
    file = folder.kept / f"{mark.position:09d}.pt"
    file.with_suffix(".json").unlink(missing_ok=True)
    durable.link(mark.file, file)
    write_json(file.with_suffix(".json"), _marker(mark))


def _thin(folder: Folder) -> None:
    """Remove kept checkpoints until ``KEPT`` are left, each marker before its file."""
    there = {int(file.stem): file for file in folder.kept.glob("*.pt")}
    for position in there.keys() - set(spread(list(there))):
        there[position].with_suffix(".json").unlink(missing_ok=True)
        there[position].unlink()


def _marker(mark: Mark) -> dict[str, Any]:
    return {"ledger_head": mark.head, "position": mark.position}
