"""Every way that a sum of gradients can take, for batches in which all gradients are multiples of one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.gradients import engine, record_by_record
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_blocks import Blocks
from evenhand.gradients.views import Viewed, mean_loss
from evenhand.summation import KEY_BITS, Summation

Patch = Callable[[pytest.MonkeyPatch], None]


class Called(nn.Module):
    """Any function of a module, so that no chain stands in for it."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner, x)


class Raw(nn.Module):
    """A parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Tied(nn.Module):
    """A table that is looked up and the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(48, 16), nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def multiple(out: Any, times: Tensor) -> Tensor:
    """A loss whose gradient is ``times`` that of the output's sum."""
    out = out[0] if isinstance(out, tuple) else out
    return out.flatten(1).sum(1) * times


def without_loops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pytest.importorskip("evenhand.gradients.fast.dense_chain"), "loops", lambda: None)


def keep_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScratchBuffers, "keeps", lambda self, rows, each, like: False)


def whole_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "further_apart", lambda *_: None)


def no_vmap(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no vmap")

    whole_model(patch)
    patch.setattr(record_by_record, "vectorised", refuse)


class Turned(nn.Module):
    """A linear layer with its weight as (in, out), as transformers has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Way:
    """A model, the shape of a record, and what makes the engine take this way."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    patch: Patch | None = None
    options: dict[str, Any] = field(default_factory=dict)
    early: bool = False
    views: int = 1
    tokens: int = 0
    most: int = 65_536
    times: tuple[float, ...] = ()
    """The record's steps of time as multiples of the first."""


ALMOST_CANCELLING = (1.0, -1.0, 1.0, -1.0, 1.0, -0.85)
"""Terms whose lengths add up to forty times the length of their sum: too long for a block, good for a norm."""
LINEAR = lambda: nn.Sequential(nn.Linear(64, 1, bias=False))  # noqa: E731
WAYS: dict[str, Way] = {
    "chain, compiled sums": Way(LINEAR, (64,)),
    "chain, compiled sums and bias": Way(lambda: nn.Sequential(nn.Linear(8, 4)), (8,)),
    "chain, matrix product": Way(lambda: nn.Sequential(nn.Linear(8, 24)), (8,)),
    "chain without compiled loops": Way(LINEAR, (64,), without_loops),
    "tape": Way(lambda: Called(lambda m, x: m(x), nn.Linear(64, 1, bias=False)), (64,)),
    "several layers": Way(lambda: nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3)), (8,)),
    "raw parameter": Way(Raw, (16,)),
    "vmap": Way(lambda: Called(lambda m, x: m(x, x), nn.Bilinear(4, 4, 3)), (4,), whole_model, most=16_384),
    "module run again": Way(lambda: Called(lambda m, x: m(x, x), nn.Bilinear(4, 4, 3)), (4,), most=16_384),
    "module run again, not kept": Way(
        lambda: Called(lambda m, x: m(x, x), nn.Bilinear(4, 4, 3)), (4,), keep_nothing, most=16_384
    ),
    "transposed weight": Way(lambda: Called(lambda m, x: m(x), Turned(8, 4)), (8,)),
    "transposed weight, time": Way(lambda: Called(lambda m, x: m(x), Turned(4, 5)), (6, 4), keep_nothing),
    "folded with time": Way(
        lambda: Called(lambda m, x: m(x.flatten(0, 1)).unflatten(0, (len(x), -1)), nn.Linear(4, 4)), (6, 4)
    ),
    "one by one": Way(lambda: Called(lambda m, x: m(x, x), nn.Bilinear(4, 4, 3)), (4,), no_vmap, most=256),
    "parts run twice": Way(LINEAR, (64,), options={"limit": 700}),
    "parts with early weights": Way(LINEAR, (64,), options={"limit": 700}, early=True),
    "lean": Way(lambda: nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3)), (8,), options={"lean": True}),
    "time, kept": Way(lambda: nn.Sequential(nn.Linear(4, 4)), (6, 4)),
    "time, not kept": Way(lambda: nn.Sequential(nn.Linear(4, 4)), (6, 4), keep_nothing),
    "time, too long for a block": Way(
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False)), (6, 4), keep_nothing, most=16_384, times=ALMOST_CANCELLING
    ),
    "time, Gram": Way(lambda: nn.Sequential(nn.Linear(40, 40)), (2, 40), most=16_384),
    "convolution, kept": Way(lambda: nn.Sequential(nn.Conv2d(1, 3, 3)), (1, 6, 6)),
    "convolution, not kept": Way(lambda: nn.Sequential(nn.Conv2d(1, 3, 3)), (1, 6, 6), keep_nothing, most=16_384),
    "convolution, Gram": Way(lambda: nn.Sequential(nn.Conv2d(32, 32, 2)), (32, 2, 2), most=4_096),
    "embedding": Way(lambda: nn.Sequential(nn.Embedding(5, 4)), (3,), tokens=5),
    "tied table": Way(Tied, (3,), tokens=48, most=4_096),
    "embedding bag": Way(lambda: nn.Sequential(nn.EmbeddingBag(5, 4, mode="sum")), (3,), tokens=5),
    "layer norm": Way(lambda: nn.Sequential(nn.LayerNorm(8)), (8,)),
    "group norm": Way(lambda: nn.Sequential(nn.GroupNorm(2, 4)), (4, 5)),
    "lstm": Way(lambda: Called(lambda m, x: m(x)[0], nn.LSTM(3, 4, batch_first=True)), (3, 3), most=16_384),
    "attention": Way(
        lambda: Called(lambda m, x: m(x, x, x)[0], nn.MultiheadAttention(4, 1, batch_first=True)), (3, 4), most=16_384
    ),
    "views": Way(LINEAR, (64,), views=2, most=16_384),
    "double": Way(lambda: LINEAR().double(), (64,)),
}


