"""``verify``: check a run folder against itself, with neither torch nor the data.

The chain of hashes is not keyed: who rewrites the whole folder can make it consistent. Keep the statement's ledger head
elsewhere, and a rewritten or shortened ledger shows.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand.errors import EvenhandError
from evenhand.plans import Plan
from evenhand.privacy import statement as statements
from evenhand.privacy import statement_warnings
from evenhand.privacy.ledger import Commit, Reading, parse
from evenhand.runs import Folder, as_json, head_in, sha256
from evenhand.software import software

_COMPUTED = ("guarantee", "owners", "accounting", "public_inputs", "plan", "ledger_head", "model_sha256", "files")


def verify(path: str | Path) -> dict[str, Any]:
    """Check a run folder against itself: chain, plan, noise of every step, budget, statement, model.

    Returns:
      ``{"ok", "epsilon", "delta", "steps", "owners", "problems", "notes"}``; epsilon is recomputed from the ledger.
      Notes are what a reader must know even when all is well: a public seed, foreign updates, a missing anchor.
    """
    folder = Folder.existing(path)
    try:
        plan, reading = folder.plan(), folder.ledger()
    except EvenhandError as error:
        return _unreadable(str(error))
    if plan.digest != reading.plan or plan.steps != reading.steps or _history(plan) != reading.replans:
        return _unreadable("plan.json is not the plan that the ledger was opened with, or that replaced it.")
    problems = _plan_problems(folder, plan) + _noise_problems(plan, reading)
    epsilons = plan.spent_by_owner(reading.reserved)
    for name, epsilon, budget in zip(plan.facts.owner_names, epsilons, plan.budgets, strict=True):
        if epsilon is not None and budget is not None and epsilon > budget * (1 + 1e-9):
            problems.append(f"owner {name!r} was promised epsilon {budget:g} but the ledger charges {epsilon:.6g}.")
    problems += [statement_warnings.blocked(row) for row in reading.blocked]
    problems += _checkpoint_problems(folder, reading) + _statement_problems(folder, plan, reading)
    worst = None if any(epsilon is None for epsilon in epsilons) else max(e for e in epsilons if e is not None)
    return {
        "ok": not problems,
        "epsilon": None if reading.blocked else worst,
        "delta": plan.delta,
        "steps": reading.reserved,
        "owners": {} if reading.blocked else dict(zip(plan.facts.owner_names, epsilons, strict=True)),
        "problems": problems,
        "notes": _notes(folder, reading),
    }


def _history(plan: Plan) -> tuple[tuple[str, int], ...]:
    """The plans before this one, with the steps that were charged when each was replaced, as the ledger lists them."""
    ends = itertools.accumulate(stage.steps for stage in plan.earlier)
    return tuple((stage.plan, end) for stage, end in zip(plan.earlier, ends, strict=True))


def _unreadable(problem: str) -> dict[str, Any]:
    return {"ok": False, "epsilon": None, "delta": None, "steps": 0, "owners": {}, "problems": [problem], "notes": []}


def _plan_problems(folder: Folder, plan: Plan) -> list[str]:
    """The file must be what was written, and its epsilons must follow from its noise, now as then."""
    problems = [] if folder.plan_file.read_bytes() == as_json(plan.to_json()) else ["plan.json was changed."]
    for recomputed, written in zip(plan.spent_by_owner(), plan.epsilons, strict=True):
        if (recomputed is None) != (written is None) or (recomputed or 0.0) > (written or 0.0) * (1 + 1e-6):
            problems.append("an epsilon written in plan.json is smaller than its noise and steps allow.")
    return problems


def _noise_problems(plan: Plan, reading: Reading) -> list[str]:
    """Every committed step must have been reserved, and have used at least the planned noise for every class."""
    if not plan.certified:
        return []
    for commit in reading.commits:
        if commit.first < 0 or commit.first + commit.count > reading.reserved:
            return ["a step was run that the ledger did not reserve."]
        for position in range(commit.first, commit.first + commit.count):
            level = plan.level_at(position)
            gradient = [
                commit.std >= level.noise / scale * value * (1 - 1e-12)
                for value, scale in _covered(plan.scales_at(position), commit)
            ]
            side = [
                std >= noise * value * (1 - 1e-12)
                for noise, (value, std) in zip(level.queries, commit.queries, strict=True)
            ]
            if not all(gradient + side):
                return [f"step {position} used less noise than planned."]
    return []


def _covered(scales: Sequence[float], commit: Commit) -> list[tuple[float, float]]:
    """Sensitivity and scale of every class that a commit lists; one number for many classes is per unit of scale."""
    if len(commit.sensitivity) == 1 < len(scales):
        return [(commit.sensitivity[0], 1.0)]
    return list(zip(commit.sensitivity, scales, strict=True))


def _checkpoint_problems(folder: Folder, reading: Reading) -> list[str]:
    if any(head_in(marker) not in reading.hashes for marker in folder.markers()):
        return ["the ledger no longer contains the row that a checkpoint was written after: it was shortened."]
    if folder.withdrawn_file.exists() and reading.withdrawn is None:
        return ["this run was withdrawn, and its ledger does not say so any more: it was shortened."]
    return []


def _statement_problems(folder: Folder, plan: Plan, reading: Reading) -> list[str]:
    problems = []
    for file in (folder.model_file, folder.last_model_file):
        if file.exists() and sha256(file) not in reading.released:
            problems.append(f"{file.name} is not a model whose release the ledger records.")
    if not folder.statement_file.exists():
        return problems
    try:
        written = json.loads(folder.statement_file.read_bytes())
        words = statements.markdown(written).encode() if _same_words(written) else None
        intact = (
            folder.statement_file.read_bytes() == as_json(written) and statements.digest(written) == written["digest"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return [*problems, "statement.json cannot be read: it was damaged or edited."]
    if not intact:
        return [*problems, "statement.json was changed."]
    page = folder.path / "statement.md"
    if not page.exists() or words not in (None, page.read_bytes()):
        problems.append("statement.md does not say what statement.json says.")
    if written.get("ledger_head") not in reading.hashes:
        return [
            *problems,
            "the ledger no longer contains the row that the statement was written after: it was shortened.",
        ]
    if written.get("model_sha256") is not None and not folder.model_file.exists():
        problems.append("the model that the statement describes is missing.")
    return problems + _rebuilt_problems(folder, plan, written)


def _same_words(written: Mapping[str, Any]) -> bool:
    """Whether this version wrote the statement; another version's figures are checked, its wording may differ."""
    return bool(written["software"]["evenhand"] == software()["evenhand"])


def _rebuilt_problems(folder: Folder, plan: Plan, written: Mapping[str, Any]) -> list[str]:
    """The statement must follow from the plan and from the ledger as it was when the statement was written."""
    lines = folder.ledger_file.read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if f'"hash":"{written["ledger_head"]}"'.encode() in line)
    then = parse(b"".join(lines[: place + 1]))
    model = (
        sha256(folder.model_file) if written.get("model_sha256") is not None and folder.model_file.exists() else None
    )
    again = statements.build(
        plan,
        then,
        model=model,
        software=written.get("software", {}),
        groups=written.get("groups", {}),
        composition=folder.composition(),
        files=folder.hashes(),
    )
    compared = again if _same_words(written) else _COMPUTED
    wrong = [key for key in compared if key != "digest" and not _alike(again[key], written.get(key))]
    return [f"the statement's {key!r} does not follow from the plan, the ledger and the model." for key in wrong]


def _alike(ours: Any, theirs: Any) -> bool:
    """Equal, numbers up to what another version of the accountant may compute differently."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return set(ours) == set(theirs) and all(_alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-12)
    return bool(ours == theirs)


def _notes(folder: Folder, reading: Reading) -> list[str]:
    notes = []
    if any(row["insecure"] for row in reading.segments):
        notes.append("the noise comes from a public seed: this run protects nobody who knows or guesses it.")
    if reading.foreign:
        notes.append(
            "weights, or settings of model or loss, were also changed outside of private steps; what did that is not "
            "accounted."
        )
    notes += [statement_warnings.forked(row) for row in reading.forks]
    if reading.withdrawn is not None:
        notes.append(statement_warnings.withdrawn(reading.withdrawn))
    if reading.committed < reading.reserved:
        notes.append(f"{reading.reserved - reading.committed} charged steps have no record of what they used.")
    if not folder.anchors():
        notes.append(
            "no statement or checkpoint anchors the ledger: that it was not shortened cannot be told from here."
        )
    return notes
