"""The steps that remain after budgets changed: noise, rates and bounds on top of what each owner has spent already.

What was spent is never added up as epsilons: the steps before and the steps to come are composed as one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.accounting.accountant import Composition, epsilon
from evenhand.accounting.calibration import COARSE, solve
from evenhand.accounting.events import merged
from evenhand.errors import CalibrationError
from evenhand.types import Event

SPENT = 1e-3
"""An owner that has less than this share of its budget left is left out of the steps that remain."""
MOST = 64
"""Distinct owner classes that are continued; each is solved on its own."""


class NothingLeftError(CalibrationError):
    """What is left of the budgets allows no further step of this method."""


@dataclass(frozen=True)
class Owed:
    """One class: its records, its new budget, and what it was exposed to before."""

    records: int
    budget: float
    before: tuple[Event, ...]


@dataclass(frozen=True)
class Rest:
    """The steps that remain: (relative noise, count), expected batch size, delta, fixed noise of side queries."""

    shape: tuple[tuple[float, int], ...]
    batch: float
    delta: float
    query_noise: float = math.inf

    def events(self, rate: float, scale: float) -> list[Event]:
        """What a class with this rate is exposed to when noise and bound stand in this ratio."""
        return [(rate, merged(scale * noise, [self.query_noise]), count) for noise, count in self.shape]


def alike(classes: Sequence[Owed], rest: Rest) -> float:
    """The noise with which every class keeps its budget when all are treated alike.

    Examples:
      >>> rest = Rest(((1.0, 100),), batch=10, delta=1e-5)
      >>> quiet, loud = (alike([Owed(1000, budget, ((0.01, 1.0, 100),))], rest) for budget in (2.0, 1.0))
      >>> 0 < quiet < loud
      True
    """
    rate = rest.batch / sum(owner.records for owner in classes)
    return max(_noise(owner, rate, rest, "raise its budget too, or use idp_sample") for owner in _distinct(classes))


def bounds(classes: Sequence[Owed], rest: Rest) -> tuple[float, list[float]]:
    """IDP Scale for the rest: one noise, and a relative bound per class; bounds average to 1 over records."""
    rate = rest.batch / sum(owner.records for owner in classes)
    solved = {
        owner: _noise(owner, rate, rest, "raise it a little: a bound cannot be zero") for owner in _distinct(classes)
    }
    own = np.array([solved[_key(owner)] for owner in classes])
    count = np.array([owner.records for owner in classes], dtype=float)
    scale = float(count.sum() / np.sum(count / own))
    return scale, (scale / own).tolist()


def rates(classes: Sequence[Owed], rest: Rest) -> tuple[float, list[float]]:
    """IDP Sample for the rest: one noise, and a rate per class that adds up to the expected batch.

    A class that has nothing left gets rate 0: its records are not drawn any more.

    Examples:
      >>> spent = Owed(500, 1.0, ()), Owed(500, 2.0, ())
      >>> noise, found = rates(spent, Rest(((1.0, 100),), batch=10, delta=1e-5))
      >>> round(500 * sum(found), 6), found[0] < found[1]
      (10.0, True)
    """
    distinct = [owner for owner in _distinct(classes) if not _exhausted(owner, rest.delta)]
    records = {owner: sum(one.records for one in classes if _key(one) == owner) for owner in distinct}
    reach = sum(records.values())
    if reach < rest.batch:
        raise NothingLeftError(
            f"Only {reach} records have any budget left, fewer than the expected batch of {rest.batch:g}: raise more "
            "budgets, or take the model as it is."
        )

    def at(x: float, fine: bool) -> dict[Owed, float]:
        return {owner: _rate(owner, math.exp(x), rest, rest.batch / reach, fine) for owner in distinct}

    def excess(x: float, fine: bool) -> float:
        return math.log(sum(records[owner] * rate for owner, rate in at(x, fine).items()) / rest.batch)

    mean = sum(records[owner] * math.log(_left(owner, rest.delta)) for owner in distinct) / reach
    x = math.log(_start(math.exp(mean), rest.batch / reach, rest))
    x = _crossing(lambda point: excess(point, False), x, width=0.25, within=0.02, grain=0.02)
    x = _crossing(lambda point: excess(point, True), x, width=0.02, within=0.001, grain=1e-4)
    found, over = at(x, True), math.exp(-excess(x, True))
    return math.exp(x), [found.get(_key(owner), 0.0) * over for owner in classes]


def _crossing(rising: Callable[[float], float], x: float, *, width: float, within: float, grain: float) -> float:
    """Where a rising function lies in [0, within]: a bracket that widens, then secants that stay inside it.

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


def _distinct(classes: Sequence[Owed]) -> list[Owed]:
    found = list(dict.fromkeys(_key(owner) for owner in classes))
    if len(found) > MOST:
        raise CalibrationError(
            f"The budgets of {len(found)} different owner classes cannot be changed while a run goes on: at most "
            f"{MOST} can. Start a new run with the new budgets; the dataset ledger adds up both."
        )
    return found


def _key(owner: Owed) -> Owed:
    return Owed(0, owner.budget, owner.before)


def _exhausted(owner: Owed, delta: float) -> bool:
    return epsilon(owner.before, delta) >= owner.budget * (1 - SPENT)


def _left(owner: Owed, delta: float) -> float:
    """About what may still be spent; only a place to start searching from."""
    return owner.budget - epsilon(owner.before, delta)


def _spend(owner: Owed, rest: Rest, events: Callable[[float], list[Event]]) -> Callable[[float, float, float], float]:
    def spend(x: float, rel: float, near: float) -> float:
        whole = [*owner.before, *events(x)]
        return Composition(whole, rel=rel).epsilon(rest.delta, near=near if rel < COARSE else None)

    return spend


def _start(budget: float, rate: float, rest: Rest) -> float:
    """Noise that spends about ``budget`` in the rest alone."""
    fresh = Owed(0, budget, ())
    return math.exp(solve(_spend(fresh, rest, lambda x: rest.events(rate, math.exp(x))), budget, 0.0, fine=False))


def _noise(owner: Owed, rate: float, rest: Rest, advice: str) -> float:
    if _exhausted(owner, rest.delta):
        raise NothingLeftError(
            f"An owner with epsilon {owner.budget:g} has nothing left of it for further steps: {advice}."
        )
    start = math.log(_start(_left(owner, rest.delta), rate, rest))
    return math.exp(solve(_spend(owner, rest, lambda x: rest.events(rate, math.exp(x))), owner.budget, start))


def _rate(owner: Owed, scale: float, rest: Rest, start: float, fine: bool) -> float:
    """The rate that spends the class's budget at this noise; 1 if even that does not."""
    spend = _spend(owner, rest, lambda x: rest.events(math.exp(-x), scale))
    if spend(0.0, COARSE, owner.budget) <= owner.budget * (1 - 1e-2):
        return 1.0
    return math.exp(-solve(spend, owner.budget, -math.log(start), floor=0.0, fine=fine))
