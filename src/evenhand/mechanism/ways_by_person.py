"""Say which of two ways to train by person has less noise: draw records one by one with a cap, or draw persons.

Both are compared at the same epsilon, delta, number of steps and expected records a step, by the noise in the mean
gradient, in multiples of the clip bound (Charles et al. 2024). Only public facts are used. What is not known from them:
how alike a person's records are. If a step uses several, their mean is shorter the less alike they are, and by person
the clip bound could be smaller.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from evenhand.accounting import calibration
from evenhand.accounting.accountant import merged_noise
from evenhand.accounting.plan import Plan

ALIKE = 0.02
"""Relative difference of noise below which neither way is called better."""


@dataclass(frozen=True)
class Ways:
    """Noise in the mean gradient of a step, in clip bounds, in either way.

    ``persons`` are drawn in a step by person, with ``records`` each.
    """

    one_by_one: float
    by_person: float
    persons: float
    records: int

    @property
    def better(self) -> str:
        """Return the way with less noise: "one by one", "by person", or "alike"."""
        if abs(math.log(self.one_by_one / self.by_person)) <= ALIKE:
            return "alike"
        return "one by one" if self.one_by_one < self.by_person else "by person"

    def __str__(self) -> str:
        factor = self.one_by_one / self.by_person
        verdict = {
            "alike": "neither has less noise",
            "by person": f"by person has less noise, by a factor of {factor:.3g}",
            "one by one": f"one by one has less noise, by a factor of {1 / factor:.3g}",
        }[self.better]
        shorter = (
            ""
            if self.records == 1
            else "; a mean of several gradients is shorter the less alike they are, which is not known here and would "
            "let the clip bound by person be smaller"
        )
        return (
            f"at this epsilon, these steps and records a step the mean gradient has noise {self.one_by_one:.4g} clip "
            f"bounds with records drawn one by one, {self.by_person:.4g} with about {self.persons:.4g} persons drawn "
            f"and {self.records} record(s) of each: {verdict}{shorter}. One by one every record counts the same, by "
            "person every person"
        )


def compare_ways(plan: Plan) -> Ways | None:
    """Return how a plan with a cap of records a person compares with one by person that computes as much.

    None where there is nothing to compare: the plan has no cap or no epsilon above 0, treats owners differently, or
    changed its budgets on the way. Counts of labels are left out on both sides.

    Examples:
      >>> from evenhand.accounting.budgets import Privacy
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand.types import Facts
      >>> facts = Facts(5000, (("all", 5000),), person_cap=10, persons=1000)
      >>> ways = compare_ways(plan("dpsgd", Privacy(3, 1e-5), data=facts, epochs=5, batch_size=100))
      >>> ways.better, ways.persons, ways.records, round(ways.one_by_one / ways.by_person, 1)
      ('by person', 100.0, 1, 1.9)
    """
    batch, persons = plan.expected_batch, plan.facts.persons
    alike = len(set(plan.rates)) == len(set(plan.scales)) == 1
    if not (plan.facts.person_cap and plan.certified and alike) or plan.earlier:
        return None
    spent = dataclasses.replace(plan, prior=None).composed().epsilon(plan.delta)
    if spent == 0:
        return None
    records = math.ceil(batch / persons)
    drawn = batch / records
    events = [(drawn / persons, merged_noise(level.noise, level.queries), level.count) for level in plan.levels]
    factor = calibration.calibrate(events, spent, plan.delta)
    least = min(level.noise for level in plan.levels)
    return Ways(least / batch, factor * least / drawn, drawn, records)
