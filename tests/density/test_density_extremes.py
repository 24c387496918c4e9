"""Records at the ends of what floats can hold: they count as any other, and nobody can tell that they are there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from density_exact import Exact, planned, wrapped
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.density import MomentDensity, NoisyEmbeddingDensity, RandomFeatureDensity, private_features
from evenhand.density import noisy_embedding as rows
from evenhand.density.noisy_sums import CHUNK, Query, chunks
from evenhand.density.private_features import Embedding
from evenhand.mechanism.random_streams import Stream

SOUND = [RandomFeatureDensity, MomentDensity, NoisyEmbeddingDensity]
EXTREMES = {"underflow": 2.6e-23, "denormal": 1e-45, "largest": 3e38, "negative": -3e38}
SKETCH = private_features.sketch(40, 4, seed=0)


def made(count: int = 300, width: int = 40) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 2
    return (generator.normal(size=(count, width)) + labels[:, None]).astype(np.float32), labels


@pytest.mark.parametrize("value", EXTREMES.values(), ids=list(EXTREMES))
def test_rows_have_norm_one_whatever_their_size(value: float) -> None:
    found = torch.full((3, 50), value)
    found[1, 1:], found[2, ::2] = 0.0, -found[2, ::2]
    norms = private_features.unit(found).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(private_features.unit(torch.zeros(1, 3)), torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("value", EXTREMES.values(), ids=list(EXTREMES))
@pytest.mark.parametrize("kind", SOUND)
def test_one_extreme_record_neither_stops_a_fit_nor_a_prediction(kind: Any, value: float) -> None:
    inputs, labels = made()
    inputs[7] = value * np.where(np.arange(40) % 3, 1, -1)
    fitted = kind(epsilon=3.0, delta=1e-5, dimension=8, insecure_seed=0).fit(inputs, labels)
    assert fitted.plan_.epsilons[0] <= 3.0
    assert np.isfinite(fitted.decision_function(inputs)).all()
    direction = np.sign(inputs[7:8]) * np.float32(1.0)
    np.testing.assert_allclose(
        fitted.decision_function(inputs[7:8]), fitted.decision_function(direction), rtol=1e-4, atol=1e-4
    )


def class_sums(data: Data, exact: Exact) -> None:
    features = private_features.Features.public(4, 6, 1.0, seed=0)
    private_features.class_sums(data, exact, Embedding(SKETCH), features, 0.3)


SUMS: dict[str, tuple[Callable[[Data, Exact], object], Query]] = {
    "class sums": (class_sums, private_features.query(1.0, 0.3, 1)),
    "mean": (lambda data, exact: private_features._mean(data, exact, SKETCH), Query("mean", 1.0, 1.0)),
    "second moments": (
        lambda data, exact: private_features._moments(data, exact, Embedding(SKETCH, torch.zeros(4))),
        Query("moments", 1.0, private_features.queries(0.5, 0.5, 1)[1].bound),
    ),
    "rows": (
        lambda data, exact: rows.noisy_rows(data, exact, Embedding(SKETCH), 1.0, Stream.insecure(0, 0)),
        rows.query(1.0, 1),
    ),
}


def summed(case: str, inputs: Any, labels: Any) -> Tensor:
    mechanism, query = SUMS[case]
    data = wrapped(inputs, labels, 2)
    exact = Exact(planned(data, [query]))
    mechanism(data, exact)
    return exact.sums[0]


@pytest.mark.parametrize("case", list(SUMS))
def test_an_embedding_that_is_not_finite_contributes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = made(20)
    spoilt = inputs.copy()
    spoilt[3] = math.nan
    without = summed(case, spoilt, labels)
    centred = Embedding.centred

    def broken(self: Embedding, given: Tensor) -> Tensor:
        found = centred(self, given).clone()
        found[3, 1] = math.nan
        return found

    monkeypatch.setattr(Embedding, "centred", broken)
    torch.testing.assert_close(summed(case, inputs, labels), without, rtol=0, atol=1e-12)


def across(directions: Tensor, count: int) -> Any:
    """Records that the public directions hardly see: what is left after reduction is rounding."""
    wide = directions.double()
    found = torch.randn(count, len(wide), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (found - found @ wide @ torch.linalg.pinv(wide)).float().numpy()


@pytest.mark.parametrize("case", [name for name in SUMS if name != "rows"])
def test_removing_a_record_does_not_move_others_through_the_chunks(case: str) -> None:
    """The last record changes from a chunk of its own to a full one; float32 reduction once turned it around."""
    assert SKETCH is not None
    labels = np.arange(CHUNK + 1) % 2
    inputs = across(SKETCH, CHUNK + 1)
    inputs[0] = 0.0
    labels[0] = 0
    moved = summed(case, inputs, labels) - summed(case, inputs[1:], labels[1:])
    alone = summed(case, np.concatenate([inputs[:1], inputs[1:3]]), labels[:3]) - summed(case, inputs[1:3], labels[1:3])
    assert (moved - alone).norm() < 2.0**-24, "what is charged for the rounding of one record"


def test_smoothing_does_not_depend_on_how_many_records_come_along() -> None:
    means = 1e5 + torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    features = private_features.Features.public(4, 50, 1.0, seed=0, smoothing=1.0, means=means)
    given = 1e5 + 3 * torch.randn(26, 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(features.smoothed(given)[:25], features.smoothed(given[:25]), rtol=0, atol=1e-8)


def test_the_embedding_is_clipped_even_if_its_rows_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_features, "unit", lambda given: 2.0 * given.double())
    inputs, labels = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    data = wrapped(inputs, labels, 2)
    exact = Exact(planned(data, [rows.query(1.0, 1)]))
    rows.noisy_rows(data, exact, Embedding(None), 1.0, Stream.insecure(0, 0))
    assert exact.sums[0][:, :4].norm(dim=1).max() <= 1.0


def test_a_huge_record_is_present() -> None:
    (part,) = chunks(wrapped(torch.full((1, 3), 3e38), [0], 1))
    points, present = part.usable(Embedding(None).centred(part.inputs))
    assert present.item() == 1.0
    assert points.norm().item() == pytest.approx(1.0)
