"""The noise is what the ledger says, and epsilon is that of the exact Gaussian."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import torch
from density_exact import planned, two_owners, wrapped
from dp_accounting import pld
from scipy import optimize, stats

from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy
from evenhand.density import noisy_embedding as rows
from evenhand.density import private_features
from evenhand.density.base_estimator import replaced
from evenhand.density.noisy_embedding import NoisyEmbeddingDensity
from evenhand.density.noisy_sums import Query, Releases, plan_of
from evenhand.density.private_features import Embedding
from evenhand.density.random_feature import RandomFeatureDensity, total_noise
from evenhand.errors import UsageError
from evenhand.mechanism import noise_grid
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts

FACTS = Facts(60_000, (("all", 60_000),), labels=("0", "1"))


def exact(multiplier: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism (Balle & Wang 2018), by root finding to nine digits."""
    mu = 1 / multiplier

    def gap(epsilon: float) -> float:
        return float(
            stats.norm.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))
            - delta
        )

    return (1 - 1e-9) * float(optimize.brentq(gap, 0.0, 500.0, xtol=1e-12))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_epsilon_is_the_exact_gaussians_and_never_below_it(epsilon: float, delta: float) -> None:
    made = RandomFeatureDensity().plan(FACTS, Privacy(epsilon, delta))
    true = exact(total_noise(made), delta)
    (claimed,) = made.epsilons
    assert claimed is not None
    assert true <= claimed <= 1.001 * true
    assert 0.999 * epsilon <= claimed <= epsilon


def test_dp_accounting_agrees_on_three_releases() -> None:
    made = RandomFeatureDensity().plan(FACTS, Privacy(2.0, 1e-5))
    theirs = pld.PLDAccountant()
    for _, multiplier, count in made.events():
        theirs.compose(dp_accounting.GaussianDpEvent(multiplier), count)
    assert made.epsilons[0] == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


def test_budgets_by_owner_are_spent_exactly() -> None:
    facts = Facts(1000, (("open", 200), ("strict", 300), ("usual", 500)), labels=("0", "1"))
    made = RandomFeatureDensity().plan(facts, Budgets({"strict": 1, "usual": 3, "open": 8}, 1e-5))
    for owner, promised in enumerate((8.0, 1.0, 3.0)):
        true = exact(total_noise(made, owner), 1e-5)
        assert true <= made.epsilons[owner] <= min(1.001 * true, promised)
        assert true >= 0.997 * promised


@pytest.mark.parametrize("k", [0.3, 1.0])
@pytest.mark.parametrize("most", [1, 3])
def test_replace_one_is_met_exactly_and_add_remove_is_given_too(k: float, most: int) -> None:
    made = NoisyEmbeddingDensity(label_weight=k, most_labels=most).plan(FACTS, Privacy(2.0, 1e-5))
    factor = rows.replacing(k, most)
    true = exact(total_noise(made) / factor, 1e-5)
    assert true <= replaced(made, factor)[0] <= min(2.0, 1.001 * true)
    assert true > 0.999 * 2.0
    assert exact(total_noise(made), 1e-5) <= made.epsilons[0] < 1.3


def test_add_remove_can_be_promised_instead() -> None:
    made = NoisyEmbeddingDensity(adjacency="add/remove").plan(FACTS, Privacy(2.0, 1e-5))
    assert 0.999 * 2 < made.epsilons[0] <= 2


def test_a_noise_multiplier_is_taken_as_it_is() -> None:
    for kind in (RandomFeatureDensity, NoisyEmbeddingDensity):
        made = kind().plan(FACTS, FixedNoise(3.0, 1e-5))
        assert total_noise(made) == pytest.approx(3.0)


def test_the_noise_is_gaussian_of_the_recorded_size_and_on_the_grid() -> None:
    data = wrapped(torch.zeros(500, 3), np.zeros(500, int))
    query = private_features.query(1.0, 0.3, 1)
    made = planned(data, [query])
    features = private_features.Features.public(3, 4000, 1.0, seed=0)
    quiet = [
        private_features.class_sums(data, Releases(made, Stream.insecure(seed, 0)), Embedding(None), features, 0.3)
        for seed in (0, 1)
    ]
    releases = Releases(made, Stream.insecure(0, 0))
    sums, _ = private_features.class_sums(data, releases, Embedding(None), features, 0.3)
    (commit,) = releases.commits
    spacing = noise_grid.grid(query.bound)
    covered = noise_grid.charged(query.bound, spacing, 3 * 8000 + 3, 500)
    assert commit.sensitivity == (pytest.approx(covered, rel=1e-12),)
    assert commit.std == pytest.approx(made.levels[0].noise * covered, rel=1e-12)
    assert torch.all(torch.remainder(sums, spacing) == 0)
    empty = sums[1:].reshape(-1).numpy()  # classes without a record: noise alone
    assert stats.kstest(empty / commit.std, "norm").pvalue > 1e-4
    assert not torch.equal(quiet[0][0], quiet[1][0])
    assert torch.equal(quiet[0][0], sums)


def test_rows_of_strict_owners_carry_more_noise() -> None:
    data = wrapped(torch.zeros(4000, 3), np.zeros(4000, int), owners=["strict", "usual"] * 2000)
    made = two_owners(data, [rows.query(1.0, 1)])
    releases = Releases(made, Stream.insecure(0, 0))
    points, labels, owner = rows.noisy_rows(data, releases, Embedding(None), 1.0, Stream.insecure(0, 0))
    (commit,) = releases.commits
    for index in (0, 1):
        mine = torch.cat([points[owner == index], labels[owner == index][:, 1:]], dim=1).reshape(-1).numpy()
        assert stats.kstest(mine / (commit.std / made.scales[index]), "norm").pvalue > 1e-4
    assert made.scales[0] < made.scales[1]
    assert int((owner == 0).sum()) == 2000


def test_the_order_of_noisy_rows_tells_nothing() -> None:
    data = wrapped(torch.zeros(50, 3), np.zeros(50, int), owners=["strict"] * 25 + ["usual"] * 25)
    made = two_owners(data, [rows.query(1.0, 1)])
    _, _, owner = rows.noisy_rows(data, Releases(made, Stream.fresh()), Embedding(None), 1.0, Stream.fresh())
    assert not torch.equal(owner, data.owner)


def test_each_release_has_noise_of_its_own() -> None:
    made = plan_of("test", {}, [Query("a", 0.5, 1.0), Query("b", 0.5, 1.0)], FixedNoise(1.0, 1e-5), FACTS)
    releases = Releases(made, Stream.insecure(0, 0))
    one, two = (releases.release(torch.zeros(1000)) for _ in range(2))
    assert abs(np.corrcoef(one.numpy(), two.numpy())[0, 1]) < 0.2
    with pytest.raises(IndexError):
        releases.release(torch.zeros(1000))


def test_shares_must_divide_one_budget() -> None:
    with pytest.raises(UsageError, match="add up to 1"):
        RandomFeatureDensity(shares=(0.5, 0.5, 0.5)).plan(FACTS, Privacy(1.0))
    with pytest.raises(UsageError, match="say what was promised"):
        RandomFeatureDensity().plan(FACTS, None)
