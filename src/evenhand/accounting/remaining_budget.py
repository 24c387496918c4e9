"""The steps that remain after budgets changed: noise, rates and bounds on top of what each owner has spent already.

What was spent is never added up as epsilons: the steps before and the steps to come are composed as one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.accounting.accountant import Composition, epsilon, merged_noise
from evenhand.accounting.calibration import COARSE, find_point
from evenhand.errors import CalibrationError
from evenhand.types import Event

_EXHAUSTED = 1e-3  # an owner that has less than this share of its budget left is left out of the steps that remain
_MAX_CLASSES = 64  # distinct owner classes that are continued; each is solved on its own


class NothingLeftError(CalibrationError):
    """The budgets leave nothing for a further step of this method."""


@dataclass(frozen=True)
class OwnerBudget:
    """One owner class: its records, its new budget, and the events that it was exposed to before."""

    records: int
    budget: float
    before: tuple[Event, ...]


@dataclass(frozen=True)
class RemainingSteps:
    """The steps that remain.

    Attributes:
      shape: (relative noise, count) of each stretch.
      batch: expected batch size.
      delta: delta of all steps together.
      query_noise: fixed noise multiplier of side queries on the same samples.
      cap: above 1, how many records of a person there are at most, each of which is sampled by itself.
    """

    shape: tuple[tuple[float, int], ...]
    batch: float
    delta: float
    query_noise: float = math.inf
    cap: int = 1

    def events(self, rate: float, scale: float) -> list[Event]:
        """Return what a class with this rate is exposed to when noise and bound stand in the ratio ``scale``."""
        return [(rate, merged_noise(scale * noise, [self.query_noise]), count) for noise, count in self.shape]


def common_noise(classes: Sequence[OwnerBudget], steps: RemainingSteps) -> float:
    """Return the noise with which every class keeps its budget when all are treated alike.

    Examples:
      >>> steps = RemainingSteps(((1.0, 100),), batch=10, delta=1e-5)
      >>> quiet, loud = (common_noise([OwnerBudget(1000, budget, ((0.01, 1.0, 100),))], steps) for budget in (2.0, 1.0))
      >>> 0 < quiet < loud
      True
    """
    rate = steps.batch / sum(owner.records for owner in classes)
    return max(_noise(owner, rate, steps, "raise its budget too, or use idp_sample") for owner in _distinct(classes))


def remaining_bounds(classes: Sequence[OwnerBudget], steps: RemainingSteps) -> tuple[float, list[float]]:
    """Compute one noise and a relative bound per class (IDP Scale); bounds average to 1 over records."""
    rate = steps.batch / sum(owner.records for owner in classes)
    solved = {
        owner: _noise(owner, rate, steps, "raise it a little: a bound cannot be zero") for owner in _distinct(classes)
    }
    noises = np.array([solved[_key(owner)] for owner in classes])
    count = np.array([owner.records for owner in classes], dtype=float)
    scale = float(count.sum() / np.sum(count / noises))
    return scale, (scale / noises).tolist()


def remaining_rates(classes: Sequence[OwnerBudget], steps: RemainingSteps) -> tuple[float, list[float]]:
    """Compute one noise and a rate per class (IDP Sample); they add up to the expected batch.

    A class that has nothing left gets rate 0: its records are not drawn any more.

    Examples:
      >>> spent = OwnerBudget(500, 1.0, ()), OwnerBudget(500, 2.0, ())
      >>> noise, fractions = remaining_rates(spent, RemainingSteps(((1.0, 100),), batch=10, delta=1e-5))
      >>> round(500 * sum(fractions), 6), fractions[0] < fractions[1]
      (10.0, True)
    """
    distinct = [owner for owner in _distinct(classes) if not _exhausted(owner, steps)]
    records = {owner: sum(one.records for one in classes if _key(one) == owner) for owner in distinct}
    reach = sum(records.values())
    if reach < steps.batch:
        raise NothingLeftError(
            f"Only {reach} records have any budget left, fewer than the expected batch of {steps.batch:g}: raise more "
            "budgets, or take the model as it is."
        )

    def at(x: float, fine: bool) -> dict[OwnerBudget, float]:
        return {owner: _rate(owner, math.exp(x), steps, steps.batch / reach, fine) for owner in distinct}

    def excess(x: float, fine: bool) -> float:
        return math.log(sum(records[owner] * rate for owner, rate in at(x, fine).items()) / steps.batch)

    mean = sum(records[owner] * math.log(_left(owner, steps)) for owner in distinct) / reach
    x = math.log(_start(math.exp(mean), steps.batch / reach, steps))
    x = _crossing(lambda point: excess(point, False), x, width=0.25, within=0.02, grain=0.02)
    x = _crossing(lambda point: excess(point, True), x, width=0.02, within=0.001, grain=1e-4)
    by_class, correction = at(x, True), math.exp(-excess(x, True))
    return math.exp(x), [by_class.get(_key(owner), 0.0) * correction for owner in classes]


def _crossing(rising: Callable[[float], float], x: float, *, width: float, within: float, grain: float) -> float:
    """Find where a rising function lies in [0, within]: a bracket that widens, then secants that stay inside it.

    Where little is left of a budget the rates are rough and the function jumps: then the upper end of a bracket
    narrower than ``grain`` will do.
    """
    low, high = (-math.inf, 0.0), (math.inf, 0.0)
    for _ in range(60):
        value = rising(x)
        if 0 <= value <= within:
            return x
        low, high = ((x, value), high) if value < 0 else (low, (x, value))
        if high[0] - low[0] < grain:
            return high[0]
        if math.isinf(low[0]) or math.isinf(high[0]):
            x += math.copysign(width, -value)
            width *= 1.5
        else:
            share = (within / 2 - low[1]) / (high[1] - low[1])
            x = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
    raise CalibrationError("No noise makes the rates of what is left add up to the expected batch; try another.")


def _distinct(classes: Sequence[OwnerBudget]) -> list[OwnerBudget]:
    distinct = list(dict.fromkeys(_key(owner) for owner in classes))
    if len(distinct) > _MAX_CLASSES:
        raise CalibrationError(
            f"The budgets of {len(distinct)} different owner classes cannot be changed while a run goes on: at most "
            f"{_MAX_CLASSES} can. Start a new run with the new budgets; the dataset ledger adds up both."
        )
    return distinct


def _key(owner: OwnerBudget) -> OwnerBudget:
    """Return the class without its number of records: classes that agree in the steps are solved once."""
    return OwnerBudget(0, owner.budget, owner.before)


def _spent(owner: OwnerBudget, steps: RemainingSteps) -> float:
    return epsilon(owner.before, steps.delta, cap=steps.cap)


def _exhausted(owner: OwnerBudget, steps: RemainingSteps) -> bool:
    return _spent(owner, steps) >= owner.budget * (1 - _EXHAUSTED)


def _left(owner: OwnerBudget, steps: RemainingSteps) -> float:
    """Estimate what may still be spent: only a place to start searching from."""
    return owner.budget - _spent(owner, steps)


def _spend(
    owner: OwnerBudget, steps: RemainingSteps, events: Callable[[float], list[Event]]
) -> Callable[[float, float, float], float]:
    def spend(x: float, rel: float, near: float) -> float:
        whole = [*owner.before, *events(x)]
        return Composition(whole, rel=rel, cap=steps.cap).epsilon(steps.delta, near=near if rel < COARSE else None)

    return spend


def _start(budget: float, rate: float, steps: RemainingSteps) -> float:
    """Return a noise that spends about ``budget`` in the remaining steps alone."""
    fresh = OwnerBudget(0, budget, ())
    return math.exp(
        find_point(_spend(fresh, steps, lambda x: steps.events(rate, math.exp(x))), budget, 0.0, fine=False)
    )


def _noise(owner: OwnerBudget, rate: float, steps: RemainingSteps, advice: str) -> float:
    if _exhausted(owner, steps):
        raise NothingLeftError(
            f"An owner with epsilon {owner.budget:g} has nothing left of it for further steps: {advice}."
        )
    start = math.log(_start(_left(owner, steps), rate, steps))
    return math.exp(find_point(_spend(owner, steps, lambda x: steps.events(rate, math.exp(x))), owner.budget, start))


def _rate(owner: OwnerBudget, scale: float, steps: RemainingSteps, start: float, fine: bool) -> float:
    """Return the rate that spends the class's budget at this noise; 1 if even that does not."""
    spend = _spend(owner, steps, lambda x: steps.events(math.exp(-x), scale))
    if spend(0.0, COARSE, owner.budget) <= owner.budget * (1 - 1e-2):
        return 1.0
    return math.exp(-find_point(spend, owner.budget, -math.log(start), floor=0.0, fine=fine))
