"""Events: what a composition is made of, their checks, and their export to dp-accounting.

An event is ``(rate, noise, count)``: ``count`` Gaussian releases with noise multiplier ``noise``, each on a Poisson
sample of rate ``rate``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from evenhand._validate import real
from evenhand.errors import UsageError
from evenhand.types import Event


def _check_count(count: object, position: int) -> int:
    if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < 0:
        raise UsageError(f"event {position}: count must be a whole number of releases >= 0, got {count!r}.")
    if int(count) > 10**15:
        raise UsageError(f"event {position}: more than 10^15 releases cannot be accounted for.")
    return int(count)


def check_events(events: Iterable[Event]) -> list[Event]:
    """Return the events as plain triples, or raise naming the first one that cannot be used.

    Example:
        >>> check_events([(0.1, 2, 3)])
        [(0.1, 2.0, 3)]
    """
    checked: list[Event] = []
    for position, event in enumerate(events):
        try:
            rate, noise, count = event
        except (TypeError, ValueError):
            raise UsageError(f"event {position} must be a triple (rate, noise, count), got {event!r}.") from None
        q, s = real(rate, f"event {position}: rate"), real(noise, f"event {position}: noise")
        if not 0 < q <= 1:
            raise UsageError(f"event {position}: rate must lie in (0, 1], got {q}; leave out what is never sampled.")
        if s < 0:
            raise UsageError(f"event {position}: noise must not be negative, got {s}.")
        checked.append((q, s, count if type(count) is int and 0 <= count < 10**15 else _check_count(count, position)))
    return checked


def merged_noise(grad_noise: float, query_noises: Sequence[float]) -> float:
    """Return the noise multiplier of one Gaussian that costs what a gradient and its side queries cost together.

    All of them read the same Poisson sample, so together they are one subsampled Gaussian in more dimensions.
    Accounting them as separate samples gives an epsilon that is too small.

    Example:
        >>> round(merged_noise(1.0, [2.0]), 4)
        0.8944
    """
    noises = [real(value, "noise") for value in (grad_noise, *query_noises)]
    if min(noises) < 0:
        raise UsageError(f"noise must not be negative, got {min(noises)}.")
    if min(noises) == 0:
        return 0.0
    least = min(noises)
    if not 1e-100 < least < 1e100:  # squares would leave the range of floats
        return least if math.isinf(least) else least / math.sqrt(math.fsum((least / value) ** 2 for value in noises))
    return float(math.fsum(value**-2 for value in noises) ** -0.5)


def dp_event(events: Iterable[Event]) -> Any:
    """Return the composition as a ``dp_accounting.DpEvent``, for cross-checks and other tools.

    Needs the extra ``dp-accounting``; nothing else in this package does.

    Raises:
        UsageError: if dp-accounting is not installed; says what to type.

    Example:
        >>> dp_event([(1.0, 2.0, 1)])  # doctest: +ELLIPSIS
        ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=1)])
    """
    try:
        import dp_accounting as dpa
    except ImportError:
        raise UsageError(
            "Exporting events needs dp-accounting, which is not installed: pip install 'evenhand[dp-accounting]'."
        ) from None
    composed = []
    for rate, noise, count in check_events(events):
        release: Any = dpa.GaussianDpEvent(noise)
        if rate < 1:
            release = dpa.PoissonSampledDpEvent(rate, release)
        composed.append(dpa.SelfComposedDpEvent(release, count))
    return dpa.ComposedDpEvent(composed)
