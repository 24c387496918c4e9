"""Concentrated privacy (zCDP and its truncated form) for papers that state their guarantees in it.

The exact accountant is always tighter; these formulas exist to repeat what a paper claims, to check whether the
preconditions of its lemmas hold, and for one-off Gaussian releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evenhand._validate import any_delta, real
from evenhand.errors import UsageError


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
