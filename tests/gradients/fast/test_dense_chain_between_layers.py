"""What comes between the layers of a chain, or between its outputs and the loss: never taken for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense_models import LOSS, batch, chained, mlp, norms
from evenhand.errors import DataError
from evenhand.gradients import Engine
from evenhand.gradients.fast.dense_chain import DenseChain
from evenhand.gradients.model_layout import Layout
from evenhand.training.losses import CrossEntropy
from evenhand.types import Pass

Oracle = Callable[..., Pass]
BENDS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def test_only_torchs_own_classes_make_a_chain() -> None:
    assert DenseChain.of(Layout.read(mlp())) is not None
    assert DenseChain.of(Layout.read(nn.Linear(2, 2))) is not None
    others = [
        Doubled(nn.Linear(2, 2)),
        nn.Sequential(Scaled(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        nn.Sequential(nn.Conv1d(1, 1, 1)),
        nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU()),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
    ]
    for model in others:
        assert DenseChain.of(Layout.read(model)) is None


def test_a_parameter_of_the_container_makes_no_chain() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert DenseChain.of(Layout.read(model)) is None


def _hook_layer(model: nn.Sequential) -> Any:
    return model[3].register_forward_hook(lambda module, args, out: 2 * out)


def _hook_container(model: nn.Sequential) -> Any:
    return model.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _hook_activation(model: nn.Sequential) -> Any:
    return model[2].register_forward_hook(lambda module, args, out: out + 1)


def _hook_all(model: nn.Sequential) -> Any:
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if isinstance(module, nn.Tanh) else None
    )


def _own_forward(model: nn.Sequential) -> None:
    model[4].forward = lambda x: torch.tanh(2 * x)  # type: ignore[method-assign]


def _other_layer(model: nn.Sequential) -> None:
    model[4] = nn.Softplus()


def _other_flattening(model: nn.Sequential) -> None:
    model[0].start_dim = -2


@pytest.mark.parametrize(
    "change",
    [_hook_layer, _hook_container, _hook_activation, _hook_all, _own_forward, _other_layer, _other_flattening],
)
def test_what_comes_between_later_counts(change: Callable[[nn.Sequential], Any]) -> None:
    """The same engine, after some batches: from then on the model computes something else."""
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    engine = Engine(model, LOSS)
    assert chained(engine, x, y)
    handle = change(model)
    try:
        result = engine.run(x, y)
        expected = norms(model, LOSS, x, y)
    finally:
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(result.norm, expected)


def test_a_layer_changed_in_place_is_seen() -> None:
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    engine = Engine(model, LOSS)
    before = engine.run(x, y).norm
    with torch.no_grad():
        model[5].weight.mul_(2)
    norm = norms(model, LOSS, x, y)
    torch.testing.assert_close(engine.run(x, y).norm, norm)
    assert not torch.allclose(before, norm)


def test_a_loss_that_reads_the_weights_is_not_taken_for_one_of_outputs(agrees: Oracle) -> None:
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)

    def penalised(out: Tensor, target: Tensor) -> Tensor:
        return LOSS(out, target) + model[1].weight.square().sum()

    engine = Engine(model, penalised)
    result = engine.run(x, y)
    assert not engine._path_works
    torch.testing.assert_close(result.norm, norms(model, penalised, x, y))


def test_a_loss_that_runs_the_model_again_is_not_taken_for_one_of_outputs() -> None:
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    engine = Engine(model, lambda out, target: LOSS(out, target) + LOSS(model(torch.ones_like(x[:1])), target[:1]))
    engine.run(x, y)
    assert not engine._path_works


def test_a_loss_that_writes_into_the_outputs(agrees: Oracle) -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return LOSS(out.mul_(2), target)

    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    plain = Engine(model, lambda out, target: LOSS(out * 2, target)).run(x, y)
    torch.testing.assert_close(Engine(model, loss).run(x, y).norm, plain.norm)


def test_a_label_without_an_output_is_refused_without_its_value() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    engine.run(x, y)
    y[3] = 71
    with pytest.raises(DataError, match="does not fit") as error:
        engine.run(x, y)
    assert "71" not in str(error.value)
    assert error.value.__cause__ is None


def test_labels_to_be_ignored_give_no_gradient() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, LOSS)
    engine.run(x, y)
    y[3] = -100
    result = engine.run(x, y)
    assert result.norm[3] == 0.0
    assert result.loss[3] == 0.0
    assert bool((result.norm[:3] > 0).all())


def test_the_loss_of_a_subclass_is_its_own() -> None:
    class Sharper(CrossEntropy):
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().__call__(3 * outputs, targets)

    class Harder(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().forward(3 * outputs, targets)

    model, (x, y) = mlp(), batch()
    plain = Engine(model, lambda out, target: LOSS(3 * out, target)).run(x, y)
    for loss in (Sharper(), Harder(reduction="none")):
        torch.testing.assert_close(Engine(model, loss).run(x, y).norm, plain.norm)


def test_a_loss_with_a_hook_is_its_own() -> None:
    loss = nn.CrossEntropyLoss(reduction="none")
    model, (x, y) = mlp(), batch()
    engine = Engine(model, loss)
    before = engine.run(x, y).norm
    loss.register_forward_hook(lambda module, args, out: 5 * out)
    torch.testing.assert_close(engine.run(x, y).norm, 5 * before)


def test_a_loss_that_couples_records_is_found() -> None:
    def coupled(out: Tensor, target: Tensor) -> Tensor:
        return LOSS(out - out.mean(0), target)

    model, (x, y) = mlp(), batch()
    result = Engine(model, coupled).run(x, y)  # differentiated record by record, where nothing is coupled
    torch.testing.assert_close(result.norm, norms(model, coupled, x, y), rtol=1e-4, atol=1e-6)
