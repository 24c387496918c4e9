"""The competitors: each gives the full training step of one model on one batch, noise included."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.mechanism.add_noise import Ahead, release_parts
from evenhand.mechanism.random_streams import Stream
from evenhand.training.attach import Private, attach

BOUND, STEPS = 1.0, 1_000_000
NOISE, LAST = "noise of ours", "SGD, channels last"
PICTURES = 4
"""Dimensions of a batch of pictures."""
Step = Callable[[], Any]


@dataclass(frozen=True)
class Competitor:
    """One way to train.

    ``steps(model, inputs, targets, learning rate, noise multiplier)`` gives one step after the other; calling a step
    is timed, getting it is not. ``accept`` turns a model into one that the competitor takes.
    """

    steps: Callable[[nn.Module, Tensor, Tensor, float, float], Iterator[Step]]
    accept: Callable[[nn.Module], nn.Module] = lambda model: model
    private: bool = True


def sgd(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """Forward, mean loss, backward, update: nothing private about it."""
    optimizer, loss = torch.optim.SGD(model.parameters(), rate), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    while True:
        yield step


def sgd_last(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """The same for who asks torch to lay out pictures and weights with their channels last, as our engine does."""
    if x.dim() != PICTURES:
        raise ValueError("these records are no pictures")
    turned = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return sgd(turned, x.contiguous(memory_format=torch.channels_last), y, rate, noise)


def ours(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float, lean: bool = False) -> Iterator[Step]:
    """`Private.step` as `attach` gives it, ledger and guards included; drawing the batch is not timed.

    Every record has the sampling rate 1, so that all steps are of the same size.
    """
    data = eh.data.wrap(x, y, labels=list(range(int(y.max()) + 1)))
    plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=data.facts, epochs=STEPS, batch_size=len(x))
    plan = replace(plan, levels=tuple(replace(level, noise=noise, bound=BOUND) for level in plan.levels))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with tempfile.TemporaryDirectory() as folder:
        compute, loss = eh.Compute(lean=lean), nn.CrossEntropyLoss(reduction="none")
        with attach(model, optimizer, loss, plan, out=f"{folder}/run", compose=False, compute=compute) as private:
            yield from _steps(private, data)


def _steps(private: Private, data: eh.Data) -> Iterator[Step]:
    for batch in private.batches(data):
        yield lambda batch=batch: private.step(batch)  # type: ignore[misc]


def ours_lean(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """The same in memory mode."""
    return ours(model, x, y, rate, noise, lean=True)


def noise_alone(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """What the noise of our step costs by itself: made from the cipher's bits, added on the grid, divided."""
    source = Ahead(Stream.fresh())
    totals = [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]
    for number in range(STEPS):
        yield lambda number=number: release_parts(totals, noise, 2.0**-30, source, number, len(x))  # type: ignore[misc]


def vmap_grad(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """torch.func's per-record gradients, clipped and added up in chunks of at most 256 MB."""
    from torch.func import functional_call, grad, vmap

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    loss = nn.CrossEntropyLoss()

    def one(tensors: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, (tensors, buffers), (record.unsqueeze(0),))
        return loss(outputs, label.unsqueeze(0))

    each = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")
    chunk = max(1, 2**26 // sum(weight.numel() for weight in weights.values()))
    optimizer = torch.optim.SGD(model.parameters(), rate)

    def step() -> None:
        optimizer.zero_grad()
        totals: dict[str, Tensor] = {}
        for rows, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            found = each(weights, rows, labels)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factor = (BOUND / norms.clamp(min=1e-12)).clamp(max=1.0)
            for name, g in found.items():
                part = (factor @ g.flatten(1)).view(g.shape[1:])
                totals[name] = totals[name].add_(part) if name in totals else part
        for name, parameter in model.named_parameters():
            noisy = totals[name].add_(torch.randn_like(parameter), alpha=noise * BOUND)
            parameter.grad = noisy.div_(len(x))
        optimizer.step()

    while True:
        yield step


def opacus_model(model: nn.Module) -> nn.Module:
    """With Opacus's own layers in the place of those it does not take (LSTM, MultiheadAttention)."""
    from opacus.validators import ModuleValidator

    return model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model)


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """Per-record gradients by hooks, the default of Opacus."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    plain, size = torch.optim.SGD(model.parameters(), rate), len(x)
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(plain, noise_multiplier=noise, max_grad_norm=BOUND, expected_batch_size=size)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    while True:
        yield step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, rate: float, noise: float) -> Iterator[Step]:
    """Ghost norms and a second backward, Opacus's fast gradient clipping."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    plain, size = torch.optim.SGD(model.parameters(), rate), len(x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        plain, noise_multiplier=noise, max_grad_norm=BOUND, expected_batch_size=size
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    while True:
        yield step


def reference(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean of the clipped gradients, one record after the other by plain autograd."""
    total = torch.zeros(())
    for record, label in zip(x.split(1), y.split(1), strict=True):
        found = torch.autograd.grad(nn.functional.cross_entropy(model(record), label), list(model.parameters()))
        whole = torch.cat([gradient.flatten() for gradient in found])
        total = total + whole * min(1.0, BOUND / float(whole.norm()))
    return total / len(x)


def deviation(competitor: Competitor, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """How far the competitor's step without noise is from what it should be, relative to that."""
    model = competitor.accept(model)
    expected, before = reference(model, x, y), _flat(model)
    steps = competitor.steps(model, x, y, 1.0, 1e-9)
    next(steps)()
    return float((before - _flat(model) - expected).norm() / expected.norm())


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def competitors() -> dict[str, Competitor]:
    """Those that can run here, by the name of their column."""
    found = {
        "SGD": Competitor(sgd, private=False),
        LAST: Competitor(sgd_last, private=False),
        "ours": Competitor(ours),
        "ours, memory mode": Competitor(ours_lean),
        NOISE: Competitor(noise_alone, private=False),
    }
    if importlib.util.find_spec("opacus") is not None:
        found["Opacus hooks"] = Competitor(opacus_hooks, opacus_model)
        found["Opacus ghost"] = Competitor(opacus_ghost, opacus_model)
    return found | {"vmap(grad)": Competitor(vmap_grad)}
