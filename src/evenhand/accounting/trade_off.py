"""Bound the power of every test for a record: the trade-off curve of composed events, one point at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenhand.accounting.gaussian_profile import Array, Direction, excess
from evenhand.accounting.loss_distribution import LossDistribution, choose_grid
from evenhand.accounting.noise_levels import NoiseLevels
from evenhand.types import Event

_EPSILONS = np.concatenate([np.linspace(0, 4, 513), np.geomspace(4, 700, 512)[1:]])
_LEAST_NOISE = 1e-5
"""Below this a release counts as made without noise."""


def largest_power(events: Sequence[Event], alarms: float, *, near: float = 0.3, rel: float = 2e-3) -> float:
    """Return a bound on the chance that any test says "in" of a record that is in, at this chance of a false alarm.

    Guarantee:
      No test of the composed, dominating pair has more power, and so none of the mechanism (adjacency add/remove). The
      bound is sharp where the power is about ``near``, and loose elsewhere.

    Args:
      events: (rate, noise, count) of what the record is exposed to.
      alarms: chance that the test says "in" of a record that is not.
      near: about the power, if known.
      rel: relative precision of the profile.

    Examples:
      >>> round(largest_power([(1.0, 1.0, 1)], 0.30854), 3), round(largest_power([(1.0, 2.0, 4)], 0.30854), 3)
      (0.691, 0.691)
    """
    if any(count > 0 and noise < _LEAST_NOISE for _, noise, count in events):
        return 1.0
    levels = NoiseLevels.of(events, "add_remove")
    if levels.rate.size == 0:
        return alarms
    anchor = min(0.25, max(1e-8, (near - alarms) / 2))
    inside, outside = (_delta(levels, direction, anchor, rel) for direction in ("remove", "add"))
    bounds = np.minimum(np.exp(_EPSILONS) * alarms + inside, 1 - np.exp(-_EPSILONS) * (1 - alarms - outside))
    return float(np.clip(bounds.min(), 0.0, 1.0))


def _delta(levels: NoiseLevels, direction: Direction, anchor: float, rel: float) -> Array:
    """Return an upper bound on delta in one direction at every epsilon, sharp where it is about ``anchor``."""
    if levels.count.sum() == 1:
        value, error = excess(_EPSILONS, float(levels.rate[0]), float(levels.noise[0]), direction)
        return np.minimum(value + error, 1.0)
    return LossDistribution(levels, direction, choose_grid(levels, direction, delta=anchor, rel=rel)).delta(_EPSILONS)
