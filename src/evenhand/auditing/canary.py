"""Audit one training by canaries: train once with them in or out by secret coins, guess the coins, bound epsilon."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from evenhand import _validate
from evenhand.accounting.plan import Plan
from evenhand.auditing.canaries import (
    Canaries,
    ProbeLoss,
    WithProbe,
    gradient_canaries,
    input_canaries,
    planted,
    with_probe_numbers,
)
from evenhand.auditing.one_run import (
    Family,
    Guesses,
    choose_guesses,
    family_bound,
    gaussian_distance,
    largest_contradicted_epsilon,
)
from evenhand.auditing.scores import GradientScore, LossScore, ProbeScore, Score, Vector, watched
from evenhand.auditing.subject import Subject, attacked_owners, secret_draws
from evenhand.data.dataset import Data
from evenhand.errors import UsageError
from evenhand.mechanism.audit.result import Audit, Bound
from evenhand.terminal import note
from evenhand.training import losses
from evenhand.training.config import Config
from evenhand.training.fit import fit
from evenhand.training.from_config import fit_options
from evenhand.training.losses import Loss, default_loss
from evenhand.training.optimizers import Descent
from evenhand.training.run import Run

FORMS = {
    "gradient": "each canary's gradient lies in a number of its own, beyond the bound",
    "input": "canaries are records with random inputs and the target of another record",
}
VIEWS = {
    "steps": "sees every private gradient and all weights",
    "model": "sees the first and the last weights only",
}
LEAST = 20
"""Canaries of an owner class or a group at least: fewer can show nothing."""


def audit_with_canaries(
    target: Run | Plan | Config,
    *,
    canaries: int = 1000,
    form: str = "gradient",
    sees: str = "steps",
    confidence: float = 0.95,
    model: nn.Module | None = None,
    train: Any = None,
    public: bool = False,
) -> Audit:
    """Train once with canaries that are in or out by secret coins, and bound epsilon by how many coins can be guessed.

    The training is the ordinary one, with ``eh.fit``: sampler, engine, rule, noise and ledger of the settings, in a
    folder that is removed afterwards. Nothing of it is released, so it is not added up with other runs.

    Args:
      target: a run, or the settings of one.
      canaries: how many coins are tossed; owner classes and groups share them equally. The training has room for all
        of them: batches are larger by their share, so that rates, steps and noise are those of the settings.
      form: "gradient" (each canary has a number of the model for itself, the sharpest there can be) or "input" (random
        inputs, as a person could send).
      sees: "steps" (every private gradient and iterate) or "model" (the first and the last weights).
      confidence: with which all lower bounds hold together.
      model: the untrained model, where the settings do not name it. It is copied.
      train: the training data, where the settings do not name them.
      public: the records are public, so that the figures may be shared.

    Returns:
      A bound for every owner class, and for every group if there are several. They are private unless the records are
      public.

    Raises:
      UsageError: the training cannot be attacked in this way. Nothing was spent.

    Examples:
      >>> import torch
      >>> settings = Config(data="python", model="python", epsilon=20.0, epochs=1)
      >>> records = torch.randn(100, 2), [0, 1] * 50
      >>> audit = audit_with_canaries(settings, canaries=100, model=torch.nn.Linear(2, 2), train=records)
      >>> audit.lower_bound < audit.claim <= 20
      True
    """
    _validate.known(form, FORMS, "form of canaries")
    _validate.known(sees, VIEWS, "view of the attacker")
    _validate.number(confidence, "confidence", low=0.5, high=1)
    subject = Subject.of(target, model, train, public)
    data, draw = subject.data, secret_draws(subject.config, 1)
    owners, groups = attacked_owners(subject.plan(data.facts)), data.facts.groups
    parts = len(owners) + (len(groups) if len(groups) > 1 else 0)
    _validate.whole(canaries, "canaries", low=LEAST * max(len(owners), len(groups)))
    tossed = Canaries.toss(canaries, owners.tolist(), len(groups), draw)
    attack, subject = _Attack.on(subject, tossed, form, draw), subject.with_records(len(data) + canaries)
    plan = subject.plan(attack.data.facts)
    miss = (1 - confidence) / parts
    note(_announcement(plan, tossed, owners, miss, len(data)))
    scores = attack.train(subject, plan, sees)
    judged = _Judge(plan, tossed, scores, miss)
    names = plan.facts.owner_names
    per_owner = {names[index]: judged.owner(index) for index in owners.tolist()}
    several, dearest = len(groups) > 1, int(owners[-1])
    per_group = {name: judged.group(place, dearest) for place, name in enumerate(groups)} if several else {}
    return Audit(
        kind="canary",
        delta=plan.delta,
        confidence=confidence,
        per_owner=per_owner,
        per_group=per_group,
        threat_model=f"one run; the attacker knows all records but the coins, and {VIEWS[sees]}; {FORMS[form]}",
        method=(
            "guesses at secret coins in one run, as many as were fixed before; the recursion of Mahloujifar et al. "
            "(2024) within the plan's own mechanisms, Bonferroni over owners and groups; beside it the theorem of "
            "Steinke et al. (2023), which assumes nothing about the mechanism"
        ),
        data=f"{subject.about}; {canaries} canaries",
        private=not public,
        details={"form": form, "sees": sees, "steps": plan.steps, "canaries": canaries, "parts": judged.told},
    )


def _announcement(plan: Plan, canaries: Canaries, owners: NDArray[np.int64], miss: float, records: int) -> str:
    """Return what the audit costs and what it can find at most."""
    each = int((canaries.owner == owners[0]).sum())
    most = _ceiling(family_of(plan, int(owners[-1])), each, miss)
    return (
        f"This audit trains once on {records:,} records and {len(canaries):,} canaries, {plan.steps:,} steps. With "
        f"{each:,} canaries an owner class it can certify an epsilon of {most:.3g} at most. Nothing is released."
    )


def family_of(plan: Plan, owner: int) -> Family:
    """Return the mechanisms among which an owner's bound is searched; of a training without privacy, a Gaussian's."""
    return Family(tuple(plan.events(owner)) if plan.certified else ((1.0, 1.0, 1),), plan.delta)


def _guesses(plan: Plan, owner: int, coins: int, miss: float) -> int:
    """Return how many coins of an owner's canaries are guessed at, by what the plan says."""
    return choose_guesses(coins, gaussian_distance(plan.epsilons[owner], plan.delta), miss)


