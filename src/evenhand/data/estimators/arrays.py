"""scikit-learn's own check of what an estimator is given, without values in its errors, or advice to learn from X."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from evenhand.errors import DataError

_NO_NUMBER = (
    "X contains something that is not a number: encode columns of names first, for example with "
    "evenhand.sklearn.DeclaredEncoder. Nothing was spent."
)
_NOT_FINITE = (
    "Input X contains NaN, infinity or a value too large for float32: drop such records, or put missing values at the "
    "middle of public bounds, with evenhand.sklearn.DeclaredScaler(bounds, missing='middle'). Nothing was spent."
)
_NO_LABEL = "Some labels in y are missing, or cannot be compared with each other: give every record one of one kind."
_IN_WORDS = {
    "could not convert": _NO_NUMBER,
    "invalid literal": _NO_NUMBER,
    "could not be promoted": _NO_NUMBER,
    "Input X contains": _NOT_FINITE,
    "Complex data not supported": "Complex data not supported: pass real numbers. Nothing was spent.",
    "Expected 2D array, got": (
        "Expected 2D array, with one row per record. Reshape your data: X.reshape(-1, 1) if there is one column, "
        "X.reshape(1, -1) if there is one record. Nothing was spent."
    ),
    "NA is ambiguous": _NO_LABEL,
    "Unknown label type: unknown": (
        "Unknown label type: y holds objects that are not all names, or some are missing. Pass names, or an array of "
        "whole numbers. Nothing was spent."
    ),
    "not supported between instances": _NO_LABEL,
}
"""Messages of others that print values, say little, or advise to learn from private records; and ours instead."""


def validated(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """Return X, or X and y, as ``sklearn.utils.validation.validate_data`` does.

    Raises:
      DataError: X or y cannot be used; the message prints none of their values.

    Examples:
      >>> from sklearn.base import BaseEstimator
      >>> validated(BaseEstimator(), [1.0, 2.0])
      Traceback (most recent call last):
      ...
      evenhand.errors.DataError: Expected 2D array, with one row per record. ...
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit into float32 is refused as infinite
            return validate_data(estimator, X, *y, **options)
    except (ValueError, TypeError) as error:
        raise in_words(error) from None


def in_words(error: ValueError | TypeError) -> ValueError | TypeError:
    """Return an error to raise instead of one of numpy's or scikit-learn's, or that error itself."""
    return next((DataError(words) for part, words in _IN_WORDS.items() if part in str(error)), error)
