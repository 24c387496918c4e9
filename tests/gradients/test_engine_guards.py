"""What a pass must leave alone, what it must refuse, and what it must not be confused by."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients import Engine, per_sample, record_by_record, register_kernel
from evenhand.gradients.layers.linear import LinearKernel
from evenhand.types import Pass

LOSS = nn.CrossEntropyLoss(reduction="none")


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *extra, nn.Linear(6, 3))


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


def one_by_one(result: Pass) -> Tensor:
    """Norms of the gradients that the weighted sum adds, record by record."""
    rows = [result.weighted_sum(row).values() for row in torch.eye(len(result.norm))]
    return torch.stack([torch.cat([g.flatten().double() for g in row]).norm() for row in rows])


def snapshot(model: nn.Module) -> list[Any]:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [(sorted(m.__dict__), m.training, len(m._forward_hooks)) for m in model.modules()]
    parameters = [(id(p), p.requires_grad, sorted(vars(p)), p.grad) for p in model.parameters()]
    return [list(state), [v.tolist() for v in state.values()], attributes, parameters]


@pytest.mark.parametrize("extra", [(), (nn.Dropout(0.5),), (nn.PReLU(),), (nn.Dropout(0.5), nn.PReLU())])
def test_the_model_is_left_as_it_was(extra: tuple[nn.Module, ...]) -> None:
    model = net(*extra)
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(6, 4)
    kept = model[0].weight.grad
    before = snapshot(model)
    x, y = batch()
    x[0] = 1e30
    per_sample(model, LOSS, x, y).weighted_sum(torch.ones(5))
    assert str(snapshot(model)) == str(before)
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(6, 4))
    assert x.grad is None


def test_the_model_is_restored_when_forward_fails() -> None:
    model = net()
    with pytest.raises(RuntimeError):
        per_sample(model, LOSS, torch.randn(5, 7), torch.zeros(5, dtype=torch.long))
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_random_layers_draw_as_in_a_plain_forward() -> None:
    model, (x, y) = net(nn.Dropout(0.5)), batch(64)
    for engine in (Engine(model, LOSS),):
        torch.manual_seed(1)
        expected = LOSS(model(x), y)
        after = torch.rand(1)
        for _ in range(2):
            torch.manual_seed(1)
            result = engine.run(x, y)
            assert torch.equal(result.loss.float(), expected)
            assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(one_by_one(result), result.norm)


@pytest.mark.parametrize("kept", [1 << 28, 0])
def test_dropout_in_the_fallback_is_the_same_in_norms_and_sums(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(record_by_record, "KEPT_BYTES", kept)
    monkeypatch.setattr(record_by_record, "CHUNK", 200)
    model, (x, y) = net(nn.Dropout(0.5), weight_norm(nn.Linear(6, 6))), batch(16)
    monkeypatch.setattr("evenhand.gradients.engine.further_apart", lambda *_: None)
    result = per_sample(model, LOSS, x, y)
    torch.manual_seed(3)
    torch.testing.assert_close(one_by_one(result), result.norm)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    with torch.no_grad():
        model[0].weight.add_(1)
    if kept == 0:
        with pytest.raises(UsageError, match="before the update"):
            result.weighted_sum(torch.ones(16))


@pytest.mark.parametrize("extra", [(), (nn.PReLU(),)])
def test_an_empty_batch_is_an_ordinary_one(extra: tuple[nn.Module, ...]) -> None:
    model = net(*extra)
    for engine in (Engine(model, LOSS),):
        for size in (0, 3, 0):
            result = engine.run(*batch(size))
            assert result.loss.shape == result.norm.shape == (size,)
            sums = result.weighted_sum(torch.ones(size))
            assert {n: s.shape for n, s in sums.items()} == {n: p.shape for n, p in model.named_parameters()}
            assert any(bool(s.any()) for s in sums.values()) == (size > 0)


def test_frozen_parameters_count_for_nothing() -> None:
    model, (x, y) = net(), batch()
    whole = per_sample(model, LOSS, x, y)
    model[0].requires_grad_(False)
    part = per_sample(model, LOSS, x, y)
    assert list(part.weighted_sum(torch.ones(5))) == ["2.weight", "2.bias"]
    assert bool((part.norm < whole.norm).all())
    with pytest.raises(UsageError, match="no trainable parameter"):
        per_sample(model.requires_grad_(False), LOSS, x, y)


def test_thawing_between_batches_is_noticed() -> None:
    model, (x, y) = net(), batch()
    engine = Engine(model, LOSS)
    model[0].requires_grad_(False)
    engine.run(x, y)
    model[0].requires_grad_(True)
    torch.testing.assert_close(engine.run(x, y).norm, per_sample(model, LOSS, x, y).norm)


def test_an_unused_parameter_is_named() -> None:
    model = net()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match=r"'spare.bias' and 1 more; freeze"):
        per_sample(model, LOSS, *batch())


def test_a_module_used_only_in_some_batches_has_gradient_zero_in_the_others() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = nn.Linear(4, 3), nn.Linear(4, 3), True

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if self.both else self.a(x)

    model, (x, y) = Sometimes(), batch()
    engine = Engine(model, LOSS)
    engine.run(x, y)
    model.both = False
    assert not engine.run(x, y).weighted_sum(torch.ones(5))["b.weight"].any()
    with pytest.raises(UnsupportedModelError, match=r"'b\.bias'"):
        per_sample(model, LOSS, x, y)


def test_a_bypass_that_starts_later_is_noticed() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.turned = nn.Linear(4, 3), False

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) + (x @ self.l.weight.t() if self.turned else 0)

    model, (x, y) = Turning(), batch()
    engine = Engine(model, LOSS)
    engine.run(x, y)
    model.turned = True
    torch.testing.assert_close(engine.run(x, y).norm, per_sample(model, LOSS, x, y).norm)


def test_an_in_place_edit_of_a_saved_input_raises() -> None:
    class Editing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            out = self.b(hidden)
            hidden.relu_()
            return out

    with pytest.raises(RuntimeError, match="inplace"):
        per_sample(Editing(), LOSS, *batch())


def test_works_under_no_grad_and_with_inputs_that_require_grad() -> None:
    model, (x, y) = net(), batch()
    expected = per_sample(model, LOSS, x, y).norm
    with torch.no_grad():
        torch.testing.assert_close(per_sample(model, LOSS, x, y).norm, expected)
    torch.testing.assert_close(per_sample(model, LOSS, x.requires_grad_(), y).norm, expected)
    assert x.grad is None


def test_checkpointing_is_exact() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, (x, y) = Checkpointed(), batch()
    torch.testing.assert_close(per_sample(model, LOSS, x, y).norm, per_sample(model.inner, LOSS, x, y).norm)


def test_a_wrong_kernel_is_not_believed() -> None:
    class Half(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    register_kernel(Half)(LinearKernel)
    model, (x, y) = Half(4, 3), batch()
    result = per_sample(model, LOSS, x, y)
    torch.testing.assert_close(result.loss.float(), LOSS(model(x), y).detach())
    torch.testing.assert_close(one_by_one(result), result.norm)


def test_parametrized_layers_are_exact() -> None:
    model, (x, y) = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Linear(6, 3)), batch()
    result = per_sample(model, LOSS, x, y)
    assert "0.parametrizations.weight.original0" in result.weighted_sum(torch.ones(5))
    torch.testing.assert_close(one_by_one(result), result.norm)


def test_bf16_autocast_keeps_norms_and_sums_in_float32() -> None:
    model, (x, y) = net(), batch()
    exact = per_sample(model, LOSS, x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = per_sample(model, lambda o, t: LOSS(o.float(), t), x, y)
    torch.testing.assert_close(result.norm, exact.norm, rtol=0.05, atol=0.01)
    torch.testing.assert_close(one_by_one(result), result.norm, rtol=1e-5, atol=1e-6)


def test_comparisons_leave_the_generator_of_python_alone() -> None:
    random.seed(3)
    state = random.getstate()
    engine, (x, y) = Engine(net(), LOSS), batch(8)
    for _ in range(4):
        engine.run(x, y)
    assert random.getstate() == state
