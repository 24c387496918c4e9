from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from evenhand.data import Data, wrap
from evenhand.errors import DataError, ForeignLoaderError
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw

STREAM = Stream.insecure(seed=1, segment=0)


def inclusion(owner: torch.Tensor, rates: list[float], steps: int) -> np.ndarray:
    sampler = PoissonSampler(owner, rates, STREAM)
    table = np.zeros((steps, owner.numel()), dtype=bool)
    for step in range(steps):
        table[step, sampler.rows(step).numpy()] = True
    return table


def test_marginal_and_pairwise_inclusion_follow_the_rates() -> None:
    owner = torch.tensor([0] * 10 + [1] * 10)
    rates = np.array([0.1] * 10 + [0.4] * 10)
    table = inclusion(owner, [0.1, 0.4], 20_000)
    for column, rate in zip(table.T, rates, strict=True):
        assert stats.binomtest(int(column.sum()), table.shape[0], rate).pvalue > 1e-6
    for i in range(20):
        for j in range(i):
            both = int((table[:, i] & table[:, j]).sum())
            assert stats.binomtest(both, table.shape[0], rates[i] * rates[j]).pvalue > 1e-7


def test_batch_sizes_are_binomial_with_empty_batches() -> None:
    sizes = inclusion(torch.zeros(20, dtype=torch.long), [0.05], 5_000).sum(1)
    expected = stats.binom.pmf(range(5), 20, 0.05) * 5_000
    observed = np.bincount(sizes, minlength=5)[:5]
    assert observed[0] > 0
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-6


def test_tiny_rates_are_not_rounded_up() -> None:
    owner = torch.zeros(1_000_000, dtype=torch.long)
    drawn = sum(PoissonSampler(owner, [1e-9], STREAM).rows(step).numel() for step in range(20))
    assert drawn <= 2


def test_rate_one_takes_everything_and_a_draw_is_repeatable() -> None:
    sampler = PoissonSampler(torch.zeros(50, dtype=torch.long), [1.0], STREAM)
    assert sorted(sampler.rows(0).tolist()) == list(range(50))
    half = PoissonSampler(torch.zeros(50, dtype=torch.long), [0.5], STREAM)
    assert half.rows(4).tolist() == half.rows(4).tolist()


def test_a_batch_holds_exactly_the_drawn_rows(tiny: Data) -> None:
    sampler = PoissonSampler(tiny.owner, [0.5, 0.2], STREAM)
    batch = draw(tiny, sampler, 3, token=1)
    rows = sampler.rows(3)
    assert batch.record.tolist() == rows.tolist()
    assert torch.equal(batch.inputs, tiny.fetch(torch.arange(40))[0][rows])
    assert torch.equal(batch.owner, tiny.owner[rows])


def test_an_empty_batch_keeps_shapes() -> None:
    for data in (wrap(torch.ones(5, 3), [0, 1, 0, 1, 0]), wrap(TensorDataset(torch.ones(5, 3), torch.zeros(5)))):
        inputs, targets = data.fetch(torch.arange(0))
        assert inputs.shape == (0, 3)
        assert targets.shape == (0,)


@pytest.mark.parametrize(
    "foreign",
    [
        DataLoader(TensorDataset(torch.ones(4, 1), torch.ones(4)), shuffle=True),
        DataLoader(TensorDataset(torch.ones(4, 1), torch.ones(4))),
        RandomSampler(range(4)),
        type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})(),
    ],
)
def test_foreign_samplers_and_loaders_are_refused(foreign: object) -> None:
    with pytest.raises(ForeignLoaderError, match=r"Pass|give a Dataset with __len__"):
        wrap(foreign)


def test_dataframes_and_datasets_are_read_alike() -> None:
    import pandas as pd

    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    sets = [
        wrap(frame, pd.Series(["no", "yes"])),
        wrap((frame.to_numpy(), ["no", "yes"])),
        wrap(TensorDataset(torch.tensor(frame.to_numpy()).float(), torch.tensor([0, 1]))),
    ]
    for data in sets:
        inputs, targets = data.fetch(torch.tensor([1, 0]))
        assert inputs.tolist() == [[2.0, 4.0], [1.0, 3.0]]
        assert targets.tolist() == [1, 0]


SECRET = "alice-secret-4711"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((torch.ones(3, 2), [0, 1]), {}), "one target per row"),
        (((torch.ones(0, 2), []), {}), "no records"),
        ((([[1.0], [2.0, 3.0]], [0, 1]), {}), "rows of different length"),
        ((([[SECRET], ["b"]], [0, 1]), {}), "not a number"),
        (((torch.ones(2, 1), [SECRET, "b"]), {"labels": ["a", "b"]}), "not among the declared"),
        (((torch.ones(2, 1), [0, 1]), {"groups": [SECRET]}), "one per record"),
        (((torch.ones(2, 1), [0, 1]), {"owners": [SECRET, None]}), "missing"),
        (((torch.ones(2, 1), [0, 1]), {"groups": [SECRET, float("nan")]}), "missing"),
        (((torch.ones(2, 1), [0.5, 1]), {"labels": ["a", "b"]}), "real numbers"),
        (((torch.ones(2, 1), [[0], [1]]), {}), "one column"),
        (((TensorDataset(torch.ones(0, 1), torch.ones(0)),), {}), "no records"),
        (((TensorDataset(torch.ones(3, 1)),), {}), "pairs"),
        (((object(),), {}), "cannot be read"),
    ],
)
def test_bad_data_is_refused_without_printing_values(arguments: tuple, words: str) -> None:
    positional, named = arguments
    with pytest.raises(DataError, match=words) as caught:
        wrap(*positional, **named)
    assert SECRET not in str(caught.value)


def test_what_nobody_declared_is_named_and_many_values_are_refused() -> None:
    inputs = torch.ones(300, 2)
    read_off = wrap(inputs, [0, 1, 2] * 100, groups=["a", "b"] * 150)
    assert read_off.facts.derived == ("labels", "groups")
    declared = wrap(inputs, [0, 1, 2] * 100, labels=[0, 1, 2], groups=["a", "b"] * 150, group_names=["a", "b"])
    assert declared.facts.derived == ()
    for arguments in ({"targets": list(range(300))}, {"targets": [0, 1, 2] * 100, "groups": list(range(300))}):
        with pytest.raises(DataError, match="printed as public facts"):
            wrap(inputs, **arguments)
    assert wrap(inputs, [0, 1, 2] * 100, owners=list(range(300))).facts.records == 300
