"""Renyi divergences of the subsampled Gaussian by quadrature: a second opinion, and a guide for the exact accountant.

``log_moments`` gives ``K(t) = log E_P[exp(t * loss)]``, which is ``t`` times the Renyi divergence of order ``t + 1``.
The trapezoidal rule converges geometrically here because the integrand is analytic in a strip around the real line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from evenhand._validate import any_delta, real
from evenhand.accounting.gaussian_profile import Array, Direction, sampled_reach
from evenhand.errors import UsageError
from evenhand.types import Event

_REACH = 11.0


class LogMoments(NamedTuple):
    """``K``, ``K'`` and ``K''`` of the privacy loss, one entry per order."""

    value: Array
    slope: Array
    curvature: Array


def log_moments(
    rate: float, noise: float, orders: Array, direction: Direction, *, reach: float | None = None
) -> LogMoments:
    """Compute ``K``, ``K'`` and ``K''`` of the privacy loss of one release at every order.

    Args:
        rate: sampling rate in (0, 1].
        noise: noise multiplier.
        orders: the ``t`` above; negative orders describe the lower tail.
        direction: which ordered pair.
        reach: leave out outputs further than this many deviations from both centres, on a coarse grid: the moments
            of a truncated loss, good to a few digits, for planning. By default everything, to 10 digits or more.

    Example:
        >>> float(log_moments(1.0, 2.0, np.array([1.0]), "remove").value[0])
        0.25
    """
    m = 1.0 / noise
    if rate == 1.0:
        spread = 4 * m * m if direction == "replace" else m * m
        return LogMoments(orders * (orders + 1) * spread / 2, (orders + 0.5) * spread, np.full_like(orders, spread))
    power_p, power_q = {"remove": (orders + 1, 0 * orders), "add": (-orders, 0 * orders)}.get(
        direction, (orders + 1, -orders)
    )
    low, high, step = -(reach or 0.0), sampled_reach(reach or 0.0, rate) + m, 0.2
    if reach is None:
        pull = np.concatenate([power_p, power_p - power_q, [0.0]]) * m
        low, high, step = float(pull.min()) - _REACH, float(pull.max()) + _REACH, min(0.25, noise / 4)
    t = np.arange(low, high + step, step)
    log_p = np.logaddexp(math.log1p(-rate), math.log(rate) + m * t - 0.5 * m * m)
    loss, exponent = log_p, np.multiply.outer(power_p, log_p) - 0.5 * t * t
    if direction == "replace":
        log_q = np.logaddexp(math.log1p(-rate), math.log(rate) - m * t - 0.5 * m * m)
        loss = log_p - log_q
        exponent += np.multiply.outer(power_q, log_q)
    elif direction == "add":
        loss = -log_p
    top = exponent.max(axis=1)
    weight = np.exp(exponent - top[:, None])
    mass = weight.sum(axis=1)
    mean = np.einsum("ij,j->i", weight, loss) / mass  # einsum: a threaded BLAS costs more than it saves here
    variance = np.maximum(np.einsum("ij,j->i", weight, loss * loss) / mass - mean * mean, 0.0)
    return LogMoments(top + np.log(mass * step / math.sqrt(2 * math.pi)), mean, variance)


