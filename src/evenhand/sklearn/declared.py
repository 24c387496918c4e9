"""Preprocessing from public parameters only: nothing is learned from records, so nothing has to be paid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from evenhand import _validate
from evenhand.data.columns import Category
from evenhand.data.estimators.arrays import validated
from evenhand.data.frames import is_frame
from evenhand.errors import UsageError


class DeclaredScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Scale columns from declared bounds to -1 ... 1; values outside are cut. In place of StandardScaler, MinMaxScaler.

    A record's numbers depend on that record and on the bounds alone. ``fit`` only notes the columns. Missing values are
    refused, unless ``missing="middle"`` puts them at the middle of the bounds.

    Args:
      bounds: (low, high) for all columns, a pair for each column in order, or a mapping from the names of a DataFrame's
        columns. They must be known without looking at the records: from a codebook, a sensor's range, the law.
      missing: "refuse" or "middle".

    Attributes:
      n_features_in_: number of columns.
      feature_names_in_: their names, where X was a DataFrame.

    Examples:
      >>> DeclaredScaler([(0, 100), (0, 1)]).fit_transform([[50, 0.0], [130, 1.0]]).tolist()
      [[0.0, -1.0], [1.0, 1.0]]
    """

    learns_from_records = False

    def __init__(self, bounds: Any = (0.0, 1.0), *, missing: str = "refuse") -> None:
        self.bounds = bounds
        self.missing = missing

    def fit(self, X: Any, y: Any = None) -> DeclaredScaler:
        """Note the columns and check that each has bounds; no value is looked at."""
        _validate.known(self.missing, ("refuse", "middle"), "way to treat missing values")
        validated(self, X, dtype=[np.float64, np.float32], ensure_all_finite=self._finite)
        pairs(self.bounds, self.n_features_in_, getattr(self, "feature_names_in_", None))
        return self

    def transform(self, X: Any) -> NDArray[np.floating[Any]]:
        """Return the scaled columns; the caller owns them."""
        check_is_fitted(self)
        array = validated(self, X, dtype=[np.float64, np.float32], ensure_all_finite=self._finite, reset=False)
        known = pairs(self.bounds, self.n_features_in_, getattr(self, "feature_names_in_", None))
        low, high = known.T.astype(array.dtype)
        scaled = 2 * ((np.clip(array, low, high) - low) / (high - low)) - 1
        result: NDArray[np.floating[Any]] = np.nan_to_num(scaled, nan=0.0, copy=False)
        return result

    @property
    def _finite(self) -> bool | str:
        return True if self.missing == "refuse" else "allow-nan"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "middle"
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def pairs(bounds: Any, columns: int, names: Sequence[str] | None) -> NDArray[np.float64]:
    """Return declared bounds as one row (low, high) for each column; raise UsageError unless all columns have them.

    Examples:
      >>> pairs((0, 1), 2, None).tolist(), pairs({"b": (2, 3), "a": (0, 1)}, 2, ["a", "b"]).tolist()
      ([[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [2.0, 3.0]])
    """
    if isinstance(bounds, Mapping):
        if names is None:
            raise UsageError(
                "bounds by name need a DataFrame: pass one, or a pair (low, high) for each column in order."
            )
        missing, unknown = [name for name in names if name not in bounds], set(bounds) - set(names)
        if missing or unknown:
            what = f"column {missing[0]!r} has no bounds" if missing else f"there is no column {sorted(unknown)[0]!r}"
            raise UsageError(f"bounds and columns differ: {what}. Declare (low, high) for every column that is passed.")
        bounds = [bounds[name] for name in names]
    try:
        table = np.asarray(bounds, dtype=np.float64)
        table = np.broadcast_to(table, (columns, 2)) if table.shape == (2,) else table
    except (TypeError, ValueError):
        table = np.empty((0, 0))
    if table.shape != (columns, 2):
        raise UsageError(f"bounds must be one pair (low, high), or a pair for each of the {columns} columns.")
    if not np.isfinite(table).all() or not (table[:, 0] < table[:, 1]).all():
        raise UsageError(
            "Every pair of bounds must be two finite numbers, low below high: bounds=(0, 100) for example."
        )
    return table


class DeclaredEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Encode columns of names as one column of 0 and 1 for each declared value. In place of OneHotEncoder.

    Args:
      categories: the values of each column in order, or a mapping from the names of a DataFrame's columns. They must be
        known without looking at the records.
      other: name of one more category that takes every value that was not declared; without it such values are refused.

    Attributes:
      n_features_in_: number of columns.
      feature_names_in_: their names, where X was a DataFrame.

    Examples:
      >>> DeclaredEncoder([["no", "yes"]]).fit_transform([["yes"], ["no"]]).tolist()
      [[0.0, 1.0], [1.0, 0.0]]
    """

    learns_from_records = False

    def __init__(self, categories: Any, *, other: str | None = None) -> None:
        self.categories = categories
        self.other = other

    def fit(self, X: Any, y: Any = None) -> DeclaredEncoder:
        """Note the columns and check that the values of each are declared; no value is looked at."""
        validated(self, X, skip_check_array=is_frame(X), dtype=None)
        self._declared()
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the columns of 0 and 1; a value that was not declared is an error, and is not printed."""
        check_is_fitted(self)
        if is_frame(X):
            validated(self, X, skip_check_array=True, reset=False)
            columns = [np.asarray(X[name]) for name in X.columns]
        else:
            columns = list(validated(self, X, dtype=None, reset=False).T)
        parts = [
            declared.encode(name, ["" if _absent(cell) else str(cell) for cell in column.tolist()], {""})
            for (name, declared), column in zip(self._declared(), columns, strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """Return ``column=value`` for every column of the result."""
        check_is_fitted(self)
        names = [f"{name}={value}" for name, declared in self._declared() for value in declared.names]
        return np.asarray(names, dtype=object)

    def _declared(self) -> list[tuple[str, Category]]:
        names = getattr(self, "feature_names_in_", None)
        given = self.categories
        if isinstance(given, Mapping):
            if names is None or set(given) != set(names):
                raise UsageError("categories by name need a DataFrame with exactly these columns: select them first.")
            given = [given[name] for name in names]
        if isinstance(given, str) or len(given) != self.n_features_in_:
            raise UsageError(f"categories must have the values of each of the {self.n_features_in_} columns, in order.")
        called = [f"x{place}" for place in range(len(given))] if names is None else [str(name) for name in names]
        return [
            (name, Category(tuple(map(str, values)), self.other)) for name, values in zip(called, given, strict=True)
        ]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical, tags.input_tags.string = True, True
        return tags


def _absent(cell: Any) -> bool:
    return cell is None or cell != cell
