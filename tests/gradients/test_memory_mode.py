"""Memory mode: large batches go through in parts where weights are known at once, and noise is added in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from evenhand.gradients import memory
from evenhand.gradients.microbatches import MicroBatches
from evenhand.mechanism.add_noise import SMALL_CHUNK, Ahead, in_parts, release, release_within
from evenhand.mechanism.random_streams import Stream

LOSS = nn.CrossEntropyLoss(reduction="none")
X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


class Watched(nn.Module):
    """Notes how many rows come at once, and the memory of what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.rows: list[int] = []
        self.hidden: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not hidden.expired() for hidden in self.hidden))
        hidden = torch.tanh(self.first(x))
        self.rows.append(len(x))
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        return self.last(hidden)


def clip(norm: Tensor, loss: Tensor, rows: slice) -> Tensor:
    return (0.5 / norm).clamp(max=1.0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "PART_BYTES", 100)
    return


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("lean", "early", "most"), [(True, clip, 7), (True, None, 20), (False, clip, 20)])
def test_a_lean_engine_splits_where_weights_are_known_at_once(lean: bool, early: object, most: int) -> None:
    model = Watched()
    engine, plain = MicroBatches(model, LOSS, lean=lean), MicroBatches(model, LOSS)
    engine.run(X, Y, early)  # type: ignore[arg-type]
    model.rows.clear()
    result = engine.run(X, Y, early)  # type: ignore[arg-type]
    assert max(model.rows) == most
    weights = clip(result.norm, result.loss, slice(None))
    total, found = plain.run(X, Y).weighted_sum(weights), result.weighted_sum(weights)
    for name, value in total.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_parts")
def test_a_part_is_forgotten_before_the_next() -> None:
    model = Watched()
    engine = MicroBatches(model, LOSS, lean=True)
    for _ in range(5):
        model.alive.clear()
        engine.run(X, Y, clip)
    assert model.rows[-3:] == [7, 7, 6]
    assert model.alive[-3:] == [0, 0, 0]


@pytest.mark.usefixtures("small_parts")
def test_a_sum_that_was_handed_over_may_be_written_and_asked_for_again() -> None:
    result = MicroBatches(Watched(), LOSS, lean=True).run(X, Y, clip)
    weights = clip(result.norm, result.loss, slice(None))
    first = {name: value.clone() for name, value in result.weighted_sum(weights).items()}
    for value in (again := result.weighted_sum(weights)).values():
        value.zero_()
    for name, value in result.weighted_sum(weights).items():
        assert not again[name].any()
        torch.testing.assert_close(value, first[name], rtol=1e-6, atol=1e-7)


def test_small_models_and_those_that_cannot_be_weighed_stay_whole() -> None:
    class Transformed(Watched):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.func.grad(lambda a: (a**2).sum())(x).sum() * 0

    for model in (Watched(), Transformed()):
        assert memory.part_of(20, memory.saved_bytes(model, LOSS, X, Y)) == 20
    assert memory.saved_bytes(Transformed(), LOSS, X, Y) == 0


def test_weighing_counts_what_grows_with_the_batch_and_leaves_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 1000), nn.Tanh(), nn.Dropout(0.5), nn.Linear(1000, 2))
    state = torch.get_rng_state()
    few, many = (memory.saved_bytes(model, LOSS, X[:rows], Y[:rows]) for rows in (2, 20))
    assert torch.equal(state, torch.get_rng_state())
    assert 2 * 4000 <= few < 4 * 4000
    assert abs(many - few) <= 64


@pytest.mark.parametrize("count", [1, 1000, SMALL_CHUNK, 3 * SMALL_CHUNK + 777])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_added_in_place_is_the_same_to_the_bit(count: int, dtype: torch.dtype) -> None:
    stream, total = Stream.insecure(3, 0), 10 * torch.randn(count).to(dtype)
    expected = release(total, 1.7, 2.0**-12, stream, "gradient", 9, divisor=60.5)
    before = total.clone()
    ahead = Ahead(stream)
    for parts in (in_parts(stream, "gradient", 9, count), ahead.parts("gradient", 9, count)):
        found = release_within(total.copy_(before), 1.7, 2.0**-12, parts, 60.5)
        assert found.data_ptr() == total.data_ptr()
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("count", [1, 5, SMALL_CHUNK, SMALL_CHUNK + 6])
def test_parts_that_do_not_fit_are_refused(count: int) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"shorter|differ in size"):
        release_within(torch.zeros(SMALL_CHUNK + 5), 1.0, 0.5, in_parts(Stream.fresh(), "gradient", 0, count), 1.0)


def test_noise_added_in_place_stays_on_the_grid() -> None:
    total = torch.randn(SMALL_CHUNK + 5, dtype=torch.float64)
    found = release_within(total, 0.3, 2.0**-10, in_parts(Stream.fresh(), "gradient", 0, len(total)), 1.0) * 2.0**10
    assert torch.equal(found, found.round())
