"""Rules: gradient norms, losses, groups and owners -> one weight per record, with a declared sensitivity."""

from evenhand.methods.registry import register
from evenhand.methods.rules.auto_s import AutoS, Nsgd
from evenhand.methods.rules.base import BatchRule, Rule, SampleRule
from evenhand.methods.rules.clip import Clip
from evenhand.methods.rules.global_adapt import GlobalAdapt
from evenhand.methods.rules.global_adapt_v2 import GlobalAdaptV2
from evenhand.methods.rules.global_clip import Global
from evenhand.methods.rules.group_clip import GroupClip
from evenhand.methods.rules.group_reweight import GroupReweight
from evenhand.methods.rules.no_clipping import Identity
from evenhand.methods.rules.ordered import Ordered, ordered_sum
from evenhand.methods.rules.psac import Psac

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
