"""Queries: noisy side answers, taken on the gradient's own sample, that a rule may use."""

from evenhand.queries.base import Query
from evenhand.queries.exceedance import Exceedance
from evenhand.queries.groups import GroupCounts, GroupSizes
from evenhand.registry import register

__all__ = ["Exceedance", "GroupCounts", "GroupSizes", "Query", "register"]
