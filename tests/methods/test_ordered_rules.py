"""INO scores against the definition, integrated numerically; orders, tails, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from rows import column, rows, state
from scipy.integrate import quad
from scipy.special import betainc
from torch import Tensor

from evenhand.errors import UsageError
from evenhand.methods import registry
from evenhand.methods.rules import BatchRule, Clip, Identity, Ordered, Psac, ordered_sum
from evenhand.methods.rules.ordered import scores, shuffled
from evenhand.methods.rules.tails import Beta, Heights, Tail, heights
from evenhand.types import State, Stats

Function = Callable[[float], float]
TAILS: list[tuple[Tail, Function, Sequence[float]]] = [
    (Beta(), lambda x: 1 - x, ()),
    (Beta(2.0, 3.0), lambda x: float(betainc(2.0, 3.0, 1 - x)), ()),
    (Beta(0.3, 0.4), lambda x: float(betainc(0.3, 0.4, 1 - x)), ()),
    (Beta(40.0, 2.0), lambda x: float(betainc(40.0, 2.0, 1 - x)), (0.05,)),
    (Heights(heights(lambda x: 1 - x, 4)), lambda x: 1 - (min(int(4 * x), 3) + 0.5) / 4, (0.25, 0.5, 0.75)),
    (Heights((1.0, 1.0, 0.0)), lambda x: 1.0 if x < 2 / 3 else 0.0, (2 / 3,)),
    (Heights((0.0,)), lambda x: 0.0, ()),
]


def by_definition(masses: Sequence[float], h: float, f: Function, breaks: Sequence[float]) -> list[float]:
    """Masses from the HIGHEST loss down, as the paper counts them; BIF is 1 up to H - h and f behind it."""
    total = math.fsum(masses)
    ends = np.concatenate([[0.0], np.cumsum(masses)])

    def bif(x: float) -> float:
        place = x - (total - h)
        return 1.0 if place < 0 else f(min(place / h, 1.0))

    found = []
    for low, high in pairwise(ends):
        cuts = sorted({low, high, *(c for c in (total - h + h * b for b in (0.0, 1.0, *breaks)) if low < c < high)})
        area = math.fsum(
            quad(bif, a + 1e-14, b - 1e-14, epsabs=1e-13, epsrel=1e-12, limit=400)[0] for a, b in pairwise(cuts)
        )
        found.append(area / (high - low))
    return found


@pytest.mark.parametrize(("tail", "f", "breaks"), TAILS, ids=lambda part: str(part)[:24])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0, 3.7], ids=["short", "half", "all", "longer than the batch"])
def test_scores_are_the_definition(tail: Tail, f: Function, breaks: Sequence[float], share: float) -> None:
    masses = np.random.default_rng(3).choice([0.3, 1.0, 1.7], 15)
    h = share * float(masses.sum())
    found = scores(masses[::-1], h, tail)[::-1]
    assert found.tolist() == pytest.approx(by_definition(masses, h, f, breaks), abs=1e-9)


def test_the_integral_is_that_of_its_function() -> None:
    for tail, f, breaks in TAILS:
        for u in (0.0, 1e-6, 0.2, 0.55, 0.999, 1.0):
            points = sorted({0.0, u, *(1 - b for b in breaks if 1 - b < u)})
            slow = math.fsum(
                quad(lambda t, f=f: f(1 - t), a, b, epsabs=1e-14, epsrel=1e-12, limit=400)[0]
                for a, b in pairwise(points)
            )
            assert float(tail.integral(np.array([u]))[0]) == pytest.approx(slow, abs=1e-9)


def test_weights_are_scores_times_the_inner_rule_held_to_its_bound() -> None:
    stats = rows([0.2, 5.0, 1.0, 3.0], loss=[0.4, 0.1, 2.0, 0.3], owner=[0, 1, 0, 1])
    here = state((1.0, 2.0), expected=(4.0, 1.0))
    masses, h = [2.0, 2.0, 1.0, 1.0], 0.5 * (4.0 * 1.0 + 1.0 * 2.0)
    score = dict(zip([1, 3, 0, 2], scores(masses, h, Beta()), strict=True))
    clip = [1.0, 2.0 / 5.0, 1.0, 2.0 / 3.0]
    assert Ordered().weights(stats, here).tolist() == pytest.approx([score[i] * clip[i] for i in range(4)])
    psac = Psac(r=0.05).weight(stats, here)
    found = Ordered(over=Psac(r=0.05)).weights(stats, here)
    assert found.tolist() == pytest.approx([score[i] * float(psac[i]) for i in range(4)])
    assert Ordered(over="psac").sensitivity(here).tolist() == [1.0, 2.0]


def order_of(rule: Ordered, losses: list[float], **more: object) -> list[int]:
    """Records from the least to the most important, read off strictly rising scores."""
    stats = rows([1.0] * len(losses), loss=losses, owner=more.pop("owner", None), record=more.pop("record", None))  # type: ignore[arg-type]
    bound = more.pop("bound", (1.0,))
    here = state(bound, expected=[len(losses) / len(bound)] * len(bound), **more)  # type: ignore[arg-type]
    return torch.argsort(rule.weights(stats, here)).tolist()


def test_orders() -> None:
    losses = [0.5, 0.1, 0.9, 0.3]
    assert order_of(Ordered(length=1.0), losses) == [1, 3, 0, 2]
    assert order_of(Ordered(length=1.0, order="ascending"), losses) == [2, 0, 3, 1]
    owner = Ordered(length=1.0, order="owner")
    assert order_of(owner, losses, owner=[0, 1, 1, 0], bound=(1.0, 1.0), rate=(0.1, 0.3)) == [1, 2, 3, 0]
    assert order_of(owner, losses, owner=[0, 1, 1, 0], bound=(1.0, 0.9), rate=(0.1, 0.1)) == [3, 0, 1, 2]
    assert order_of(owner, losses, owner=[0, 1, 1, 0], bound=(1.0, 1.0), rate=(0.1, 0.1)) == [1, 3, 0, 2]


def test_ties_go_by_record_id_wherever_the_row_stands() -> None:
    assert order_of(Ordered(length=1.0), [1.0, 1.0, 1.0], record=[7, 2, 5]) == [1, 2, 0]


def test_the_random_order_follows_from_a_records_own_row_and_the_step() -> None:
    random, losses = Ordered(length=1.0, order="random"), [1.0 + 0.01 * place for place in range(30)]
    first = order_of(random, losses, step=4)
    assert first not in (sorted(first), sorted(first, reverse=True))
    assert first != order_of(random, losses, step=5)
    assert first == order_of(random, losses, step=4, record=list(range(7, 37))), "numbers break ties alone"
    assert first == order_of(random, [loss * (1 + 1e-7) for loss in losses], step=4), "last digits do not count"
    loss, norm = np.linspace(0.1, 3.0, 100), np.linspace(0.2, 9.0, 100)
    keys = [shuffled(loss, norm, step) for step in range(400)]
    places = np.stack([np.argsort(np.argsort(key)) for key in keys])
    assert np.abs(places.mean(0) - 49.5).max() < 8, "every record comes early and late"
    assert abs(np.corrcoef(places[0], loss)[0, 1]) < 0.4
    assert len(np.unique(shuffled(np.ones(100), norm, 3))) == 100, "norms tell records of equal loss apart"


@pytest.mark.parametrize("order", ["loss", "ascending", "random", "owner"])
def test_a_record_that_goes_moves_the_sum_by_its_bound_though_others_are_renumbered(order: str) -> None:
    random, rule = np.random.default_rng(8), Ordered(length=0.7, order=order)
    for _ in range(20):
        norms, losses = random.uniform(0.1, 3.0, 24), random.choice(random.uniform(0.0, 2.0, 8), 24)
        owners, gone = random.integers(0, 2, 24), int(random.integers(24))
        given = state(step=3, bound=(1.0, 0.6), expected=(8.0, 8.0), rate=(0.1, 0.2))
        left = np.delete(np.arange(24), gone)
        everybody, others = (
            rule.weights(rows(norms[some].tolist(), losses[some].tolist(), owner=owners[some].tolist()), given).numpy()
            for some in (np.arange(24), left)
        )
        moved = everybody[gone] * norms[gone] + (np.abs(everybody[left] - others) * norms[left]).sum()
        assert moved <= (1.0, 0.6)[owners[gone]] * (1 + 1e-9)


def test_an_empty_batch_and_one_record() -> None:
    for over in ("clip", "psac", "auto_s", "global_adapt_v2"):
        assert Ordered(over=over).weights(rows([]), state(expected=(4.0,))).shape == (0,)
    assert Ordered().weights(rows([9.0]), state(expected=(4.0,))).tolist() == pytest.approx([0.25 / 9.0])


def test_the_tail_scales_with_the_bound() -> None:
    stats = rows([100.0] * 8)
    once, twice = (Ordered().weights(stats, state((bound,), expected=(8.0,))) for bound in (1.0, 2.0))
    assert torch.allclose(2 * once, twice)


def test_what_the_inner_rule_remembers_is_passed_on() -> None:
    rule = Ordered(over="global_adapt")
    assert rule.needs == ("exceedance",)
    assert rule.initial(None) == {"threshold": 50.0}  # type: ignore[arg-type]
    here = state(answers={"exceedance": [0.0]}, memory={"threshold": 1.0}, batch=10.0, expected=(10.0,))
    assert rule.advance(here)["threshold"] == pytest.approx(math.exp(-0.1))
    assert rule.weights(rows([2.0]), here).shape == (1,)


def test_a_plan_can_name_it() -> None:
    for made in (Ordered(over=Psac(r=0.05), tail=[0.9, 0.2]), Ordered(tail=lambda x: 1 - x * x), Ordered(tail="step")):
        spec = registry.spec(made)
        assert registry.build("rule", **spec) == made
        assert isinstance(made.tail, str) or all(isinstance(height, float) for height in made.tail)


class Wild(Clip):
    """Ignores its bound, and gives nonsense for some rows."""

    name = "clip"

    def weight(self, row: Stats, state: State) -> Tensor:
        assert row.norm.ndim == 0, "a user's rule sees one row at a time"
        return torch.where(row.norm > 5, float("nan"), row.norm * 0 + 1e9)


def test_an_inner_rule_that_ignores_its_bound_is_held_to_it_before_it_is_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._parts["rule"], "clip", Wild)
    assert not Wild.__module__.startswith("evenhand.")
    found = Ordered(length=1.0).weights(rows([1.0, 2.0, 9.0]), state(expected=(3.0,)))
    assert found.tolist() == pytest.approx([1 / 6, 0.5 / 2, 0.0])


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: Ordered(over=Identity()), "one record at a time and bounds it"),
        (lambda: Ordered(over=Ordered()), "one record at a time and bounds it"),
        (lambda: Ordered(over="psca"), "Did you mean 'psac'"),
        (lambda: Ordered(over=3), "over= takes a rule"),
        (lambda: Ordered(order="los"), "Did you mean 'loss'"),
        (lambda: Ordered(tail="bta"), "Did you mean 'beta'"),
        (lambda: Ordered(tail=[0.2, 0.3]), "never rise towards its end"),
        (lambda: Ordered(tail=[1.1, 0.3]), "between 0 and 1"),
        (lambda: Ordered(tail=[0.5, -0.1]), "between 0 and 1"),
        (lambda: Ordered(tail=[]), "between 0 and 1"),
        (lambda: Ordered(tail=lambda x: x), "never rise"),
        (lambda: Ordered(tail=lambda x: math.nan), "between 0 and 1"),
        (lambda: Ordered(a=0.0), "greater than 0"),
        (lambda: Ordered(tail="step", steps=0), "at least 1"),
        (lambda: Ordered(length=0.0), "greater than 0"),
        (lambda: Ordered(length=1.5), "at most 1"),
        (lambda: ordered_sum(torch.ones(2, 1), torch.ones(2), 0.0, 1.0), "greater than 0"),
        (lambda: ordered_sum(torch.ones(2, 1), torch.ones(2), 1.0, 0.0), "greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(construct: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        construct()


def test_it_is_a_batch_rule_with_a_proof() -> None:
    assert issubclass(Ordered, BatchRule)
    assert Ordered.guarantee == "proved and tested"


def test_the_mechanism_outside_training_leaves_out_what_is_not_finite() -> None:
    vectors = column([[3.0, 4.0], [0.3, 0.4], [math.nan, 0.0], [1.0, 0.0], [0.0, 1.0]])
    order = column([5.0, 1.0, 9.0, math.inf, 2.0])
    found = ordered_sum(vectors, order, column([2.0, 1.0, 1.0, 1.0, 1.0]), 2.0, Heights((0.5,)))
    expected = column([0.5 * 0.3 + 1.2, 0.5 * 0.4 + 0.5 * 1.0 + 1.6])
    assert torch.allclose(found, expected)
    assert ordered_sum(torch.zeros(0, 3), torch.zeros(0), 1.0, 1.0).tolist() == [0.0, 0.0, 0.0]
