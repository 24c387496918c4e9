"""Queries: noisy side answers, taken on the gradient's own sample, that a rule may use."""

from evenhand.queries.base import Query
from evenhand.registry import register

__all__ = ["Query", "register"]
