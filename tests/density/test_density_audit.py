"""Attacks: on the sound releases they stay below the claimed epsilon, on wrong ones and on the published form not."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from density_exact import Exact, certified, planned, wrapped
from numpy.typing import NDArray

from evenhand.accounting import accountant
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density import noisy_embedding as rows
from evenhand.density import private_features
from evenhand.density.noisy_sums import Query, Releases
from evenhand.density.private_features import Embedding
from evenhand.mechanism.random_streams import Stream

TRIALS, DELTA, K = 800, 0.05, 1.0
INPUTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1e6, 1e6]])
LABELS = np.array([[1, 0], [0, 1], [1, 1]])
"""The last record is the target: far out, and of both classes."""


def class_sums(data: Data, releases: Releases) -> None:
    private_features.class_sums(data, releases, Embedding(None), private_features.Features.public(2, 3, 1.0, seed=0), K)


def second_moments(data: Data, releases: Releases) -> None:
    private_features._moments(data, releases, Embedding(None, torch.zeros(2)))


def noisy_rows(data: Data, releases: Releases) -> None:
    """A removed record leaves a row of zeros; the attacker is even told the order of the rows."""
    inputs, labels = data.fetch(torch.arange(len(data)))
    missing = torch.zeros(3 - len(data), 2)
    padded = wrapped(torch.cat([inputs, missing]), torch.cat([labels, missing]).numpy(), 2)
    rows.noisy_rows(padded, releases, Embedding(None), K, Stream.insecure(0, 0))


Mechanism = Callable[[Data, Releases], None]
SOUND: dict[str, tuple[Mechanism, Query]] = {
    "class sums": (class_sums, private_features.query(1.0, K, 2)),
    "second moments": (second_moments, Query("moments", 1.0, private_features.queries(0.5, 0.5, 2)[1].bound)),
    "noisy rows": (noisy_rows, rows.query(K, 2)),
}


def losses(mechanism: Mechanism, plan: Plan, present: bool) -> NDArray[np.float64]:
    """Log-likelihood ratios of present over absent, in many trials: the best test there is for Gaussian noise."""
    sums = []
    for kept in (2, 3):
        exact = Exact(plan)
        mechanism(wrapped(INPUTS[:kept], LABELS[:kept], 2), exact)
        sums.append(exact.sums[0])
    shift = (sums[1] - sums[0]).reshape(-1)
    found = np.empty(TRIALS)
    for trial in range(TRIALS):
        releases = Releases(plan, Stream.insecure(2 * trial + int(present), 7))
        seen = (releases.release(sums[int(present)]) - sums[0]).reshape(-1)
        found[trial] = float(seen @ shift - 0.5 * shift @ shift) / releases.commits[0].std ** 2
    return found


def attack(name: str) -> tuple[float, float]:
    """The epsilon that an attack certifies, and the one that is claimed."""
    mechanism, query = SOUND[name]
    plan = planned(wrapped(INPUTS, LABELS, 2), [query])
    claimed = accountant.epsilon(plan.events(), DELTA)
    with_it, without = (losses(mechanism, plan, present) for present in (True, False))
    lowest = 0.0
    for threshold in (0.0, claimed):
        lowest = max(lowest, certified(with_it > threshold, without > threshold, DELTA))
        lowest = max(lowest, certified(without < -threshold, with_it < -threshold, DELTA))
    return lowest, claimed


@pytest.mark.parametrize("name", list(SOUND))
def test_attacks_on_sound_releases_stay_below_what_is_claimed(name: str) -> None:
    lowest, claimed = attack(name)
    assert 0.15 * claimed < lowest <= claimed, "and the attack is strong enough to mean something"


def test_an_attack_catches_forgotten_counts_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_features, "sum_norms", lambda made, labels, k: made.norm(dim=1))
    monkeypatch.setitem(SOUND, "class sums", (class_sums, Query("sums", 1.0, 1.0)))
    lowest, claimed = attack("class sums")
    assert lowest > claimed


def test_an_attack_catches_missing_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unit", "lengthened"):
        monkeypatch.setattr(private_features, name, lambda found: found.double())
    monkeypatch.setattr(Releases, "weights", lambda self, norms, owner: torch.ones_like(norms))
    lowest, claimed = attack("second moments")
    assert lowest > claimed


def leak() -> ModuleType:
    file = Path(__file__).parents[2] / "experiments" / "density_leak.py"
    spec = importlib.util.spec_from_file_location("density_leak", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dimension", [2, 64])
def test_the_published_form_leaks_more_than_it_claims(dimension: int) -> None:
    found = leak().measured(dimension=dimension, claimed=1.0, trials=400)
    assert found.certified > found.claimed == 1.0
    assert math.isfinite(found.certified)


def test_the_same_attack_does_not_break_a_sound_release() -> None:
    found = leak().measured_sound(claimed=1.0, trials=400)
    assert found.certified <= found.claimed
