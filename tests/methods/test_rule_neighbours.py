"""One record more or less never moves an ordered sum by more than its bound: the exact worst case over directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rows import column, rows, state
from torch import Tensor

from evenhand.methods.rules import Ordered, ordered_sum
from evenhand.methods.rules.ordered import scores
from evenhand.methods.rules.tails import Beta, Heights
from evenhand.types import State, Stats

BOUNDS = (0.3, 1.0, 2.5)
ORDERS = ("loss", "ascending", "random", "owner")
RULES = [
    Ordered(over=over, order=order, tail=tail, a=a, b=b, length=length)
    for over, order, tail, a, b, length in (
        ("clip", "loss", "beta", 1.0, 1.0, 0.5),
        ("clip", "loss", "beta", 2.0, 0.5, 0.9),
        ("psac", "loss", "step", 1.0, 1.0, 0.5),
        ("auto_s", "ascending", [1.0, 0.0], 1.0, 1.0, 0.3),
        ("global_adapt_v2", "random", "beta", 0.2, 4.0, 1.0),
        ("group_clip", "loss", "beta", 1.0, 1.0, 0.5),
        ("clip", "owner", "beta", 1.0, 1.0, 0.5),
        ("group_reweight", "loss", [0.0, 0.0], 1.0, 1.0, 1.0),
    )
]


def drawn(random: np.random.Generator, count: int) -> Stats:
    """Losses with many ties; norms from tiny to huge, most of them at the bound, where the worst case lies."""
    return rows(
        np.exp(random.normal(2.0, 3.0, count)).tolist(),
        loss=random.integers(0, random.integers(1, 2 * count + 2), count).astype(float).tolist(),
        group=random.integers(0, 2, count).tolist(),
        owner=random.integers(0, 3, count).tolist(),
        record=random.permutation(1000)[:count].tolist(),
    )


def without(stats: Stats, place: int) -> Stats:
    kept = torch.arange(stats.norm.shape[0]) != place
    return Stats(stats.norm[kept], stats.loss[kept], stats.group[kept], stats.owner[kept], stats.record[kept])


def moved(rule: Ordered, stats: Stats, place: int, here: State) -> float:
    """``w_r n_r + sum_j |w_j - w_j'| n_j``, reached when all gradients are aligned, as a share of what is declared."""
    kept = torch.arange(stats.norm.shape[0]) != place
    full = rule.weights(stats, here)
    rest = rule.weights(without(stats, place), here)
    change = full[place] * stats.norm[place] + ((full[kept] - rest).abs() * stats.norm[kept]).sum()
    return float(change / rule.sensitivity(here)[stats.owner[place]])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.over['name']}-{rule.order}-{rule.tail}")
def test_no_neighbour_moves_the_sum_by_more_than_its_bound(rule: Ordered) -> None:
    """1,250 neighbours of each of eight rules: 10,000. Half of the batches are shorter than the tail."""
    random = np.random.default_rng(0)
    answers = {"group_counts": [8.0, 1.0, 2.0, 9.0], "group_sizes": [15.0, 5.0]}
    worst, short = [], 0
    for step in range(1250):
        count = int(random.integers(1, 25))
        expected = (random.dirichlet(np.ones(3)) * random.uniform(0.5, 2.0) * count).tolist()
        here = state(BOUNDS, answers, step=step, batch=20.0, groups=2, expected=expected, rate=(0.1, 0.2, 0.05))
        stats = drawn(random, count)
        worst.append(moved(rule, stats, int(random.integers(0, count)), here))
        mass = float(rule.sensitivity(here)[stats.owner].sum())
        short += mass < rule.length * float((column(expected) * rule.sensitivity(here)).sum())
    assert max(worst) <= 1 + 1e-9
    assert short > 20, "some batches were shorter than the tail"
    if rule.over["name"] in ("clip", "psac") and rule.order != "owner":
        assert max(worst) > 0.99, "the bound is tight: the search looks in the right place"


def test_aligned_vectors_reach_the_bound_and_never_pass_it() -> None:
    random = np.random.default_rng(1)
    ratios = []
    for _ in range(300):
        count = int(random.integers(2, 40))
        bounds = column(random.choice(BOUNDS, count))
        direction = torch.from_numpy(random.normal(size=5))
        vectors = bounds[:, None] * direction / direction.norm() * (1 + 9 * column(random.random(count))[:, None])
        order, length = column(random.integers(0, 10, count).astype(float)), float(random.uniform(0.1, 30))
        tail = Beta(float(random.uniform(0.2, 5)), float(random.uniform(0.2, 5)))
        place = int(random.integers(0, count))
        kept = torch.arange(count) != place
        change = ordered_sum(vectors, order, bounds, length, tail) - ordered_sum(
            vectors[kept], order[kept], bounds[kept], length, tail
        )
        ratios.append(float(change.norm() / bounds[place]))
    assert 0.999 < max(ratios) <= 1 + 1e-9


def test_the_sum_of_scores_is_the_telescope() -> None:
    """Total score mass is the integral of the importance over the whole batch: the heart of the proof."""
    random = np.random.default_rng(2)
    for tail in (Beta(), Beta(0.5, 3.0), Heights((0.9, 0.4, 0.1))):
        for length in (0.7, 5.0, 400.0):
            masses = random.choice(BOUNDS, 60)
            total = float((scores(masses, length, tail) * masses).sum())
            knot = masses.sum() / length
            area = float(tail.integral(np.array([min(knot, 1.0)]))[0]) + max(knot - 1.0, 0.0)
            assert total == pytest.approx(area * length, rel=1e-12)


def test_rounding_stays_far_below_what_is_charged() -> None:
    """A hundred thousand rows of a bound that floats cannot hold exactly."""
    masses = np.full(100_000, 0.1)
    for tail in (Beta(), Beta(2.0, 3.0)):
        full, rest = scores(masses, 5_000.0, tail), scores(masses[1:], 5_000.0, tail)
        change = full[0] * 0.1 + np.abs(full[1:] - rest).sum() * 0.1
        assert change <= 0.1 * (1 + 1e-7), "noise.charged covers 1e-5 and more"


def test_dropping_the_lowest_losses_would_not_be_covered() -> None:
    """A wrong rule that the search must catch: drop the k records of lowest loss whatever their bounds are."""

    def dropped(stats: Stats, bound: Tensor) -> Tensor:
        keep = torch.argsort(torch.argsort(stats.loss)) >= 2
        return keep * (bound[stats.owner] / stats.norm).clamp(max=1.0)

    stats = rows([99.0] * 4, loss=[1.0, 2.0, 3.0, 4.0], owner=[0, 0, 2, 2])
    bound, kept = column(BOUNDS), torch.arange(4) != 0
    full, rest = dropped(stats, bound), dropped(without(stats, 0), bound)
    change = full[0] * 99 + ((full[kept] - rest).abs() * stats.norm[kept]).sum()
    assert float(change) == pytest.approx(2.5), "eight times the bound of the record that left"
