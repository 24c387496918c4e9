"""Models that change under the engine: what it learned on one batch must not be believed where it no longer holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exactness import DOUBLE, SIZE, batch, check, compare, exact_or_refused, lin, net, oracle
from exactness import Case as Model
from oracles import Custom, cross_entropy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from evenhand.errors import UsageError
from evenhand.gradients import Engine, per_sample


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def replace_weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn(4, 4, dtype=DOUBLE))


def replace_layer(model: nn.Module) -> None:
    model[0] = nn.PReLU().double()


def tie(model: nn.Module) -> None:
    model[1].weight = model[0].weight


def set_forward(model: nn.Module) -> None:
    model[0].forward = lambda x: functional.linear(x, model[0].weight ** 2, model[0].bias)


def add_hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, args, out: out * module.weight.sum())


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight**2, self.bias)


def change_class(model: nn.Module) -> None:
    model[0].__class__ = Squared


def to_eval(model: nn.Module) -> None:
    model.eval()


CHANGES: list[Callable[[nn.Module], None]] = [
    freeze,
    replace_weight,
    replace_layer,
    tie,
    set_forward,
    add_hook,
    to_eval,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_batches_is_noticed(change: Callable[[nn.Module], None]) -> None:
    model = net(lin(4, 4), lin(4, 4), nn.Tanh(), lin())
    engine = Engine(model, cross_entropy)
    compare(engine.run(*(first := batch())), oracle(model, cross_entropy, *first))
    change(model)
    compare(engine.run(*(second := batch())), oracle(model, cross_entropy, *second))


def test_compiling_in_place_between_two_batches() -> None:
    model = net(lin(4, 4), nn.Tanh(), lin())
    engine = Engine(model, cross_entropy)
    engine.run(*batch())
    model[0].compile(backend="eager")
    exact_or_refused(engine, model, *batch())


@pytest.mark.parametrize("layer", [nn.Tanh, nn.PReLU])
def test_the_sum_is_of_the_pass_it_belongs_to(layer: type[nn.Module]) -> None:
    """Weights updated, or another batch run, between the norms and the sum."""
    model = net(lin(4, 4), layer(), lin())
    engine, (x, y) = Engine(model, cross_entropy), batch()
    for disturb in (lambda: model[0].weight.data.add_(1), lambda: engine.run(*batch(9))):
        expected, result = oracle(model, cross_entropy, x, y), engine.run(x, y)
        disturb()
        with contextlib.suppress(UsageError):
            compare(result, expected)


def test_dropout_is_the_same_in_norms_and_sums() -> None:
    model, (x, y) = net(lin(4, 8), nn.Dropout(0.5), lin(8, 3)), batch()
    engine = Engine(model, cross_entropy)
    engine.run(x, y)
    torch.manual_seed(7)
    loss = cross_entropy(model(x), y)
    rows = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in loss]
    names = [name for name, _ in model.named_parameters()]
    expected = {name: torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)}
    torch.manual_seed(7)
    compare(engine.run(x, y), expected)


@pytest.fixture
def _doubling() -> Iterator[None]:
    handle = register_module_forward_hook(lambda m, args, out: out * 2 if isinstance(m, nn.Linear) else None)
    yield
    handle.remove()


@pytest.mark.usefixtures("_doubling")
def test_a_hook_on_every_module_is_exact() -> None:
    check(Model(net(lin(4, 4), nn.Tanh(), lin())))


@pytest.mark.parametrize("layer", [nn.Tanh, nn.PReLU])
def test_two_threads(layer: type[nn.Module]) -> None:
    model = net(lin(4, 4), layer(), lin())
    batches = [batch(5) for _ in range(4)]
    expected = [per_sample(model, cross_entropy, *rows).norm for rows in batches]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(start, start + 12):
            if not torch.equal(per_sample(model, cross_entropy, *batches[i % 4]).norm, expected[i % 4]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Switched(nn.Module):
    """Does something else once ``on`` is set."""

    def __init__(self, plain: Any, other: Any, **layers: nn.Module):
        super().__init__()
        self.plain, self.other, self.on = Custom(plain, **layers), other, False

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.plain, x) if self.on else self.plain(x)


def swapped(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.l, {"weight": 2 * m.l.weight}, (x.mean(1),))


def shared_lookup(m: Any, x: Tensor) -> Tensor:
    return m.l(x + m.e(torch.arange(SIZE)).mean(0)).mean(1)


def looked_up(m: Any, x: Tensor) -> Tensor:
    return m.l(x + m.e(torch.zeros(x.shape[:2], dtype=torch.long))).mean(1)


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.l(x).mean(1)


SWITCHES: dict[str, Any] = {
    "functional use": lambda: Switched(pooled, lambda m, x: x.mean(1) @ m.l.weight.t() + m.l.bias, l=lin()),
    "weights swapped": lambda: Switched(pooled, swapped, l=lin()),
    "lookup shared by all records": lambda: Switched(looked_up, shared_lookup, l=lin(), e=nn.Embedding(SIZE, 4)),
    "time first": lambda: Switched(pooled, lambda m, x: m.l(x.transpose(0, 1)).mean(0), l=lin()),
    "records flipped": lambda: Switched(pooled, lambda m, x: m.l(x.flip(0)).flip(0).mean(1), l=lin()),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_inside_the_model(name: str) -> None:
    model = SWITCHES[name]()
    engine = Engine(model, cross_entropy)
    engine.run(*batch(SIZE, SIZE, 4))
    model.on = True
    exact_or_refused(engine, model, *batch(SIZE, SIZE, 4))


def by_sign(m: Any, x: Tensor) -> Tensor:
    """As one sorts sequences by their length: ties keep their order."""
    order = (x[:, 0] > 0).long().argsort(stable=True)
    return m.l(x[order])[order.argsort()]


def test_records_sorted_by_something_that_ties_in_the_first_batch() -> None:
    model = Custom(by_sign, l=lin())
    engine, (x, y) = Engine(model, cross_entropy), batch()
    engine.run(torch.cat([x[:, :1].abs(), x[:, 1:]], 1), y)
    x[:, 0] = torch.tensor([1.0, -1.0] * 3)
    exact_or_refused(engine, model, x, y)


@pytest.mark.parametrize("size", [1, 2])
def test_records_flipped_after_a_tiny_first_batch(size: int) -> None:
    model = Custom(lambda m, x: m.l(x.flip(0)).flip(0), l=lin())
    engine = Engine(model, cross_entropy)
    engine.run(*batch(size))
    exact_or_refused(engine, model, *batch())


def test_forward_replaced_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(lin())
    engine = Engine(model, cross_entropy)
    engine.run(*batch())
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight**2, self.bias))
    exact_or_refused(engine, model, *batch())


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9])
def test_gradients_too_small_to_compare_are_not_believed(scale: float) -> None:
    """Sorted records whose norms are below what rounding leaves of a comparison."""

    def by_value(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.l(x[order])[order.argsort()]

    model = Custom(by_value, l=lin()).float()
    x, y = torch.randn(8, 4) * torch.arange(1, 9).view(-1, 1), torch.randint(3, (8,))
    engine = Engine(model, lambda out, target: scale * cross_entropy(out, target))
    for _ in range(3):
        result = engine.run(x, y)
        alone = [engine.run(x[i : i + 1], y[i : i + 1]).norm for i in range(8)]
        torch.testing.assert_close(result.norm, torch.cat(alone), rtol=1e-4, atol=0.0)
