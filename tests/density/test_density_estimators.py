"""The estimators as people use them: accuracy, parameters, budgets, inputs of every kind, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.neighbors import KernelDensity

from evenhand.accounting.budgets import Budgets
from evenhand.density import (
    METHODS,
    ClaimedFigures,
    MomentDensity,
    NoisyEmbeddingDensity,
    PublishedSmoothing,
    RandomFeatureDensity,
)
from evenhand.density.published_smoothing import rho_of
from evenhand.errors import UsageError

SOUND = [RandomFeatureDensity, MomentDensity, NoisyEmbeddingDensity]


def blobs(count: int = 3000, classes: int = 3, size: int = 6, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    centres = 4 * np.random.default_rng(99).normal(size=(classes, size))
    return (generator.normal(size=(count, size)) + centres[labels]).astype(np.float32), labels


@pytest.mark.parametrize("kind", SOUND)
def test_blobs_are_told_apart(kind: Any) -> None:
    epsilon = 1.0 if kind is not NoisyEmbeddingDensity else 20.0
    fitted = kind(epsilon=epsilon, delta=1e-5, insecure_seed=0).fit(*blobs())
    inputs, labels = blobs(seed=1)
    assert fitted.score(inputs, labels) > 0.95
    likely = fitted.predict_proba(inputs)
    np.testing.assert_allclose(likely.sum(1), 1.0, rtol=1e-6)
    assert np.all(likely >= 0)
    assert np.all(fitted.classes_[likely.argmax(1)] == fitted.predict(inputs))
    assert 0.99 * epsilon < fitted.privacy_.epsilon <= epsilon


def test_of_two_classes_the_decision_function_is_one_column() -> None:
    inputs, labels = blobs(200, classes=2)
    fitted = MomentDensity(epsilon=5.0, delta=1e-5, insecure_seed=0).fit(inputs, labels)
    both = fitted.log_densities(inputs)
    np.testing.assert_array_equal(fitted.decision_function(inputs), both[:, 1] - both[:, 0])
    np.testing.assert_array_equal(fitted.predict(inputs), (fitted.decision_function(inputs) > 0).astype(int))


@pytest.mark.parametrize("kind", [*SOUND, PublishedSmoothing])
def test_parameters_can_be_read_set_and_cloned(kind: Any) -> None:
    made = kind(delta=1e-6)
    again = clone(made.set_params(seed=7))
    assert again.get_params() == made.get_params()
    assert again.seed == 7
    with pytest.raises(ValueError, match="Invalid parameter"):
        made.set_params(nonsense=1)


@pytest.mark.parametrize("kind", SOUND)
def test_numpy_torch_pictures_and_read_only_arrays_are_the_same(kind: Any) -> None:
    inputs, labels = blobs(300)
    frozen = inputs.copy()
    frozen.flags.writeable = False
    scores = [
        kind(epsilon=5.0, delta=1e-5, insecure_seed=0).fit(given, targets).decision_function(inputs)
        for given, targets in (
            (inputs, labels),
            (torch.from_numpy(inputs), torch.from_numpy(labels)),
            (torch.from_numpy(inputs).view(-1, 1, 2, 3), labels),
            (frozen, labels),
        )
    ]
    assert all(np.array_equal(scores[0], other) for other in scores[1:])


def test_a_public_projection_gives_the_kernel_density_of_scikit_learn() -> None:
    inputs, labels = blobs(400, classes=2, size=3)
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    form = RandomFeatureDensity(private_projection=False, noise=0.01, delta=1e-5, features=4000, bandwidth=0.8)
    scores = form.fit(inputs, labels).log_densities(inputs[:50])
    for label in (0, 1):
        theirs = KernelDensity(bandwidth=0.8).fit(inputs[labels == label]).score_samples(inputs[:50])
        known = theirs + 1.5 * math.log(2 * math.pi * 0.8**2)  # ours is the kernel without its constant
        np.testing.assert_allclose(np.exp(scores[:, label]), np.exp(known), atol=0.05)


def test_smoothing_widens_sparse_records_only() -> None:
    from evenhand.density.private_features import Features

    features = Features.public(2, 100, 1.0, seed=0, smoothing=2.0, means=torch.zeros(1, 2))
    rows = torch.tensor([[0.5, 0.0], [6.0, 0.0]])
    norms = features.smoothed(rows).norm(dim=1)
    assert norms[0].item() == pytest.approx(1.0, abs=1e-6)
    assert norms[1] < 0.5
    with pytest.raises(UsageError, match="private_projection"):
        RandomFeatureDensity(epsilon=1.0, private_projection=False, smoothing=1.0).fit(*blobs(50))


def test_records_may_have_several_labels() -> None:
    generator = np.random.default_rng(0)
    columns = generator.integers(0, 2, (4000, 3))
    inputs = 3.0 * columns @ np.eye(3, 6) + generator.normal(size=(4000, 6)) - 1.5
    fitted = RandomFeatureDensity(epsilon=3.0, delta=1e-5, most_labels=3, insecure_seed=0).fit(inputs, columns)
    from evenhand.density import auc_by_class

    likely = torch.from_numpy(fitted.predict_proba(inputs))
    assert min(auc_by_class(likely, torch.from_numpy(columns))) > 0.7
    assert fitted.plan_.levels[-1].bound == pytest.approx(math.sqrt(3 * (1 + 0.3**2)))


@pytest.mark.parametrize("kind", SOUND)
def test_owners_spend_their_own_budgets(kind: Any) -> None:
    inputs, labels = blobs(600)
    owners = np.array(["strict", "usual"])[np.arange(600) % 2]
    for budgets in ({"strict": 1.0, "usual": 4.0}, Budgets({"strict": 1.0, "usual": 4.0}, 1e-5)):
        fitted = kind(delta=1e-5, insecure_seed=0).fit(inputs, labels, owners=owners, budgets=budgets)
        promised = fitted.privacy_.replaced if kind is NoisyEmbeddingDensity else fitted.privacy_.epsilons
        assert 0.99 < promised["strict"] <= 1.0
        assert 3.96 < promised["usual"] <= 4.0


@pytest.mark.parametrize("kind", SOUND)
def test_every_record_can_have_its_own_budget(kind: Any) -> None:
    inputs, labels = blobs(300)
    budgets = np.repeat(np.linspace(0.5, 4.0, 30).round(2), 10)
    fitted = kind(delta=1e-5, insecure_seed=0).fit(inputs, labels, budgets=budgets)
    promised = fitted.privacy_.replaced if kind is NoisyEmbeddingDensity else fitted.privacy_.epsilons
    assert set(promised) == {f"{value:g}" for value in budgets}
    assert all(0.99 * float(name) < spent <= float(name) * (1 + 1e-9) for name, spent in promised.items())


def test_the_words_name_the_relation_and_what_is_not_covered() -> None:
    inputs, labels = blobs(200)
    rows = str(NoisyEmbeddingDensity(epsilon=2.0, delta=1e-5, insecure_seed=0).fit(inputs, labels).privacy_)
    assert "promised for: replace one" in rows
    assert "if it is added or removed" in rows
    assert "PUBLIC SEED" in rows
    sums = str(RandomFeatureDensity(epsilon=2.0, delta=1e-5).fit(inputs, labels).privacy_)
    assert "promised for: add/remove" in sums
    assert "epsilon 2.000 if it is added or removed" in sums
    assert "not added up" in sums
    assert "PUBLIC SEED" not in sums


def test_public_labels_are_named_and_get_no_run_folder(tmp_path: Any) -> None:
    inputs, labels = blobs(200)
    form = NoisyEmbeddingDensity(epsilon=2.0, delta=1e-5, labels="public", insecure_seed=0)
    fitted = form.fit(inputs, labels)
    assert "LABELS ARE PUBLIC" in str(fitted.privacy_)
    assert "(unit: one record's features; labels are public)" in str(fitted.privacy_)
    assert "labels are public" in fitted.plan_.unit
    with pytest.raises(UsageError, match="labels"):
        form.set_params(out=tmp_path / "run").fit(inputs, labels)
    assert not (tmp_path / "run").exists()


def test_the_published_form_needs_to_be_asked_for_and_prints_no_epsilon() -> None:
    inputs, labels = blobs(200)
    with pytest.raises(UsageError, match="allow_unproven=True"):
        PublishedSmoothing().fit(inputs, labels)
    with pytest.raises(UsageError, match="one class per record"):
        PublishedSmoothing(allow_unproven=True).fit(inputs, np.eye(3)[labels])
    fitted = PublishedSmoothing(allow_unproven=True, dimension=3, epochs=3).fit(inputs, labels)
    assert fitted.score(inputs, labels) > 0.9
    assert fitted.privacy_.epsilon is None
    assert fitted.privacy_.guarantee == "not established"
    words = str(fitted.privacy_)
    assert "No privacy guarantee is established" in words
    assert "theorem 1" in words
    assert "epsilon " not in words.replace("no epsilon is printed", "")


def test_the_published_noise_is_nil_or_absurd_in_64_dimensions() -> None:
    form = PublishedSmoothing(rho=rho_of(1.0, 1e-5), allow_unproven=True)
    wide, narrow = (form.smoothing_noise(torch.full((1000,), h**2, dtype=torch.float64), 64)[0] for h in (1.0, 0.1))
    assert wide < 1e-26
    assert narrow > 1e33
    assert ClaimedFigures(0.02, 1e-5).log_sensitivity(64, 1.0, 1) == pytest.approx(math.log(2 * math.pi) * -32)


def test_what_cannot_be_used_is_refused_in_words() -> None:
    inputs, labels = blobs(60)
    with pytest.raises(NotFittedError, match="not fitted"):
        RandomFeatureDensity(epsilon=1.0).predict(inputs)
    with pytest.raises(UsageError, match="say what was promised"):
        MomentDensity().fit(inputs, labels)
    with pytest.raises(UsageError, match="one of epsilon and noise"):
        MomentDensity(epsilon=1.0, noise=1.0).fit(inputs, labels)
    with pytest.raises(UsageError, match="Did you mean"):
        NoisyEmbeddingDensity(epsilon=1.0, adjacency="replace-one").fit(inputs, labels)  # type: ignore[arg-type]
    fitted = MomentDensity(epsilon=1.0).fit(inputs, labels)
    with pytest.raises(ValueError, match="expecting 6 features"):
        fitted.predict(inputs[:, :4])
    with pytest.raises(UsageError, match="no run folder"):
        fitted.folder  # noqa: B018
    assert set(METHODS.values()) == {kind.__name__ for kind in SOUND}


@pytest.mark.parametrize("kind", SOUND)
def test_records_that_are_not_finite_change_nothing_but_their_own_row(kind: Any) -> None:
    inputs, labels = blobs(400)
    spoilt = inputs.copy()
    spoilt[3, 2] = np.nan
    fitted = kind(epsilon=5.0, delta=1e-5, insecure_seed=0).fit(spoilt, labels)
    assert np.isfinite(fitted.decision_function(inputs)).all()
