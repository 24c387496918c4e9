"""Modules that no kernel serves are run again for each record, and only they; what cannot be run again is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Case, batch, check, compare, exact_or_refused, oracle
from oracles import Custom, Oracle, cross_entropy, lin
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from evenhand.errors import UsageError
from evenhand.gradients import Engine, per_sample
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_by_record import HeldGradients
from evenhand.gradients.unserved import module_fallback
from evenhand.gradients.views import Viewed, mean_loss

DOUBLE = torch.float64
KERNELS, SOME = "kernels", "kernels, some modules record by record"


class Gate(nn.Module):
    """A parameter through a function that nothing else can follow, and an argument that all records share."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor, shared: Tensor | None = None, *, power: int = 1) -> Tensor:
        out = x * torch.softmax(self.scale, 0) ** power + self.shift
        return out if shared is None else out + shared


class Pair(nn.Module):
    """Two inputs, two outputs, one of which is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        mixed = torch.einsum("bi,oi->bo", a, self.weight)
        return {"first": mixed + b, "second": mixed * b, "count": torch.ones(len(a))}


class Branching(nn.Module):
    """Looks at the data, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.softmax(self.scale, 0) * x
        return torch.stack([row if float(row.detach().sum()) > 0 else -2 * row for row in grown])


def gate(m: Any, x: Tensor) -> Tensor:
    return m.o(torch.tanh(m.g(m.l(x))))


def shared_argument(m: Any, x: Tensor) -> Tensor:
    return m.o(m.g(m.l(x), torch.arange(4.0, dtype=x.dtype), power=2))


def called_twice(m: Any, x: Tensor) -> Tensor:
    return m.o(m.g(torch.tanh(m.g(m.l(x)))))


def written(m: Any, x: Tensor) -> Tensor:
    out = m.g(m.l(x))
    out[:, 0] = 0
    return m.o(out)


def tied(m: Any, x: Tensor) -> Tensor:
    return m.o(m.g(m.l(x))) + m.o.weight[:, :1].t() * 0 + functional.linear(x, m.l.weight[:3])


def pair(m: Any, x: Tensor) -> Tensor:
    out = m.g(m.l(x), x)
    return m.o(out["first"] * out["second"])


MODELS: dict[str, Case] = {
    "between layers": Case(Custom(gate, l=lin(4, 4), g=Gate(), o=lin())),
    "on the input": Case(Custom(lambda m, x: m.o(m.g(x)), g=Gate(), o=lin())),
    "shared argument": Case(Custom(shared_argument, l=lin(4, 4), g=Gate(), o=lin())),
    "called twice": Case(Custom(called_twice, l=lin(4, 4), g=Gate(), o=lin())),
    "over time": Case(Custom(lambda m, x: m.o(m.g(m.l(x)).mean(1)), l=lin(4, 4), g=Gate(), o=lin()), (5, 4)),
    "written in place": Case(Custom(written, l=lin(4, 4), g=Gate(), o=lin())),
    "two outputs": Case(Custom(pair, l=lin(4, 4), g=Pair(), o=lin())),
    "a loop": Case(Custom(gate, l=lin(4, 4), g=Branching(), o=lin())),
    "weight norm": Case(Custom(gate, l=lin(4, 4), g=weight_norm(lin(4, 4)), o=lin())),
    "bilinear": Case(Custom(lambda m, x: m.o(m.g(x, m.l(x))), l=lin(4, 4), g=nn.Bilinear(4, 4, 4), o=lin())),
    "inside a module": Case(
        Custom(gate, l=lin(4, 4), g=Custom(lambda m, x: m.d(x) @ torch.softmax(m.d.weight, 0), d=lin(4, 4)), o=lin())
    ),
    "two modules": Case(Custom(lambda m, x: m.o(m.b(m.l(m.a(x)))), a=Gate(), l=lin(4, 4), b=Gate(), o=lin())),
}


@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str) -> None:
    case = MODELS[name]
    engine = Engine(case.model, case.loss)
    inputs, targets = case.inputs(), torch.arange(6) % 3
    compare(engine.run(inputs, targets), oracle(case.model, case.loss, inputs, targets))
    assert engine.way() == SOME
    assert set(engine.apart().values()) == {"loop" if name == "a loop" else "vmap"}
    check(case)


@pytest.mark.parametrize("name", ["between layers", "called twice", "weight norm"])
def test_parts_of_a_batch(agrees: Oracle, name: str) -> None:
    case = MODELS[name]
    agrees(case.model, case.inputs(), torch.arange(6) % 3, kernels=True)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("chunk", [1, 20, 1 << 22])
def test_what_is_not_held_is_computed_again(monkeypatch: pytest.MonkeyPatch, lean: bool, chunk: int) -> None:
    monkeypatch.setattr(module_fallback, "CHUNK", chunk)
    monkeypatch.setattr("evenhand.gradients.memory.KEPT_BYTES", 0)
    monkeypatch.setattr("evenhand.gradients.memory.LEAN_BYTES", 0)
    case = MODELS["between layers"]
    inputs, targets = case.inputs(), torch.arange(6) % 3
    result = MicroBatches(case.model, case.loss, lean=lean).run(inputs, targets)
    compare(result, oracle(case.model, case.loss, inputs, targets))
    with torch.no_grad():
        case.model.g.scale.add_(1)
    if chunk == 1 << 22:  # one chunk, and that is held from the sum before
        return
    with pytest.raises(UsageError, match="before the update"):
        result.weighted_sum(torch.ones(6))


