"""Figures that paper 002 prints about itself. None of them is a guarantee: its theorem 1 does not hold.

See docs/explanation/density.md for why. They are here so that the published form can be studied with its own numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenhand import _validate


@dataclass(frozen=True)
class ClaimedFigures:
    """What the paper computes from rho and delta, as plain numbers.

    Examples:
      >>> claimed = ClaimedFigures(rho=0.02, delta=1e-5)
      >>> round(claimed.noise, 1), round(claimed.error(margin=10.0), 3), claimed.records(h=1.0, alpha=2.0)
      (33.9, 1.915, 20)
    """

    rho: float
    delta: float

    def __post_init__(self) -> None:
        _validate.number(self.rho, "rho", low=0)
        _validate.delta(self.delta)

    @property
    def noise(self) -> float:
        """Sigma of theorem 1, ``sqrt(2 ln(1/delta)/rho)``; each record multiplies it by its "local sensitivity"."""
        return math.sqrt(2 * math.log(1 / self.delta) / self.rho)

    def records(self, h: float, alpha: float) -> int:
        """The sample-size bound of theorem 2: ``1 / (sqrt(2 pi h^2) rho (alpha - 1))``."""
        return math.ceil(1 / (math.sqrt(2 * math.pi * h**2) * self.rho * (alpha - 1)))

    def error(self, margin: float) -> float:
        """The error bound of theorem 3: ``2 exp(-m^2 rho / (4 ln(1/delta)))``; above 1 it says nothing."""
        return 2 * math.exp(-(margin**2) * self.rho / (4 * math.log(1 / self.delta)))

    def log_sensitivity(self, dimension: int, h: float, records: int) -> float:
        """Logarithm of the paper's largest local sensitivity ``K_h(0) / n``: tiny for h = 1, astronomic for h = 0.1."""
        return -0.5 * dimension * math.log(2 * math.pi * h**2) - math.log(records)


def rho_of(epsilon: float, delta: float) -> float:
    """The rho whose conversion ``rho + 2 sqrt(rho ln(1/delta))`` gives this epsilon.

    Examples:
      >>> rho = rho_of(1.0, 1e-5)
      >>> round(rho + 2 * math.sqrt(rho * math.log(1e5)), 9)
      1.0
    """
    tail = math.log(1 / _validate.delta(delta))
    return (math.sqrt(tail + _validate.number(epsilon, "epsilon", low=0)) - math.sqrt(tail)) ** 2
