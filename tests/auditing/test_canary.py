"""One training with canaries: what it certifies, what it must not, and that canaries are ordinary records."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.auditing.canaries import Canaries, ProbeLoss, WithProbe, gradient_canaries, planted, with_probe_numbers
from evenhand.auditing.canary import audit_with_canaries
from evenhand.data.dataset import Data
from evenhand.data.persons import by_person
from evenhand.errors import UsageError
from evenhand.gradients.engine import per_sample
from evenhand.mechanism import step
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.training.config import PYTHON, Config
from evenhand.training.losses import CrossEntropy

RECORDS = 200
STRONG = Config(data=PYTHON, model=PYTHON, epsilon=4.38, delta=1e-5, epochs=4, batch_size=RECORDS, insecure_seed=3)
"""All records in every step."""


def records(**columns: Any) -> Data:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 6, generator=drawn)
    return eh.data.wrap(inputs, inputs[:, :3].argmax(1), **columns)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def audited(config: Config = STRONG, data: Data | None = None, **options: Any) -> Any:
    options = {"canaries": 200, **options}
    return audit_with_canaries(config, model=net(), train=records() if data is None else data, **options)


@pytest.mark.parametrize("form", ["gradient", "input"])
def test_a_training_is_certified_below_its_claim_and_above_nothing(form: str) -> None:
    outcome = audited(form=form)
    bound = outcome.per_owner["all"]
    assert outcome.ok
    assert 0.3 < bound.lower < bound.claim <= 4.38 < bound.ceiling
    assert outcome.private
    told = outcome.details["parts"]["owner all"]
    assert told["without_assumptions"] < bound.lower
    assert told["canaries"] == bound.trials == 200


def test_the_last_weights_show_less_than_every_step_but_something() -> None:
    assert 0.1 < audited(sees="model").lower_bound < 4.38
    assert audited(sees="model", form="input").ok


def test_a_tenth_of_the_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step.release_parts

    def quiet(parts: list[Tensor], std: float, *others: Any, **options: Any) -> Any:
        return honest(parts, std / 10, *others, **options)

    monkeypatch.setattr(step, "release_parts", quiet)
    outcome = audited(dataclasses.replace(STRONG, epsilon=1.0))
    assert not outcome.ok
    assert outcome.lower_bound > 1.0


def test_every_owner_class_and_group_has_a_bound_of_its_own() -> None:
    data = records(owners=["strict", "open"] * (RECORDS // 2), groups=["a"] * 150 + ["b"] * 50)
    config = dataclasses.replace(STRONG, epsilon=None, budgets={"strict": 0.5, "open": 30.0}, method="idp_scale")
    outcome = audited(config, data, canaries=400)
    assert set(outcome.per_owner) == {"strict", "open"}
    assert set(outcome.per_group) == {"a", "b"}
    assert outcome.ok
    assert outcome.per_owner["open"].lower > 0.5 > outcome.per_owner["strict"].lower
    assert [outcome.per_owner[name].trials for name in ("strict", "open")] == [200, 200]


def test_canaries_that_are_in_are_drawn_like_records_and_those_that_are_out_never() -> None:
    data = records(owners=["a", "b"] * (RECORDS // 2))
    canaries = Canaries.toss(100, [0, 1], 1, np.random.default_rng(0))
    pulled = planted(with_probe_numbers(data), canaries, gradient_canaries(data))
    assert pulled.facts.records == len(pulled) == RECORDS + 100
    assert pulled.facts.owners == (("a", 150), ("b", 150)), "whatever the coins say"
    sampler = PoissonSampler(pulled.owner, [0.5, 0.5], Stream.insecure(0, 0))
    drawn = np.zeros(101)
    for position in range(60):
        batch = draw(pulled, sampler, position, 0)
        drawn[batch.inputs["canary"].numpy()] += 1
        mine = batch.inputs["canary"] > 0
        assert torch.equal(batch.owner[mine], torch.from_numpy(canaries.owner)[batch.inputs["canary"][mine] - 1])
        real = batch.record[~mine]
        assert torch.equal(batch.inputs["inputs"][~mine], data.fetch(real)[0]), "records in the order of their rows"
    assert (drawn[1:][~canaries.coins] == 0).all()
    assert (drawn[1:][canaries.coins] > 12).all()
    assert drawn[1:][canaries.coins].mean() == pytest.approx(30, abs=2)


def test_a_gradient_canary_moves_its_own_number_and_a_record_only_the_model() -> None:
    data, model = records(), net()
    probed, loss = WithProbe(model, 5), CrossEntropy()
    inputs = {"inputs": data.fetch(torch.arange(4))[0], "canary": torch.tensor([0, 3, 0, 5])}
    targets = data.fetch(torch.arange(4))[1]
    result = per_sample(probed, ProbeLoss(loss), inputs, targets)
    alone = per_sample(model, loss, inputs["inputs"], targets)
    assert result.norm[[1, 3]].tolist() == pytest.approx([1000.0, 1000.0])
    assert torch.allclose(result.norm[[0, 2]], alone.norm[[0, 2]])
    total = result.weighted_sum(torch.tensor([1.0, 0.001, 1.0, 0.002]))
    assert total["probe.weight"][:, 0].tolist() == pytest.approx([0, 0, 0, 1.0, 0, 2.0])
    own = alone.weighted_sum(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert all(torch.allclose(total[f"model.{name}"], value, atol=1e-6) for name, value in own.items())


def test_what_cannot_be_attacked_is_refused_before_anything_is_trained() -> None:
    by_name = by_person(records(), torch.arange(RECORDS) // 2)
    tokens = eh.data.wrap(torch.randint(0, 5, (RECORDS, 4)), torch.randint(0, 2, (RECORDS,)))
    plan = eh.plan("dpsgd", eh.Privacy(3.0), data=records().facts, epochs=1)
    for target, options, word in (
        (STRONG, {"train": None}, "train="),
        (plan, {}, "neither records nor a model"),
        (STRONG, {"train": by_name}, "persons"),
        (STRONG, {"train": tokens, "form": "input"}, 'form="gradient"'),
        (dataclasses.replace(STRONG, optimizer=PYTHON), {}, "optimizer"),
        (dataclasses.replace(STRONG, method="moment_density"), {}, "densities"),
        (STRONG, {"canaries": 10}, "canaries"),
        (STRONG, {"form": "gradients"}, "gradient"),
        (STRONG, {"public": "no"}, "public is true or false"),
        (STRONG, {"model": "linear"}, "torch.nn.Module"),
        (STRONG, {"confidence": 0.05}, "confidence"),
    ):
        with pytest.raises(UsageError, match=word):
            audit_with_canaries(target, **{"model": net(), "train": records(), **options})  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_run_with_a_thousand_canaries_at_mu_1_certifies_1_4_of_4_38() -> None:
    """All records in every step, gradient canaries, every step seen: the sharpest attack that one training allows."""
    config = dataclasses.replace(STRONG, epochs=10, insecure_seed=None)
    outcome = audited(config, canaries=1000)
    print(outcome.per_owner, outcome.details["parts"])
    assert 1.4 <= outcome.lower_bound <= 4.38
