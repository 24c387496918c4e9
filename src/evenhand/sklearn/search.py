"""``PrivateGridSearch``: one promise shared among all trainings of a search, its scores and the final fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import ParameterGrid
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, indexable

from evenhand import _validate
from evenhand.accounting import accountant
from evenhand.accounting.budgets import Privacy, default_delta
from evenhand.accounting.plan import Plan
from evenhand.density.noisy_sums import Query, Releases, plan_of
from evenhand.errors import CalibrationError, UsageError
from evenhand.mechanism.random_streams import Stream
from evenhand.runs.dataset_ledger import DatasetLedger
from evenhand.sklearn.classifier import PrivateClassifier
from evenhand.sklearn.pipeline import PrivatePipeline
from evenhand.sklearn.private_estimator import PrivateEstimator
from evenhand.sklearn.regressor import PrivateRegressor
from evenhand.sklearn.rows import origin
from evenhand.sklearn.total_privacy import TotalPrivacy
from evenhand.types import Facts

_DECIDED_HERE = ("epsilon", "delta", "noise", "privacy", "compose", "insecure_seed", "classes", "target_bounds", "out")
_PLANNED = ("method", "settings", "epochs", "batch_size", "prior", "allow_unproven")
"""Parameters that a plan is made of, besides the promise."""
_LEAST, _TRIES = 0.99, 20
"""Share of the promise that is spent at least, and how often a part's epsilon is corrected until it is."""


def _delegated(name: str) -> Callable[[Any], bool]:
    return lambda search: hasattr(getattr(search, "best_estimator_", search.estimator), name)


