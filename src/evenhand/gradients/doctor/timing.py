"""The cost of a private step beside plain SGD, and beside Opacus if it is installed, measured on one model and batch.

The competitors take turns in one process, so that a busy machine slows all of them. Each works on a copy of the model.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.gradients.batch_utils import LossFn, apply_loss, batch_size, call
from evenhand.gradients.engine import Engine

Step: TypeAlias = Callable[[], None]
BOUND, RATE, BLOCK_SECONDS = 1.0, 1e-6, 0.05


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step, and how many times plain SGD's; ``error`` says why there is none."""

    name: str
    milliseconds: float | None
    ratio: float | None
    error: str = ""


def plain_step(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Step:
    """Run forward, mean loss, backward and update: nothing private about it."""
    optimizer = _optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        apply_loss(loss_fn, call(model, inputs), targets).mean().backward()
        optimizer.step()

    return step


def private_step(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Step:
    """Run the engine, clip, sum, add noise from torch's generator as Opacus does, and update."""
    optimizer, engine = _optimizer(model), Engine(model, loss_fn)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    size = batch_size(inputs, targets)

    def step() -> None:
        optimizer.zero_grad()
        result = engine.run(inputs, targets)
        sums = result.last_sum((BOUND / result.norm).clamp(max=1.0))
        for name, value in sums.items():
            noisy = value.add_(torch.randn_like(value), alpha=BOUND).div_(size)
            parameters[name].grad = noisy.to(parameters[name].dtype)
        optimizer.step()

    return step


def opacus_hooks(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Step:
    """Return a step of Opacus as it is by default: every record's gradient is held."""
    wrapped = importlib.import_module("opacus").GradSampleModule(model)
    optimizer = importlib.import_module("opacus.optimizers").DPOptimizer(
        _optimizer(model), noise_multiplier=1.0, max_grad_norm=BOUND, expected_batch_size=batch_size(inputs, targets)
    )

    def step() -> None:
        optimizer.zero_grad()
        apply_loss(loss_fn, call(wrapped, inputs), targets).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Step:
    """Return a step of Opacus with ghost clipping: norms first, then a second backward."""
    wrapped = importlib.import_module("opacus").GradSampleModuleFastGradientClipping(
        model, max_grad_norm=BOUND, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = importlib.import_module("opacus.optimizers").DPOptimizerFastGradientClipping(
        _optimizer(model), noise_multiplier=1.0, max_grad_norm=BOUND, expected_batch_size=batch_size(inputs, targets)
    )
    tools = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    criterion = tools.DPLossFastGradientClipping(wrapped, optimizer, _Criterion(loss_fn), loss_reduction="mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(call(wrapped, inputs), targets).backward()
        optimizer.step()

    return step


class _Criterion:
    """A loss with the attribute that Opacus sets to ask for one value per record."""

    def __init__(self, loss_fn: LossFn):
        self._loss_fn, self.reduction = loss_fn, "mean"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        values: Tensor = apply_loss(self._loss_fn, outputs, targets)
        return values if self.reduction == "none" else values.mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def measure(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, opacus: bool = False, rounds: int = 5
) -> tuple[Timing, ...]:
    """Return time per step of plain SGD, of evenhand and, if asked and installed, of both ways of Opacus.

    A ratio is that of the medians over the rounds. One that cannot run (a layer it does not know) says why.

    >>> rows = measure(nn.Linear(2, 1), lambda out, y: (out[:, 0] - y).square(), torch.ones(4, 2), torch.ones(4))
    >>> [row.name for row in rows], rows[0].ratio
    (['plain SGD', 'evenhand'], 1.0)
    """
    makers: dict[str, Callable[..., Step]] = {"plain SGD": plain_step, "evenhand": private_step}
    if opacus:
        makers |= {"Opacus hooks": opacus_hooks, "Opacus ghost": opacus_ghost}
    steps, counts, errors = {}, {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in makers.items():
            try:
                steps[name] = make(copy.deepcopy(model), loss_fn, inputs, targets)
                steps[name]()
                counts[name] = max(1, round(BLOCK_SECONDS / max(_seconds(steps[name], 1), 1e-6)))
            except Exception as error:  # a competitor that cannot run is a row of the table
                steps.pop(name, None)
                errors[name] = _reason(error)
        times = _rounds(steps, counts, rounds)
    base = times.get("plain SGD")
    return tuple(
        Timing(name, None, None, errors[name])
        if name in errors
        else Timing(name, 1e3 * times[name], times[name] / base if base else None)
        for name in makers
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "opacus":
        return "not installed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _seconds(step: Step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def _rounds(steps: Mapping[str, Step], counts: Mapping[str, int], rounds: int) -> dict[str, float]:
    """Return median seconds per step; who begins changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds if names else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_seconds(steps[name], counts[name]))
    return {name: statistics.median(values) for name, values in seconds.items()}