@contextmanager
def taking(way: Way) -> Iterator[None]:
    """Inside, the engine takes this way."""
    with pytest.MonkeyPatch.context() as patch:
        if way.patch is not None:
            way.patch(patch)
        yield


def keys_of(count: int) -> NDArray[np.uint64]:
    """Keys at equal distances: blocks are then runs of rows in the order that the attack was made for."""
    return ((np.arange(count, dtype=np.float64) + 0.5) * (2.0**KEY_BITS / count)).astype(np.uint64)


class Sums:
    """Bounded sums by one way, of records whose gradients are ``times`` one vector of length one."""

    def __init__(self, way: Way, expected: float, whole: bool = False) -> None:
        torch.manual_seed(0)
        self._way, self._summation, self._whole = way, Summation(expected), whole
        model = way.build()
        self._model: nn.Module = model if way.views == 1 else Viewed(model, way.views)
        self._loss = multiple if way.views == 1 else mean_loss(multiple, way.views)
        self._dtype = next(model.parameters()).dtype
        shape = way.shape if way.views == 1 else (way.views, *way.shape)
        self._record = torch.randint(way.tokens, shape) if way.tokens else torch.ones(shape, dtype=self._dtype)
        if not way.tokens and way.shape != (64,):
            self._record = torch.randn(shape, dtype=self._dtype)
        if way.times:
            self._record = torch.tensor(way.times, dtype=self._dtype)[:, None] * self._record[0]
        self.length = 1.0
        self.length = float(self._engine().run(*self._batch(torch.ones(4))).norm[0])

    def _engine(self) -> MicroBatches:
        return MicroBatches(self._model, self._loss, **self._way.options)

    def _batch(self, times: Tensor) -> tuple[Tensor, Tensor]:
        each = self._record.unsqueeze(0)
        return each.expand(len(times), *each.shape[1:]).contiguous(), (times / self.length).to(self._dtype)

    def __call__(self, times: Tensor, keys: NDArray[np.uint64]) -> Tensor:
        """All parameters' sums as one vector in float64; every gradient is held to length one."""

        def weights(norm: Tensor, loss: Tensor, rows: slice) -> Tensor:
            return (1.0 / norm.clamp(min=1e-300)).clamp(max=1.0)

        blocks = Blocks(len(times), keys, self._summation, self._whole)
        early = weights if self._way.early else None
        result = self._engine().run(*self._batch(times), early, blocks)
        sums = result.last_sum(weights(result.norm, result.loss, slice(None)))
        return torch.cat([part.detach().double().reshape(-1) for part in sums.values()])


def cancelling(count: int, step: int) -> Tensor:
    """Times of large records and of tiny ones that round to nothing or to a whole unit, by where the sum stands.

    ``step`` large records come before as many tiny ones. Their sum lies just below a power of two; one large record
    more lifts it above, where the unit of rounding is twice as long and every tiny record is lost.
    """
    power = 2.0 ** np.floor(np.log2(max(2, step)))
    large = (power - 2.0**-18 * power) / step
    tiny = -power * 2.0**-24 * (1 - 2.0**-10)
    block = torch.cat([torch.full((step,), large), torch.full((step,), tiny)])
    return block.repeat(-(-count // len(block)))[:count].double()


def change(sums: Sums, times: Tensor, at: int, keys: NDArray[np.uint64]) -> float:
    """How far one large record, put at row ``at``, moves the sum of the others."""
    more = torch.cat([times[:at], torch.ones(1, dtype=torch.float64), times[at:]])
    return float((sums(more, keys) - sums(times, np.delete(keys, at))).norm())


def worst_change(way: Way, count: int, whole: bool = False) -> float:
    """The most that one record moves the sum of ``count`` others, over attacks on the whole sum and on blocks of it."""
    sums, keys = Sums(way, count, whole), keys_of(count + 1)
    attacks = [(cancelling(count, step), at) for step in (count // 2, 140, 32, 8) for at in (0, int(0.6 * count))]
    return max(change(sums, times, at, keys) for times, at in attacks)