def _ceiling(family: Family, coins: int, miss: float) -> float:
    """Return the bound if every coin were guessed right."""
    return family_bound(family, coins, coins, coins, miss)


@dataclass
class _Judge:
    """Bounds from the scores of all canaries; ``told`` collects how many guesses were right, part by part."""

    plan: Plan
    canaries: Canaries
    scores: Vector
    miss: float

    def __post_init__(self) -> None:
        self.told: dict[str, dict[str, Any]] = {}

    def owner(self, index: int) -> Bound:
        """Return the bound for an owner class, from its own canaries."""
        name = f"owner {self.plan.facts.owner_names[index]}"
        return self._bound(name, self.canaries.owner == index, index)

    def group(self, index: int, dearest: int) -> Bound:
        """Return the bound for a group, whose canaries may be of several owner classes: the dearest one's claim."""
        return self._bound(f"group {self.plan.facts.groups[index]}", self.canaries.group == index, dearest)

    def _bound(self, name: str, mine: NDArray[np.bool_], owner: int) -> Bound:
        coins, scores = self.canaries.coins[mine], self.scores[mine]
        family, count = family_of(self.plan, owner), _guesses(self.plan, owner, len(coins), self.miss)
        correct = Guesses.by_score(scores, count).correct(coins)
        pair = largest_contradicted_epsilon(len(coins), count, correct, self.plan.delta, self.miss)
        self.told[name] = {"canaries": len(coins), "guesses": count, "correct": correct, "without_assumptions": pair}
        lower = family_bound(family, len(coins), count, correct, self.miss)
        claim = self.plan.epsilons[owner]
        return Bound(claim, lower, _ceiling(family, len(coins), self.miss), len(coins))


@dataclass(frozen=True)
class _Attack:
    """The data with canaries, the model that trains on them, and how a score is made of the training."""

    data: Data
    model: nn.Module
    loss: Loss
    score: Callable[[str], Score]

    @classmethod
    def on(cls, subject: Subject, canaries: Canaries, form: str, draw: np.random.Generator) -> _Attack:
        """Return the attack in one of the forms of canaries."""
        data, model = subject.data, subject.model(subject.data.facts)
        named = subject.config.loss
        loss = default_loss(data, model) if named is None else losses.named(named)
        if form == "gradient":
            probed = WithProbe(model, len(canaries))
            pulled = planted(with_probe_numbers(data), canaries, gradient_canaries(data))
            return cls(pulled, probed, ProbeLoss(loss), lambda sees: ProbeScore(probed, canaries, last=sees == "model"))
        records = input_canaries(data, len(canaries), draw)

        def score(sees: str) -> Score:
            if sees == "model":
                return LossScore(model, loss, records, len(canaries))
            return GradientScore(model, loss, data, canaries, records)

        return cls(planted(data, canaries, records), model, loss, score)

    def train(self, subject: Subject, plan: Plan, sees: str) -> Vector:
        """Train once as the settings say, in a folder that is removed, and return the scores of all canaries."""
        config, score = subject.config, self.score(sees)
        descent = Descent(config.optimizer, config.lr, config.momentum, config.weight_decay, "constant")
        options: Mapping[str, Any] = {
            **fit_options(config, self.data),
            "loss": self.loss,
            "optimizer": lambda _: watched(descent.build(self.model, plan.steps)[0], score, plan),
            "momentum": None,
            "weight_decay": None,
            "prior": False,
            "goal": "overall",
            "tau": None,
            "compose": False,
            "training_records": False,
            "audit": None,
            "progress": False,
        }
        with tempfile.TemporaryDirectory(prefix="evenhand-audit-") as place:
            run = fit(self.model, self.data, out=Path(place) / "run", **options)
            if run.plan.digest != plan.digest:
                raise UsageError("The training followed another plan than was announced: its settings changed.")
            return score.values()
