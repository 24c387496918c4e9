"""Densities under attack: much of a right claim is certified, never more, and missing noise is exposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from evenhand.density import noisy_sums
from evenhand.density.audit_releases import play_releases
from evenhand.mechanism.audit.attack import prepare
from evenhand.mechanism.audit.packed_runs import Mechanics
from evenhand.mechanism.audit.result import Audit
from evenhand.mechanism.random_streams import Stream
from evenhand.methods.rules import Clip
from evenhand.runs.folder import Folder
from evenhand.training.config import Config
from evenhand.training.from_config import planned
from evenhand.training.run import Run
from evenhand.types import Facts

FACTS = Facts(1000, (("strict", 600), ("open", 400)), labels=("a", "b"), inputs="(4,) float32")
METHODS = ["moment_density", "random_feature_density", "noisy_embedding_density"]


def plan_for(method: str) -> eh.Plan:
    return planned(Config(method=method), FACTS, eh.Budgets({"strict": 1.0, "open": 5.0}, 1e-5))


def seeded(plan: eh.Plan) -> Audit:
    """An audit whose outcome is the same in every run."""
    mechanics = Mechanics(Clip(), (), stream=lambda number: Stream.insecure(1, number))
    return prepare(plan, mechanics=mechanics, trials=20_000, player=play_releases).run()


@pytest.mark.parametrize("method", METHODS)
def test_every_density_is_audited_below_its_claim_and_above_most_of_it(method: str) -> None:
    outcome = seeded(plan_for(method))
    assert outcome.ok
    strict, generous = outcome.per_owner["strict"], outcome.per_owner["open"]
    assert strict.lower > 0.0
    assert generous.lower > 0.7 * (generous.claim or 0)
    assert not outcome.private


@pytest.mark.parametrize("method", METHODS)
def test_missing_noise_is_exposed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = noisy_sums.release

    def quiet(summed: Any, std: float, *others: Any, **options: Any) -> Any:
        return honest(summed, std / 3, *others, **options)

    monkeypatch.setattr(noisy_sums, "release", quiet)
    outcome = seeded(plan_for(method))
    assert not outcome.ok
    assert outcome.lower_bound > 2 * (outcome.claim or 0)


def test_the_run_of_a_density_is_audited_and_verifies(tmp_path: Path) -> None:
    inputs, labels = eh.data.digits()[0].fetch(torch.arange(200))
    eh.density.MomentDensity(epsilon=3.0, delta=1e-4, out=tmp_path / "run").fit(inputs.numpy(), labels.numpy())
    assert eh.audit(Run(Folder(tmp_path / "run")), record=True, trials=5000).ok
    assert eh.verify(tmp_path / "run")["problems"] == []