def test_views_of_a_record() -> None:
    inner = Custom(gate, l=lin(4, 4), g=Gate(), o=lin())
    model, loss = Viewed(inner, 3), mean_loss(cross_entropy, 3)
    inputs, targets = torch.randn(6, 3, 4, dtype=DOUBLE), torch.arange(6) % 3
    engine = Engine(model, loss)
    compare(engine.run(inputs, targets), oracle(model, loss, inputs, targets))
    assert engine.way() == SOME


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_rows_that_float32_cannot_carry_leave_the_others_alone(value: float) -> None:
    model = Custom(gate, l=lin(4, 4), g=Gate(), o=lin()).float()
    inputs, targets = torch.randn(6, 4), torch.arange(6) % 3
    expected = oracle(model, cross_entropy, inputs, targets)
    wanted = torch.stack([rows.double().flatten(1).square().sum(1) for rows in expected.values()]).sum(0).sqrt()
    engine = Engine(model, cross_entropy)
    engine.run(inputs, targets)
    spoiled = inputs.clone()
    spoiled[2] = value
    result = engine.run(spoiled, targets)
    others = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(result.norm[others], wanted[others], rtol=1e-5, atol=1e-6)
    weights = torch.ones(6, dtype=DOUBLE)
    weights[2] = 0
    total = result.weighted_sum(weights)
    for name, rows in expected.items():
        torch.testing.assert_close(total[name], rows[others].sum(0), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_used_elsewhere_too() -> None:
    model = Custom(
        lambda m, x: m.b(m.a(x) * torch.softmax(m.g.scale, 0)) + m.g(x)[:, :3], a=lin(4, 4), b=lin(), g=Gate()
    )
    inputs, targets = batch()
    exact_or_refused(Engine(model, cross_entropy), model, inputs, targets)
    shared = Custom(lambda m, x: m.o(m.h(m.g(m.l(x)))), l=lin(4, 4), g=Gate(), h=Gate(), o=lin())
    shared.h.scale = shared.g.scale
    check(Case(shared))


class Drawing(Gate):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return functional.dropout(super().forward(x), 0.5)


class Counting(Gate):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        self.shift.add_(0.1)
        return super().forward(x)


class Caching(Gate):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache.seen = True
        return super().forward(x)


@pytest.mark.parametrize("kind", [Drawing, Counting])
def test_a_module_whose_second_run_would_be_another_one_takes_the_whole_model_along(kind: type[nn.Module]) -> None:
    model = Custom(gate, l=lin(4, 4), g=kind(), o=lin())
    engine = Engine(model, cross_entropy)
    result = engine.run(*batch())
    assert engine.way().startswith("record by record")
    assert isinstance(result.weighted_sum.__self__._raw, HeldGradients)  # type: ignore[attr-defined]


def test_an_argument_that_may_remember_is_not_given_twice() -> None:
    class Cache:
        seen = False

    model = Custom(lambda m, x: m.o(m.g(m.l(x), Cache())), l=lin(4, 4), g=Caching(), o=lin())
    engine = Engine(model, cross_entropy)
    engine.run(*batch())
    assert engine.way().startswith("record by record")


def test_a_module_that_mixes_records_is_found_out() -> None:
    class Mixing(Gate):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x.flip(0)).flip(0) if len(x) > 1 else super().forward(x)

    check(Case(Custom(gate, l=lin(4, 4), g=Mixing(), o=lin())))


def test_another_way_past_the_module_is_noticed_later() -> None:
    """A weight that a later batch uses past its module must not be bounded by what the module saw."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.o(m.g(m.l(x)))
        return out + torch.softmax(m.g.scale, 0)[:3] * x[:, :3] if m.more else out

    model = Custom(forward, l=lin(4, 4), g=Gate(), o=lin())
    model.more = False
    engine = Engine(model, cross_entropy)
    for more in (False, False, True, True):
        model.more = more
        inputs, targets = batch()
        compare(engine.run(inputs, targets), oracle(model, cross_entropy, inputs, targets))
    assert engine.way().startswith("record by record")


def test_the_model_keeps_its_own_parameters() -> None:
    model = Custom(gate, l=lin(4, 4), g=Gate(), o=lin())
    parameters, attributes = dict(model.named_parameters()), [sorted(m.__dict__) for m in model.modules()]
    per_sample(model, cross_entropy, *batch()).weighted_sum(torch.ones(6))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert [sorted(m.__dict__) for m in model.modules()] == attributes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precisions(dtype: torch.dtype) -> None:
    model = Custom(gate, l=lin(4, 4), g=Gate(), o=lin()).to(dtype)
    inputs, targets = torch.randn(6, 4, dtype=dtype), torch.arange(6) % 3
    result = Engine(model, cross_entropy).run(inputs, targets)
    compare(result, oracle(model, cross_entropy, inputs, targets), 0.1 if dtype == torch.bfloat16 else 1e-4)
