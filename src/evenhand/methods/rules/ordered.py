"""The ordered mechanism (INO-SGM): records in an order, those in the tail counting less, at no cost in sensitivity.

Clip mass is counted from the LEAST important record. At mass y the importance is ``g(y / h)`` for y < h and 1 beyond,
where g rises from the end of the tail to its beginning. A record's score is its mean importance over its own mass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.methods import references, registry
from evenhand.methods.registry import register
from evenhand.methods.rules import tails
from evenhand.methods.rules.base import BatchRule, SampleRule, built
from evenhand.methods.rules.tails import Beta, Column, Tail
from evenhand.types import Facts, Guarantee, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


def scores(masses: Column | Sequence[float], length: float, tail: Tail) -> Column:
    """Compute the mean importance of each record; ``masses`` are clip bounds, least important record first.

    Guarantee:
      Inserting a record of mass C anywhere raises the scores of those after it and leaves the others, and
      ``sum_j |change of score_j| mass_j + score C <= C``: docs/proofs/ordered.md.

    Examples:
      >>> scores([1.0, 1.0, 1.0, 1.0], 2.0, Beta())
      array([0.25, 0.75, 1.  , 1.  ])
    """
    masses = np.asarray(masses, dtype=np.float64)
    knots = np.zeros(len(masses) + 1)
    masses.cumsum(out=knots[1:])
    knots /= length
    inside = np.minimum(knots, 1.0)
    area = tail.integral(inside) + (knots - inside)
    importance = (area[1:] - area[:-1]) * length / masses
    importance[knots[:-1] >= 1.0] = 1.0
    return np.minimum(np.maximum(importance, 0.0), 1.0)


def shuffled(loss: Column, norm: Column, step: int) -> NDArray[np.uint64]:
    """Return a sort key for every record, a digest of the step and of its own loss and norm to about four digits.

    It follows from the record's own row, as the proof needs: a digest of its number would change with the numbers, when
    another record goes.

    Examples:
      >>> loss, norm = np.linspace(0.1, 2.0, 10), np.ones(10)
      >>> [int(np.argmin(shuffled(loss, norm, step))) for step in range(4)]
      [9, 7, 8, 6]
    """
    return _mixed(_digits(loss) ^ _mixed(_digits(norm) ^ _mixed(np.array([step], dtype=np.uint64))))


def _digits(values: Column) -> NDArray[np.uint64]:
    """Return sign, exponent and the first bits of each number, so that roundings in its last digits are not seen."""
    with np.errstate(over="ignore"):
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(11)).astype(np.uint64)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64: a bijection of 64 bits."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def ordered_sum(
    vectors: Tensor, order: Tensor, bounds: Tensor | float, length: float, tail: Tail | None = None
) -> Tensor:
    """Apply the ordered mechanism outside training (INO-SGM): sum bounded vectors; low ``order`` counts less.

    Rows are clipped to ``bounds`` (one, or one per row). ``length`` is in the same units and, like the bounds, must not
    depend on the rows. Ties keep their order. A row with a value that is not finite is left out.

    Guarantee:
      Adding or removing row i moves the sum by at most ``bounds[i]``: add N(0, s^2) noise with s from the largest.

    Examples:
      >>> import torch
      >>> ordered_sum(torch.tensor([[3.0], [0.5], [1.0]]), torch.tensor([9.0, 1.0, 5.0]), 1.0, length=1.0)
      tensor([2.2500], dtype=torch.float64)
    """
    import torch

    finite = torch.isfinite(vectors).all(1) & torch.isfinite(order)
    clip = torch.as_tensor(bounds, dtype=torch.float64).expand(vectors.shape[0])[finite]
    if not bool(((clip > 0) & torch.isfinite(clip)).all()):
        raise UsageError("Every bound must be finite and greater than 0: it is how far its row may move the sum.")
    rows, place = vectors[finite].to(torch.float64), torch.argsort(order[finite], stable=True)
    score = torch.from_numpy(scores(clip[place].numpy(), _validate.number(length, "length", low=0), tail or Beta()))
    norms = torch.linalg.vector_norm(rows[place], dim=1)
    total: Tensor = ((score * (clip[place] / norms).clamp(max=1.0))[:, None] * rows[place]).sum(0)
    return total


_ORDERS = ("loss", "ascending", "random", "owner")


@register
@dataclass(frozen=True)
class Ordered(BatchRule):
    """Multiply the weight of another rule by an importance that falls over the records of lowest loss.

    The tail is ``length`` (a share of the EXPECTED clip mass) long; in it the importance falls from 1 to 0 by ``tail``:
    "beta" with ``a`` and ``b``, "step" with ``steps`` equal steps, or steps of your own (a list, or a function of the
    place in the tail). ``order`` says who comes first: "loss" (high ones), "ascending" (low ones), "random" (by a
    digest of loss, norm and step), or "owner" (the most exposed owners last, then by loss). Ties go by record id. The
    paper's tail lengths and step heights are lost in our copy: 0.5 and the middles of the steps are ours.

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
        """Names of the queries that the inner rule reads."""
        return tuple(self.inner.needs)

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return the initial memory of the inner rule."""
        return self.inner.initial(facts)  # type: ignore[no-any-return]

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the next memory of the inner rule."""
        return self.inner.advance(state)  # type: ignore[no-any-return]

    def followed(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return what the inner rule follows."""
        return self.inner.followed(state)  # type: ignore[no-any-return]

    def sensitivity(self, state: State) -> Tensor:
        """Return the sensitivity of the inner rule, per owner class."""
        return self.inner.sensitivity(state)  # type: ignore[no-any-return]

    def weights(self, stats: Stats, state: State) -> Tensor:
        """Return importance times the inner rule's weight, which is limited to its own bound first."""
        import torch

        bound = self.sensitivity(state).numpy(force=True).astype(np.float64)
        length = self.length * float((np.asarray(state.public.expected) * bound).sum())
        masses = bound[stats.owner.numpy(force=True)]
        rank = np.lexsort(self._keys(stats, state))
        weights = _held(self.inner, stats, state, masses)
        weights[rank] *= scores(masses[rank], length, self.importance)
        return torch.from_numpy(weights).to(stats.norm.device)

    def _keys(self, stats: Stats, state: State) -> tuple[NDArray[Any], ...]:
        """Return sort keys, the last one first; the least important record sorts first."""
        loss, record = stats.loss.numpy(force=True), stats.record.numpy(force=True)
        if self.order == "random":
            return record, shuffled(loss, stats.norm.numpy(force=True), state.step)
        if self.order == "ascending":
            return record, -loss
        if self.order == "owner":
            exposed = np.asarray(state.public.rate) * state.bound.cpu().numpy()
            return record, loss, -exposed[stats.owner.cpu().numpy()]
        return record, loss


def _spec(over: Any) -> dict[str, Any]:
    """Return the JSON form of the inner rule, so that a plan can name it."""
    return dict(over) if isinstance(over, Mapping) else registry.spec(built(over))


def _held(rule: SampleRule, stats: Stats, state: State, bound: NDArray[np.float64]) -> NDArray[np.float64]:
    """Apply the inner rule to each row alone and project onto ``0 <= w n <= bound``, as the proof of the scores needs.

    As in the step, our own rules are applied to whole columns, and a user's row by row under vmap, without numbers.
    """
    from torch import zeros_like
    from torch.func import vmap

    if type(rule).__module__.startswith("evenhand.methods.rules.") or not len(stats.norm):
        weights = rule.weight(stats, state)
    else:
        columns = (stats.norm, stats.loss, stats.group, stats.owner, zeros_like(stats.record))
        weights = vmap(lambda *row: rule.weight(Stats(*row), state))(*columns)
    given = weights.double().numpy(force=True)
    with np.errstate(divide="ignore", over="ignore"):
        projection = np.minimum(np.maximum(given, 0.0), bound / stats.norm.numpy(force=True))
    return np.where(np.isfinite(given), projection, 0.0)
