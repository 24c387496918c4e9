"""The doctor says what the engine does, and names what is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import Custom
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients import examine
from evenhand.gradients.doctor import timing
from evenhand.gradients.doctor.doctor import Diagnosis
from evenhand.gradients.doctor.timing import measure

LOSS = nn.CrossEntropyLoss(reduction="none")


def lin(a: int = 4, b: int = 3) -> nn.Linear:
    return nn.Linear(a, b)


def diagnosis(model: nn.Module, *record: int, loss: Any = LOSS) -> Diagnosis:
    dtype = next(model.parameters()).dtype
    return examine(model, loss, torch.randn(6, *(record or (4,)), dtype=dtype), torch.arange(6) % 3, timed=False)


def problems(found: Diagnosis) -> dict[str, str]:
    return {part.name: part.problem for part in found.parts if part.problem}


def test_a_model_that_kernels_serve() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    found = diagnosis(model, 1, 6, 6)
    assert found.trainable
    assert found.way == "kernels"
    assert [(part.name, part.kind, part.parameters) for part in found.parts] == [
        ("0", "Conv2d", 40),
        ("1", "GroupNorm", 8),
        ("4", "Linear", 195),
    ]
    assert all(part.kernel and not part.problem for part in found.parts)
    assert "Trainable privately, by kernels" in str(found)
    assert all(part.kernel in str(found) for part in found.parts)


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight**2, self.bias)


def with_forward() -> nn.Module:
    model = lin()
    model.forward = lambda x: functional.linear(x, model.weight, model.bias)
    return nn.Sequential(model)


def with_hook() -> nn.Module:
    model = nn.Sequential(lin())
    model[0].register_forward_hook(lambda *parts: None)
    return model


def watched_times() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2), nn.Flatten())
    model[1].register_forward_hook(lambda *parts: None)
    return model.double()


PAST = "weight is used past the kernel, by torch.nn.functional.linear"
SLOW: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "unknown type": (lambda: nn.Sequential(lin(4, 4), nn.PReLU(), lin()), "1", "no kernel for this type"),
    "raw parameter": (
        lambda: Custom(lambda m, x: m.l(x * m.p), l=lin(), p=nn.Parameter(torch.ones(4))),
        "",
        "its own forward uses parameters directly",
    ),
    "subclass": (lambda: nn.Sequential(Squared(4, 3)), "0", "resembles a known layer but computes something else"),
    "own forward": (with_forward, "0", "its forward was replaced on the instance"),
    "hook": (with_hook, "0", "hooks are registered on it"),
    "argument": (lambda: Custom(lambda m, x: functional.linear(x, m.l.weight, m.l.bias), l=lin()), "l", PAST),
    "keyword": (
        lambda: Custom(lambda m, x: functional.linear(input=x, weight=m.l.weight, bias=m.l.bias), l=lin()),
        "l",
        PAST,
    ),
    "list": (
        lambda: Custom(lambda m, x: x @ torch.cat([m.a.weight, m.b.weight]).t() + m.a(x) + m.b(x), a=lin(4, 1),
                       b=lin(4, 1)),
        "b",
        "weight is used past the kernel, by torch.cat",
    ),
    "two names": (
        lambda: Custom(lambda m, x: m.l(x) + x @ m.l.weight.t(), l=lin()),
        "l",
        "weight is used past the kernel, by torch.Tensor.",
    ),
    "einsum": (
        lambda: Custom(lambda m, x: m.l(x * torch.einsum("i,i->", m.p, m.p)), l=lin(), p=nn.Parameter(torch.ones(4))),
        "",
        "its own forward uses parameters directly",
    ),
    "watched times": (watched_times, "1", "hooks are registered on it"),
    "rows": (
        lambda: Custom(lambda m, x: m.l(x.repeat(2, 1))[: len(x)], l=lin()), "l", "called with 12 rows for 6 records",
    ),
}  # fmt: skip


DIRECT = ("unknown type", "raw parameter", "own forward", "hook", "argument", "keyword", "two names")


@pytest.mark.parametrize("name", DIRECT)
def test_parameters_that_are_followed_without_a_kernel(name: str) -> None:
    found = diagnosis(SLOW[name][0](), loss=lambda out, y: LOSS(functional.pad(out, (0, 3)), y))
    assert found.trainable
    assert found.way == "kernels"
    assert problems(found) == {}
    assert "followed directly" in str(found) or "LinearKernel" in str(found)


@pytest.mark.parametrize("name", ["subclass", "watched times"])
def test_why_a_module_is_run_again(name: str) -> None:
    make, where, why = SLOW[name]
    found = diagnosis(make(), 4, loss=lambda out, y: LOSS(functional.pad(out, (0, 3)), y))
    assert found.way == "kernels, some modules record by record"
    assert problems(found).keys() == {where}
    assert why in problems(found)[where]
    assert [part.kernel for part in found.parts if part.name == where] == ["run again (vmap)"]
    assert "run again for each record" in str(found)


@pytest.mark.parametrize("name", [name for name in SLOW if name not in (*DIRECT, "subclass", "watched times")])
def test_why_a_model_goes_record_by_record(name: str) -> None:
    make, where, why = SLOW[name]
    found = diagnosis(make(), loss=lambda out, y: LOSS(functional.pad(out, (0, 3)), y))
    assert found.trainable
    assert found.way == "record by record (vmap)"
    assert why in problems(found)[where]
    assert why in str(found)


def test_a_loop_is_called_a_loop() -> None:
    def chosen(m: Any, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        out = x.new_zeros(len(x), 3)
        return out.index_put((positive,), m.a(x[positive])).index_put((~positive,), m.b(x[~positive]))

    assert diagnosis(Custom(chosen, a=lin(), b=lin())).way == "record by record (loop)"


def test_records_in_another_order_are_explained() -> None:
    found = diagnosis(Custom(lambda m, x: m.l(x.flip(0)).flip(0), l=lin()))
    assert problems(found) == {}
    assert "records are reordered" in str(found)


def test_looking_at_a_parameter_is_not_using_it() -> None:
    def looking(m: Any, x: Tensor) -> Tensor:
        scale = m.l.weight.detach().norm() + m.l.weight.data.sum() + len(m.l.weight) + m.l.weight.numel()
        return m.l(x.to(m.l.weight.dtype)) * scale.item()

    found = diagnosis(Custom(looking, l=lin()))
    assert problems(found) == {}
    assert found.way == "kernels"


def test_frozen_and_shared_parameters_are_noted() -> None:
    model = Custom(lambda m, x: m.o(m.b(m.a(m.f(x)))), f=lin(4, 4), a=lin(4, 4), b=lin(4, 4), o=lin())
    model.f.requires_grad_(False)
    model.b.weight = model.a.weight
    notes = {part.name: part.note for part in diagnosis(model).parts}
    assert notes == {"f": "frozen: no gradient, no noise", "a": "", "b": "weight is also a.weight", "o": ""}


def test_everything_that_is_refused_is_named_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    found = diagnosis(model)
    assert not found.trainable
    assert [reason[:3] for reason in found.refused] == ["'1'", "'2'"]
    assert [change.name for change in found.fixable] == ["1", "2"]
    assert "NOT trainable privately" in str(found)
    assert "GroupNorm(1, 8)" in str(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(lin(), torch.jit.script(lin(3, 3))),
        lambda: nn.Sequential(lin(), nn.LazyLinear(3)),
        lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), lin()),
    ],
)
def test_modules_that_cannot_be_looked_into(make: Callable[[], nn.Module]) -> None:
    found = examine(make(), LOSS, torch.randn(6, 4), torch.arange(6) % 3)
    assert len(found.refused) == 1


def test_the_probe_speaks_through_the_doctor() -> None:
    found = diagnosis(Custom(lambda m, x: m.l(x - x.mean(0)), l=lin()))
    assert not found.trainable
    assert found.refused == ()
    assert "depends on the other records" in found.probe
    assert found.probe in str(found)
    assert not diagnosis(lin(), loss=lambda out, y: LOSS(out, y) / len(y)).trainable


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(lin(4, 4), nn.Dropout(0.5), nn.PReLU(), lin())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [sorted(module.__dict__) for module in model.modules()]
    inputs = torch.randn(6, 4)
    random = torch.get_rng_state()
    examine(model, LOSS, inputs, torch.arange(6) % 3)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    assert all(p.grad is None for p in model.parameters())


def test_the_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)
    found = examine(nn.Sequential(lin()), LOSS, torch.randn(6, 4), torch.arange(6) % 3)
    assert found.slowdown is not None
    assert found.slowdown > 0
    assert f"{found.slowdown:.2f} times as long as plain SGD" in str(found)


def test_the_bench_takes_opacus_in(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    rows = measure(nn.Sequential(lin()), LOSS, x, y, opacus=True, rounds=2)
    assert [row.name for row in rows] == ["plain SGD", "evenhand", "Opacus hooks", "Opacus ghost"]
    assert all(row.ratio and row.milliseconds and not row.error for row in rows)


def test_a_competitor_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(timing.importlib, "import_module", missing)
    rows = measure(nn.Sequential(lin()), LOSS, torch.randn(6, 4), torch.arange(6) % 3, opacus=True, rounds=1)
    assert [row.error for row in rows] == ["", "", "not installed", "not installed"]
    assert rows[2].ratio is None
