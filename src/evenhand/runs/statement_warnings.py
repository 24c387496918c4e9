"""Warnings of a statement: how the run behind it went, and what else came of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan
    from evenhand.runs.ledger import Reading

STOPPED = (
    "the trainer declares that the run ended early independently of the data: epsilon counts the charged steps alone "
    "and holds only if that is true."
)
_NO_EPSILON = "no bound and no epsilon holds for this run"


def of_run(plan: Plan, ledger: Reading, model: str | None) -> list[str]:
    """Return the warnings that follow from the ledger; those that follow from the plan alone are the plan's."""
    warnings = []
    if insecure(ledger):
        warnings.append(
            "the noise comes from a known seed: this run is for research and protects nobody who knows the seed."
        )
    warnings += [blocked(row) for row in ledger.blocked]
    if ledger.foreign:
        warnings.append(
            "weights, or settings of model or loss, were also changed outside of private steps: only changes that use "
            "no data are harmless."
        )
    if plan.earlier:
        warnings.append(
            f"budgets changed after {sum(stage.steps for stage in plan.earlier)} steps: the figures hold for all steps "
            "together if that was decided without looking at what this run had released."
        )
    warnings += plan.replacement_warnings(ledger.counted)
    warnings += [forked(row) for row in ledger.forks]
    if ledger.withdrawn is not None:
        warnings.append(withdrawn(ledger.withdrawn))
    if ledger.lost:
        warnings.append(
            f"{ledger.reserved - ledger.survived()} of the {ledger.reserved} charged steps are in no weights: the run "
            "stopped before a checkpoint held them. They are paid for, and the model was trained for as many fewer."
        )
    if model is not None and ledger.reserved < plan.steps:
        warnings.append(
            f"the model was released after {ledger.reserved} of {plan.steps} planned steps: if held-out figures "
            "decided that, they no longer are an independent test of it."
        )
    return warnings


def insecure(ledger: Reading) -> bool:
    """Return whether any noise came from a public seed."""
    return any(row["insecure"] for row in ledger.segments)


def forked(row: Mapping[str, Any]) -> str:
    """Return the warning that a run went back to an earlier step, and what its promise therefore rests on.

    Examples:
      >>> forked({"from": 40, "charged": 100})[:43]
      'budgets were lowered: this run goes on from'
    """
    return (
        f"budgets were lowered: this run goes on from the first {row['from']} of the {row['charged']} steps that "
        f"another run had charged. The figures hold if nothing that was computed from the same beginning after step "
        f"{row['from']} is ever released: weights, checkpoints, metrics and reports of that run, and of others that "
        "left it. Delete them: whoever sees both sees both spends, the ledger of that run counts its own."
    )


def not_covered(row: Mapping[str, Any]) -> str:
    """Return the fork as an entry of the list of what a statement does not cover."""
    return f"what the run that this one was forked from computed after step {row['from']}: it must never be released"


def blocked(row: Mapping[str, Any]) -> str:
    """Return the warning that a run was stopped because no figure holds for it.

    Examples:
      >>> blocked({"position": 7, "cause": "records"})[:57]
      "before step 7 records were found to influence each other'"
    """
    causes = {
        "records": "records were found to influence each other's gradients",
        "state": "state of the model was found to have been changed by no private step",
        "audit": "an audit certified more epsilon than was promised",
    }
    cause = causes.get(row["cause"], "the run was found to be unsound")
    return f"before step {row['position']} {cause}: {_NO_EPSILON}. Nothing that it computed may be released: delete it."


def tells_blocked(warnings: Sequence[str]) -> bool:
    """Return whether these warnings say that the run was stopped because no figure holds for it.

    Examples:
      >>> tells_blocked([blocked({"position": 7, "cause": "state"})]), tells_blocked([])
      (True, False)
    """
    return any(_NO_EPSILON in text for text in warnings)


def withdrawn(row: Mapping[str, Any]) -> str:
    """Return the warning that a run was left for a fork and must release nothing more."""
    return (
        f"this run was withdrawn: budgets were lowered, and another run goes on from its first {row['from']} steps. "
        "Nothing that it computed after them may be released: delete it."
    )
