"""``PrivateClassifier``: any torch model, any method of the catalogue, as a classifier of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn

from evenhand.accounting.budgets import Promise
from evenhand.data.arrays import UNDECLARED
from evenhand.data.dataset import Data, wrap
from evenhand.data.estimators.arrays import in_words
from evenhand.errors import DataError
from evenhand.methods.catalogue import Method
from evenhand.methods.priors import Prior
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.reporting.metrics import CLASSES
from evenhand.sklearn.private_estimator import PrivateEstimator
from evenhand.training.goals.goal import Goal
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.optimizers import OptimizerFactory, SchedulerFactory
from evenhand.training.weight_average import EMA
from evenhand.types import PriorKind


class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """Train a classifier privately: ``evenhand.fit`` behind ``fit``, ``predict``, ``predict_proba`` and ``score``.

    Every fit is a run of its own in a new folder under ``out``, with a ledger that ``evenhand verify`` checks, and is
    counted with all other runs on the same records of this machine, folds and samples of them included. So
    ``cross_val_score`` and ``GridSearchCV`` are charged: ``privacy_`` gives the total. What they choose by held-out
    scores is in no epsilon; ``PrivateGridSearch`` pays for that too.

    Args:
      model: a name (linear, mlp, cnn ...), a torch module, which is copied, or a function (of the public facts, if it
        takes an argument) that returns a module with one output per class.
      epsilon: promise to every record; or give ``privacy``, or ``noise``.
      delta: default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier instead of a promise.
      privacy: the promise as an object (Privacy, Budgets for ``owners``, FixedNoise).
      method: a name from ``evenhand methods``, or a Method.
      settings: change the defaults of a named method.
      classes: the classes, declared public. Default: those in y, which plan and statement print as a fact.
      bounds: public bounds of the columns, see ``DeclaredScaler``: inputs are scaled to -1 ... 1. Default: as they are.
      shape: of one record, for models of pictures: rows of X are brought into it.
      goal: whom the fit serves: "overall", "balanced", "worst" or "parity:METRIC", see ``evenhand.fit``.
      tau: strength of the goal.
      prior: release noisy counts of the classes, or declare public ones, see ``evenhand.fit``.
      epochs: expected passes over the data.
      batch_size: expected records per step.
      loss: see ``evenhand.fit``; so are ``lr``, ``optimizer``, ``momentum``, ``weight_decay``, ``scheduler``,
        ``average``, ``compute``, ``allow_unproven``, ``least_records`` and ``progress``.
      lr: learning rate.
      optimizer: a name, or a function of the parameters.
      momentum: of a named optimizer.
      weight_decay: of a named optimizer.
      scheduler: of the learning rate.
      average: of the weights.
      compute: micro-batches and precision.
      allow_unproven: run a method without an established guarantee.
      least_records: figures of groups with fewer held-out records are not shared.
      out: the folder in which every fit makes a run folder of its own; default ``runs``.
      compose: count this fit with others on the same records; False is named in the statement.
      seed: public: how the model starts. Never the noise.
      insecure_seed: reproducible noise, for research only.
      progress: show progress; default only in a terminal or a notebook.

    Attributes:
      classes_: the classes, in the order of the columns of ``predict_proba``.
      n_features_in_: number of columns.
      feature_names_in_: their names, where X was a DataFrame with names.
      run_: the run, see ``evenhand.load``; ``run_.report(test)`` and ``run_.path`` for ``evenhand verify``.
      privacy_: what the records have spent in total, with the statement of this fit (``TotalPrivacy``).
      plan_: every number that decides privacy.
      model_: the trained module.
      decision_: how outputs become answers, where a goal changes that.

    Examples:
      >>> import tempfile
      >>> from sklearn.datasets import load_breast_cancer
      >>> X, y = load_breast_cancer(return_X_y=True)
      >>> form = PrivateClassifier("linear", epsilon=3.0, bounds=(0, 5000), epochs=1, out=tempfile.mkdtemp())
      >>> fitted = form.fit(X, y)
      >>> fitted.privacy_.this_fit <= 3.0, fitted.predict_proba(X[:5]).shape
      (True, (5, 2))
    """

    def __init__(
        self,
        model: str | nn.Module | Callable[..., nn.Module] = "mlp",
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise: float | None = None,
        privacy: Promise | None = None,
        method: str | Method = "dpsgd",
        settings: Mapping[str, Any] | None = None,
        classes: Sequence[Any] | None = None,
        bounds: Any = None,
        shape: Sequence[int] | None = None,
        goal: str | Goal = "overall",
        tau: float | str | None = None,
        prior: bool | PriorKind | Sequence[float] | Mapping[Any, float] | Prior = True,
        epochs: float = 10,
        batch_size: float | None = None,
        loss: str | Loss | None = None,
        lr: float = 0.2,
        optimizer: str | OptimizerFactory | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        scheduler: str | SchedulerFactory | None = None,
        average: float | EMA | None = None,
        compute: Compute | None = None,
        allow_unproven: bool = False,
        least_records: int = LEAST,
        out: str | Path | None = None,
        compose: bool = True,
        seed: int = 0,
        insecure_seed: int | None = None,
        progress: bool | None = None,
    ) -> None:
        self.model, self.epsilon, self.delta, self.noise, self.privacy = model, epsilon, delta, noise, privacy
        self.method, self.settings, self.classes = method, settings, classes
        self.bounds, self.shape, self.goal, self.tau, self.prior = bounds, shape, goal, tau, prior
        self.epochs, self.batch_size, self.loss, self.lr, self.optimizer = epochs, batch_size, loss, lr, optimizer
        self.momentum, self.weight_decay, self.scheduler, self.average = momentum, weight_decay, scheduler, average
        self.compute, self.allow_unproven, self.least_records = compute, allow_unproven, least_records
        self.out, self.compose, self.progress = out, compose, progress
        self.seed, self.insecure_seed = seed, insecure_seed

    _read_off: Sequence[Any] = ()
    """Classes that a search read off all of its records, some of which this fit does not see."""

    def predict(self, X: Any, *, groups: Sequence[str] | None = None) -> NDArray[Any]:
        """Return the class of every row; ``groups`` where the decision depends on a record's group."""
        answers = self._adjusted(X, groups).argmax(1).numpy()
        classes: NDArray[Any] = self.classes_[answers]
        return classes

    def predict_proba(self, X: Any, *, groups: Sequence[str] | None = None) -> NDArray[np.float64]:
        """Return the probability of every class, one row per record."""
        likely: NDArray[np.float64] = self._adjusted(X, groups).softmax(1).numpy()
        return likely

    def decision_function(self, X: Any, *, groups: Sequence[str] | None = None) -> NDArray[np.float64]:
        """Return the scores whose largest is the answer; of two classes the score of the second against the first."""
        scores: NDArray[np.float64] = self._adjusted(X, groups).numpy()
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _adjusted(self, X: Any, groups: Sequence[str] | None) -> Tensor:
        scores = self._scores(X)
        return scores if self.decision_ is None else self.decision_.adjust(scores, CLASSES, groups)

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        try:
            check_classification_targets(y)
            present = np.unique(y)
        except (TypeError, ValueError) as error:
            raise in_words(error) from None
        if self.classes is None:
            self.classes_ = np.asarray(self._read_off) if len(self._read_off) else present
            if len(self.classes_) > UNDECLARED:
                raise DataError(
                    f"y has more than {UNDECLARED} classes, whose names would be printed as public facts: declare them "
                    "with classes=. Nothing was spent."
                )
        else:
            self.classes_ = np.asarray(self.classes)
        if len(self.classes_) < 2:
            raise DataError(
                "y has one class only, so there is nothing to learn: declare all with classes=, or add data."
                if self.classes is None
                else "classes names one class, and there is nothing to learn of one: declare all that y may hold."
            )
        return y

    def _wrapped(self, features: Tensor, y: NDArray[Any], **roles: Any) -> Data:
        names = [str(name) for name in self.classes_.tolist()]
        place = {name: names[index] for index, name in enumerate(self.classes_.tolist())}
        if not set(values := y.tolist()) <= place.keys():
            raise DataError("Some targets are not among the declared classes: declare all of them. Nothing was spent.")
        data = wrap(features, [place[value] for value in values], labels=names, **roles)
        derived = data.facts.derived if self.classes is not None else ("labels", *data.facts.derived)
        return replace(data, facts=replace(data.facts, derived=derived))

    def _unlabelled(self, features: Tensor) -> Data:
        return self._wrapped(features, np.repeat(self.classes_[:1], len(features)))

    @property
    def _prior_kind(self) -> PriorKind | None:
        if isinstance(self.prior, str):
            return self.prior
        return "labels" if self.prior is True else None

    def _asked(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in ("goal", "tau", "prior")}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags
