"""The interface of scikit-learn that all densities share: what they read, refuse and answer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from evenhand.data.estimators.arrays import validated
from evenhand.density.noisy_sums import as_rows


class DensityClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of estimators that give one log density per class."""

    classes_: NDArray[Any]
    n_features_in_: int

    @abstractmethod
    def _log_densities(self, rows: Tensor) -> Tensor:
        """Return one log density per class for flat float32 rows, up to a common constant."""

    def log_densities(self, X: Any) -> NDArray[np.float64]:
        """Return the log of each class's density, up to a common constant; (rows, classes)."""
        check_is_fitted(self)
        rows = as_rows(checked(self, X), self.n_features_in_)
        with torch.no_grad():
            scores: NDArray[np.float64] = self._log_densities(rows).double().numpy()
        return scores

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return ``log_densities``; of two classes, as scikit-learn does, how far the second is above the first."""
        scores = self.log_densities(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of the largest density for every row."""
        scores = self.log_densities(X)
        classes: NDArray[Any] = self.classes_[scores.argmax(1)]
        return classes

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the densities divided by their sum: all classes count as equally likely beforehand."""
        scores = self.log_densities(X)
        highest = np.maximum(scores.max(1, keepdims=True), -1e300)  # where no density is above 0
        likely = np.exp(np.maximum(scores, -1e300) - highest)
        probabilities: NDArray[np.float64] = likely / likely.sum(1, keepdims=True)
        return probabilities

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # such a row adds nothing, see check_finite
        tags.classifier_tags.poor_score = True
        return tags


def checked(estimator: DensityClassifier, X: Any, *y: Any) -> Any:
    """Return X as numbers, and y where one is given: checked as by scikit-learn, with the number of columns noted.

    Records of any shape are taken as rows. Arrays and tensors of numbers are returned as they are, for runs on them are
    told by their contents; anything else becomes an array of float32.
    """
    values = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
    rows = values.reshape(len(values), -1) if isinstance(values, np.ndarray) and values.ndim > 2 else values
    if not y:
        return _as_given(X, validated(estimator, rows, dtype=np.float32, ensure_all_finite=False, reset=False))
    given = y[0].detach().cpu().numpy() if isinstance(y[0], Tensor) else y[0]
    several = getattr(given, "ndim", 1) == 2 and given.shape[1] > 1
    options = {"dtype": np.float32, "ensure_all_finite": False, "multi_output": several}
    array, targets = validated(estimator, rows, given, **options)
    if not several:
        targets = column_or_1d(targets)
        check_classification_targets(targets)
    return _as_given(X, array), targets


def _as_given(X: Any, array: Any) -> Any:
    is_plain = isinstance(X, Tensor) or (isinstance(X, np.ndarray) and X.dtype.kind in "fiub")
    return X if is_plain else array
