"""Say which steps before a private estimator learn from the records, and refuse them, also in a plain Pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import PolynomialCountSketch, RBFSampler, SkewedChi2Sampler
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.utils import get_tags

from evenhand.errors import UsageError

_SHAPES_ONLY = (PolynomialFeatures, PolynomialCountSketch, RBFSampler, SkewedChi2Sampler)
"""Transformers whose ``fit`` looks at the number of columns only."""
_PROJECTIONS = (GaussianRandomProjection, SparseRandomProjection)


def refuse_steps(pipeline: Pipeline) -> None:
    """Raise UsageError if a step before the last learns from records."""
    public = getattr(pipeline, "public", ())
    learned = [pair for name, step in pipeline.steps[:-1] for pair in _learned(name, step, public)]
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

    Seen are Pipelines, also around a search or each other, and the transformer of a TransformedTargetRegressor; not
    what another process, or code of your own, did to the records.

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
    for caller in _fitting():
        last = caller.steps[-1][1] if isinstance(caller, Pipeline) else getattr(caller, "regressor_", None)
        if any(last is one for one in inside):
            if isinstance(caller, Pipeline):
                refuse_steps(caller)
            elif isinstance(caller, TransformedTargetRegressor):
                refuse_steps(Pipeline([("transformer", caller.transformer_), ("regressor", last)]))
        inside.append(caller)


def _fitting() -> Iterator[Any]:
    """Yield the estimators whose methods are running, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, BaseEstimator):
            yield owner
        frame = frame.f_back


def _learned(name: str, step: Any, public: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the steps, also inside others, whose ``fit`` may learn from values."""
    if isinstance(step, Pipeline):
        inner = [(part, estimator) for part, estimator in step.steps]
    elif isinstance(step, ColumnTransformer):
        inner = [(part, estimator) for part, estimator, _ in step.transformers] + [("remainder", step.remainder)]
    elif isinstance(step, FeatureUnion):
        inner = list(step.transformer_list)
    else:
        if not _learns_nothing(step) and not (isinstance(step, FrozenEstimator) and name in public):
            yield name, step
        return
    for part, estimator in inner:
        yield from _learned(part, estimator, public)


def _learns_nothing(step: Any) -> bool:
    if step is None or isinstance(step, str):  # passthrough, drop
        return True
    if isinstance(step, FrozenEstimator):
        return False
    if isinstance(step, OneHotEncoder):
        counts = step.min_frequency is not None or step.max_categories is not None or step.drop is not None
        return not isinstance(step.categories, str) and not counts
    if isinstance(step, _PROJECTIONS):
        return bool(step.n_components != "auto")
    stateless: bool = not get_tags(step).requires_fit
    return stateless or isinstance(step, _SHAPES_ONLY) or getattr(step, "learns_from_records", True) is False
