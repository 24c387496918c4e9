"""Finding points that spend their budgets: a safeguarded secant for one, knots and certificates for many.

A point ``x`` is the log of a noise scale or minus the log of a rate, so that spend always falls with ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat
from typing import TypeAlias

import numpy as np

from evenhand.accounting.gaussian_profile import Array, total_variation_gap
from evenhand.accounting.many_owners import certify, pchip
from evenhand.errors import CalibrationError
from evenhand.types import Event

Spend: TypeAlias = Callable[[float, float, float], float]
"""(point, relative accuracy of the grid, about what to expect) -> epsilon."""

COARSE, FINE = 2e-3, 1e-4
_SPAN = 18.0  # how far (in logs) from its start a search may wander
FEW = 8  # distinct budgets that are solved one by one
MARGIN = 1.4e-3  # what interpolation aims below many budgets: more than a certificate loses between two knots
_BLOCK = 4e-4  # budgets this close (relative) share one certificate


def solve(spend: Spend, target: float, x: float, *, floor: float = -math.inf, fine: bool = True) -> float:
    """Point ``x >= floor`` whose spend lies 0.006 to 0.045 % below the target; ``spend`` falls with ``x``.

    Secant steps on log epsilon, on a coarse grid first (alone if not ``fine``: within 1 %). Only a point whose spend
    was computed is returned; the margin keeps it within the target when it is computed again on another grid.
    """
    slope, origin = -1.0, x
    stages = ((COARSE, 0.01, 0.003, 0.0), (FINE, 4.5e-4, 2e-4, 6e-5))
    for rel, tolerance, aim, margin in stages if fine else stages[:1]:
        low, high, step = -math.inf, math.inf, 1.0
        previous: tuple[float, float] | None = None
        for _ in range(60):
            value = spend(x, rel, target)
            if target * (1 - tolerance) <= value <= target * (1 - margin):
                break
            low, high = (x, high) if value > target * (1 - margin) else (low, x)
            if abs(x - origin) > _SPAN or (x == floor and value < target):
                raise CalibrationError(
                    f"No setting spends epsilon {target:.6g}: the nearest tried spends {value:.6g}. Ask for an epsilon "
                    "on that side, or change the number of releases or their rates."
                )
            y = math.log(value / target) + aim if 0 < value < math.inf else math.copysign(math.inf, value - target)
            if previous and math.isfinite(y) and math.isfinite(previous[1]) and x != previous[0]:
                slope = min((y - previous[1]) / (x - previous[0]), -0.02)
            previous = (x, y)
            move = max(-step, min(step, -y / slope))
            step *= 1.5 if abs(move) == step else 1.0
            x = max(x + move, floor)
            if not low < x < high:
                x = 0.5 * (max(low, floor) + high)
        else:
            raise CalibrationError(
                f"No setting was found that spends epsilon {target:.6g}: the spend jumps there, and the nearest tried "
                f"spends {value:.6g}. Try another delta, or other rates or numbers of releases."
            )
    return x


def spread(spend: Spend, budgets: Array, x: float, fine: bool, floor: float) -> tuple[Array, Array, Array]:
    """Points for sorted budgets by interpolation between knots; also the knots (falling) and their epsilons."""
    rel = FINE if fine else COARSE
    if not fine and budgets[-1] < 1.05 * budgets[0]:  # closer together than a coarse solution tells apart
        x = solve(spend, float(budgets[0]), x, floor=floor, fine=False)
        return np.full(budgets.size, x), np.array([x]), budgets[:1]
    ends = []
    for target in (float(budgets[0]), float(budgets[-1])):
        x = solve(spend, target, x, floor=floor, fine=fine)
        ends.append(x)
    count = max(6, math.ceil(math.log(budgets[-1] / budgets[0]) / (0.04 if fine else 0.3)))
    knots = np.linspace(ends[0], ends[1], count)
    guess = np.geomspace(budgets[0], budgets[-1], count)
    spent = np.array([spend(float(k), rel, float(g)) for k, g in zip(knots, guess, strict=True)])
    spent = np.maximum.accumulate(spent * (1 + 1e-12 * np.arange(count)))
    return pchip(np.log(spent), knots, np.log(budgets)), knots, spent


def _certified(
    points: Array, knots: Array, budgets: Array, delta: float, events: Callable[[float], list[Event]], by_rate: bool
) -> Array:
    """Move points up (cheaper) until every owner's certificate holds; owners in one block share it.

    Spend is monotone in the point, so the block's dearest point with the block's smallest budget covers all of it.
    """
    order = np.argsort(knots)
    edges = knots[order]
    blocks = np.floor(np.log(budgets) / _BLOCK)
    first = np.flatnonzero(np.append(True, np.diff(blocks) != 0))
    last = np.append(first[1:], budgets.size) - 1
    pending = np.arange(first.size)
    for _ in range(12):
        dear = points[last[pending]]
        cell = np.clip(np.searchsorted(edges, dear, side="left"), 1, edges.size - 1)
        failed: list[int] = []
        for j in np.unique(cell):
            rows = pending[cell == j]
            # A point outside the knots takes the nearer end of a wider cell.
            ends = max(edges[j], float(points[last[rows]].max())), min(edges[j - 1], float(points[last[rows]].min()))
            cheap, costly = events(ends[0]), events(ends[1])
            owner = [events(float(x)) for x in points[last[rows]]]
            share = np.array([list(map(mixture_share, cheap, costly, e, repeat(by_rate))) for e in owner])
            bound = certify(cheap, costly, share, budgets[first[rows]], delta)
            failed += rows[~(bound <= delta)].tolist()
        if not failed:
            return points
        for block in failed:
            points[first[block] : last[block] + 1] += 3e-4
        pending = np.array(failed)
    raise CalibrationError("Some owners could not be certified; bring the budgets closer together or use fewer levels.")


def mixture_share(cheap: Event, costly: Event, owner: Event, by_rate: bool) -> float:
    """Weight on the costly knot of the mixture that dominates the owner's release."""
    if by_rate:
        whole, part = costly[0] - cheap[0], owner[0] - cheap[0]
    else:
        m = 1 / cheap[1], 1 / owner[1], 1 / costly[1]
        whole = float(total_variation_gap(m[0], m[2], "add_remove"))
        part = float(total_variation_gap(m[0], m[1], "add_remove"))
    return min(1.0, max(0.0, part / whole + 1e-11)) if whole > 0 else 1.0  # 1e-11: far above the rounding error


def settle(
    spend: Spend,
    events: Callable[[float], list[Event]],
    budgets: Array,
    delta: float,
    x: float,
    *,
    by_rate: bool,
    floor: float = -math.inf,
) -> Array:
    """A certified point for every budget (sorted): one by one when they are few, else by knots and certificates."""
    if budgets.size <= FEW:
        single = []
        for target in budgets:
            x = solve(spend, float(target), x, floor=floor)
            single.append(x)
        return np.array(single)
    if budgets[-1] < 1.002 * budgets[0]:  # the smallest budget's point serves all within 0.3 %
        return np.full(budgets.size, solve(spend, float(budgets[0]), x, floor=floor))
    points, knots, _ = spread(spend, budgets * (1 - MARGIN), x, True, floor)
    return _certified(np.minimum.accumulate(points), knots, budgets, delta, events, by_rate)
