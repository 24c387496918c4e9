"""Checkpoints: a crash leaves the old or the new one, and reading one never executes anything."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from evenhand.errors import PlanMismatchError, UsageError
from evenhand.plans import Plan
from evenhand.runs import Folder, write_json


def save(folder: Folder, state: Mapping[str, Any]) -> None:
    """Write tensors and numbers only, with the ledger's head, so that a shortened ledger shows."""
    file = folder.private / "checkpoint.pt"
    beside = file.with_suffix(".part")
    torch.save(dict(state), beside)
    beside.chmod(0o600)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(beside, file)
    write_json(file.with_suffix(".json"), {key: state[key] for key in ("ledger_head", "position")})


def load(folder: Folder, plan: Plan) -> dict[str, Any] | None:
    """The last checkpoint of this plan or of one it continues, None if there is none; no other plan can resume it."""
    file = folder.private / "checkpoint.pt"
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        raise UsageError("The checkpoint of this run is damaged or is not one of ours: it was not loaded.") from None
    if state["plan"] not in (plan.digest, *(stage.plan for stage in plan.earlier)):
        raise PlanMismatchError("The checkpoint was written under another plan: a changed plan cannot resume a run.")
    return state
