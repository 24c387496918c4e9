"""An oracle that shares no code with the engine: vmap(grad), or record by record where vmap cannot go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from evenhand.gradients import Engine
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_by_record import HeldGradients
from evenhand.types import Pass


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def by_kernels(result: Pass) -> bool:
    """Whether the kernels served this pass, rather than the fallback."""
    return not isinstance(result.weighted_sum.__self__._raw, HeldGradients)  # type: ignore[attr-defined]


def rows(model: nn.Module, loss_fn: Any, inputs: Any, targets: Tensor, vectorise: bool) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def one(values: dict[str, Tensor], x: Any, y: Tensor) -> Tensor:
        if isinstance(x, dict):
            out = functional_call(model, values, (), {k: v[None] for k, v in x.items()})
        else:
            x = x if isinstance(x, tuple) else (x,)
            out = functional_call(model, values, tuple(v[None] for v in x))
        return loss_fn(out, y[None]).sum()

    if vectorise:
        return vmap(grad(one), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, targets)
    each = []
    for i in range(len(targets)):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        loss = one(leaves, inputs[i], targets[i])
        each.append(torch.autograd.grad(loss, list(leaves.values())))
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*each, strict=True), strict=True)}


def in_parts(model: nn.Module, loss_fn: Any, inputs: Any, targets: Tensor, weights: Tensor) -> Iterator[Any]:
    """The weighted sum by three parts, with weights that come after all norms and with weights that come at once."""
    limit = -(-len(targets) // 3)
    for early in (None, lambda norm, loss, rows: weights[rows]):
        yield MicroBatches(model, loss_fn, limit=limit).run(inputs, targets, early).last_sum(weights)


@pytest.fixture
def agrees() -> Callable[..., Pass]:
    """Check norms and a random weighted sum of one pass against the oracle, also in parts; return the pass."""

    def check(
        model: nn.Module,
        inputs: Any,
        targets: Tensor,
        loss_fn: Any = cross_entropy,
        *,
        kernels: bool | None = None,
        vectorise: bool = True,
        tolerance: float = 1e-9,
    ) -> Pass:
        expected = rows(model, loss_fn, inputs, targets, vectorise)
        norm = torch.stack([r.double().reshape(len(r), -1).square().sum(1) for r in expected.values()]).sum(0).sqrt()
        engine = Engine(model, loss_fn)
        for chains in (False, True):  # a chain of layers is also recorded on a tape
            engine._path_works = chains
            engine.run(inputs, targets)
            result = engine.run(inputs, targets)
            assert kernels is None or by_kernels(result) == kernels
            torch.testing.assert_close(result.norm, norm, rtol=tolerance, atol=tolerance)
            weights = torch.randn(len(targets), dtype=torch.float64)
            wanted = {name: torch.tensordot(weights, r.double(), dims=1) for name, r in expected.items()}
            for sums in (result.weighted_sum(weights), *in_parts(model, loss_fn, inputs, targets, weights)):
                assert list(sums) == list(expected)
                for name, own in wanted.items():
                    torch.testing.assert_close(sums[name].double(), own, rtol=tolerance, atol=tolerance)
            if engine._path is None:
                break
        return result

    return check
