"""Say which steps before a private estimator learn from the records, and refuse them, also in a plain Pipeline."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import AdditiveChi2Sampler, PolynomialCountSketch, RBFSampler, SkewedChi2Sampler
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import Binarizer, FunctionTransformer, Normalizer, OneHotEncoder, PolynomialFeatures
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.utils import get_tags

from evenhand.errors import UsageError

_SHAPES_ONLY = (PolynomialFeatures, PolynomialCountSketch, SkewedChi2Sampler)
"""Transformers whose ``fit`` looks at the number of columns only."""
_BY_RECORD = (AdditiveChi2Sampler, Binarizer, FeatureHasher, HashingVectorizer, Normalizer)
"""Transformers that learn nothing, and that make of each record what they would make of it alone."""
_PROJECTIONS = (GaussianRandomProjection, SparseRandomProjection)


def refuse_steps(pipeline: Pipeline, *, looked_at: bool = False) -> None:
    """Raise UsageError if a step before the last learns from records.

    A function, or a class of somebody's own that has no state, may still mix the records it is given. It is taken where
    what it makes of records is ``looked_at``.
    """
    public = getattr(pipeline, "public", ())
    every = [pair for name, step in pipeline.steps[:-1] for pair in _parts(name, step)]
    declared = [isinstance(step, FrozenEstimator) and name in public for name, step in every]
    asked = [pair for pair, known in zip(every, declared, strict=True) if not known]
    learned = [(name, step) for name, step in asked if not _stateless(step)]
    unseen = [] if looked_at else [repr(name) for name, step in asked if not _alone(step)]
    if unseen and not learned:
        raise UsageError(
            f"These steps may mix records, and a plain Pipeline cannot look at that: {', '.join(unseen)}. Use "
            "evenhand.sklearn.make_private_pipeline(...), which transforms records alone and in company; a target is "
            "best transformed before fit, each by itself. A numpy function such as np.log1p is taken. Nothing was "
            "spent."
        )
    if learned:
        named = ", ".join(f"{name!r} ({type(step).__name__})" for name, step in learned)
        raise UsageError(
            f"These steps learn from private records, which no promise pays for: {named}. Use DeclaredScaler(bounds) "
            "or DeclaredEncoder(categories) with public parameters; or fit the step on public data, wrap it in "
            "sklearn.frozen.FrozenEstimator and declare that: make_private_pipeline(..., public=[name]). Nothing was "
            "spent."
        )


def refuse_learned_before(estimator: BaseEstimator) -> None:
    """Raise UsageError if what calls ``estimator.fit`` has fitted steps on the same records, which nothing pays for.

    Seen are Pipelines, also around a search or each other or in another thread, and the transformer of a
    TransformedTargetRegressor; not what another process, or code of your own, did to the records.

    Examples:
      >>> from sklearn.pipeline import make_pipeline
      >>> from sklearn.preprocessing import StandardScaler
      >>> from evenhand.sklearn import PrivateClassifier
      >>> make_pipeline(StandardScaler(), PrivateClassifier(epsilon=3.0)).fit([[0.0], [1.0]], [0, 1])
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: These steps learn from private records, which no promise pays for: ...
    """
    inside: list[Any] = [estimator]
    for caller in _fitting(inspect.currentframe()):
        last = _last(caller)
        if any(last is one for one in inside):
            _refuse(caller)
        inside.append(caller)
    for number, frame in sys._current_frames().items():
        for caller in _fitting(frame) if number != threading.get_ident() else ():
            if _holds(_last(caller), type(estimator)):
                _refuse(caller)


def _fitting(frame: FrameType | None) -> Iterator[Any]:
    """Yield the estimators whose methods are running, the innermost first."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, BaseEstimator):
            yield owner
        frame = frame.f_back


def _last(caller: Any) -> Any:
    return caller.steps[-1][1] if isinstance(caller, Pipeline) else getattr(caller, "regressor_", None)


def _holds(last: Any, kind: type[BaseEstimator]) -> bool:
    """Return whether an estimator is of a kind, or fits others of it, whose copies may run in threads of their own."""
    return isinstance(last, kind) or (
        isinstance(last, BaseEstimator) and any(isinstance(part, kind) for part in last.get_params().values())
    )


def _refuse(caller: Any) -> None:
    """Raise if a Pipeline, or what transforms the targets of a regressor, learned before its last step is fitted."""
    if isinstance(caller, Pipeline):
        refuse_steps(caller, looked_at=getattr(caller, "looks_at_records", False))
    elif isinstance(caller, TransformedTargetRegressor):
        refuse_steps(Pipeline([("transformer", caller.transformer_), ("regressor", _last(caller))]))


def _parts(name: str, step: Any) -> Iterator[tuple[str, Any]]:
    """Yield a step, or the steps inside it."""
    if isinstance(step, Pipeline):
        inner = [(part, estimator) for part, estimator in step.steps]
    elif isinstance(step, ColumnTransformer):
        inner = [(part, estimator) for part, estimator, _ in step.transformers] + [("remainder", step.remainder)]
    elif isinstance(step, FeatureUnion):
        inner = list(step.transformer_list)
    else:
        yield name, step
        return
    for part, estimator in inner:
        yield from _parts(part, estimator)


def _stateless(step: Any) -> bool:
    """Return whether the ``fit`` of a step learns nothing from values."""
    return _alone(step) or not (isinstance(step, FrozenEstimator) or get_tags(step).requires_fit)


def _alone(step: Any) -> bool:
    """Return whether a step is known to learn nothing, and to make of each record what it would make of it alone."""
    if step is None or isinstance(step, str):  # passthrough, drop
        return True
    if isinstance(step, OneHotEncoder):
        counts = step.min_frequency is not None or step.max_categories is not None or step.drop is not None
        return not isinstance(step.categories, str) and not counts
    if isinstance(step, _PROJECTIONS):
        return bool(step.n_components != "auto")
    if isinstance(step, RBFSampler):  # gamma="scale" is the variance of the records
        return not isinstance(step.gamma, str)
    if isinstance(step, FunctionTransformer):
        return step.func is None or (isinstance(step.func, np.ufunc) and step.func.signature is None)
    return isinstance(step, (*_SHAPES_ONLY, *_BY_RECORD)) or getattr(step, "learns_from_records", True) is False
