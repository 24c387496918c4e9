"""The training that is attacked: its settings, its records, and the model that it begins with."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data, wrap
from evenhand.density import METHODS
from evenhand.errors import UsageError
from evenhand.runs.folder import Folder
from evenhand.training.config import PYTHON, Config, of_run
from evenhand.training.fit import choose_promise
from evenhand.training.from_config import planned, read_budgets
from evenhand.training.run import Run
from evenhand.types import Facts

_OBJECTS = ("loss", "optimizer", "lr_schedule", "augment")
"""Settings that may stand for a Python object, which cannot be found again by name."""
_CLASSES = 8
"""Owner classes that are attacked at most: with more of them, some from the strictest to the most generous."""


@dataclass(frozen=True)
class Subject:
    """A training that can be done again: for an audit, which releases nothing of it.

    ``public`` says that the records are public, so that figures about them may be shared. ``folder`` is that of the run
    whose training it is, None for settings alone.
    """

    config: Config
    data: Data
    public: bool
    folder: Folder | None = None
    given: nn.Module | None = None

    @classmethod
    def of(cls, target: Run | Plan | Config, model: nn.Module | None, train: Any, public: bool) -> Subject:
        """Return the training of a run or of settings.

        Args:
          target: the run or the settings.
          model: the untrained model, where the settings do not name it; it is copied.
          train: the training data, where the settings do not name them.
          public: the records are public.

        Raises:
          UsageError: something that was a Python object is missing, or the training cannot be attacked in this way.
        """
        if not isinstance(public, bool):
            raise UsageError("public is true or false: are these records public? Nothing was spent.")
        if not (model is None or isinstance(model, nn.Module)):
            raise UsageError("model is the untrained torch.nn.Module of this training. Nothing was spent.")
        if isinstance(target, Plan):
            raise UsageError(
                "A plan has neither records nor a model: give a run or its settings, or attack the plan itself with "
                'kind="mechanism". Nothing was spent.'
            )
        folder = target.folder if isinstance(target, Run) else None
        config = with_promise(of_run(target.path, remembered=True), target.plan) if isinstance(target, Run) else target
        for name, given in (("data", train), ("model", model)):
            if getattr(config, name) == PYTHON and given is None:
                argument = "train" if name == "data" else name
                raise UsageError(
                    f"The {name} of this training cannot be found by name: pass {argument}= to eh.audit. "
                    "Nothing was spent."
                )
        for name in _OBJECTS:
            if getattr(config, name) == PYTHON:
                raise UsageError(
                    f"The {name} of this training was a Python object, which an audit cannot find again: name one in "
                    "a Config and audit that. Nothing was spent."
                )
        if config.method in METHODS:
            raise UsageError(
                f"{config.method} releases densities once, and has no training steps to attack. Nothing was spent."
            )
        data = wrap(train) if train is not None else config.load_data()[0]
        if data.facts.promised == "person":
            able = (
                "no audit knows data with person_cap" if data.persons is None else 'only kind="mechanism" audits that'
            )
            raise UsageError(
                "These attacks put single records in and leave single records out, and the promise is about persons: "
                f"{able}. Nothing was spent."
            )
        return cls(config, data, public, folder, copy.deepcopy(model))

    def model(self, facts: Facts) -> nn.Module:
        """Return an untrained model for data with these facts; the caller owns it."""
        return self.config.build_model(facts) if self.given is None else copy.deepcopy(self.given)

    def plan(self, facts: Facts) -> Plan:
        """Return the plan that these settings lead to for data with these facts."""
        budgets = read_budgets(self.config, self.data)
        delta = self.config.delta if budgets is None else None
        promise = choose_promise(self.config.epsilon, delta, self.config.noise, budgets)
        return planned(self.config, facts, promise)

    def with_records(self, count: int) -> Subject:
        """Return the training for so many records, with the delta, the sampling rate and the steps of its own records.

        The batch grows and shrinks with the number of records.
        """
        plan = self.plan(self.data.facts)
        batch = plan.expected_batch / plan.facts.records * count
        return dataclasses.replace(self, config=dataclasses.replace(self.config, delta=plan.delta, batch_size=batch))

    @property
    def about(self) -> str:
        """Return a sentence on the records, for the outcome of an audit."""
        facts = self.data.facts
        kind = "declared public" if self.public else "private: do not share these figures"
        return f"{facts.records} training records of {self.config.data}, {kind}"


def with_promise(config: Config, plan: Plan) -> Config:
    """Return the settings of a run with the promise of its plan, where that was a Python object.

    Examples:
      >>> from evenhand import Budgets, plan
      >>> facts = Facts(100, (("a", 50), ("b", 50)))
      >>> planned = plan("idp_scale", Budgets({"a": 1, "b": 2}, 1e-5), data=facts, epochs=1, batch_size=10)
      >>> settings = with_promise(Config(method="idp_scale"), planned)
      >>> dict(settings.budgets), settings.delta, settings.batch_size
      ({'a': 1.0, 'b': 2.0}, 1e-05, 10.0)
    """
    asked = (config.epsilon, config.noise, config.record_budgets)
    if not plan.certified or config.budgets or any(given is not None for given in asked):
        return config
    budgets = {name: budget for name, budget in zip(plan.facts.owner_names, plan.budgets, strict=True) if budget}
    promised: dict[str, Any] = {"noise": plan.levels[-1].noise}
    if budgets:
        same = len(set(budgets.values())) == 1
        promised = {"epsilon": next(iter(budgets.values()))} if same else {"budgets": budgets}
    return dataclasses.replace(config, **promised, delta=plan.delta, batch_size=plan.expected_batch)


def secret_draws(config: Config, purpose: int) -> np.random.Generator:
    """Return draws for coins, from the operating system, or reproducible ones under an insecure seed."""
    seed = config.insecure_seed
    return np.random.default_rng(None if seed is None else [seed, purpose, 26])


def attacked_owners(plan: Plan) -> NDArray[np.int64]:
    """Return the owner classes that are attacked, from strict to generous: all if they are few, else some.

    Examples:
      >>> import evenhand as eh
      >>> attacked_owners(eh.plan("dpsgd", eh.Privacy(3), data=eh.data.digits()[0].facts, epochs=1)).tolist()
      [0]
    """
    spent = np.array([np.inf if epsilon is None else epsilon for epsilon in plan.epsilons])
    order = np.argsort(spent, kind="stable")
    places = np.linspace(0, len(order) - 1, min(len(order), _CLASSES)).round().astype(np.int64)
    return np.asarray(order[np.unique(places)])


def counts(column: torch.Tensor, kinds: int) -> NDArray[np.int64]:
    """Return how many rows of a column there are of each kind."""
    return torch.bincount(column, minlength=kinds).numpy()
