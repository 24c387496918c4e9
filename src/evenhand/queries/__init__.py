"""Queries: noisy side answers, taken on the gradient's own sample, that a rule may use."""

from evenhand.queries.base import Count, Query
from evenhand.queries.exceedance import Exceedance
from evenhand.queries.groups import GroupCounts, GroupSizes
from evenhand.registry import register

__all__ = ["Count", "Exceedance", "GroupCounts", "GroupSizes", "Query", "register"]
