"""Ordered down-weighting (INO-SGD, INO-SGM): records of low loss count less, at no cost in sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate, references, registry
from evenhand.errors import UsageError
from evenhand.registry import register
from evenhand.rules import ordering, tails
from evenhand.rules.base import BatchRule, Rule, SampleRule
from evenhand.types import Facts, Guarantee, State, Stats

if TYPE_CHECKING:
    from torch import Tensor

_ORDERS = ("loss", "ascending", "random", "owner")


@register
@dataclass(frozen=True)
class Ordered(BatchRule):
    """Multiply the weight of another rule by an importance that falls over the records of lowest loss.

    The tail is ``length`` (a share of the EXPECTED clip mass) long; in it the importance falls from 1 to 0 by ``tail``:
    "beta" with ``a`` and ``b``, "step" with ``steps`` equal steps, or steps of your own (a list, or a function of the
    place in the tail). ``order`` says who comes first: "loss" (high ones), "ascending" (low ones), "random" (by record
    id and step), or "owner" (the most exposed owners last, then by loss). Ties go by record id. The paper's tail
    lengths and step heights are lost in our copy: 0.5 and the middles of the steps are ours.

    Formal guarantees:
      Unit one record, add/remove: at most the sensitivity of ``over`` for its owner class. docs/proofs/ordered.md.

    Examples:
      >>> import torch
      >>> from evenhand.types import Public, State, Stats
      >>> zero = torch.zeros(4, dtype=torch.long)
      >>> rows = Stats(torch.ones(4), torch.tensor([0.1, 3.0, 0.2, 2.0]), zero, zero, torch.arange(4))
      >>> state = State(0, torch.ones(1), public=Public(4.0, expected=torch.tensor([4.0])))
      >>> Ordered(length=0.5).weights(rows, state)
      tensor([0.2500, 1.0000, 0.7500, 1.0000], dtype=torch.float64)
    """

    over: Any = "clip"
    tail: Any = "beta"
    a: float = 1.0
    b: float = 1.0
    steps: int = 4
    length: float = 0.5
    order: str = "loss"

    name = "ordered"
    reference = references.TIAN.text
    guarantee: ClassVar[Guarantee] = "proved and tested"

    def __post_init__(self) -> None:
        _validate.known(self.order, _ORDERS, "order")
        if _validate.number(self.length, "length", low=0) > 1:
            raise UsageError("length is a share of the expected clip mass: pass at most 1; the paper advises 0.5.")
        object.__setattr__(self, "over", _spec(self.over))
        if not isinstance(self.inner, SampleRule) or self.inner.guarantee != "by construction":
            raise UsageError(
                f"Ordering goes over a rule that looks at one record at a time and bounds it, which {self.inner.name!r}"
                " does not: otherwise two couplings add up and the bound is lost. Pass for example over='psac'."
            )
        if not isinstance(self.tail, str):
            object.__setattr__(self, "tail", tails.heights(self.tail) if callable(self.tail) else tuple(self.tail))
        self.importance.integral(np.zeros(1))

    @cached_property
    def inner(self) -> Any:
        """The rule whose weights are multiplied."""
        return registry.build("rule", **self.over)

    @cached_property
    def importance(self) -> tails.Tail:
        """The tail importance function."""
        if not isinstance(self.tail, str):
            return tails.Heights(self.tail)
        kinds: dict[str, Callable[[], tails.Tail]] = {
            "beta": lambda: tails.Beta(self.a, self.b),
            "step": lambda: tails.Heights(tails.heights(lambda x: 1.0 - x, _validate.whole(self.steps, "steps"))),
        }
        return kinds[_validate.known(self.tail, kinds, "tail")]()

    @property
    def needs(self) -> tuple[str, ...]:
        """What the inner rule reads."""
        return tuple(self.inner.needs)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Memory of the inner rule."""
        return self.inner.initial(facts)  # type: ignore[no-any-return]

    def advance(self, state: State) -> Mapping[str, Any]:
        """Memory of the inner rule."""
        return self.inner.advance(state)  # type: ignore[no-any-return]

    def sensitivity(self, state: State) -> Tensor:
        """That of the inner rule, per owner class."""
        return self.inner.sensitivity(state)  # type: ignore[no-any-return]

    def weights(self, stats: Stats, state: State) -> Tensor:
        """Importance times the inner rule's weight, which is held to its own bound first."""
        import torch

        bound = self.sensitivity(state).numpy(force=True).astype(np.float64)
        length = self.length * float((np.asarray(state.public.expected) * bound).sum())
        masses = bound[stats.owner.numpy(force=True)]
        rank = np.lexsort(self._keys(stats, state))
        weights = _held(self.inner, stats, state, masses)
        weights[rank] *= ordering.scores(masses[rank], length, self.importance)
        return torch.from_numpy(weights).to(stats.norm.device)

    def _keys(self, stats: Stats, state: State) -> tuple[NDArray[Any], ...]:
        """Sort keys, the last one first; the least important record sorts first."""
        loss, record = stats.loss.numpy(force=True), stats.record.numpy(force=True)
        if self.order == "random":
            return record, ordering.shuffled(record, state.step)
        if self.order == "ascending":
            return record, -loss
        if self.order == "owner":
            exposed = np.asarray(state.public.rate) * state.bound.cpu().numpy()
            return record, loss, -exposed[stats.owner.cpu().numpy()]
        return record, loss


def _spec(over: Any) -> dict[str, Any]:
    """The JSON form of the inner rule, so that a plan can name it."""
    if isinstance(over, str):
        over = registry.build("rule", over)
    if not isinstance(over, Rule | Mapping):
        raise UsageError("over= takes the rule to multiply: a name such as 'psac', or evenhand.rules.Psac(r=0.01).")
    return dict(registry.spec(over) if isinstance(over, Rule) else over)


def _held(rule: SampleRule, stats: Stats, state: State, bound: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inner rule on each row alone, projected onto ``0 <= w n <= bound``: the proof needs it before the scores.

    As in the step, our own rules are applied to whole columns, and a user's row by row under vmap.
    """
    from torch.func import vmap

    if type(rule).__module__.startswith("evenhand.rules.") or not len(stats.norm):
        weights = rule.weight(stats, state)
    else:
        columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
        weights = vmap(lambda *row: rule.weight(Stats(*row), state))(*columns)
    given = weights.double().numpy(force=True)
    with np.errstate(divide="ignore", over="ignore"):
        held = np.minimum(np.maximum(given, 0.0), bound / stats.norm.numpy(force=True))
    return np.where(np.isfinite(given), held, 0.0)
