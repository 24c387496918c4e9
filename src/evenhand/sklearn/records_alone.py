"""Look whether steps before a private estimator make of a record alone what they make of it among others."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples

from evenhand.errors import UsageError

COMPANY, ALONE = 4096, 16
"""Records that are transformed in company, at most, and how many of each kind are transformed alone too."""


def refuse_mixing(before: Pipeline, X: Any) -> None:
    """Raise UsageError if fitted steps make other numbers of a record alone than among others.

    Records at random are looked at, and those that a fill, a clip or a scale over the records would change most: with
    missing values, and with the least and the largest of a column.

    Examples:
      >>> from sklearn.preprocessing import FunctionTransformer
      >>> steps = Pipeline([("centre", FunctionTransformer(lambda rows: rows - rows.mean(0)))])
      >>> refuse_mixing(steps, np.eye(4))
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: A step before the private estimator makes other numbers of a record alone than ...
    """
    draw, count = np.random.default_rng(), _num_samples(X)
    odd = draw.permutation(conspicuous(X))[: 2 * ALONE]
    others = np.setdiff1d(draw.choice(count, min(count, COMPANY), replace=False), odd)
    some = _safe_indexing(X, np.concatenate([odd, others]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that have nothing to work with in a single record
        together = before.transform(some)
        single = [before.transform(_safe_indexing(some, [row])) for row in range(len(odd) + min(ALONE, len(others)))]
    for row, one in enumerate(single):
        alone, among = _numbers(one, 0), _numbers(together, row)
        if alone.shape != among.shape or not np.allclose(alone, among, 1e-4, 1e-6, equal_nan=True):
            raise UsageError(
                "A step before the private estimator makes other numbers of a record alone than in company: one "
                "record would change what is learned from others. Let every step look at one record at a time. "
                "Nothing was spent."
            )


def conspicuous(X: Any) -> NDArray[np.int64]:
    """Return numbers of records with missing values, or with the least or largest value of a column of numbers.

    Examples:
      >>> conspicuous(np.array([[1.0, 5.0], [2.0, 6.0], [np.nan, 7.0], [9.0, 6.0]])).tolist()
      [0, 2, 3]
      >>> conspicuous(["a text"]).tolist()
      []
    """
    if not hasattr(X, "shape") or len(X.shape) != 2 or hasattr(X, "toarray"):
        return np.empty(0, dtype=np.int64)
    records: list[int] = []
    for place in range(X.shape[1])[:COMPANY]:
        column = X.iloc[:, place].to_numpy() if hasattr(X, "iloc") else np.asarray(X[:, place])
        column = column if column.dtype.kind in "fiub" else _read(column[:COMPANY])
        missing = np.isnan(column)
        records += np.flatnonzero(missing)[:ALONE].tolist()
        if not missing.all():
            records += [int(np.nanargmin(column)), int(np.nanargmax(column))]
    return np.unique(np.array(records, dtype=np.int64))


def _read(column: NDArray[Any]) -> NDArray[np.float64]:
    """Return cells as numbers: NaN where one is missing, 0 for what is no number."""

    def number(cell: Any) -> float:
        try:
            return np.nan if cell is None or cell != cell else float(cell)
        except (TypeError, ValueError):
            return 0.0

    return np.array([number(cell) for cell in column.tolist()], dtype=np.float64)


def _numbers(table: Any, row: int) -> NDArray[np.float64]:
    """Return a row of an array, a sparse matrix or a DataFrame as numbers."""
    part = _safe_indexing(table, [row])
    numbers: NDArray[np.float64] = np.asarray(part.toarray() if hasattr(part, "toarray") else part, dtype=np.float64)[0]
    return numbers
