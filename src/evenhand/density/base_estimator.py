"""The scikit-learn interface that all private densities share: fit, predict, predict_proba, privacy_."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from evenhand._numbers import rounded_up
from evenhand.accounting import accountant
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy, Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.data.estimators.learning_steps import refuse_learned_before
from evenhand.data.fingerprint import survey
from evenhand.data.owners_and_groups import by_record, owned
from evenhand.data.record_checks import check_finite
from evenhand.density.classifier import DensityClassifier, checked
from evenhand.density.noisy_sums import Releases, as_data, refuse_persons
from evenhand.density.save_run import After, Before, run_releases
from evenhand.density.torch_models import DensityModel
from evenhand.errors import UsageError
from evenhand.mechanism.random_streams import Stream
from evenhand.runs.folder import Folder
from evenhand.runs.known_records import origin_of
from evenhand.types import Facts, Guarantee

_SEED = (
    "The noise comes from a PUBLIC SEED (insecure_seed): this protects nobody who knows the seed. For research only."
)
_OTHERS = (
    "Other runs on the same data, tuning included, were not added up: give out= for a run folder that counts them."
)
_FACTS = "The number of records (per owner) and the names of classes and owners count as public."


class PrivateDensity(DensityClassifier):
    """Base of ``RandomFeatureDensity`` and ``NoisyEmbeddingDensity``. After ``fit``:

    ``classes_`` the classes, ``plan_`` every number that decides privacy, ``privacy_`` the promise in words and
    numbers, ``model_`` a torch module made of released values only, ``folder_`` the run folder (with ``out=``).
    """

    epsilon: float | None
    delta: float | None
    noise: float | None
    classes: Sequence[Any] | None
    insecure_seed: int | None
    out: str | Path | None
    compose: bool

    @abstractmethod
    def plan(self, facts: Facts, promise: Promise | None) -> Plan:
        """Return the plan: every number that decides privacy, from public facts."""

    @abstractmethod
    def released(self, data: Data, releases: Releases, stream: Stream) -> DensityModel:
        """Make the releases and return the model, which is computed from them alone."""

    @abstractmethod
    def _promised(self, plan: Plan, notes: tuple[str, ...]) -> SpentPrivacy:
        """Return the privacy that the plan promises, with notes for the reader."""

    def fit(
        self, X: Any, y: Any = None, *, owners: Any = None, budgets: Any = None, allow_not_finite: bool = False
    ) -> PrivateDensity:
        """Fit on arrays.

        Args:
          X: features, one row per record (numpy or torch); frozen features of any kind.
          y: one class per record; or one column of 0 and 1 per class where a record may have several.
          owners: the budget class of each record.
          budgets: an epsilon per owner (Budgets or a mapping), or one per record (a sequence).
          allow_not_finite: fit although more than one record in a hundred holds values that are not finite.
        """
        refuse_learned_before(self)
        X, y = checked(self, X, y)
        promise = self.promise(budgets)
        data, names = as_data(X, y, owners=owners, classes=self.classes)
        data = replace(data, origin=partial(origin_of, data))
        if isinstance(promise, Budgets) and promise.owners is not None:
            data = by_record(data, promise.owners, owners)
        return self.fit_data(data, promise, names, allow_not_finite=allow_not_finite)

    def fit_data(
        self,
        data: Data,
        promise: Promise | None,
        names: Sequence[Any] | None = None,
        after: After | None = None,
        *,
        before: Before | None = None,
        begun: Before | None = None,
        allow_not_finite: bool = False,
    ) -> PrivateDensity:
        """Fit on wrapped data, under a promise; see ``run_releases`` for ``before``, ``begun`` and ``after``."""
        refuse_persons(data.facts)
        if isinstance(promise, Budgets) and promise.owners is not None:
            data = owned(data, promise.owners)
        if not data.facts.labels:
            raise UsageError("A density per class needs classes: pass whole numbers or names as labels.")
        check_finite(survey(data), allow_not_finite)
        plan = self.plan(data.facts, promise)
        model, folder = run_releases(
            plan,
            data,
            lambda releases, stream: self.released(data, releases, stream),
            out=self.out,
            insecure_seed=self.insecure_seed,
            compose=self.compose,
            before=before,
            begun=begun,
            after=after,
        )
        assert isinstance(model, DensityModel)
        self.classes_ = np.asarray(data.facts.labels if names is None else names)
        self.n_features_in_ = model.width
        self.plan_: Plan = plan
        self.model_: DensityModel = model
        self.folder_ = folder
        notes = [_FACTS]
        notes += [_OTHERS] if folder is None or not self.compose else _together(folder)
        notes += [] if self.insecure_seed is None else [_SEED]
        self.privacy_: SpentPrivacy = self._promised(plan, tuple(notes))
        return self

    @property
    def folder(self) -> Folder:
        """The run folder of a fit with ``out=``."""
        folder: Folder | None = getattr(self, "folder_", None)
        if folder is None:
            raise UsageError("There is no run folder: fit with out='runs/mine' to have plan, ledger and statement.")
        return folder

    def promise(self, budgets: Any = None) -> Promise | None:
        """Return the promise that the settings, or budgets by owner or record, make."""
        if budgets is None:
            if self.epsilon is not None and self.noise is not None:
                raise UsageError("Give one of epsilon and noise: together they would contradict each other.")
            if self.noise is not None:
                return FixedNoise(self.noise, self.delta)
            return None if self.epsilon is None else Privacy(self.epsilon, self.delta)
        if isinstance(budgets, Budgets):
            return budgets
        if isinstance(budgets, Mapping):
            return Budgets(budgets, self.delta)
        return Budgets.per_record(budgets, self.delta)

    def _log_densities(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.model_(rows)
        return scores


def _together(folder: Folder) -> list[str]:
    """Return a note that earlier runs on these data count too, if there are any."""
    runs = (folder.composition() or {}).get("runs") or 0
    words = f"This run alone: {runs} runs on these data were counted; the statement in the run folder adds them up."
    return [words] if runs > 1 else []


REPLACE_ONE, ADD_REMOVE = "replace one", "add/remove"


@dataclass(frozen=True)
class SpentPrivacy:
    """The privacy spent, by owner class; ``epsilon`` is the largest, None where none is established.

    ``epsilons`` hold for adding or removing one record, ``replaced`` for replacing one by another of the same owner.
    Printing it gives the words; a bare epsilon is never printed.
    """

    guarantee: Guarantee
    adjacency: str
    delta: float
    epsilons: Mapping[str, float | None]
    replaced: Mapping[str, float | None]
    notes: tuple[str, ...] = ()
    unit: str = "one record"

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the owner class that spends most, under ``adjacency``."""
        return _largest(self.replaced if self.adjacency == REPLACE_ONE else self.epsilons)

    def __str__(self) -> str:
        if self.epsilon is None:
            return "\n".join(
                ["No privacy guarantee is established for this model, so no epsilon is printed.", *self.notes]
            )
        lines = [f"Guarantee: {self.guarantee}; promised for: {self.adjacency} (unit: {self.unit})."]
        for name, epsilon in self.epsilons.items():
            assert epsilon is not None
            other = self.replaced[name]
            assert other is not None
            lines.append(
                f"Each record of owner {name!r}: epsilon {rounded_up(epsilon)} if it is added or removed, epsilon "
                f"{rounded_up(other)} if it is replaced; delta {self.delta:g}."
            )
        return "\n".join([*lines, *self.notes])


def of_plan(plan: Plan, factor: float, adjacency: str, notes: tuple[str, ...]) -> SpentPrivacy:
    """Return the privacy that a plan of full-batch releases promises; for ``factor`` see ``replaced``."""
    names = plan.facts.owner_names
    added, exchanged = (dict(zip(names, epsilons, strict=True)) for epsilons in (plan.epsilons, replaced(plan, factor)))
    return SpentPrivacy(plan.guarantee, adjacency, plan.delta, added, exchanged, notes, plan.unit)


def replaced(plan: Plan, factor: float) -> tuple[float, ...]:
    """Compute each owner class's epsilon if one record is REPLACED by another of its owner, from the plan's noise.

    ``factor`` is how much further that moves the releases than removing a record does: at most 2, since it is a removal
    and an addition.
    """
    epsilons: dict[float, float] = {}
    for index, scale in enumerate(plan.scales):
        if scale not in epsilons:
            events = [(rate, noise / factor, count) for rate, noise, count in plan.events(index)]
            epsilons[scale] = accountant.epsilon(events, plan.delta)
    return tuple(epsilons[scale] for scale in plan.scales)


def _largest(values: Mapping[str, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None]
    return max(known) if len(known) == len(values) else None
