"""Audit a training by many models (LiRA): guess who was in a model by what other models do with and without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evenhand import _validate
from evenhand.accounting.plan import Plan
from evenhand.auditing.canary import family_of
from evenhand.auditing.membership import Leak, blind_auc_interval, confidence_of, membership_scores
from evenhand.auditing.one_run import Guesses, choose_guesses, family_bound, gaussian_distance
from evenhand.auditing.shadow_models import Shadows, first_weights, with_wrong_labels
from evenhand.auditing.subject import Subject, attacked_owners, secret_draws
from evenhand.data.dataset import Data
from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.mechanism.audit.result import Audit, Bound
from evenhand.terminal import note, progress_bar
from evenhand.training import losses
from evenhand.training.config import PYTHON, Config
from evenhand.training.losses import default_loss
from evenhand.training.run import Run
from evenhand.training.steps.stacks import chain_for

ATTACKS = {
    "online": "compares with models that have a record and with models that lack it",
    "offline": "compares with models that lack a record",
}
INITIAL = {
    "settings": "models begin with the weights that the seed of the settings gives, which the attacker knows",
    "worst": "models begin with weights that learned other records without privacy, and the attacked records have a "
    "wrong class (Annamalai and De Cristofaro 2024)",
}
TARGETS = 4
"""One model in so many is attacked; the others are shadows."""
_FEWEST_MODELS, _LEAST_RECORDS, _ODD = 16, 40, 10
_COINS = 4000
"""Coins for which the share of guesses is chosen: with more, the best share is about the same."""
_OPERATIONS = 8e9
"""Multiplications in a second, for the forecast."""


def audit_with_models(
    target: Run | Plan | Config,
    *,
    models: int = 256,
    records: int = 2000,
    attack: str = "online",
    initial: str = "settings",
    confidence: float = 0.95,
    model: nn.Module | None = None,
    train: Any = None,
    public: bool = False,
) -> Audit:
    """Train many models on random halves of the records, and guess of each record whether a model was trained on it.

    The likelihood-ratio attack of Carlini et al. (2022). A quarter of the models is attacked, each by its losses alone;
    the others show how losses look with and without a record. The models are trained together, as the replicas of
    ``evenhand compare``: small networks of linear layers. Plan, rates, steps and noise are those of the settings, with
    room for all records whatever the coins say. Nothing is released.

    Args:
      target: a run, or the settings of one.
      models: how many are trained.
      records: how many of the training records take part at most; they are drawn at random, each owner class alike.
      attack: "online" or "offline", see ``ATTACKS``.
      initial: "settings" or "worst", see ``INITIAL``. The latter needs further records to begin with, and attacks a
        tenth of those that take part, which then have a wrong class; the others are in every model.
      confidence: with which all lower bounds hold together.
      model: the untrained model, where the settings do not name it. It is copied.
      train: the training data, where the settings do not name them.
      public: the records are public, so that the figures may be shared.

    Returns:
      A bound for every owner class, and for every group if there are several; ``details`` has AUC, hits at few false
      alarms and a curve for each. They are private unless the records are public.

    Raises:
      UsageError: the training cannot be attacked in this way. Nothing was spent.

    Examples:
      >>> import torch
      >>> settings = Config(data="python", model="python", epsilon=8.0, epochs=1, batch_size=50)
      >>> data = torch.randn(100, 4), [0, 1] * 50
      >>> audit = audit_with_models(settings, models=16, model=torch.nn.Linear(4, 2), train=data)
      >>> audit.ok, audit.details["parts"]["all"]["records"]
      (True, 100)
    """
    _validate.known(attack, ATTACKS, "attack")
    _validate.known(initial, INITIAL, "initial")
    _validate.number(confidence, "confidence", low=0.5, high=1)
    _validate.whole(models, "models", low=_FEWEST_MODELS)
    _validate.whole(records, "records", low=_LEAST_RECORDS)
    subject = Subject.of(target, model, train, public)
    subject = replace(subject, config=replace(subject.config, prior=False, goal="overall", tau=None, audit=None))
    draw = secret_draws(subject.config, 2)
    pool, others = _pool(subject.data, records, draw)
    subject = replace(subject.with_records(len(pool)), data=pool)
    plan = subject.plan(pool.facts)
    attacked = np.arange(len(pool))
    if initial == "worst":
        attacked = np.sort(draw.choice(len(pool), max(_LEAST_RECORDS // 2, len(pool) // _ODD), replace=False))
        pool = with_wrong_labels(pool, attacked, draw)
    shadows = _shadows(subject, plan, pool, others if initial == "worst" else None)
    targets = max(2, models // TARGETS)
    parts = _Parts.of(pool, plan, attacked)
    miss = (1 - confidence) / parts.number
    note(_announcement(shadows, parts, models, targets, miss))
    present = np.ones((models, len(pool)), dtype=bool)
    present[:, attacked] = draw.random((models, len(attacked))) < 0.5
    with progress_bar("models") as told:
        confidences = confidence_of(shadows.train(present, told))[:, attacked]
    coins = present[:, attacked]
    scores = membership_scores(confidences[targets:], coins[targets:], confidences[:targets], online=attack == "online")
    judged = _Judge(plan, coins[:targets], scores, miss)
    per_owner = {name: judged.bound(rows, owner) for name, (rows, owner) in parts.owners.items()}
    per_group = {name: judged.bound(rows, owner) for name, (rows, owner) in parts.groups.items()}
    leaks: dict[str, Any] = {"all": judged.leak(np.ones(len(attacked), dtype=bool)).to_json()}
    leaks |= {f"owner {name}": judged.leak(rows).to_json() for name, (rows, _) in parts.owners.items()}
    leaks |= {f"group {name}": judged.leak(rows).to_json() for name, (rows, _) in parts.groups.items()}
    inside = int(coins[0].sum())
    return Audit(
        kind="lira",
        delta=plan.delta,
        confidence=confidence,
        per_owner=per_owner,
        per_group=per_group,
        threat_model=(
            f"sees the last model of a training, knows its settings and all records but who was in; {ATTACKS[attack]}; "
            f"{INITIAL[initial]}"
        ),
        method=(
            "likelihood ratio of Gaussians, record by record (Carlini et al. 2022); guesses at secret coins of all "
            "attacked models, as many as were fixed before, and the recursion of Mahloujifar et al. (2024) within the "
            "plan's own mechanisms, Bonferroni over owners and groups"
        ),
        data=f"{len(attacked)} of {len(pool)} training records of {subject.config.data}, {_whose(public)}",
        private=not public,
        details={
            "models": models,
            "attacked_models": targets,
            "steps": plan.steps,
            "attack": attack,
            "initial": initial,
            "blind_auc": list(blind_auc_interval(inside, len(attacked) - inside)),
            "parts": leaks,
        },
    )


def _whose(public: bool) -> str:
    return "declared public" if public else "private: do not share these figures"


def _pool(data: Data, records: int, draw: np.random.Generator) -> tuple[Data, Data]:
    """Return the records that take part, of every owner class the same share, and the others."""
    share = min(1.0, records / len(data))
    chosen = np.zeros(len(data), dtype=bool)
    owner = data.owner.numpy()
    for kind in range(len(data.facts.owners)):
        rows = np.flatnonzero(owner == kind)
        chosen[draw.choice(rows, max(1, round(share * len(rows))), replace=False)] = True
    return data.take(torch.from_numpy(np.flatnonzero(chosen))), data.take(torch.from_numpy(np.flatnonzero(~chosen)))


def _shadows(subject: Subject, plan: Plan, pool: Data, others: Data | None) -> Shadows:
    """Return what all trainings share; ``others`` are the records that the first weights learn, None for none."""
    model = subject.model(pool.facts)
    given = model if subject.config.model == PYTHON else None
    try:
        chain = chain_for(subject.config, pool, given)
    except UnsupportedModelError as error:
        raise UsageError(
            f'This training cannot be repeated many times at once: {error}. Use kind="canary", which trains once. '
            "Nothing was spent."
        ) from None
    named = subject.config.loss
    loss = default_loss(pool, model) if named is None else losses.named(named)
    if others is not None:
        if len(others) < _LEAST_RECORDS:
            raise UsageError(
                f'initial="worst" begins with weights that learned other records, and {len(others)} are left: give '
                "fewer records=. Nothing was spent."
            )
        model = first_weights(model, others, loss)
    return Shadows(subject.config, plan, pool, chain, model, loss)


@dataclass(frozen=True)
class _Parts:
    """The attacked records by owner class and by group: which they are, and whose claim is beside their bound."""

    owners: Mapping[str, tuple[NDArray[np.bool_], int]]
    groups: Mapping[str, tuple[NDArray[np.bool_], int]]

    @classmethod
    def of(cls, data: Data, plan: Plan, attacked: NDArray[np.int64]) -> _Parts:
        """Return the parts of the attacked records; a group's claim is that of the most generous owner."""
        owner, group = data.owner.numpy()[attacked], data.group.numpy()[attacked]
        classes = [int(k) for k in attacked_owners(plan) if (owner == k).any()]
        names, groups = plan.facts.owner_names, data.facts.groups
        dearest = classes[-1]
        several = {name: (group == k, dearest) for k, name in enumerate(groups) if (group == k).any()}
        return cls({names[k]: (owner == k, k) for k in classes}, several if len(several) > 1 else {})

    @property
    def number(self) -> int:
        """Return how many bounds are asked for."""
        return len(self.owners) + len(self.groups)


