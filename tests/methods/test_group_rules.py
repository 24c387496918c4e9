"""Rules that look at groups: the papers' formulas, and clamps that hold for the nastiest noisy counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows, state
from torch.func import vmap

from evenhand.errors import UsageError
from evenhand.methods.rules import GroupClip, GroupReweight
from evenhand.types import Facts, State, Stats

ANY = st.floats(-1e12, 1e12) | st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-300, -1e-300])


def slow_clip(over: list[float], under: list[float], batch: float, most: float) -> list[float]:
    """DPSGD-F, clamped in the order b_k, m_k, m, C_k."""
    size = [max(m + o, 1.0) for m, o in zip(over, under, strict=True)]
    m = [min(max(value, 0.0), b) for value, b in zip(over, size, strict=True)]
    total = max(math.fsum(m), 1.0)
    return [min(max(1.0 + (a / b) / (total / batch), 1.0), most) for a, b in zip(m, size, strict=True)]


@settings(max_examples=150, deadline=None)
@given(counts=st.lists(st.tuples(ANY, ANY), min_size=2, max_size=12), batch=st.floats(0.5, 1e5))
def test_group_bounds_of_dpsgd_f(counts: list[tuple[float, float]], batch: float) -> None:
    over, under = [m for m, _ in counts], [o for _, o in counts]
    here = state((0.5, 2.0), {"group_counts": over + under}, batch=batch, groups=len(counts))
    factors = GroupClip().factors(here)
    assert factors.tolist() == pytest.approx(slow_clip(over, under, batch, 5.0), rel=1e-9)
    assert ((factors >= 1) & (factors <= 5)).all()
    largest = max(factors.tolist())
    assert GroupClip().sensitivity(here).tolist() == pytest.approx([0.5 * largest, 2.0 * largest])


def test_clean_counts_give_the_papers_bounds() -> None:
    """Group 0: 30 of 40 above; group 1: 12 of 60 above; C_k = C0 (1 + (m_k / b_k) / (m / b))."""
    here = state((2.0,), {"group_counts": [30.0, 12.0, 10.0, 48.0]}, batch=100.0, groups=2)
    bounds = (2.0 * GroupClip(most=10.0).factors(here)).tolist()
    assert bounds == pytest.approx([2 * (1 + 0.75 / 0.42), 2 * (1 + 0.2 / 0.42)])
    stats = rows([1.0, 4.0, 40.0, 1.0, 4.0, 40.0], group=[0, 0, 0, 1, 1, 1])
    weights = GroupClip(most=10.0).weight(stats, here).tolist()
    assert weights == pytest.approx([1, 1, bounds[0] / 40, 1, bounds[1] / 4, bounds[1] / 40])


def test_the_sensitivity_is_over_all_groups_even_those_without_a_record() -> None:
    here = state((1.0,), {"group_counts": [0.0, 9.0, 9.0, 1.0]}, batch=20.0, groups=2)
    alone = rows([50.0], group=[0])
    declared = float(GroupClip().sensitivity(here)[0])
    assert declared == pytest.approx(1 + 0.9 / (9 / 20))
    assert float(GroupClip().weight(alone, here)[0]) * 50 == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(ANY, min_size=2, max_size=12), batch=st.floats(0.5, 1e5))
def test_weights_of_the_naive_baseline(sizes: list[float], batch: float) -> None:
    here = state((0.5,), {"group_sizes": sizes}, batch=batch, groups=len(sizes))
    theta = GroupReweight().factors(here)
    expected = [min(max(batch / len(sizes) / max(b, 1.0), 0.1), 10.0) for b in sizes]
    assert theta.tolist() == pytest.approx(expected, rel=1e-12)
    assert GroupReweight().sensitivity(here).tolist() == pytest.approx([0.5 * max(expected)])
    stats = rows([0.2] * len(sizes) + [9.0] * len(sizes), group=list(range(len(sizes))) * 2)
    found = GroupReweight().weight(stats, here)
    assert found.tolist() == pytest.approx(expected + [theta * 0.5 / 9.0 for theta in expected], rel=1e-12)
    assert (found * stats.norm <= GroupReweight().sensitivity(here) * (1 + 1e-12)).all()


@pytest.mark.parametrize("rule", [GroupClip(), GroupReweight()])
def test_given_the_answers_a_record_is_weighted_alone(rule: GroupClip | GroupReweight) -> None:
    answers = {"group_counts": [3.0, -1.0, 5.0, 8.0, 0.0, 2.0], "group_sizes": [11.0, -4.0, 7.0]}
    here = state((0.5, 2.0), answers, batch=20.0, groups=3)
    generator = torch.Generator().manual_seed(0)
    stats = rows(
        torch.rand(50, generator=generator) * 9,
        group=torch.randint(0, 3, (50,), generator=generator),
        owner=torch.randint(0, 2, (50,), generator=generator),
    )
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    alone = vmap(lambda *row: rule.weight(Stats(*row), here))(*columns)
    assert torch.equal(alone, rule.weight(stats, here))
    assert (alone * stats.norm <= rule.sensitivity(here)[stats.owner] * (1 + 1e-12)).all()


@pytest.mark.parametrize("rule", [GroupClip(), GroupReweight()])
def test_one_group_is_refused_before_anything_is_spent(rule: GroupClip | GroupReweight) -> None:
    with pytest.raises(UsageError, match="this data has one group: pass groups="):
        rule.initial(Facts(10, (("all", 10),)))
    assert rule.initial(Facts(10, (("all", 10),), groups=("a", "b"))) == {}
    with pytest.raises(UsageError, match="at least 1"):
        type(rule)(most=0.5)


class Halved(GroupClip):
    """Factors of one's own."""

    def factors(self, state: State) -> torch.Tensor:
        return super().factors(state) / 2


def test_weight_and_sensitivity_follow_the_same_factors() -> None:
    here = state((1.0,), {"group_counts": [9.0, 1.0, 1.0, 9.0]}, batch=20.0, groups=2)
    stats = rows([50.0], group=[0])
    reached = float(Halved().weight(stats, here)[0]) * 50.0
    assert reached == pytest.approx(float(Halved().sensitivity(here)[0]))
    assert reached == pytest.approx(float(GroupClip().sensitivity(here)[0]) / 2)
