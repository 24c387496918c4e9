"""A pass that is summed for the last time gives back what the layers saw, and its sums belong to the caller."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients import Engine, register_kernel
from evenhand.gradients.layers import base as registry
from evenhand.gradients.layers.linear import LinearKernel
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.model_layout import Call
from evenhand.types import Pass

LOSS = nn.CrossEntropyLoss(reduction="none")


class Own(nn.Module):
    """A chain is run without a tape; this is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return self.layers(x) * 1.0  # type: ignore[no-any-return]


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 9), nn.Tanh(), nn.Linear(9, 3))


def bilinear() -> nn.Module:
    """No kernel serves its layer."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(5, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x)  # type: ignore[no-any-return]

    return Twice()


def tables(result: Pass) -> list[weakref.ref[Tensor]]:
    """What the layers saw, as the pass holds it."""
    raw = result.weighted_sum.__self__._raw  # type: ignore[attr-defined]
    calls = raw._calls if hasattr(raw, "_calls") else [call for group in raw._groups for call in group.calls]
    return [weakref.ref(table) for call in calls for table in call.tensors]


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "one row is not"])
@pytest.mark.parametrize("make", [chain, Own, bilinear])
def test_the_last_sum_is_the_same_and_there_is_no_other(make: Any, odd: bool) -> None:
    torch.manual_seed(0)
    model, x, y, weights = make(), torch.randn(6, 5), torch.arange(6) % 3, torch.rand(6)
    if odd:
        x[2] = torch.nan
    expected = Engine(model, LOSS).run(x, y).weighted_sum(weights)
    result = Engine(model, LOSS).run(x, y)
    found = result.last_sum(weights)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    for again in (result.weighted_sum, result.last_sum):
        with pytest.raises(UsageError, match="this pass was spent"):
            again(weights)


@pytest.mark.parametrize("make", [chain, Own])
def test_what_a_layer_saw_is_given_back_before_the_next_but_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make(), LOSS)
    for _ in range(2):
        result = engine.run(torch.randn(6, 5), torch.arange(6) % 3)
    result.weighted_sum(torch.ones(6))
    seen, counts = tables(result), []
    assert len(seen) == 6
    checked = Call.check

    def count(call: Call) -> None:
        counts.append(sum(table() is not None for table in seen))
        checked(call)

    monkeypatch.setattr(Call, "check", count)
    result.last_sum(torch.ones(6))
    assert counts[0] == 6
    assert counts[-1] <= 4  # the last layer's own, and what its predecessor's names still hold
    assert [table() for table in seen] == [None] * 6


def test_weights_that_cannot_be_used_do_not_spend_a_pass() -> None:
    result = Engine(chain(), LOSS).run(torch.randn(6, 5), torch.arange(6) % 3)
    for wrong, said in ((torch.ones(5), "one weight per record"), (torch.full((6,), torch.nan), "not finite")):
        with pytest.raises(UsageError, match=said):
            result.last_sum(wrong)
    assert len(result.last_sum(torch.ones(6))) == 6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN, nn.GRU])
def test_a_record_keeps_its_bound_when_an_lstm_runs_in_parts(kind: Any) -> None:
    """Both biases have one and the same gradient: added up in one memory, every part but the first counted twice."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(4, 6, batch_first=True)
            self.inner.weight_ih_l0.requires_grad_(False)
            self.inner.weight_hh_l0.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0][:, -1]  # type: ignore[no-any-return]

    result = MicroBatches(Last(), LOSS, limit=3).run(torch.randn(6, 7, 4), torch.arange(6) % 3)
    weights = torch.zeros(6, dtype=torch.float64)
    weights[5] = 1 / result.norm[5]
    total = torch.cat([part.double().flatten() for part in result.last_sum(weights).values()])
    assert float(total.norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.fixture
def hoarding() -> Iterator[dict[str, Tensor]]:
    """A kernel from elsewhere that still holds the sums it has given."""
    held: dict[str, Tensor] = {}

    class Mine(nn.Linear):
        pass

    class Share:
        def __init__(self, inner: Any):
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
            held.update(self._inner.weighted_sum(weights, rows))
            return dict(held)

    class Hoarder(LinearKernel):
        def share(self, *given: Any) -> Any:
            return Share(super().share(*given))

    register_kernel(Mine)(Hoarder)
    held["layer"] = Mine  # type: ignore[assignment]
    yield held
    registry._KERNELS.pop(Mine)
    registry._FORWARDS.pop(Mine)


def test_sums_of_a_foreign_kernel_are_not_handed_over(hoarding: dict[str, Any]) -> None:
    model = nn.Sequential(hoarding.pop("layer")(5, 3))
    result = Engine(model, LOSS).run(torch.randn(6, 5), torch.arange(6) % 3)
    found = result.last_sum(torch.ones(6))
    assert hoarding.keys() == {"weight", "bias"}
    for name, total in found.items():
        own = hoarding[name.removeprefix("0.")]
        assert torch.equal(total, own)
        assert total.data_ptr() != own.data_ptr()
