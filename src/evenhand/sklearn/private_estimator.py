"""Shared by classifier and regressor: read arrays as scikit-learn does, call ``evenhand.fit``, store the run."""

from __future__ import annotations

import copy
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from evenhand import _validate
from evenhand.accounting.budgets import Promise
from evenhand.data.dataset import Data
from evenhand.data.estimators.arrays import validated
from evenhand.data.estimators.learning_steps import refuse_learned_before
from evenhand.errors import DataError, UsageError
from evenhand.mechanism.make_plan import Plan
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.methods.catalogue import method
from evenhand.models.build import build, from_factory
from evenhand.sklearn.declared import pairs
from evenhand.sklearn.rows import origin
from evenhand.sklearn.total_privacy import TotalPrivacy
from evenhand.training import evaluate
from evenhand.training.config import PYTHON, Config
from evenhand.training.fit import fit
from evenhand.training.goals.decision import Decision
from evenhand.training.run import Run
from evenhand.types import Facts, PriorKind

Floats = NDArray[np.float32]
PASSED = (
    *("epsilon", "delta", "noise", "privacy", "method", "settings", "epochs", "batch_size", "loss", "lr", "optimizer"),
    *("momentum", "weight_decay", "scheduler", "average", "compute", "progress", "insecure_seed", "allow_unproven"),
    *("compose", "least_records"),
)
"""Parameters that go to ``evenhand.fit`` as they are."""
_WEIGHTED = (
    "sample_weight is refused: a record of weight w would need its own bound, noise and promise, and weights that were "
    "computed from the data would have to be paid for. Serve small groups by goal=, groups= and a method (evenhand "
    "methods), or give owners budgets of their own. Nothing was spent."
)


class PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of ``PrivateClassifier`` and ``PrivateRegressor``."""

    model: str | nn.Module | Callable[..., nn.Module]
    bounds: Any
    shape: Sequence[int] | None
    out: str | Path | None
    seed: int
    method: Any
    epochs: float
    settings: Mapping[str, Any] | None
    batch_size: float | None
    allow_unproven: bool
    insecure_seed: int | None

    @abstractmethod
    def _wrapped(self, features: Tensor, y: NDArray[Any], **roles: Any) -> Data:
        """Return the records with their targets, as ``evenhand.data.wrap`` does."""

    @abstractmethod
    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return checked targets; note what is public about them."""

    @abstractmethod
    def _asked(self) -> Mapping[str, Any]:
        """Return the arguments of ``evenhand.fit`` that only this kind of estimator has."""

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Iterable[Any] | None = None,
        owners: Iterable[Any] | None = None,
        test: Sequence[Any] | None = None,
        **refused: Any,
    ) -> Self:
        """Train privately. Everything that can be wrong is checked before any budget is spent.

        Args:
          X: one row of numbers per record (array, DataFrame or tensor).
          y: one target per record.
          groups: one name per record: who is reported, and what group rules see.
          owners: the budget class of each record.
          test: held-out records for the report, (X, y) or (X, y, groups); no statement covers them.
          refused: nothing else can be passed; ``sample_weight`` is refused, and the error says why.
        """
        if refused:
            name = sorted(refused)[0]
            raise UsageError(
                _WEIGHTED if name == "sample_weight" else f"fit takes no argument {_validate.shown(name)}."
            )
        refuse_learned_before(self)
        array, y = self._read(X, y)
        data = self._wrapped(self._features(array), self._targets(y), groups=groups, owners=owners)
        data = replace(data, origin=self._counted_as or (lambda: origin(array)))
        name = self.method if isinstance(self.method, str) else self.method.name
        folder = f"{name.partition(':')[0]}-{secrets.token_hex(4)}"
        run = fit(
            self._model(data.facts),
            data,
            test=None if test is None else self._held_out(test),
            out=Path("runs" if self.out is None else self.out) / folder,
            config=Config(
                data=PYTHON,
                model=self.model if isinstance(self.model, str) else PYTHON,
                method=name,
                epochs=self.epochs,
                insecure_seed=self.insecure_seed,
            ),
            **{name: getattr(self, name) for name in PASSED},
            **self._asked(),
        )
        self.run_: Run = run
        self.plan_: Plan = run.plan
        self.model_: nn.Module = run.model
        self.decision_: Decision | None = run.decision
        self.privacy_ = TotalPrivacy.of(run)
        return self

    def planned(self, facts: Facts, promise: Promise | None) -> Plan:
        """Return the plan that a fit of data with these public facts follows; nothing is spent.

        Examples:
          >>> from evenhand import Privacy
          >>> from evenhand.sklearn import PrivateRegressor
          >>> from evenhand.types import Facts
          >>> PrivateRegressor(epochs=2, batch_size=100).planned(Facts(1000, (("all", 1000),)), Privacy(3.0)).steps
          20
        """
        return make_plan(
            *(method(self.method, self.settings), promise),
            data=facts,
            epochs=self.epochs,
            batch_size=self.batch_size,
            allow_unproven=self.allow_unproven,
            prior=self._prior_kind,
        )

    @property
    def _prior_kind(self) -> PriorKind | None:
        """Return which noisy counts a fit releases, if any."""
        return None

    _counted_as: str | Callable[[], str] | None = None
    """Name under which runs on these records add up; set where a pipeline or a search sees the records as passed."""

    def _scores(self, X: Any) -> Tensor:
        """Return the outputs of the model for new records, float64, one row each; nothing is spent."""
        check_is_fitted(self)
        features = self._features(self._read(X)[0])
        scores, _ = evaluate.compute_scores(self.model_, self._unlabelled(features))
        return scores.double()

    @abstractmethod
    def _unlabelled(self, features: Tensor) -> Data:
        """Return new records with any targets."""

    def _held_out(self, test: Sequence[Any]) -> Data:
        """Return held-out records, encoded as those to train on."""
        if not isinstance(test, tuple | list) or len(test) not in (2, 3):
            raise UsageError("test takes held-out records as (X, y) or (X, y, groups). Nothing was spent.")
        array = self._read(test[0])[0]
        targets = np.asarray(test[1])
        if targets.shape != (len(array),):
            raise DataError("test must have one target per record: test=(X_test, y_test). Nothing was spent.")
        return self._wrapped(self._features(array), targets, groups=test[2] if len(test) == 3 else None)

    def _read(self, X: Any, *y: Any) -> tuple[Floats, Any]:
        """Return X as a new array of finite float32, and y, checked by scikit-learn; with y the columns are noted."""
        if len(getattr(X, "shape", ())) > 2:
            raise DataError(
                f"X has {len(X.shape)} dimensions: give one row per record, X.reshape(len(X), -1), and declare the "
                "shape of a record for the model, for example shape=(1, 8, 8)."
            )
        if not y:
            return validated(self, X, dtype=np.float32, reset=False, copy=True), None
        array, targets = validated(self, X, y[0], dtype=np.float32, copy=True)
        return array, targets

    def _features(self, array: Floats) -> Tensor:
        """Return the inputs of the model: scaled from declared bounds, in the declared shape."""
        if self.bounds is not None:
            names = getattr(self, "feature_names_in_", None)
            low, high = pairs(self.bounds, array.shape[1], names).T.astype(np.float32)
            array = 2 * ((np.clip(array, low, high) - low) / (high - low)) - 1
        features = torch.from_numpy(np.array(array, dtype=np.float32))
        if self.shape is None:
            return features
        if any(size < 1 for size in self.shape) or int(np.prod(self.shape)) != features.shape[1]:
            raise UsageError(f"shape={tuple(self.shape)} does not have the {features.shape[1]} numbers of a row of X.")
        return features.reshape(len(features), *self.shape)

    def _model(self, facts: Facts) -> nn.Module:
        """Return a new model; the one that was passed stays as it is, so that every fit starts from it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_validate.whole(self.seed, "seed", low=0))
            if isinstance(self.model, str):
                return build(self.model, facts)
            if isinstance(self.model, nn.Module):
                return copy.deepcopy(self.model)
            if callable(self.model):
                return from_factory(self.model, facts, "the function passed as model")
        raise UsageError("model takes a name such as 'mlp', a torch module, or a function that returns one.")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = False
        tags.non_deterministic = self.insecure_seed is None
        return tags
