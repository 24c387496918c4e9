"""Tail importance functions: how much records count that come last in an order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.errors import UsageError

Column = NDArray[np.float64]


class Tail(Protocol):
    """A tail importance function f on [0, 1], non-increasing into [0, 1], by the integral of ``g(t) = f(1 - t)``."""

    def integral(self, u: Column) -> Column:
        """Return ``int_0^u g(t) dt`` for u in [0, 1], exactly (no grid)."""


@dataclass(frozen=True)
class Beta:
    """``f(x) = I_{1 - x}(a, b)``: a flipped Beta distribution function. ``a = b = 1`` falls linearly.

    Examples:
      >>> Beta().integral(np.array([0.0, 0.5, 1.0]))
      array([0.   , 0.125, 0.5  ])
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        _validate.number(self.a, "a", low=0)
        _validate.number(self.b, "b", low=0)

    def integral(self, u: Column) -> Column:
        """Return ``u I_u(a, b) - a / (a + b) I_u(a + 1, b)``."""
        if self.a == self.b == 1.0:
            return u * u / 2.0
        from scipy.special import betainc

        rest = self.a / (self.a + self.b) * betainc(self.a + 1.0, self.b, u)
        return np.asarray(np.maximum(u * betainc(self.a, self.b, u) - rest, 0.0), dtype=np.float64)


@dataclass(frozen=True)
class Heights:
    """Equal steps of given importance, from the beginning of the tail to its end.

    Examples:
      >>> Heights((0.8, 0.2)).integral(np.array([0.5, 1.0]))
      array([0.1, 0.5])
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        if values.ndim != 1 or not values.size or not (np.diff(values) <= 0).all() or not _unit(values):
            raise UsageError(
                "A tail's importance must lie between 0 and 1 and never rise towards its end, or one record could move "
                "the sum by more than its bound: pass for example tail=[0.75, 0.5, 0.25]."
            )

    def integral(self, u: Column) -> Column:
        """Interpolate the integral, which is exact since it is piecewise linear."""
        rising = np.concatenate([[0.0], np.cumsum(self.values[::-1])]) / len(self.values)
        return np.interp(u, np.linspace(0.0, 1.0, len(self.values) + 1), rising)


def heights(function: Callable[[float], float], count: int = 64) -> tuple[float, ...]:
    """Return ``count`` steps of a tail of your own: ``function`` maps the place in the tail (0 to 1) to importance.

    The step function itself is what is integrated, exactly, so the bound holds for it whatever it approximates.

    Examples:
      >>> heights(lambda x: 1 - x, count=4)
      (0.875, 0.625, 0.375, 0.125)
    """
    values = tuple(float(function((index + 0.5) / count)) for index in range(_validate.whole(count, "count")))
    return Heights(values).values


def _unit(values: Column) -> bool:
    return bool((values >= 0).all() and (values <= 1).all())
