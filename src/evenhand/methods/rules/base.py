"""The interface of a rule: scalars in, one weight per record out, and how far one record can move the weighted sum."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.types import Facts, Guarantee, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


class Rule(ABC):
    """Common part of sample rules and batch rules. Subclass one of those two, never this."""

    kind: ClassVar[str] = "rule"
    name: ClassVar[str]
    reference: ClassVar[str] = ""
    guarantee: ClassVar[Guarantee] = "not established"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the side queries whose answers this rule reads."""
        return ()

    @abstractmethod
    def sensitivity(self, state: State) -> Tensor:
        """Return the largest change of the weighted sum by one record, per owner class, as ``state.bound``."""

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return the memory before the first step, from public facts only."""
        return {}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the memory for the next step, from this step's noisy answers only."""
        return state.memory

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return what a report draws over the steps: bounds and thresholds by name, one number or one per group.

        Like everything that is made of a state alone, it may be shown: public numbers and answers that are private.
        """
        return {"clip bound": [float(self.sensitivity(state).max())]}


class SampleRule(Rule):
    """A rule whose weight depends on its own row only.

    Formal guarantees:
      The step calls ``weight`` on each row alone (under vmap) and projects ``0 <= weight * norm <= sensitivity`` of the
      row's owner class, so adding or removing one record moves the weighted sum by at most that sensitivity whatever
      ``weight`` returns: by construction. ``row.record`` is 0, since numbers change when another record goes.
    """

    guarantee: ClassVar[Guarantee] = "by construction"

    @abstractmethod
    def weight(self, row: Stats, state: State) -> Tensor:
        """Return the weight of one record. Use torch.where and arithmetic only: no ``if``, no ``.item()``."""


class BatchRule(Rule):
    """A rule whose weights depend on the whole batch: needs docs/proofs/<name>.md and the sensitivity search."""

    @abstractmethod
    def weights(self, stats: Stats, state: State) -> Tensor:
        """Return one weight per row of ``stats``."""


def built(over: Any) -> Any:
    """Return the rule that ``over`` names: a registered name, the JSON form of a rule, or the rule itself."""
    if isinstance(over, Rule):
        return over
    if isinstance(over, str):
        return registry.build("rule", over)
    if isinstance(over, Mapping):
        return registry.build("rule", **over)
    raise UsageError("over= takes a rule: a name such as 'psac', or eh.rules.Psac(r=0.01).")


def bounded_by_owner(over: Any) -> SampleRule:
    """Return the rule that ``over`` names; raise unless it keeps each record within the bound C_k of its owner class.

    Budgets per owner are calibrated for records of sensitivity C_k. A rule whose sensitivity follows noisy answers is
    private too, since the noise follows with it; but what an owner's budget buys would then be decided by those
    answers, so it must be composed on purpose, with its queries.
    """
    rule = built(over)
    if (
        isinstance(rule, SampleRule)
        and rule.guarantee == "by construction"
        and not rule.needs
        and _declares_bound(rule)
    ):
        return rule
    raise UsageError(
        "Owners with budgets of their own need a rule that looks at one record at a time and bounds it by the C_k of "
        f"its owner, which {rule.name!r} does not: take one such as 'clip', 'auto_s' or 'psac'. A rule with side "
        "queries is composed by hand: eh.Method(rule, queries=[...], sampling='owner')."
    )


def _declares_bound(rule: Rule) -> bool:
    """Return whether the sensitivity of a rule is the bound itself: the same object, or equal numbers.

    Most rules return the bound as they got it, which is seen without torch: commands that only plan stay light.
    """
    bound: Any = object()
    with contextlib.suppress(AttributeError, TypeError):
        if rule.sensitivity(State(0, bound, memory=rule.initial(_MADE_UP))) is bound:
            return True
    import torch

    bound = torch.tensor([0.5, 2.0], dtype=torch.float64)
    declared = rule.sensitivity(State(0, bound.clone(), memory=rule.initial(_MADE_UP)))
    return declared.shape == bound.shape and torch.equal(declared, bound)


_MADE_UP = Facts(2, (("a", 1), ("b", 1)), groups=("a", "b"))
