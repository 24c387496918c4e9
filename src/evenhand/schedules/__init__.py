"""Schedules: how noise multiplier and clip bound move over the steps. They fix the shape; the plan finds the scale."""

from evenhand.registry import register
from evenhand.schedules.base import Schedule
from evenhand.schedules.constant import Constant
from evenhand.schedules.decay import Linear, Step, Time
from evenhand.schedules.phases import Phases
from evenhand.schedules.table import Table

__all__ = ["Constant", "Linear", "Phases", "Schedule", "Step", "Table", "Time", "register"]