def epsilon(
    events: Sequence[Event],
    delta: float,
    *,
    conversion: Literal["improved", "old"] = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """Compute epsilon of a composition by Renyi accounting (add/remove): an upper bound, usually 5 to 15 % high.

    Guarantee: valid for every choice of ``orders``; ``remove`` is the larger direction at every order (Mironov 2019).

    Args:
        events: (rate, noise, count) triples.
        delta: target delta.
        conversion: ``improved`` (Canonne, Kamath and Steinke 2020) or ``old`` (Mironov 2017), as in
            papers up to 2020.
        orders: Renyi orders above 1; by default a fine geometric set.

    Example:
        >>> round(epsilon([(0.01, 1.0, 1000)], 1e-5), 2)
        2.1
    """
    noisy = [(q, s, n) for q, s, n in events if n > 0 and math.isfinite(s)]
    if not noisy:
        return 0.0
    if min(s for _, s, _ in noisy) <= 0:
        return math.inf
    reach = 200.0 * min(s for _, s, _ in noisy)
    shifts = np.geomspace(reach * 1e-7, reach, 400) if orders is None else np.asarray(orders, dtype=float) - 1
    total = np.zeros_like(shifts)
    for q, s, n in noisy:
        total += n * log_moments(q, s, shifts, "remove").value
    budget = -math.log(delta)
    if conversion == "old":
        candidates = (total + budget) / shifts
    else:
        candidates = (total + budget - np.log1p(shifts)) / shifts + np.log(shifts / (1 + shifts))
    return max(0.0, float(candidates.min()))


def _check_rho(rho: object) -> float:
    value = real(rho, "rho")
    if value < 0:
        raise UsageError(f"rho must not be negative, got {value}.")
    return value


def gaussian_rho(noise: float) -> float:
    """Return rho (zCDP) of one Gaussian release with this noise multiplier: ``1 / (2 noise^2)``, exactly.

    Example:
        >>> gaussian_rho(2.0)
        0.125
    """
    value = real(noise, "noise")
    if value < 0:
        raise UsageError(f"noise must not be negative, got {value}.")
    return math.inf if value == 0 else 0.5 / value**2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return the epsilon of rho-zCDP by the usual conversion ``rho + 2 sqrt(rho log(1/delta))`` (Bun and Steinke 2016).

    Example:
        >>> round(zcdp_epsilon(0.1, 1e-5), 3)
        2.246
    """
    rho, delta = _check_rho(rho), any_delta(delta)
    return rho + 2 * math.sqrt(rho * -math.log(delta))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Return the largest rho whose ``zcdp_epsilon`` is at most ``epsilon``.

    Example:
        >>> round(zcdp_rho(zcdp_epsilon(0.1, 1e-5), 1e-5), 9)
        0.1
    """
    value, budget = real(epsilon, "epsilon"), -math.log(any_delta(delta))
    if value < 0:
        raise UsageError(f"epsilon must not be negative, got {value}.")
    return (value / (math.sqrt(budget + value) + math.sqrt(budget))) ** 2


@dataclass(frozen=True)
class TruncatedCDP:
    """(rho, omega)-tCDP: the Renyi divergence of every order below omega is at most ``rho * order`` (Bun et al. 2018).

    Example:
        >>> round(TruncatedCDP(0.02, 20.0).epsilon(1e-5), 3)
        1.006
    """

    rho: float
    omega: float

    def epsilon(self, delta: float) -> float:
        """Return epsilon by the conversion of that paper; beyond omega it degrades to one fixed order."""
        budget = -math.log(any_delta(delta))
        if self.omega <= 1:
            return math.inf
        if budget <= (self.omega - 1) ** 2 * self.rho:
            return self.rho + 2 * math.sqrt(self.rho * budget)
        return self.rho * self.omega + budget / (self.omega - 1)


def tcdp_sum(parts: Iterable[TruncatedCDP]) -> TruncatedCDP:
    """Compose: rhos add up, the smallest omega remains.

    Example:
        >>> tcdp_sum([TruncatedCDP(0.5, 9.0), TruncatedCDP(0.25, 4.0)])
        TruncatedCDP(rho=0.75, omega=4.0)
    """
    items = list(parts)
    return TruncatedCDP(math.fsum(p.rho for p in items), min((p.omega for p in items), default=math.inf))


def tcdp_subsampled(rate: float, noise: float) -> tuple[TruncatedCDP, list[str]]:
    """Apply the amplification lemma for subsampled tCDP; also return which of its preconditions fail.

    The lemma gives ``(13 rate^2 rho, log(1/rate) / (4 rho))``-tCDP for ``rho = 1/(2 noise^2)``. If the returned list is
    not empty the lemma does not apply, and the first value is only what a paper that ignores this would print.

    Example:
        >>> tcdp_subsampled(0.001, 1.0)[1]
        ['rho = 0.5 must be at most 0.1 (noise at least 2.237)']
    """
    q, rho = real(rate, "rate"), gaussian_rho(noise)
    if not 0 < q <= 1:
        raise UsageError(f"rate must lie in (0, 1], got {q}.")
    failed = []
    if rho > 0.1:
        failed.append(f"rho = {rho:.4g} must be at most 0.1 (noise at least 2.237)")
    if q > 0.1:
        failed.append(f"rate = {q:.4g} must be at most 0.1")
    if 0 < rho <= 0.1 and math.log(1 / q) < 3 * rho * (2 + math.log2(1 / rho)):
        failed.append(f"log(1/rate) = {math.log(1 / q):.4g} must be at least 3 rho (2 + log2(1/rho))")
    return TruncatedCDP(13 * q * q * rho, math.log(1 / q) / (4 * rho) if rho > 0 else math.inf), failed