class PrivateGridSearch(BaseEstimator):  # type: ignore[misc]
    """Choose settings under one promise: every training, every score and the final fit are paid from it.

    A share of the records is set aside, each by its own coin. Every point of the grid is trained on the rest and scored
    on the share; the scores get noise, the best is trained again on all records. All of these together spend at most
    ``epsilon``: each training gets the same part, so does the release of the scores, and the accountant composes them.
    That is less for each than without a search: a grid should be short.

    Args:
      estimator: PrivateClassifier, PrivateRegressor (with ``target_bounds``), or a PrivatePipeline that ends in one; no
        promise of its own.
      param_grid: values by parameter, as for ``GridSearchCV``; nothing that decides the promise.
      epsilon: what a record may spend in the whole search.
      delta: default the largest power of ten that is at most 1/(10 N).
      validation: share of the records that trainings are scored on. How many there are is printed.

    Attributes:
      best_estimator_: the final fit, on all records.
      best_params_: its point of the grid.
      best_score_: its noisy score.
      best_index_: its place in ``cv_results_``.
      cv_results_: ``params`` and ``mean_test_score``, the noisy share of right answers (of a regressor: one minus the
        mean distance in units of ``target_bounds``); private, so it may be shared.
      epsilon_: what each training spends alone.
      privacy_: what the records have spent in total, see ``TotalPrivacy``.
      classes_: the classes, of a classifier.

    Guarantee:
      The trainings and the scores are Gaussian releases composed by the accountant, each record counted as if it were
      in all of them, and the final fit as if it followed the plan of any point. Trials and final fit are runs of their
      own, entered in the dataset ledger before they start.

    Examples:
      >>> import os, tempfile
      >>> os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
      >>> from sklearn.datasets import load_breast_cancer
      >>> X, y = load_breast_cancer(return_X_y=True)
      >>> form = PrivateClassifier("linear", bounds=(0, 5000), epochs=1, out=tempfile.mkdtemp())
      >>> search = PrivateGridSearch(form, {"lr": [0.1, 1.0]}, epsilon=3.0).fit(X, y)
      >>> search.privacy_.epsilon <= 3.0, search.privacy_.runs
      (True, 4)
    """

    def __init__(
        self,
        estimator: Any,
        param_grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]],
        *,
        epsilon: float,
        delta: float | None = None,
        validation: float = 0.2,
    ) -> None:
        self.estimator, self.param_grid = estimator, param_grid
        self.epsilon, self.delta, self.validation = epsilon, delta, validation

    def fit(self, X: Any, y: Any = None, *, groups: Iterable[Any] | None = None) -> Self:
        """Search, then train the best on all records.

        Args:
          X: as the estimator takes it.
          y: one target per record.
          groups: one name per record.
        """
        points = list(ParameterGrid(self.param_grid))
        share = _validate.number(self.validation, "validation", low=0, high=1)
        if y is None:
            raise UsageError("PrivateGridSearch requires y to be passed, but the target y is None.")
        indexable(X, y)
        y, names = np.asarray(y), None if groups is None else list(groups)
        trials = [self._trial(point, y) for point in points]
        final = _last(trials[0][1])
        delta = default_delta(len(y)) if self.delta is None else _validate.delta(self.delta)
        chosen = _uniform(len(y), final.insecure_seed) < share
        if not 0 < chosen.sum() < len(y):
            raise UsageError(
                f"{len(y)} records are too few to set some aside for scores: pass more, or validation=0.5."
            )
        sizes = int((~chosen).sum()), int(chosen.sum())
        cost = _Cost([_last(one) for _, one in trials], sizes, tuple(dict.fromkeys(map(str, names or ("all",)))), delta)
        self.epsilon_ = cost.part(_validate.number(self.epsilon, "epsilon", low=0))
        counted_as = origin(X)

        def trained(estimator: Any, rows: NDArray[np.int64]) -> Any:
            _last(estimator).set_params(epsilon=self.epsilon_, delta=delta)
            estimator._counted_as = counted_as
            some = {} if names is None else {"groups": [names[row] for row in rows.tolist()]}
            try:
                return estimator.fit(_safe_indexing(X, rows), y[rows], **some)
            finally:
                del estimator._counted_as  # a secret, which must not be pickled

        inside, held_out = np.flatnonzero(~chosen), np.flatnonzero(chosen)
        fitted = [trained(one, inside) for _, one in trials]
        answers = [_right(one, _safe_indexing(X, held_out), y[held_out]) for one in fitted]
        scores = self._released(answers, counted_as, delta, final.insecure_seed)
        self.cv_results_ = {"params": points, "mean_test_score": scores}
        self.best_index_ = int(scores.argmax())
        self.best_score_, self.best_params_ = float(scores[self.best_index_]), points[self.best_index_]
        best = clone(self.estimator).set_params(**self.best_params_)
        self.best_estimator_ = trained(best, np.arange(len(y)))
        self.privacy_: TotalPrivacy = _last(best).privacy_
        if hasattr(best, "classes_"):
            self.classes_ = best.classes_
        return self

    def _trial(self, point: Mapping[str, Any], y: NDArray[Any]) -> tuple[Mapping[str, Any], Any]:
        """Return an estimator for a point of the grid; raise if anything in it would decide the promise."""
        for name in point:
            if name.rpartition("__")[2] in _DECIDED_HERE:
                raise UsageError(f"{name} cannot be searched: it decides the promise, which is the search's own.")
        estimator = clone(self.estimator).set_params(**point)
        last = _last(estimator)
        if any(value is not None for value in (last.epsilon, last.noise, last.privacy)) or not last.compose:
            raise UsageError("Leave epsilon, noise, privacy and compose of the estimator as they are: the search pays.")
        if isinstance(last, PrivateRegressor) and last.target_bounds is None:
            raise UsageError("Scores of a regressor need public bounds: PrivateRegressor(target_bounds=(low, high)).")
        if isinstance(last, PrivateClassifier) and last.classes is None:
            last._read_off = np.unique(y).tolist()  # also those that the split leaves out
        return point, estimator

    def _released(
        self, answers: Sequence[NDArray[np.float64]], counted_as: str, delta: float, seed: int | None
    ) -> NDArray[np.float64]:
        """Return the noisy mean of each trial's answers; entered in the dataset ledger before any is drawn."""
        records = len(answers[0])
        plan = _scores_plan(len(answers), records, self.epsilon_, delta)
        stream = Stream.fresh() if seed is None else Stream.insecure(seed, 0)
        DatasetLedger(counted_as).enter(plan, seeded=stream.public)
        releases, owner = Releases(plan, stream), torch.zeros(records, dtype=torch.long)
        noisy = []
        for each in answers:
            right = torch.from_numpy(each)
            total = (right * releases.weights(right, owner)).sum().reshape(1)
            noisy.append(float(releases.release(total)) / records)
        return np.array(noisy)

    def _best(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    def predict(self, X: Any, **params: Any) -> NDArray[Any]:
        """Return the answers of the final fit."""
        answers: NDArray[Any] = self._best().predict(X, **params)
        return answers

    @available_if(_delegated("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, **params: Any) -> NDArray[np.float64]:
        """Return the probabilities of the final fit."""
        likely: NDArray[np.float64] = self._best().predict_proba(X, **params)
        return likely

    @available_if(_delegated("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any, **params: Any) -> NDArray[np.float64]:
        """Return the scores of the final fit."""
        scores: NDArray[np.float64] = self._best().decision_function(X, **params)
        return scores

    def score(self, X: Any, y: Any) -> float:
        """Return the score of the final fit on held-out records, which no statement covers."""
        return float(self._best().score(X, y))

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type, tags.target_tags = inner.estimator_type, inner.target_tags
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        return tags


def _last(estimator: Any) -> Any:
    """Return the private estimator itself, or at the end of a pipeline."""
    last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    if not isinstance(last, PrivateEstimator):
        raise UsageError(
            "The search takes a PrivateClassifier, a PrivateRegressor, or a PrivatePipeline that ends in one."
        )
    if isinstance(estimator, Pipeline) and not isinstance(estimator, PrivatePipeline):
        raise UsageError("The search takes a PrivatePipeline: a plain Pipeline may hold steps that learn from records.")
    return last


def _uniform(count: int, seed: int | None) -> NDArray[np.float64]:
    """Return one number from 0 to 1 for each record, secret unless there is a public seed."""
    return np.random.default_rng(seed).random(count)


def _scores_plan(points: int, records: int, epsilon: float, delta: float) -> Plan:
    """Plan the release of one sum for each point; no record changes one by more than 1."""
    queries = [Query(f"score {point}", 1 / points, 1.0) for point in range(points)]
    return plan_of("search_scores", {}, queries, Privacy(epsilon, delta), Facts(records, (("all", records),)))


@dataclass(frozen=True)
class _Cost:
    """All that a search pays for: its trainings, the release of their scores, and the final fit.

    Attributes:
      trials: one estimator for each point of the grid.
      sizes: how many records are trained on, and how many set aside.
      groups: names of the groups.
      delta: of all parts together.
    """

    trials: Sequence[PrivateEstimator]
    sizes: tuple[int, int]
    groups: tuple[str, ...]
    delta: float

    def part(self, epsilon: float) -> float:
        """Return the epsilon of each part such that all parts together spend at most ``epsilon``, and hardly less.

        Between points of different plans "hardly less" is meant of the bound that covers every choice.
        """
        if not all(self._planned(trial, self.sizes[0], 1.0).certified for trial in self.trials):
            raise UsageError("A method without an established guarantee has no epsilon to share: choose another one.")
        part: float = epsilon / (len(self.trials) + 2) ** 0.6
        for _ in range(_TRIES):
            spent = self._spent(part)
            if _LEAST * epsilon <= spent <= epsilon:
                return part
            part *= (1 + _LEAST) / 2 * epsilon / spent  # what is spent grows about as its parts
        raise CalibrationError(f"So many trainings cannot share epsilon {epsilon:g}: search fewer points.")

    def _spent(self, part: float) -> float:
        """Return an epsilon that no record exceeds that is in every training and in the scores, whatever point wins.

        The scores choose which plan the final fit follows. So it counts as each plan that it may have, with an equal
        share of delta for each: see docs/proofs/accountant.md, section 1.
        """
        kinds = [repr([getattr(trial, name, None) for name in _PLANNED]) for trial in self.trials]
        distinct = dict(zip(kinds, self.trials, strict=True))
        some, every = (
            {kind: self._planned(trial, records, part).events() for kind, trial in distinct.items()}
            for records in (self.sizes[0], sum(self.sizes))
        )
        scores = _scores_plan(len(kinds), self.sizes[1], part, self.delta).events()
        before = [event for one in (*(some[kind] for kind in kinds), scores) for event in one]
        return max(accountant.epsilon([*before, *final], self.delta / len(every)) for final in every.values())

    def _planned(self, trial: PrivateEstimator, records: int, part: float) -> Plan:
        known = getattr(trial, "classes", None)
        labels = tuple(map(str, getattr(trial, "_read_off", ()) if known is None else known))
        facts = Facts(records, (("all", records),), self.groups, labels)
        return trial.planned(facts, Privacy(part, self.delta))


def _right(fitted: Any, X: Any, y: NDArray[Any]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each record, the higher the better."""
    answers, last = fitted.predict(X), _last(fitted)
    if isinstance(last, PrivateClassifier):
        right: NDArray[np.float64] = np.equal(answers, y).astype(np.float64)
        return right
    low, high = last._range
    far: NDArray[np.float64] = np.abs(answers - np.asarray(y, dtype=np.float64)) / (high - low)
    near: NDArray[np.float64] = 1 - np.minimum(far, 1)
    return near