@dataclass(frozen=True)
class _Judge:
    """Bounds and leaks from the scores of the attacked models and their coins, (models, records)."""

    plan: Plan
    coins: NDArray[np.bool_]
    scores: NDArray[np.float64]
    miss: float

    def bound(self, rows: NDArray[np.bool_], owner: int) -> Bound:
        """Return the bound from these records' coins in all attacked models, whose trainings are independent."""
        coins, scores = self.coins[:, rows].ravel(), self.scores[:, rows].ravel()
        family = family_of(self.plan, owner)
        count = guesses_at(len(coins), self.plan, owner, self.miss)
        correct = Guesses.by_score(scores, count).correct(coins)
        lower = family_bound(family, len(coins), count, correct, self.miss)
        ceiling = family_bound(family, len(coins), count, count, self.miss)
        return Bound(self.plan.epsilons[owner], lower, ceiling, len(coins))

    def leak(self, rows: NDArray[np.bool_]) -> Leak:
        """Return how well guesses at these records do."""
        return Leak.of(self.scores[:, rows], self.coins[:, rows])


def guesses_at(coins: int, plan: Plan, owner: int, miss: float) -> int:
    """Return at how many coins guesses are made, by what the plan says and before any model is trained."""
    few = min(coins, _COINS)
    return max(1, round(choose_guesses(few, gaussian_distance(plan.epsilons[owner], plan.delta), miss) / few * coins))


def _announcement(shadows: Shadows, parts: _Parts, models: int, targets: int, miss: float) -> str:
    """Return what the audit costs and what it can find at most."""
    plan, numbers = shadows.plan, sum(p.numel() for p in shadows.model.parameters())
    seconds = 1.5 * models * plan.steps * plan.expected_batch * numbers / _OPERATIONS + models * plan.steps * 1.5e-4
    rows, place = list(parts.owners.values())[-1]
    coins = targets * int(rows.sum())
    count = guesses_at(coins, plan, place, miss)
    most = family_bound(family_of(plan, place), coins, count, count, miss)
    return (
        f"This audit trains {models} models of {plan.steps:,} steps on about half of {len(shadows.data):,} records "
        f"each, about {max(1, round(seconds / 60))} minute(s), and attacks {targets} of them. With {coins:,} coins an "
        f"owner class it can certify an epsilon of {most:.3g} at most. Nothing is released."
    )
