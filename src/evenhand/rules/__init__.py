"""Rules: gradient norms, losses, groups and owners -> one weight per record, with a declared sensitivity."""

from evenhand.registry import register
from evenhand.rules.base import BatchRule, Rule, SampleRule
from evenhand.rules.clip import Clip
from evenhand.rules.identity import Identity

__all__ = ["BatchRule", "Clip", "Identity", "Rule", "SampleRule", "register"]
