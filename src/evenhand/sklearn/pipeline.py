"""Pipelines whose steps learn nothing from private records before the private estimator trains on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import sklearn
from sklearn.base import clone
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import _safe_indexing

from evenhand.data.estimators.learning_steps import refuse_steps
from evenhand.density.base_estimator import PrivateDensity
from evenhand.errors import UsageError
from evenhand.sklearn.private_estimator import PrivateEstimator
from evenhand.sklearn.records_alone import refuse_mixing
from evenhand.sklearn.rows import origin
from evenhand.sklearn.total_privacy import TotalPrivacy


class PrivatePipeline(Pipeline):  # type: ignore[misc]
    """A ``sklearn.pipeline.Pipeline`` whose last step is a private estimator and whose other steps learn nothing.

    A scaler, an imputer, a PCA or a feature selection is fitted on private records, and nothing pays for what it
    learns: the promise of the last step would not hold for the pipeline. ``fit`` refuses such steps by name, before
    anything is spent. Accepted are steps that scikit-learn knows as stateless, those that only look at the number of
    columns, encoders with declared categories, ``DeclaredScaler`` and ``DeclaredEncoder``, and ``FrozenEstimator``
    where you declare in ``public`` that it was fitted on public data. Some records, with missing and with extreme
    values among them, are also transformed alone and in company: a step that mixes records (a function that subtracts
    the mean, say) is refused. That can refute that records are independent; it cannot prove it.

    Runs are counted on the records that were passed in, whatever the steps make of them.

    Args:
      steps: (name, estimator) pairs, as for ``Pipeline``.
      public: names of frozen steps that were fitted on public data.
      transform_input: see ``Pipeline``.
      memory: see ``Pipeline``.
      verbose: see ``Pipeline``.

    Examples:
      >>> from sklearn.preprocessing import StandardScaler
      >>> from evenhand.sklearn import PrivateClassifier
      >>> make_private_pipeline(StandardScaler(), PrivateClassifier(epsilon=3.0))
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: These steps learn from private records, which no promise pays for: ...
    """

    def __init__(
        self,
        steps: list[tuple[str, Any]],
        *,
        public: Sequence[str] = (),
        transform_input: Any = None,
        memory: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(steps, transform_input=transform_input, memory=memory, verbose=verbose)
        self.public = public

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Iterable[Any] | None = None,
        owners: Iterable[Any] | None = None,
        test: Sequence[Any] | None = None,
        **params: Any,
    ) -> Self:
        """Check the steps, then transform the records and train the last step; see ``PrivateClassifier.fit``.

        ``test`` holds records as they are passed in, before any step.
        """
        refuse_learned(self)
        before = self._before(X)
        name, last = self.steps[-1]
        if test is not None and before is not None:
            if any(key.endswith("random_state") and value is None for key, value in before.get_params().items()):
                raise UsageError(
                    "A step draws at random, and would draw otherwise for the held-out records: give it a "
                    "random_state, or leave out test. Nothing was spent."
                )
            test = (before.transform(test[0]), *test[1:])
        given = {"groups": groups, "owners": owners, "test": test}
        prefix = "" if sklearn.get_config()["enable_metadata_routing"] else f"{name}__"
        passed = {f"{prefix}{key}": value for key, value in given.items() if value is not None}
        if isinstance(last, PrivateEstimator):
            counted_as = self._counted_as
            last._counted_as = (lambda: origin(X)) if counted_as is None else counted_as
        try:
            super().fit(X, y, **params, **passed)
        finally:
            vars(last).pop("_counted_as", None)
        return self

    looks_at_records = True
    """Whether ``fit`` transforms some records alone and in company."""
    _counted_as: str | None = None
    """Name under which runs on these records add up, where a search that saw them all has set it."""

    @property
    def privacy_(self) -> TotalPrivacy:
        """Return what the records have spent in total, see ``TotalPrivacy``."""
        privacy: TotalPrivacy = self.steps[-1][1].privacy_
        return privacy

    def _before(self, X: Any) -> Pipeline | None:
        """Return the steps before the last, fitted for new records; refuse them if they mix records."""
        if len(self.steps) == 1:
            return None
        before = clone(Pipeline(self.steps[:-1])).fit(_safe_indexing(X, [0]))
        refuse_mixing(before, X)
        return before


def make_private_pipeline(
    *steps: Any, public: Sequence[str] = (), memory: Any = None, verbose: bool = False
) -> PrivatePipeline:
    """Return a ``PrivatePipeline`` with steps named after their classes; refuse steps that learn from records.

    Examples:
      >>> from evenhand.sklearn import DeclaredScaler, PrivateClassifier
      >>> pipe = make_private_pipeline(DeclaredScaler((0, 16)), PrivateClassifier("linear", epsilon=3.0))
      >>> [name for name, _ in pipe.steps]
      ['declaredscaler', 'privateclassifier']
    """
    pipeline = PrivatePipeline(make_pipeline(*steps).steps, public=public, memory=memory, verbose=verbose)
    refuse_learned(pipeline)
    return pipeline


def refuse_learned(pipeline: Pipeline) -> None:
    """Raise UsageError unless a private estimator comes last and no step before it learns from records.

    Examples:
      >>> from sklearn.decomposition import PCA
      >>> from evenhand.sklearn import PrivateClassifier
      >>> refuse_learned(Pipeline([("pca", PCA()), ("model", PrivateClassifier())]))
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: These steps learn from private records, which no promise pays for: 'pca' (PCA). ...
    """
    last = pipeline.steps[-1][1]
    if not isinstance(last, PrivateEstimator | PrivateDensity) and not getattr(last, "trains_privately", False):
        raise UsageError(
            f"The last step is {type(last).__name__}, which is not private: end with PrivateClassifier, "
            "PrivateRegressor, a density of evenhand, or a net of skorch with PrivateNet before it."
        )
    refuse_steps(pipeline, looked_at=True)
