"""Densities, neighbours, the loss and AUC against brute force and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KernelDensity, NearestNeighbors

from evenhand.density import Bandwidth, ClassDensities, auc_by_class, histograms, kernel_density, mean_distances
from evenhand.density.projection_network import contrastive_loss, train_projection
from evenhand.errors import UsageError


def points(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel_density, kernel_density):
        monkeypatch.setattr(module, "ROWS", 7)
        monkeypatch.setattr(module, "POINTS", 11)


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("h", [0.1, 1.0, 5.0])
def test_log_density_is_that_of_scikit_learn(size: int, h: float, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    known, asked = points(40, size), points(16, size, seed=1)
    theirs = KernelDensity(bandwidth=h, kernel="gaussian", rtol=1e-12).fit(known.numpy()).score_samples(asked.numpy())
    np.testing.assert_allclose(kernel_density.log_density(asked, known, h**2).numpy(), theirs, rtol=1e-9)


def test_every_point_has_its_own_variance_and_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    known, asked = points(30, 2), points(9, 2, seed=1)
    variance = torch.linspace(0.2, 3.0, 30, dtype=torch.float64)
    weights = torch.linspace(0.0, 1.0, 30, dtype=torch.float64)
    each = np.stack(
        [
            stats.multivariate_normal(known[i].numpy(), float(variance[i]) * np.eye(2)).pdf(asked.numpy())
            for i in range(30)
        ]
    )
    expected = np.log((each * weights.numpy()[:, None]).sum(0) / weights.sum().item())
    found = kernel_density.log_density(asked, known, variance, weights)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    assert torch.isneginf(kernel_density.log_density(asked, known[:0], 1.0)).all()


def test_neighbours_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    known = points(50, 4)
    theirs = NearestNeighbors(n_neighbors=6).fit(known.numpy()).kneighbors(known.numpy())[0][:, 1:].mean(1)
    np.testing.assert_allclose(mean_distances(known, 5).numpy(), theirs, rtol=1e-9)
    others = points(20, 4, seed=3)
    theirs = NearestNeighbors(n_neighbors=3).fit(others.numpy()).kneighbors(known.numpy())[0].mean(1)
    np.testing.assert_allclose(mean_distances(known, 3, others).numpy(), theirs, rtol=1e-9)
    with pytest.raises(UsageError, match="smaller k"):
        mean_distances(known[:4], 4)


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.75])
def test_only_sparse_places_get_extra_bandwidth(quantile: float) -> None:
    known = points(101, 3)
    found = Bandwidth(h=0.5, k=5, quantile=quantile, extra=2.0).variances(known)
    distance = mean_distances(known, 5)
    limit = torch.quantile(1 / distance, quantile)
    sparse = 1 / distance < limit
    assert abs(sparse.double().mean().item() - quantile) < 0.02
    assert torch.all(found[~sparse] == 0.25)
    torch.testing.assert_close(found[sparse], 0.25 + (0.5 * 2.0 * limit * distance[sparse]) ** 2)


def test_identical_points_are_dense_and_nothing_is_infinite() -> None:
    known = torch.cat([torch.zeros(10, 2), points(10, 2).float() * 5])
    found = Bandwidth(k=3).variances(known)
    assert torch.isfinite(found).all()
    assert torch.all(found[:10] == 1)


def test_class_densities_and_auc() -> None:
    known = torch.cat([points(60, 2), points(60, 2, seed=1) + 3])
    labels = torch.arange(120) // 60
    made = ClassDensities.of(known, labels, 2, Bandwidth(h=0.7, extra=0.0))
    asked = torch.cat([points(40, 2, seed=2), points(40, 2, seed=3) + 3])
    scores, true = made.log_densities(asked), torch.arange(80) // 40
    for label in (0, 1):
        theirs = KernelDensity(bandwidth=0.7, rtol=1e-12).fit(known[labels == label].numpy())
        np.testing.assert_allclose(scores[:, label].numpy(), theirs.score_samples(asked.numpy()), rtol=1e-9)
    assert (scores.argmax(1) == true).double().mean() > 0.95
    expected = [roc_auc_score(true.numpy() == label, scores[:, label].numpy()) for label in (0, 1)]
    np.testing.assert_allclose(auc_by_class(scores, true), expected)
    columns = torch.stack([true == 0, torch.zeros(80, dtype=torch.bool)], dim=1).double()
    several = auc_by_class(scores, columns)
    assert several[0] == pytest.approx(expected[0])
    assert np.isnan(several[1])


def test_histograms_count_every_record_of_every_class() -> None:
    known, labels = points(70, 3), torch.arange(70) % 3
    edges, counts = histograms(known, labels, k=5, bins=12)
    assert len(edges) == 13
    assert {label: int(found.sum()) for label, found in counts.items()} == {0: 24, 1: 23, 2: 23}
    own = mean_distances(known[labels == 1], 5).numpy()
    np.testing.assert_array_equal(counts[1], np.histogram(own, bins=edges)[0])


def test_the_loss_is_the_papers_in_log_space() -> None:
    known, labels = points(12, 2), torch.arange(12) % 3
    batch, mine = points(5, 2, seed=1), torch.tensor([0, 1, 2, 0, 1])
    variance = torch.full((12,), 0.8, dtype=torch.float64)
    found = contrastive_loss(batch, mine, known, labels, variance, margin=1.0)
    for i in range(5):
        each = stats.multivariate_normal(batch[i].numpy(), 0.8 * np.eye(2)).pdf(known.numpy())
        same = (labels == mine[i]).numpy()
        expected = max(0.0, np.log(each[~same].mean()) - np.log(each[same].mean()) + 1.0)
        assert found[i].item() == pytest.approx(expected, abs=1e-9)


def test_a_record_is_not_its_own_neighbour_in_the_loss() -> None:
    known, labels = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1])
    alone = contrastive_loss(known[:1], labels[:1], known, labels, torch.ones(3))
    without = contrastive_loss(known[:1], labels[:1], known[1:], labels[1:], torch.ones(2))
    torch.testing.assert_close(alone, without)


def test_training_the_projection_lowers_the_loss() -> None:
    labels = torch.arange(200) % 2
    features = points(200, 10).float()
    features[:, 0] += 4.0 * labels

    def loss(weight: torch.Tensor) -> float:
        projected = features @ weight
        return contrastive_loss(projected, labels, projected, labels, torch.ones(200)).mean().item()

    before = train_projection(features, labels, dimension=3, epochs=0)
    after = train_projection(features, labels, dimension=3, epochs=10, batch=20, lr=0.03)
    assert loss(after) < 0.7 * loss(before)
