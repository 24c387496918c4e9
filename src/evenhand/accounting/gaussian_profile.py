"""Privacy profiles of one subsampled Gaussian release, to full relative accuracy in the far tail.

For a pair of output distributions ``P`` (the record is in) and ``Q`` the profile is the hockey-stick divergence
``delta(e) = sup_S P(S) - exp(e) Q(S)``. It is represented here by its **excess** over the trivial bound,
``g(e) = delta(e) - max(0, 1 - exp(e))``: the excess is tiny on both sides of 0, and nothing is lost to cancellation.

The pairs, with noise multiplier ``s`` (so ``m = 1/s`` is the distance in units of noise) and sampling rate ``q``:

* ``add_remove``: ``P = (1-q) N(0,1) + q N(m,1)``, ``Q = N(0,1)``; the other direction has the roles exchanged.
* ``replace_one``: ``P = (1-q) N(0,1) + q N(m,1)``, ``Q = (1-q) N(0,1) + q N(-m,1)``; symmetric, one direction.

That these pairs dominate every neighbouring dataset is in docs/proofs/accountant.md.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, erfc, erfcx, log_ndtr, ndtr, ndtri_exp

Array: TypeAlias = NDArray[np.float64]
Relation: TypeAlias = Literal["add_remove", "replace_one"]
Direction: TypeAlias = Literal["remove", "add", "replace"]

_UNIT = 2.0**-53
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
_SMALL = 0.05  # below this distance a difference of Mills ratios is integrated instead of subtracted


def directions(relation: Relation) -> tuple[Direction, ...]:
    """Return the ordered pairs whose profiles must be composed separately; the larger one counts.

    Example:
        >>> directions("add_remove")
        ('remove', 'add')
    """
    return ("remove", "add") if relation == "add_remove" else ("replace",)


def _mills(t: Array) -> Array:
    """Compute ``(1 - Phi(t)) / phi(t)``; finite for t > -37."""
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2)))


def _mills_drop(t: Array, width: float) -> tuple[Array, Array]:
    """Compute ``mills(t) - mills(t + width)`` for t >= -width, and its amplification of rounding errors."""
    if width > _SMALL:
        first = _mills(t)
        drop = first - _mills(t + width)
        return drop, first / drop
    drop = np.zeros_like(t)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        s = t + 0.5 * width * (1 + node)
        drop += 0.5 * width * weight * (1 - s * _mills(s))
    return drop, 4 * (1 + t * t)


def _density(t: Array) -> Array:
    return np.asarray(np.exp(-0.5 * t * t) / math.sqrt(2 * math.pi))


def gaussian_profile(x: Array, m: float) -> tuple[Array, Array]:
    """Compute the profile of N(m,1) against N(0,1) at ``x >= 0``, with a bound on its relative error.

    Example:
        >>> round(float(gaussian_profile(np.array([0.0]), 1.0)[0][0]), 6)
        0.382925
    """
    t = x / m - 0.5 * m
    value = np.empty_like(t)
    amplify = np.empty_like(t)
    tail = t >= -0.5 * _SMALL if m <= _SMALL else t > 0
    drop, amplify[tail] = _mills_drop(t[tail], m)
    value[tail] = _density(t[tail]) * drop
    body = t[~tail]
    value[~tail] = ndtr(-body) - _density(body) * _mills(body + m)
    amplify[~tail] = 2 / np.maximum(value[~tail], 1e-300)
    near = np.abs(t)
    return value, 8 * _UNIT * (4 + (near + 2) * (near + m) + amplify)


def _remove(eps: Array, q: float, m: float) -> tuple[Array, Array]:
    """Compute the excess of the remove direction and its error; at negative ``eps`` by ``g_G(x) = exp(x) g_G(-x)``."""
    if q == 1.0:
        value, relative = gaussian_profile(np.abs(eps), m)
        value *= np.exp(np.minimum(eps, 0))
        return value, value * (relative + 2 * _UNIT * (1 + np.abs(eps)))
    value, error = np.zeros_like(eps), np.zeros_like(eps)
    up = eps >= 0
    x = eps[up] + np.log1p(-(1 - q) / q * np.expm1(-eps[up]))
    value[up], error[up] = gaussian_profile(x, m)
    error[up] *= value[up]
    ratio = 1 + np.expm1(np.minimum(eps, 0.0)) / q
    down = ~up & (ratio > 0)
    x = -np.log(ratio[down])
    inner, relative = gaussian_profile(x, m)
    value[down] = ratio[down] * inner
    # 1 + expm1(eps)/q is off by a few units. That moves g by at most as much (its slope lies in [0, 1]), and by no
    # more than the logarithmic derivative allows.
    shift = np.minimum(1.0, value[down] * (1 + np.abs(x / m - m / 2) / m) / ratio[down])
    error[down] = value[down] * relative + 8 * _UNIT * shift
    edge = ~up & (ratio > -8 * _UNIT) & (ratio < 1e-12)
    above = 2 * np.maximum(ratio[edge], 0.0) + 16 * _UNIT  # exceeds the true ratio, and g rises with it
    error[edge] = above * gaussian_profile(-np.log(above), m)[0]
    return q * value, q * error


def _replace(eps: Array, q: float, m: float) -> tuple[Array, Array]:
    """Compute the excess of the replace-one pair at ``eps >= 0`` and its error."""
    if q == 1.0:
        value, relative = gaussian_profile(eps, 2 * m)
        return value, value * relative
    with np.errstate(divide="ignore"):
        log_sinh = 0.5 * eps + np.log(-0.5 * np.expm1(-eps))
    log_b = math.log1p(-q) - math.log(q) + 0.5 * m * m + log_sinh
    slope = np.where(log_b > 30, log_b + math.log(2), np.arcsinh(np.exp(np.minimum(log_b, 30))))
    t = (0.5 * eps + slope) / m
    with np.errstate(divide="ignore"):
        w0 = np.exp(math.log1p(-q) + eps + np.log(-np.expm1(-eps)) - 0.5 * t * t) / math.sqrt(2 * math.pi)
    w1 = np.exp(math.log(q) + eps - 0.5 * (t + m) ** 2) / math.sqrt(2 * math.pi)
    value, amplify = np.empty_like(t), np.empty_like(t)
    tail = t >= m - _SMALL if m <= _SMALL / 2 else t > m
    near, near_amplify = _mills_drop(t[tail] - m, m)
    far, far_amplify = _mills_drop(t[tail] - m, 2 * m)
    value[tail] = w0[tail] * near + w1[tail] * far
    amplify[tail] = np.maximum(near_amplify, far_amplify)
    body = ~tail
    value[body] = q * ndtr(m - t[body]) - w0[body] * _mills(t[body]) - w1[body] * _mills(t[body] + m)
    amplify[body] = 4 * q / np.maximum(value[body], 1e-300)
    return value, 8 * _UNIT * value * (4 + eps + m * m + (t + 2) * (t + 2 * m + 2) + amplify)


def excess(eps: Array, rate: float, noise: float, direction: Direction) -> tuple[Array, Array]:
    """Compute the excess ``g`` of one release at every ``eps`` and a bound on the error of each value.

    Guarantee: the true excess lies within ``g +- error``; tested against 60-digit arithmetic.

    Args:
        eps: privacy losses, any sign.
        rate: Poisson sampling rate in (0, 1].
        noise: noise multiplier, positive.
        direction: ``remove``, ``add`` or ``replace``.

    Example:
        >>> g, _ = excess(np.array([0.0]), 1.0, 1.0, "remove")
        >>> round(float(g[0]), 6)
        0.382925
    """
    m = 1.0 / noise
    if direction == "remove" or (direction == "add" and rate == 1.0):
        return _remove(eps, rate, m)
    if direction == "add":
        # With rate < 1 the excess vanishes beyond -log(1 - rate) < 38, so the cap changes nothing.
        (value, error), factor = _remove(-eps, rate, m), np.exp(np.minimum(eps, 600.0))
    else:
        (value, error), factor = _replace(np.abs(eps), rate, m), np.exp(np.minimum(eps, 0))
    return value * factor, factor * (error + 2 * _UNIT * value * (1 + np.abs(eps)))


def loss_at(t: float, rate: float, noise: float, direction: Direction) -> float:
    """Compute the privacy loss ``log P/Q`` at output ``t`` (in units of noise); monotone in ``t``.

    Example:
        >>> loss_at(0.5, 1.0, 1.0, "remove")
        0.0
    """
    m = 1.0 / noise

    def log_ratio(exponent: float) -> float:
        if rate == 1.0:
            return exponent
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))

    up = log_ratio(m * t - 0.5 * m * m)
    if direction == "replace":
        return up - log_ratio(-m * t - 0.5 * m * m)
    return up if direction == "remove" else -up


def sampled_reach(reach: float, rate: float) -> float:
    """Return how far past the record's centre outputs matter, if ``reach`` deviations matter without sampling.

    Of the mass beyond an output only the share ``rate`` differs between the two datasets, so that the excess there is
    at most ``rate * Q(distance)``; with a small rate the loss can be cut off much earlier at the same cost.

    Example:
        >>> sampled_reach(8.0, 1.0), round(sampled_reach(8.0, 1e-8), 1)
        (8.0, 5.3)
    """
    if rate == 1.0:
        return reach
    return -float(ndtri_exp(min(float(log_ndtr(-reach)) - math.log(rate), math.log(0.5))))


def total_variation_gap(low: Array | float, high: Array | float, relation: Relation) -> Array:
    """Compute ``u(high) - u(low)``; ``u`` is the total variation of the unsampled pair at distance ``m = 1/noise``.

    Every profile is convex in ``u`` (docs/proofs/accountant.md, section 3), so a mixture of two noise levels matched
    in ``u`` dominates every level between them.

    Example:
        >>> round(float(total_variation_gap(0.0, 1.0, "add_remove")), 6)
        0.382925
    """
    scale = math.sqrt(8) if relation == "add_remove" else math.sqrt(2)
    a, b = np.asarray(low) / scale, np.asarray(high) / scale
    return np.asarray(np.where(a < 0.5, erf(b) - erf(a), erfc(a) - erfc(b)))
