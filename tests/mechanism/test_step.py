from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats as tests
from steps import FACTS, almost_noiseless, made, rows, run, vectors
from torch import nn

from evenhand.accounting.budgets import Privacy
from evenhand.data import wrap
from evenhand.gradients import per_sample
from evenhand.mechanism import noise_grid as noises
from evenhand.mechanism.make_plan import plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods.catalogue import Method
from evenhand.methods.rules import Clip, Identity, Ordered
from evenhand.methods.schedules import Constant
from evenhand.summation import Summation

LOSS = nn.CrossEntropyLoss(reduction="none")


def test_without_noise_the_step_is_the_clipped_sum_over_the_expected_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = 3 * torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    mechanism = Mechanism(almost_noiseless(), Clip(), (), Stream.insecure(0, 0))
    found = private_gradient(mechanism, per_sample(model, LOSS, inputs, targets), rows(7), {})
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(7):
        grads = torch.autograd.grad(LOSS(model(inputs[i : i + 1]), targets[i : i + 1]).sum(), list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for name, grad in zip(expected, grads, strict=True):
            expected[name] += grad * min(1.0, 1.0 / norm) / 10
    for name, value in expected.items():
        assert torch.allclose(found.gradient[name], value, atol=1e-8)


def test_the_ledger_entry_is_made_of_the_number_that_made_the_noise() -> None:
    found = made(noise=1.7)
    values = np.concatenate(
        [
            run(torch.zeros(0, 16_000), found, batch=rows(0, position)).gradient["p"].numpy() * 10
            for position in range(8)
        ]
    )
    commit = run(torch.zeros(0, 16_000), found).commit
    assert values.size == 128_000
    assert commit.std == pytest.approx(1.7 * commit.sensitivity[0], rel=1e-12)
    assert tests.kstest(values / commit.std, "norm").pvalue > 1e-6
    chi = float((values**2).sum() / commit.std**2)
    assert 1e-6 < tests.chi2.cdf(chi, values.size) < 1 - 1e-6
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(values.size)


def test_noise_scales_with_the_bound_and_covers_rounding() -> None:
    method = Method(Clip(), schedule=Constant(bound=7.0))
    commit = run(torch.zeros(0, 100), made(method)).commit
    least = 1 + noises.NORMS + Summation(10).relative
    assert 7.0 * least < commit.sensitivity[0] < 7.0 * (least + 1e-6)


def test_every_class_sees_at_least_its_planned_noise() -> None:
    found = made(scales=(0.5, 1.0))
    batch = replace(rows(2), owner=torch.tensor([0, 1]))
    commit = run(torch.eye(2) * 100, found, batch=batch).commit
    for value, scale in zip(commit.sensitivity, (0.5, 1.0), strict=True):
        assert commit.std / value >= 1.0 / scale * (1 - 1e-12)
    gradient = run(torch.eye(2) * 100, replace(almost_noiseless(), scales=(0.5, 1.0)), batch=batch).gradient["p"]
    assert (gradient * 10).tolist() == pytest.approx([0.5, 1.0], rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_contributes_zero_and_noise_and_charge_stay(poison: float) -> None:
    good = torch.tensor([[0.3, 0.4], [0.0, 0.5]])
    bad = torch.cat([good, torch.tensor([[poison, 1.0]])])
    with_it, without = run(bad, made()), run(good, made())
    assert torch.equal(with_it.gradient["p"], without.gradient["p"])
    assert with_it.commit == without.commit
    assert (with_it.left_out, without.left_out) == (1, 0)


def test_a_huge_finite_row_is_clipped_exactly() -> None:
    model = nn.Linear(3, 2)
    inputs = torch.tensor([[1e30, -1e30, 1e30], [0.1, 0.2, 0.3]])
    result = per_sample(model, LOSS, inputs, torch.tensor([0, 1]))
    mechanism = Mechanism(almost_noiseless(), Clip(), (), Stream.insecure(0, 0))
    flat = torch.cat([v.reshape(-1) for v in private_gradient(mechanism, result, rows(2), {}).gradient.values()])
    only_small = per_sample(model, LOSS, inputs[1:], torch.tensor([1]))
    rest = torch.cat([v.reshape(-1) for v in private_gradient(mechanism, only_small, rows(1), {}).gradient.values()])
    assert torch.isfinite(flat).all()
    assert (flat - rest).norm() * 10 <= 1 + 1e-5


def test_an_empty_batch_is_an_ordinary_step() -> None:
    empty, full = run(torch.zeros(0, 50), made()), run(torch.zeros(3, 50), made())
    assert torch.equal(empty.gradient["p"], full.gradient["p"])
    assert empty.gradient["p"].abs().sum() > 0
    assert empty.commit == full.commit


def test_the_divisor_is_the_expected_batch_not_the_realised_one() -> None:
    one = torch.tensor([[0.5, 0.0]])
    for copies in (1, 4):
        gradient = run(one.repeat(copies, 1), almost_noiseless()).gradient["p"]
        assert gradient[0].item() == pytest.approx(0.5 * copies / 10, rel=1e-6)


def test_released_values_lie_on_the_grid() -> None:
    found = run(torch.randn(5, 200), made())
    spacing = noises.grid(1.0)
    units = found.gradient["p"].numpy() * 10 / spacing
    assert np.abs(units - np.rint(units)).max() < 1e-3


def test_rounding_to_the_grid_costs_at_most_the_charged_slack() -> None:
    source = np.random.default_rng(0)
    spacing = noises.grid(1.0)
    for _ in range(50):
        total = source.normal(size=1000)
        record = source.normal(size=1000)
        record /= np.linalg.norm(record)
        moved = (np.rint((total + record) / spacing) - np.rint(total / spacing)) * spacing
        assert np.linalg.norm(moved) <= 1 + noises.slack(spacing, 1000)


def test_sgd_releases_the_plain_mean() -> None:
    found = plan("sgd", None, data=FACTS, epochs=1, batch_size=10)
    rule = Identity()
    released = run(torch.tensor([[30.0, 40.0], [1.0, 1.0]]), found, rule)
    assert torch.allclose(released.gradient["p"], torch.tensor([3.1, 4.1], dtype=torch.float64))
    assert released.commit.std == 0.0


def test_a_calibrated_plan_and_its_commits_give_the_promised_epsilon() -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    data = wrap(torch.ones(100, 2), [0, 1] * 50)
    found = plan("dpsgd", Privacy(2.0, 1e-3), data=data.facts, epochs=5, batch_size=10)
    commits = [run(torch.randn(3, 2), found, batch=rows(3, position)).commit for position in range(found.steps)]
    accountant = PLDAccountant()
    for ratio, count in Counter(commit.std / commit.sensitivity[0] for commit in commits).items():
        accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(ratio)), count)
    assert accountant.get_epsilon(1e-3) <= 2.0 * (1 + 1e-3)


def test_a_class_is_charged_for_the_rounding_of_the_classes_that_may_share_its_block() -> None:
    found, summation = made(scales=(0.001, 1.0, 1.1)), Summation(10, ratio=1100)
    small, usual, large = (value / found.levels[0].bound for value in run(torch.zeros(0, 4), found).commit.sensitivity)
    assert 0.001 * (1 + summation.block) < small < 0.001 * 1.01
    assert 1 + 1.1 * summation.block < usual < 1 + 1.1 * summation.block + 2e-5
    assert 1.1 * (1 + summation.block) < large < 1.1 * 1.01


def test_every_class_is_charged_for_the_largest_if_weights_depend_on_the_batch() -> None:
    found = made(scales=(0.5, 1.0))
    mechanism = Mechanism(found, Ordered(), (), Stream.insecure(0, 0))
    small, _ = private_gradient(mechanism, vectors(torch.zeros(0, 4)), rows(0), {}).commit.sensitivity
    assert small > found.levels[0].bound * (0.5 + mechanism.summation.block)
