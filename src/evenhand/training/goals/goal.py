"""Name a goal and what follows from it: the offset's strength in the loss, and the kind of decision.

A goal changes a loss's constant offsets and how outputs become answers. It never changes the plan, so a promise does
not depend on it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods.priors import Prior

TAU: Mapping[str, float] = {"overall": 0.0, "balanced": 2.0, "worst": 2.5, "parity": 0.0}
"""Strength of the offset by goal, where nobody gives one: a rule that looks at no record.

1 is the textbook's value for balanced accuracy. Outputs of a privately trained model are smaller than log odds, so the
offset that balances is larger: docs/results/serving_* have what each strength gives on several data sets.
"""
PATH = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Strengths that every frontier shows."""
PARITY: Mapping[str, str] = {
    "fpr": "false_positive_rate_parity",
    "tpr": "true_positive_rate_parity",
    "selection_rate": "demographic_parity",
    "equalized_odds": "equalized_odds",
}
"""Metrics that can be made equal between groups, and fairlearn's names of the constraint."""
HELD_OUT = "held-out"
"""In place of a number: the strength is chosen on held-out records, see ``crossed``."""
Tau: TypeAlias = float | str | None


@dataclass(frozen=True)
class Goal:
    """One goal: "overall", "balanced", "worst", or "parity" with the metric that groups are to share.

    Examples:
      >>> Goal.parse("worst").tau, Goal.parse("parity:fpr")
      (2.5, Goal(name='parity', metric='fpr'))
    """

    name: str = "overall"
    metric: str | None = None

    def __post_init__(self) -> None:
        _validate.known(self.name, TAU, "goal")
        if self.name == "parity":
            _validate.known(self.metric or "", PARITY, "metric of parity")
        elif self.metric is not None:
            raise UsageError(f"The goal {self.name} takes no metric: write --goal {self.name}.")

    @classmethod
    def parse(cls, text: str | Goal) -> Goal:
        """Return the goal that ``NAME`` or ``parity:METRIC`` stands for; raise for an unknown one."""
        if isinstance(text, Goal):
            return text
        if not isinstance(text, str):
            raise UsageError("A goal is a name: overall, balanced, worst, or parity:fpr.")
        if text == "parity":
            raise UsageError(f"Say what groups are to share: parity:{', parity:'.join(PARITY)}.")
        name, colon, metric = text.partition(":")
        return cls(name, metric if colon else None)

    @property
    def tau(self) -> float:
        """Return the strength of the offset where none is given."""
        return TAU[self.name]

    @property
    def needs_prior(self) -> bool:
        """Return whether the goal can be served with counts of labels only."""
        return self.name in ("balanced", "worst")

    def __str__(self) -> str:
        return self.name if self.metric is None else f"{self.name}:{self.metric}"


OVERALL = Goal()


def check_tau(tau: Any, goal: Goal) -> Tau:
    """Return a strength that was asked for: None, a number from 0 on, or "held-out"; raise for anything else.

    Examples:
      >>> check_tau("2", Goal("worst")), check_tau("held-out", Goal("worst")), check_tau(None, Goal())
      (2.0, 'held-out', None)
    """
    if tau is None:
        return None
    if goal.name == "parity":
        raise UsageError("tau belongs to the goals balanced and worst; parity sets one threshold per group.")
    if isinstance(tau, str) and tau == HELD_OUT:
        if not goal.needs_prior:
            raise UsageError("tau can be chosen on held-out records for a goal: --goal balanced or --goal worst.")
        return tau
    try:
        number = float(tau)
    except (TypeError, ValueError):
        raise UsageError(f"tau takes a number from 0 on, or {HELD_OUT}.") from None
    if not math.isfinite(number) or number < 0 or isinstance(tau, bool):
        raise UsageError(f"tau takes a finite number from 0 on, or {HELD_OUT}.")
    return number


def declared(counts: Prior | Sequence[float] | Mapping[Any, float], labels: int) -> Prior:
    """Return the prior of publicly known counts, one per label.

    Examples:
      >>> declared([900, 100], 2).shares()
      ((0.9, 0.1),)
    """
    prior = counts if isinstance(counts, Prior) else Prior.declared(counts)
    if labels and prior.labels != labels:
        raise UsageError(
            f"The prior has {prior.labels} counts, and there are {labels} labels: give one count per label, in their "
            "order. Nothing was spent."
        )
    return prior


def refuse_without_prior(goal: Goal, tau: Tau, prior: object | None) -> None:
    """Raise if a goal or a strength needs counts of labels and there are none."""
    if prior is None and (goal.needs_prior or tau not in (None, 0.0)):
        raise UsageError(
            f"The goal {goal} needs to know how frequent each label is, and this run has no counts of labels: they "
            "are released with noise, at a small charge, unless --no-prior is given or targets are real numbers. "
            "Publicly known counts can be declared: --prior 900,100, in Python prior=[900, 100]. No step was made."
        )
