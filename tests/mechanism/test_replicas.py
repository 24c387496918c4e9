"""Replicas that step together against single runs with the same keys, step by step, for every kind of method."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.errors import UnsupportedModelError
from evenhand.gradients.engine import Engine, per_sample
from evenhand.gradients.stacked_models import chain_of, run_stacked
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.replicas import Replicas
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods import registry
from evenhand.types import Facts

RECORDS, WIDTH, CLASSES = 120, 6, 3
LOSS = nn.CrossEntropyLoss(reduction="none")
METHODS = (
    *("dpsgd", "auto_s", "psac", "global_adapt", "global_adapt_v2", "dpsgd_f", "naive", "sad", "sgd"),
    *("idp_sample", "idp_scale", "ino_sample", "ino_scale"),
)
OWNED = ("idp_sample", "idp_scale", "ino_sample", "ino_scale")


def records(seed: int = 0, count: int = RECORDS) -> Data:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=drawn)
    labels = inputs[:, :CLASSES].argmax(1)
    return eh.data.wrap(inputs, labels, groups=["a", "b"] * (count // 2), owners=["strict", "open"] * (count // 2))


def mlp(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


@functools.cache
def planned(method: str, facts: Facts, batch: float) -> Plan:
    promise = eh.Budgets({"strict": 1.0, "open": 4.0}, 1e-3) if method in OWNED else eh.Privacy(3.0, 1e-3)
    return eh.plan(method, None if method == "sgd" else promise, data=facts, epochs=3, batch_size=batch)


def mechanism(method: str, data: Data, key: int, batch: float = 30.0) -> Mechanism:
    plan = planned(method, data.facts, batch)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    return Mechanism(plan, registry.build("rule", **plan.rule), queries, Stream.insecure(key, 0))


def alone(
    mechanism: Mechanism, data: Data, model: nn.Module, steps: int, engine: Engine | None = None
) -> tuple[Tensor, list[object]]:
    """One run by the functions of a single run, with momentum; all its weights in a row."""
    engine = engine or Engine(model, LOSS)
    scales = None if mechanism.whole else mechanism.plan.scales
    sampler = PoissonSampler(data.owner, mechanism.plan.rates, mechanism.stream, scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    memory, commits = mechanism.rule.initial(data.facts), list[object]()
    for position in range(steps):
        batch = draw(data, sampler, position, 0)
        released = private_gradient(mechanism, engine.run(batch.inputs, batch.targets), batch, memory)
        memory = released.memory
        commits.append(released.commit)
        for name, parameter in model.named_parameters():
            parameter.grad = released.gradient[name].to(parameter.dtype)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), commits


def together(
    mechanisms: list[Mechanism], data: list[Data], make: Callable[[int], nn.Module], steps: int
) -> tuple[Tensor, list[list[object]]]:
    models = [make(seed) for seed in range(len(data))]
    chain = chain_of(models[0], (WIDTH,))
    stacked = {
        name: nn.Parameter(torch.stack([dict(model.named_parameters())[name].detach() for model in models]))
        for name in chain.names
    }
    replicas = Replicas(mechanisms, data, chain, LOSS)
    optimizer = torch.optim.SGD(stacked.values(), lr=0.5, momentum=0.9)
    commits: list[list[object]] = [[] for _ in models]
    for position in range(steps):
        gradient, noted = replicas.step(stacked, position)
        parts = torch.split(gradient, [value[0].numel() for value in stacked.values()], dim=1)
        for parameter, part in zip(stacked.values(), parts, strict=True):
            parameter.grad = part.reshape(parameter.shape).float()
        optimizer.step()
        for row, commit in zip(commits, noted, strict=True):
            row.append(commit)
    return torch.cat([value.detach().flatten(1) for value in stacked.values()], dim=1), commits


@pytest.mark.parametrize("method", METHODS)
def test_a_replica_is_the_single_run_with_its_key(method: str) -> None:
    data = [records(), records(), records(1)]
    mechanisms = [mechanism(method, part, key) for key, part in enumerate(data)]
    weights, commits = together(mechanisms, data, mlp, 5)
    for place, part in enumerate(data):
        single, noted = alone(mechanism(method, part, place), part, mlp(place), 5)
        assert float((weights[place] - single).abs().max()) < 1e-5
        assert commits[place] == noted, "noise, sensitivity and queries that the ledger will name"


def test_what_a_replica_releases_does_not_depend_on_the_others() -> None:
    few, many = mechanism("dpsgd", records(), 0, 10.0), mechanism("dpsgd", records(2), 9, 100.0)
    by_itself, _ = together([few], [records()], mlp, 4)
    padded, _ = together([few, many], [records(), records(2)], mlp, 4)
    assert torch.allclose(by_itself[0], padded[0], atol=1e-7, rtol=0)


def test_rows_of_weight_zero_add_nothing_and_rows_that_are_not_finite_neither() -> None:
    chain, model = chain_of(mlp(0), (WIDTH,)), mlp(0)
    stacked = {name: value.detach().unsqueeze(0) for name, value in model.named_parameters()}
    inputs, labels = records().fetch(torch.arange(7))
    inputs = inputs.double().clone()
    inputs[2] = torch.nan
    weights = torch.tensor([[1.0, 0.5, 1.0, 0.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    result = run_stacked(chain, stacked, inputs.unsqueeze(0), labels.unsqueeze(0), LOSS)
    assert not result.finite
    rows = torch.tensor([0, 1, 5, 6])
    exact = per_sample(model.double(), LOSS, inputs[rows], labels[rows])
    total = exact.weighted_sum(weights[0, rows])
    wanted = torch.cat([total[name].flatten() for name in chain.names])
    assert torch.allclose(result.weighted_sum(weights)[0], wanted, atol=1e-12)
    assert torch.allclose(result.norm[0, rows], exact.norm, rtol=1e-12)


def test_an_empty_draw_is_an_ordinary_step() -> None:
    data, one, many = records(), mechanism("dpsgd", records(), 3, 0.5), mechanism("dpsgd", records(), 4)
    sampler = PoissonSampler(data.owner, one.plan.rates, one.stream)
    assert [len(sampler.rows(position)) for position in range(4)].count(0) in (1, 2, 3)
    by_itself, commits = together([one], [data], mlp, 4)
    beside, _ = together([one, many], [data, data], mlp, 4)
    assert torch.isfinite(by_itself).all()
    assert torch.allclose(by_itself[0], beside[0], atol=1e-7, rtol=0)
    assert len(commits[0]) == 4


def test_replicas_of_several_plans_are_each_weighed_under_their_own() -> None:
    """Plans of two batch sizes take turns, and a rule with side queries stands between those that share a call."""
    data = [records(), records(1), records(2), records(3), records(4)]
    kinds = [("dpsgd", 30.0), ("dpsgd", 60.0), ("global_adapt_v2", 30.0), ("dpsgd", 30.0), ("dpsgd", 60.0)]
    several = [
        mechanism(method, part, key, batch) for key, (part, (method, batch)) in enumerate(zip(data, kinds, strict=True))
    ]
    weights, commits = together(several, data, mlp, 3)
    for place, (part, (method, batch)) in enumerate(zip(data, kinds, strict=True)):
        single, noted = alone(mechanism(method, part, place, batch), part, mlp(place), 3)
        assert float((weights[place] - single).abs().max()) < 1e-5
        assert commits[place] == noted


def test_weights_and_accuracy_of_replicas_have_the_law_of_single_runs() -> None:
    """Two-sample tests, keys of their own on both sides; seeds are fixed, so that the test never fails by chance."""
    data, count, steps = records(), 50, 5
    make = mechanism("dpsgd", data, 0)
    keyed = [Mechanism(make.plan, make.rule, make.queries, Stream.insecure(key, 0)) for key in range(2 * count)]
    stacked, _ = together(keyed[:count], [data] * count, lambda _: mlp(0), steps)
    model, rows = mlp(0), []
    engine, start = Engine(model, LOSS), mlp(0).state_dict()
    for one in keyed[count:]:
        model.load_state_dict(start)
        rows.append(alone(one, data, model, steps, engine)[0])
    single = torch.stack(rows)
    inputs, labels = data.fetch(torch.arange(RECORDS))

    def accuracies(rows: Tensor) -> list[float]:
        model = mlp(0)
        shares = []
        for row in rows:
            torch.nn.utils.vector_to_parameters(row, model.parameters())
            shares.append(float((model(inputs).argmax(1) == labels).float().mean()))
        return shares

    rng = np.random.default_rng(0)
    tests = {"accuracy": stats.ks_2samp(accuracies(stacked), accuracies(single)).pvalue}
    tests |= {f"weight {n}": stats.ks_2samp(stacked[:, n], single[:, n]).pvalue for n in range(stacked.shape[1])}
    directions = torch.from_numpy(rng.standard_normal((5, stacked.shape[1]))).float()
    tests |= {f"along {n}": stats.ks_2samp(stacked @ d, single @ d).pvalue for n, d in enumerate(directions)}
    assert min(tests.values()) * len(tests) > 0.01, "Bonferroni over all tests"
    shifted = stacked + 1.5 * single.std(0)
    assert stats.ks_2samp(shifted[:, 0], single[:, 0]).pvalue * len(tests) < 0.01, "and they would tell a difference"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)), "BatchNorm1d"),
        (nn.Linear(WIDTH, 100_000), "parameters"),
        (nn.Linear(WIDTH + 1, 2), "flat row"),
        (nn.Sequential(nn.Tanh()), "no linear layer"),
        (nn.Linear(WIDTH, 2).double(), "float32"),
    ],
)
def test_other_models_are_refused_with_the_reason(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        chain_of(model, (WIDTH,))


def test_shared_layers_and_hooks_are_refused() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(UnsupportedModelError, match="share"):
        chain_of(nn.Sequential(layer, layer), (WIDTH,))
    hooked = nn.Linear(WIDTH, 2)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="hooks"):
        chain_of(hooked, (WIDTH,))
