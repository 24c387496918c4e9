"""Say before an audit of a mechanism what it costs, what it can find at most, and that it reads no data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenhand._numbers import shown_down
from evenhand.terminal import note

if TYPE_CHECKING:
    from evenhand.mechanism.audit.attack import Forecast


def announce(forecast: Forecast) -> None:
    """Print what an audit costs and can find."""
    note(in_words(forecast))


def in_words(forecast: Forecast) -> str:
    """Return what an audit costs and can find, for the owner class of which it can find most.

    Examples:
      >>> from evenhand.mechanism.audit.attack import Forecast
      >>> in_words(Forecast(1000, 1, 0.4, {"all": 2.0}, {"all": 9.0}))[:70]
      'This audit reads no data and spends nothing: 2,000 trials for each of '
    """
    name = max(forecast.ceiling, key=lambda owner: forecast.expected[owner])
    return (
        f"This audit reads no data and spends nothing: {2 * forecast.trials:,} trials for each of "
        f"{len(forecast.ceiling)} owner class(es), about {max(1, round(forecast.seconds))} second(s). If all is right "
        f"it certifies an epsilon of about {forecast.expected[name]:.3g}; so many trials can show "
        f"{shown_down(forecast.ceiling[name])} at most."
    )
