"""``privacy_``: what a fitted density promises, to whom, under which relation, or why it promises nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenhand._numbers import rounded_up
from evenhand.accounting import accountant
from evenhand.accounting.plan import Plan
from evenhand.types import Guarantee

REPLACE_ONE, ADD_REMOVE = "replace one", "add/remove"


@dataclass(frozen=True)
class Promise:
    """What was spent, by owner class; ``epsilon`` is the largest, None where none is established.

    ``epsilons`` hold for adding or removing one record, ``replaced`` for replacing one by another of the same owner.
    Printing it gives the words; a bare epsilon is never printed.
    """

    guarantee: Guarantee
    adjacency: str
    delta: float
    epsilons: Mapping[str, float | None]
    replaced: Mapping[str, float | None]
    notes: tuple[str, ...] = ()
    unit: str = "one record"

    @property
    def epsilon(self) -> float | None:
        """Of the owner class that spends most, under ``adjacency``."""
        return _largest(self.replaced if self.adjacency == REPLACE_ONE else self.epsilons)

    def __str__(self) -> str:
        if self.epsilon is None:
            return "\n".join(
                ["No privacy guarantee is established for this model, so no epsilon is printed.", *self.notes]
            )
        lines = [f"Guarantee: {self.guarantee}; promised for: {self.adjacency} (unit: {self.unit})."]
        for name, epsilon in self.epsilons.items():
            assert epsilon is not None
            other = self.replaced[name]
            assert other is not None
            lines.append(
                f"Each record of owner {name!r}: epsilon {rounded_up(epsilon)} if it is added or removed, epsilon "
                f"{rounded_up(other)} if it is replaced; delta {self.delta:g}."
            )
        return "\n".join([*lines, *self.notes])


def of_plan(plan: Plan, factor: float, adjacency: str, notes: tuple[str, ...]) -> Promise:
    """The promise of a plan of full-batch releases; for ``factor`` see ``replaced``."""
    names = plan.facts.owner_names
    added, exchanged = (dict(zip(names, found, strict=True)) for found in (plan.epsilons, replaced(plan, factor)))
    return Promise(plan.guarantee, adjacency, plan.delta, added, exchanged, notes, plan.unit)


def replaced(plan: Plan, factor: float) -> tuple[float, ...]:
    """Epsilon of every owner class if one record is REPLACED by another of its owner, from the noise of the plan.

    ``factor`` is how much further that moves the releases than removing a record does: at most 2, since it is a removal
    and an addition.
    """
    found: dict[float, float] = {}
    for index, scale in enumerate(plan.scales):
        if scale not in found:
            events = [(rate, noise / factor, count) for rate, noise, count in plan.events(index)]
            found[scale] = accountant.epsilon(events, plan.delta)
    return tuple(found[scale] for scale in plan.scales)


def _largest(values: Mapping[str, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None]
    return max(known) if len(known) == len(values) else None
