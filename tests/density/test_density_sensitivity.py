"""By brute force: no record moves a released sum further than the plan says, and worst cases come close to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from density_exact import Exact, two_owners, worst_move, wrapped
from torch import Tensor

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density import noisy_embedding as rows
from evenhand.density import private_features
from evenhand.density.noisy_sums import Query, Releases
from evenhand.density.private_features import Embedding
from evenhand.mechanism.random_streams import Stream

CLASSES, SIZE, K = 3, 4, 0.7
OWNERS = ["strict"] * 5 + ["usual"] * 8


def nasty() -> Tensor:
    """Records of every kind: huge, tiny, zero, alike, opposite, not finite, with squares that float32 cannot hold."""
    found = torch.randn(13, SIZE, generator=torch.Generator().manual_seed(0))
    found[0] *= 1e20
    found[1] *= 1e-20
    found[2] = 0.0
    found[3], found[4] = found[5], -found[5]
    found[6, 1], found[7, 0] = math.nan, math.inf
    found[10] = torch.tensor([3.8e-23] + [2.6e-23] * (SIZE - 1))
    found[11], found[12] = 1e-45, 3e38
    return found


def one_label() -> Any:
    return np.arange(13) % CLASSES


def several_labels() -> Any:
    """Up to three labels; two are declared to count in full, so that some records must be scaled down."""
    marks = np.array([7, 6, 4, 0, 7, 3, 7, 7, 7, 6, 6, 5, 3])
    return (marks[:, None] >> np.array([2, 1, 0])) & 1


def class_sums(plan: Plan, data: Data) -> Tensor:
    features = private_features.Features.public(SIZE, 6, 1.0, seed=0, smoothing=1.0, means=torch.zeros(CLASSES, SIZE))
    exact = Exact(plan)
    private_features.class_sums(data, exact, Embedding(None), features, K)
    return exact.sums[0]


def mean(plan: Plan, data: Data) -> Tensor:
    exact = Exact(plan)
    private_features._mean(data, exact, None)
    return exact.sums[0]


def second_moments(plan: Plan, data: Data) -> Tensor:
    exact = Exact(plan)
    private_features._moments(data, exact, Embedding(None, torch.full((SIZE,), 0.1)))
    return exact.sums[0]


CASES: dict[str, tuple[Callable[[Plan, Data], Tensor], Callable[[int], Query]]] = {
    "class sums": (class_sums, lambda most: private_features.query(1.0, K, most)),
    "mean": (mean, lambda most: Query("mean", 1.0, 1.0)),
    "second moments": (
        second_moments,
        lambda most: Query("moments", 1.0, private_features.queries(0.5, 0.5, most)[1].bound),
    ),
}


def moved(case: str, labels: Any, most: int) -> tuple[list[float], list[float]]:
    """Measured movements, and what the plan allows each record."""
    summed, query = CASES[case]
    plan = two_owners(wrapped(nasty(), labels, CLASSES, OWNERS), [query(most)])
    allowed = [plan.scales[0 if owner == "strict" else 1] * plan.levels[0].bound for owner in OWNERS]
    return worst_move(lambda data: summed(plan, data), nasty(), labels, OWNERS, CLASSES), allowed


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("labels", "most"), [(one_label, 1), (several_labels, 2)])
def test_removing_any_record_moves_the_sum_at_most_by_its_owners_bound(
    case: str, labels: Callable[[], Any], most: int
) -> None:
    moves, allowed = moved(case, labels(), most)
    assert all(move <= most_ * (1 + 1e-9) for move, most_ in zip(moves, allowed, strict=True))
    assert max(move / most_ for move, most_ in zip(moves, allowed, strict=True)) > 0.999
    assert max(moves[6:8]) < 1e-12, "a record that is not finite contributes nothing"


def test_forgetting_the_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_features, "sum_norms", lambda made, labels, k: labels.norm(dim=1) * made.norm(dim=1))
    monkeypatch.setitem(CASES, "class sums", (class_sums, lambda most: Query("sums", 1.0, math.sqrt(most))))
    moves, allowed = moved("class sums", one_label(), 1)
    assert any(move > 1.1 * most for move, most in zip(moves, allowed, strict=True))


def test_counting_several_labels_as_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_features, "sum_norms", lambda made, labels, k: (made.square().sum(1) + k**2).sqrt())
    moves, allowed = moved("class sums", several_labels(), 1)
    assert any(move > 1.1 * most for move, most in zip(moves, allowed, strict=True))


def test_leaving_out_the_clipping_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unit", "lengthened"):
        monkeypatch.setattr(private_features, name, lambda found: found.double())
    monkeypatch.setattr(Releases, "weights", lambda self, norms, owner: torch.ones_like(norms))
    moves, allowed = moved("second moments", one_label(), 1)
    assert any(move > 2 * most for move, most in zip(moves, allowed, strict=True))


def test_a_triangle_has_the_norm_of_its_matrix() -> None:
    square = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    square = square + square.T
    assert private_features.upper_triangle(square).norm().item() == pytest.approx(square.norm().item())
    torch.testing.assert_close(private_features.symmetric(private_features.upper_triangle(square), 5), square)


def table(plan: Plan, inputs: Tensor, labels: Any) -> Tensor:
    """The rows before noise, in the order of the records."""
    exact = Exact(plan)
    data = wrapped(inputs, labels, CLASSES, OWNERS)
    stream = Stream.insecure(0, 0)
    rows.noisy_rows(data, exact, Embedding(None), K, stream)
    order = np.argsort(stream.uniforms("sampling", 0, len(inputs)), kind="stable")
    return exact.sums[0][torch.from_numpy(np.argsort(order))]


@pytest.mark.parametrize(("labels", "most"), [(one_label, 1), (several_labels, 2)])
def test_noisy_rows_move_alone_and_within_both_bounds(labels: Callable[[], Any], most: int) -> None:
    inputs, first = nasty(), labels()
    plan = two_owners(wrapped(inputs, first, CLASSES, OWNERS), [rows.query(K, most)])
    before = table(plan, inputs, first)
    scale = torch.tensor([plan.scales[0 if owner == "strict" else 1] for owner in OWNERS], dtype=torch.float64)
    bound = plan.levels[0].bound
    assert torch.all(before.norm(dim=1) <= scale * bound * (1 + 1e-9)), "added or removed: a row of zeros"
    furthest = 0.0
    for replaced in (0, 9, 10, 11, 12):
        for turned in (-inputs[replaced], torch.zeros(SIZE), inputs[replaced] * 1e-30):
            for other in range(len(first)):
                changed, labels_too = inputs.clone(), np.array(first)
                changed[replaced], labels_too[replaced] = turned, first[other]
                after = table(plan, changed, labels_too)
                moves = (after - before).norm(dim=1) / scale
                assert moves.count_nonzero() <= 1
                furthest = max(furthest, float(moves[replaced]))
    allowed = bound * rows.replacing(K, most)
    assert furthest <= allowed * (1 + 1e-9)
    assert furthest > 0.9 * allowed
