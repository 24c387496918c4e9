"""The mean of several trainings with its t-interval, as the pages of curves show it: of training alone.

It does not hold the chance of the held-out records (see ``evenhand.reporting.uncertainty``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenhand.reporting.group_metrics import Estimate


def over_seeds(values: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of several trainings with its 95 % t-interval, cut to ``low`` and ``high``.

    ``count`` of the estimate is the number of trainings. One training has no interval: its ends are NaN.

    Examples:
        >>> mean = over_seeds([0.70, 0.72, 0.74])
        >>> round(mean.value, 3), round(mean.low, 3), round(mean.high, 3)
        (0.72, 0.67, 0.77)
        >>> over_seeds([0.7]).low
        nan
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.special import stdtrit

    variance = sum((value - mean) ** 2 for value in known) / (len(known) - 1)
    half = float(stdtrit(len(known) - 1, 0.975)) * math.sqrt(variance / len(known))
    return Estimate(mean, max(low, mean - half), min(high, mean + half), len(known))
