"""Rules: gradient norms, losses, groups and owners -> one weight per record, with a declared sensitivity."""

from evenhand.methods.registry import register
from evenhand.methods.rules.adaptive_clip import AdaptiveClip
from evenhand.methods.rules.auto_s import AutoS, Nsgd
from evenhand.methods.rules.base import BatchRule, Rule, SampleRule, bounded_by_owner
from evenhand.methods.rules.bounded_adaptive import BoundedAdaptive
from evenhand.methods.rules.clip import Clip
from evenhand.methods.rules.global_adapt import GlobalAdapt
from evenhand.methods.rules.global_adapt_v2 import GlobalAdaptV2
from evenhand.methods.rules.global_clip import Global
from evenhand.methods.rules.group_clip import GroupClip
from evenhand.methods.rules.group_dro import GroupDro
from evenhand.methods.rules.group_reweight import GroupReweight
from evenhand.methods.rules.no_clipping import Identity
from evenhand.methods.rules.ordered import Ordered, ordered_sum
from evenhand.methods.rules.psac import Psac
from evenhand.methods.rules.soft_ada_clip import SoftAdaClip

__all__ = [
    "AdaptiveClip",
    "AutoS",
    "BatchRule",
    "BoundedAdaptive",
    "Clip",
    "Global",
    "GlobalAdapt",
    "GlobalAdaptV2",
    "GroupClip",
    "GroupDro",
    "GroupReweight",
    "Identity",
    "Nsgd",
    "Ordered",
    "Psac",
    "Rule",
    "SampleRule",
    "SoftAdaClip",
    "bounded_by_owner",
    "ordered_sum",
    "register",
]
