"""Train many small models of one form at once: parameters stacked, one optimizer for all of equally many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from evenhand.data.dataset import Data
from evenhand.data.record_seeds import Quiet
from evenhand.density import METHODS
from evenhand.errors import UnsupportedModelError
from evenhand.gradients.stacked_models import Chain, chain_of
from evenhand.mechanism.replicas import Replicas
from evenhand.models.build import declared_shape
from evenhand.training import weight_average
from evenhand.training.config import PYTHON, Config
from evenhand.training.loop import Companions
from evenhand.training.optimizers import OPTIMIZERS, SCHEDULES, Descent
from evenhand.training.weight_average import Average
from evenhand.types import Commit

NUMBERS = 2**23
"""Numbers that the layers of all replicas hold at once: further replicas are trained in another stack."""
MOST = 128
Stacked = dict[str, Tensor]


def most_together(rows: float, chain: Chain) -> int:
    """Return how many models of this form, with so many rows a step, are trained in one stack."""
    return max(1, min(MOST, int(NUMBERS / (rows * chain.width))))


def chain_for(config: Config, data: Data, model: nn.Module | None = None) -> Chain:
    """Return the form of the model that a config trains on these data, as trainings of it can be stacked.

    Args:
      config: settings of the training.
      data: its records.
      model: the untrained model, where the config does not name it.

    Raises:
      UnsupportedModelError: trainings must be done one by one; the message says why.
    """
    reason = _unsupported(config, model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    shape = declared_shape(data.facts)
    if data.persons is not None:
        raise UnsupportedModelError("a person's record is chosen anew in every step of each run")
    if shape is None or not data.facts.inputs.endswith(" float32") or not isinstance(data.fetch, Quiet):
        raise UnsupportedModelError("records are not rows of float32 numbers that are read without drawing anything")
    return chain_of(config.build_model(data.facts) if model is None else model, shape)


def _unsupported(config: Config, model: nn.Module | None) -> str | None:
    """Return why runs of a config cannot be trained together, as far as the config tells."""
    reasons = {
        "densities are released once, without steps": config.method in METHODS,
        "random views are drawn for each run by itself": config.augment is not None or config.views > 1,
        "only float32 on the CPU is stacked": config.device != "cpu" or config.precision != "float32",
        "the optimizer is none of those by name": config.optimizer not in OPTIMIZERS,
        "adam_bc is told the noise of every step of its own run": config.optimizer == "adam_bc",
        "counts of labels are released by each run by itself": config.prior or config.goal != "overall",
        "the audit of a promise is made by each run by itself": config.audit is not None,
        "the learning-rate schedule is none of those by name": config.lr_schedule not in SCHEDULES,
        "the loss is none of those by name": config.loss == PYTHON,
        "the model is a Python object": config.model == PYTHON and model is None,
    }
    return next((reason for reason, true in reasons.items() if true), None)


class _Cohort(nn.Module):
    """Stacked parameters of the replicas with equally many steps, which share optimizer, schedule and average.

    Every optimizer by name treats each number alone, so that stacked ones move as each would by itself.
    """

    def __init__(self, parameters: Mapping[str, Tensor], start: int, stop: int, steps: int, config: Config) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(value[start:stop]) for value in parameters.values())
        self.start, self.stop, self.steps = start, stop, steps
        descent = Descent(config.optimizer, config.lr, config.momentum, config.weight_decay, config.lr_schedule)
        self.optimizer, schedule = descent.build(self, steps)
        ema = weight_average.named(config.average)
        self.companions = Companions(schedule, None if ema is None else Average(self, ema))

    def update(self, gradient: Tensor, position: int) -> None:
        """Take one step along the private gradients, one row of all parameters for each replica."""
        self.companions.before(position)
        parts = torch.split(gradient, [part[0].numel() for part in self.parts], dim=1)
        for parameter, part in zip(self.parts, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape).to(parameter.dtype)
        self.optimizer.step()
        self.companions.after()


def train_stacked(
    stack: Replicas,
    stacked: Stacked,
    steps: Sequence[int],
    config: Config,
    told: Callable[[int, Sequence[Commit]], None],
) -> tuple[Stacked, Stacked | None]:
    """Take all steps of all replicas.

    Args:
      stack: the replicas, in the order of their numbers of steps, so that those which still train come first.
      stacked: first parameters by name in the order of the chain, replicas along the first dimension; written over.
      steps: of every replica.
      config: settings of the descent.
      told: called after each position with what the ledgers of the replicas that took it must say.

    Returns:
      The last parameters and their averages, None without; both are the caller's.
    """
    starts = [place for place in range(len(steps)) if place == 0 or steps[place] != steps[place - 1]]
    cohorts = [
        _Cohort(stacked, start, stop, steps[start], config)
        for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True)
    ]
    for position in range(steps[0]):
        training = [cohort for cohort in cohorts if cohort.steps > position]
        count = training[-1].stop
        gradient, commits = stack.step({name: value[:count] for name, value in stacked.items()}, position)
        told(position, commits)
        for cohort in training:
            cohort.update(gradient[cohort.start : cohort.stop], position)
    if config.average is None:
        return stacked, None
    last = {name: value.clone() for name, value in stacked.items()}
    for cohort in cohorts:
        assert cohort.companions.average is not None
        cohort.companions.average.apply()
    return last, stacked
