"""``PrivateRegressor``: any torch model, any method of the catalogue, as a regressor of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from torch import Tensor, nn

from evenhand.accounting.budgets import Promise
from evenhand.data.dataset import Data, wrap
from evenhand.errors import UsageError
from evenhand.methods.catalogue import Method
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.sklearn.declared import pairs
from evenhand.sklearn.private_estimator import PrivateEstimator
from evenhand.training.guards.model_guards import Compute
from evenhand.training.losses import Loss
from evenhand.training.optimizers import OptimizerFactory, SchedulerFactory
from evenhand.training.weight_average import EMA


class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """Train a model of a real number privately: ``evenhand.fit`` behind ``fit``, ``predict`` and ``score``.

    Runs, folders and what ``privacy_`` says are as for ``PrivateClassifier``.

    Args:
      model: a name (linear, mlp ...), a torch module, which is copied, or a function (of the public facts, if it takes
        an argument) that returns a module with one output.
      epsilon: promise to every record; or give ``privacy``, or ``noise``.
      delta: default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier instead of a promise.
      privacy: the promise as an object (Privacy, Budgets for ``owners``, FixedNoise).
      method: a name from ``evenhand methods``, or a Method.
      settings: change the defaults of a named method.
      target_bounds: public bounds (low, high) of y: it is cut to them and scaled to -1 ... 1 for training, and
        predictions are scaled back. Default: as it is, which suits only targets of about that size.
      bounds: public bounds of the columns, see ``DeclaredScaler``.
      shape: of one record, for models of pictures.
      epochs: expected passes over the data.
      batch_size: expected records per step.
      loss: see ``evenhand.fit``, as for ``PrivateClassifier``.
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
      compose: count this fit with others on the same records.
      seed: public: how the model starts. Never the noise.
      insecure_seed: reproducible noise, for research only.
      progress: show progress; default only in a terminal or a notebook.

    Attributes:
      n_features_in_: number of columns.
      feature_names_in_: their names, where X was a DataFrame with names.
      run_: the run, see ``evenhand.load``.
      privacy_: what the records have spent in total, with the statement of this fit (``TotalPrivacy``).
      plan_: every number that decides privacy.
      model_: the trained module.
      decision_: always None.

    Examples:
      >>> import tempfile
      >>> from sklearn.datasets import load_diabetes
      >>> X, y = load_diabetes(return_X_y=True)
      >>> out = tempfile.mkdtemp()
      >>> form = PrivateRegressor("linear", epsilon=3.0, bounds=(-0.2, 0.2), target_bounds=(0, 400), epochs=1, out=out)
      >>> fitted = form.fit(X, y)
      >>> fitted.privacy_.this_fit <= 3.0, fitted.predict(X[:5]).shape
      (True, (5,))
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
        target_bounds: Sequence[float] | None = None,
        bounds: Any = None,
        shape: Sequence[int] | None = None,
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
        self.method, self.settings, self.target_bounds = method, settings, target_bounds
        self.bounds, self.shape = bounds, shape
        self.epochs, self.batch_size, self.loss, self.lr, self.optimizer = epochs, batch_size, loss, lr, optimizer
        self.momentum, self.weight_decay, self.scheduler, self.average = momentum, weight_decay, scheduler, average
        self.compute, self.allow_unproven, self.least_records = compute, allow_unproven, least_records
        self.out, self.compose, self.progress = out, compose, progress
        self.seed, self.insecure_seed = seed, insecure_seed

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the predicted number of every row, in the unit of y."""
        numbers: NDArray[np.float64] = self._scores(X).reshape(-1).numpy()
        if self.target_bounds is None:
            return numbers
        low, high = self._range
        return (numbers + 1) / 2 * (high - low) + low

    @property
    def _range(self) -> tuple[float, float]:
        low, high = pairs(self.target_bounds, 1, None)[0]
        return float(low), float(high)

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        if len(y) < 2:
            raise UsageError("One sample cannot be trained on (n_samples=1): pass at least two records.")
        return y

    def _wrapped(self, features: Tensor, y: NDArray[Any], **roles: Any) -> Data:
        try:
            numbers = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError):
            raise UsageError("y must be numbers: for names of classes use PrivateClassifier.") from None
        if self.target_bounds is not None:
            low, high = self._range
            numbers = 2 * (np.clip(numbers, low, high) - low) / (high - low) - 1
        return wrap(features, numbers, **roles)

    def _unlabelled(self, features: Tensor) -> Data:
        return wrap(features, np.zeros(len(features)))

    def _asked(self) -> Mapping[str, Any]:
        return {}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
