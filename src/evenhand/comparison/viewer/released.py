"""Reads what may be shared of a run folder: promise, spent epsilon, and the released figures on held-out records.

Guarantee: ``private/``, ``config.toml`` and ``env.json`` are never opened. Nor are the figures of a run whose statement
says that its metrics must not be shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand._numbers import delta, promised, spent_range
from evenhand.accounting.plan import Plan
from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.reporting.group_metrics import Estimate, estimate
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.run_findings import worst_group
from evenhand.runs.folder import Folder

REPORT = "report.html"
METRICS = "metrics.jsonl"
_SHARE = (int, float)
_FIGURES: untrusted.Shape = {str: {"accuracy": _SHARE, "n": int}}
_GROUPS: untrusted.Shape = {"groups": {str: (int, float, type(None))}, "group_records": {str: int}, "records": int}


@dataclass(frozen=True)
class Strength:
    """Whom one strength of the offset serves: accuracy overall, of the mean class, of each class and of each group."""

    tau: float
    overall: Estimate
    balanced: float | None
    classes: Mapping[str, Estimate]
    groups: Mapping[str, Estimate]


@dataclass(frozen=True)
class ReleasedRun:
    """The shareable part of one run; ``withheld`` says why there are no figures, where there are none."""

    path: Path
    plan: Plan
    promise: str
    spent: str
    overall: Estimate
    groups: Mapping[str, Estimate]
    worst: str | None = None
    tau: float = 0.0
    goal: str = "overall"
    strengths: Sequence[Strength] = field(default_factory=tuple)
    withheld: str = ""
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        """Return the name of the run's folder, without where it lies."""
        return self.path.name or "run"

    def report(self) -> bytes | None:
        """Return the run's report; None if there is none or it must not be shared."""
        if self.withheld or not (self.path / REPORT).is_file():
            return None
        return untrusted.read_bytes(self.path / REPORT)


def read(path: Path) -> ReleasedRun:
    """Return what may be shared of a run folder.

    Raises:
      UsageError: it is no run folder, or nothing was charged yet.
      VerificationError: a file of it is damaged; the message names the folder.
    """
    folder = Folder.existing(path)
    if not folder.begun:
        raise UsageError(f"{path} has not begun: its ledger has no row yet. Train it first, or leave it out.")
    try:
        return _released(folder)
    except UsageError:
        raise
    except EvenhandError as error:
        raise VerificationError(f"{path}: {error} Check it with `evenhand verify {path}`, or leave it out.") from None


def _released(folder: Folder) -> ReleasedRun:
    plan, statement = folder.plan(), folder.statement()
    shared = METRICS in statement["sharing"]["may_be_shared"]
    last = folder.last_evaluation() if shared else {}
    groups = _groups(last)
    accuracy = last.get("accuracy")
    return ReleasedRun(
        path=folder.path.absolute(),
        plan=plan,
        promise=_promise(plan),
        spent=_spent(statement),
        overall=estimate(float("nan"), 0) if accuracy is None else _overall(accuracy, last),
        groups=groups,
        worst=worst_group(
            {name: one.value for name, one in groups.items()}, {name: one.independent for name, one in groups.items()}
        ),
        tau=_number(last.get("tau"), 0.0),
        goal=str(last.get("goal", "overall")),
        strengths=_strengths(last),
        withheld=_why(shared, last),
        warnings=tuple(statement["warnings"]),
    )


def _why(shared: bool, last: Mapping[str, Any]) -> str:
    """Return why a run has no figures; empty if it has some."""
    if not shared:
        return "its statement says that its metrics must not be shared"
    return "" if last else "nothing was measured on held-out records"


def _promise(plan: Plan) -> str:
    """Return what was promised, with the terms that an epsilon needs."""
    budgets = [budget for budget in plan.budgets if budget is not None]
    if not budgets:
        return "none"
    least, most = promised(min(budgets)), promised(max(budgets))
    return f"epsilon {least if least == most else f'{least} to {most}'}, delta {delta(plan.delta)}, {_unit(plan)}"


def _unit(plan: Plan) -> str:
    return f"{'person' if plan.facts.promised == 'person' else 'record'} added or removed"


def _spent(statement: Mapping[str, Any]) -> str:
    """Return what is spent, over all owner classes."""
    if statement["guarantee"]["epsilon"] is None:
        return f"no epsilon is established ({statement['guarantee']['level']})"
    spent = [row["epsilon"] for row in statement["owners"]]
    return f"epsilon {spent_range(min(spent), max(spent))}"


def _groups(last: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the accuracy per group of one evaluation, with intervals; small groups are left out of it already."""
    if "groups" not in last:
        return {}
    if not untrusted.fits(last, _GROUPS):
        raise _damaged()
    independent = effective_records.sizes(last)
    return {
        name: _estimate(share, last["group_records"].get(name), independent.get(name))
        for name, share in last["groups"].items()
        if share is not None
    }


def _strengths(last: Mapping[str, Any]) -> tuple[Strength, ...]:
    """Return the frontier of one evaluation; empty where there is none."""
    rows = last.get("frontier") or []
    if not untrusted.fits(rows, [{"tau": _SHARE, "accuracy": _SHARE}]):
        raise _damaged()
    return tuple(
        Strength(
            tau=float(row["tau"]),
            overall=_overall(row["accuracy"], last),
            balanced=None if row.get("balanced") is None else _number(row["balanced"], 0.0),
            classes=_listed(row.get("classes", {})),
            groups=_listed(row.get("groups", {})),
        )
        for row in rows
    )


def _listed(cells: Any) -> dict[str, Estimate]:
    if not untrusted.fits(cells, _FIGURES):
        raise _damaged()
    return {name: _estimate(cell["accuracy"], cell["n"], cell.get("effective")) for name, cell in cells.items()}


def _overall(share: Any, last: Mapping[str, Any]) -> Estimate:
    return _estimate(share, last.get("records"), last.get(effective_records.ALL))


def _estimate(share: Any, records: Any, independent: Any = None) -> Estimate:
    """Return a share with its interval; refuse what is no share of records."""
    told = records if independent is None else independent
    if type(share) not in _SHARE or type(records) is not int or type(told) is not int:
        raise _damaged()
    if not 0 <= share <= 1 or not 1 <= told <= records:
        raise _damaged()
    return estimate(float(share), records, told)


def _number(value: Any, missing: float) -> float:
    return float(value) if type(value) in _SHARE else missing


def _damaged() -> VerificationError:
    return VerificationError(f"{METRICS} cannot be read: it was damaged or edited.")
