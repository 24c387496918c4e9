"""A method of this package: its rule with a schedule of evenhand."""

from __future__ import annotations

import evenhand as eh
from evenhand_smooth.rules import SmoothClip


def smooth_falling(bound: float = 1.0, decay: float = 0.99) -> eh.Method:
    """Smooth clipping with noise that falls every epoch."""
    return eh.Method(SmoothClip(), schedule=eh.schedules.Linear(decay=decay, bound=bound))
