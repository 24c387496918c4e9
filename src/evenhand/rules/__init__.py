"""Rules: gradient norms, losses, groups and owners -> one weight per record, with a declared sensitivity."""

from evenhand.registry import register
from evenhand.rules.auto_s import AutoS, Nsgd
from evenhand.rules.base import BatchRule, Rule, SampleRule
from evenhand.rules.clip import Clip
from evenhand.rules.global_adapt import GlobalAdapt
from evenhand.rules.global_adapt_v2 import GlobalAdaptV2
from evenhand.rules.global_clip import Global
from evenhand.rules.group_clip import GroupClip
from evenhand.rules.group_reweight import GroupReweight
from evenhand.rules.identity import Identity
from evenhand.rules.ordered import Ordered
from evenhand.rules.ordering import ordered_sum
from evenhand.rules.psac import Psac

__all__ = [
    "AutoS",
    "BatchRule",
    "Clip",
    "Global",
    "GlobalAdapt",
    "GlobalAdaptV2",
    "GroupClip",
    "GroupReweight",
    "Identity",
    "Nsgd",
    "Ordered",
    "Psac",
    "Rule",
    "SampleRule",
    "ordered_sum",
    "register",
]
