"""Optimizers and learning-rate schedules by name, or your own: they see private gradients only.

A schedule is a torch ``LRScheduler``, stepped once per step of the plan. After a crash it goes on where the plan goes
on: steps that were lost stay lost.
"""

from __future__ import annotations

import inspect
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from evenhand import _validate
from evenhand.errors import UsageError

Optimizer: TypeAlias = torch.optim.Optimizer


class AdamBC(Optimizer):
    """Adam that takes the noise's share out of the second moment (DP-AdamBC, Tang et al. 2024).

    The update is ``m / sqrt(max(v - phi, floor phi, eps^2))``, m and v corrected for their start as in Adam. phi is the
    average of the noise's variance per coordinate with the weights of v, so it follows schedules and bounds that
    change. In private training v is mostly noise, equal for all coordinates, and plain Adam turns into SGD; without it
    rare features get the steps that Adam gives them.

    The private step tells the noise (``see_noise``) before each update; it is public. Untold, this is Adam. ``floor``
    is a share of phi, so that it carries over between batch sizes and bounds; the paper tunes an absolute one.

    Examples:
      >>> weight = nn.Parameter(torch.zeros(1))
      >>> optimizer = AdamBC([weight], lr=0.1)
      >>> optimizer.see_noise(3.0)
      >>> weight.grad = torch.tensor([5.0])
      >>> optimizer.step()
      >>> weight                                                # 0.1 * 5 / sqrt(25 - 9)
      Parameter containing:
      tensor([-0.1250], requires_grad=True)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 0.05,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _validate.number(floor, "floor", low=0, open_low=False)
        _validate.number(eps, "eps", low=0)
        settings = {"lr": lr, "betas": betas, "floor": floor, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "noise": 0.0, "noise_average": 0.0, "noise_weight": 0.0})

    def see_noise(self, std: float) -> None:
        """Note the standard deviation of the noise in every coordinate of the next gradient."""
        for group in self.param_groups:
            group["noise"] = float(std)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters along their gradients. A closure is refused: it would look at the data again."""
        if closure is not None:
            raise UsageError("AdamBC takes one private gradient per step: call step() without a closure.")
        for group in self.param_groups:
            decay = group["betas"][1]
            group["noise_average"] = decay * group["noise_average"] + (1 - decay) * group["noise"] ** 2
            group["noise_weight"] = decay * group["noise_weight"] + (1 - decay)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._follow(parameter, group)

    def _follow(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Move one parameter."""
        assert parameter.grad is not None
        gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        state["step"] += 1
        (first, second), steps = group["betas"], state["step"]
        state["mean"].mul_(first).add_(gradient, alpha=1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        noise = group["noise_average"] / group["noise_weight"]
        least = max(group["floor"] * noise, group["eps"] ** 2)
        scale = (state["square"] / (1 - second**steps) - noise).clamp_(min=least).sqrt_()
        parameter.addcdiv_(state["mean"], scale, value=-group["lr"] / (1 - first**steps))


OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory: TypeAlias = Callable[..., LRScheduler]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam_bc": AdamBC,
}
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}
"""The optimizers that have one, with our default."""


def _linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda position: max(0, steps - position) / steps)


def _cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps)


def _one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    group = optimizer.param_groups[0]
    moving = "betas" in group or group.get("momentum", 0) > 0
    return OneCycleLR(optimizer, max_lr=group["lr"], total_steps=max(steps, 2), cycle_momentum=moving)


def _thirds(optimizer: Optimizer, steps: int) -> LRScheduler:
    return StepLR(optimizer, step_size=math.ceil(steps / 3), gamma=0.1)


SCHEDULES: dict[str, SchedulerFactory | None] = {
    "constant": None,
    "linear": _linear,
    "cosine": _cosine,
    "one-cycle": _one_cycle,
    "step": _thirds,
}
"""By name: as given; falling to zero in a line; along half a cosine; up and down; a tenth after each third."""


@dataclass(frozen=True)
class Descent:
    """How weights follow the private gradients; the default is SGD with momentum, its rate falling linearly to zero.

    Examples:
      >>> optimizer, schedule = Descent("adam", lr=0.01, scheduler="cosine").build(nn.Linear(2, 1), steps=10)
      >>> type(optimizer).__name__, type(schedule.scheduler).__name__
      ('Adam', 'CosineAnnealingLR')
    """

    optimizer: str | OptimizerFactory = "sgd"
    lr: float = 0.2
    momentum: float | None = None
    weight_decay: float | None = None
    scheduler: str | SchedulerFactory = "linear"

    def __post_init__(self) -> None:
        _validate.number(self.lr, "lr", low=0)
        if isinstance(self.optimizer, str):
            _validate.known(self.optimizer, OPTIMIZERS, "optimizer")
        elif not callable(self.optimizer):
            raise UsageError(
                "optimizer takes a name, or a function that makes one of the parameters it is given: "
                "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)."
            )
        elif self.momentum is not None or self.weight_decay is not None:
            raise UsageError("Give momentum and weight_decay to your own optimizer: here they would be ignored.")
        if isinstance(self.scheduler, str):
            _validate.known(self.scheduler, SCHEDULES, "learning-rate schedule")
        if self.momentum is not None:
            _validate.number(self.momentum, "momentum", low=0, high=1, open_low=False)
            if self.optimizer not in MOMENTUM:
                raise UsageError(f"The optimizer {self.optimizer!r} has no momentum: use {' or '.join(MOMENTUM)}.")
        if self.weight_decay is not None:
            _validate.number(self.weight_decay, "weight_decay", low=0, open_low=False)

    def build(self, model: nn.Module, steps: int) -> tuple[Optimizer, Schedule | None]:
        """Return an optimizer of the trained parameters, and its schedule for so many steps (None: constant)."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise UsageError("The model has no trainable parameter: unfreeze one with requires_grad_(True).")
        optimizer = self.optimizer(trainable) if callable(self.optimizer) else self._named(self.optimizer, trainable)
        factory = SCHEDULES[self.scheduler] if isinstance(self.scheduler, str) else self.scheduler
        return optimizer, None if factory is None else Schedule(_made(factory, optimizer, steps), steps)

    def _named(self, name: str, trainable: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of this name with the settings of this descent."""
        settings: dict[str, Any] = {"lr": self.lr}
        if name in MOMENTUM:
            settings["momentum"] = MOMENTUM[name] if self.momentum is None else self.momentum
        if self.weight_decay is not None:
            settings["weight_decay"] = self.weight_decay
        return OPTIMIZERS[name](trainable, **settings)


def _made(factory: SchedulerFactory, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the scheduler; the factory gets the number of steps if it has a second argument without default."""
    needed = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    scheduler = factory(optimizer, steps) if len(needed) > 1 else factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, and none is private here: use a schedule that follows the steps."
        )
    if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
        raise UsageError(
            "scheduler must be a name or a function that takes the optimizer and returns its torch LRScheduler, for "
            "example lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)."
        )
    _check_restorable(scheduler.state_dict())
    return scheduler


def _check_restorable(state: Mapping[str, Any]) -> None:
    """Raise unless the state has plain values only: checkpoints are read without executing anything."""
    written = io.BytesIO()
    torch.save(dict(state), written)
    written.seek(0)
    try:
        torch.load(written, weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(
            "The state of this scheduler holds objects that a checkpoint cannot hold, so the run could not be resumed: "
            "use one of torch's own schedulers."
        ) from None


class Schedule:
    """A torch scheduler that follows the positions of the plan."""

    def __init__(self, scheduler: LRScheduler, steps: int) -> None:
        self.scheduler, self._steps, self._position = scheduler, steps, 0

    def go_to(self, position: int) -> None:
        """Step until the rate is that of this position of the plan; the last rate stays after the last step."""
        while self._position < min(position, self._steps - 1):
            self.scheduler.step()
            self._position += 1

    def catch_up(self, position: int) -> None:
        """Go to a position at the start of a segment, without torch's warning that lost steps had no update."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.go_to(position)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"position": self._position, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._position = int(state["position"])
        self.scheduler.load_state_dict(dict(state["scheduler"]))
