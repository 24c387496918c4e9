"""``MomentDensity``: a Gaussian density per class from noisy means and second moments. Two releases, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenhand import _validate
from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density import private_features
from evenhand.density.base_estimator import ADD_REMOVE, PrivateDensity, SpentPrivacy, of_plan
from evenhand.density.noisy_sums import Releases, chunks, plan_of
from evenhand.density.torch_models import MomentModel
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts


class MomentDensity(PrivateDensity):
    """The simplest sound density: classes are Gaussian in the directions that their noisy moments tell apart.

    It is the projection of ``RandomFeatureDensity`` with the whole budget, and a density that needs no release of its
    own: linear discriminant analysis on private moments. Where classes are not round, the kernel density can do better.

    Args:
      epsilon: promise to every record (add/remove one record); or budgets in ``fit``, or ``noise``.
      delta: default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier instead of a promise.
      dimension: public random directions that features are reduced to first (None: all features).
      mean_share: of the budget (in z^-2) for the mean; the rest is for the moments.
      most_labels: L, labels of one record that are counted in full; a record with more is scaled down.
      classes: the classes, declared public; default those in the data, printed as a fact.
      seed: public: the directions. Never the noise.
      insecure_seed: reproducible noise, for research only.
      out: folder for plan, ledger, model and statement, which ``evenhand verify`` checks.
      compose: add this run up with earlier ones on the same data (with ``out``).

    Guarantee:
      Proved and tested (docs/proofs/density.md), add/remove one record.

    Examples:
      >>> import numpy as np
      >>> generator = np.random.default_rng(0)
      >>> y = generator.integers(0, 2, 1000)
      >>> X = generator.normal(size=(1000, 5)) + 3 * y[:, None]
      >>> fitted = MomentDensity(epsilon=1.0, delta=1e-5, insecure_seed=0).fit(X, y)
      >>> bool(fitted.score(X, y) > 0.9), 0.999 < fitted.privacy_.epsilon <= 1
      (True, True)
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise: float | None = None,
        dimension: int | None = 500,
        mean_share: float = 0.03,
        most_labels: int = 1,
        classes: Sequence[Any] | None = None,
        seed: int = 0,
        insecure_seed: int | None = None,
        out: str | Path | None = None,
        compose: bool = True,
    ) -> None:
        self.epsilon, self.delta, self.noise = epsilon, delta, noise
        self.dimension, self.mean_share, self.most_labels, self.classes = dimension, mean_share, most_labels, classes
        self.seed, self.insecure_seed, self.out, self.compose = seed, insecure_seed, out, compose

    def plan(self, facts: Facts, promise: Promise | None) -> Plan:
        """Plan one release of the mean and one of the moments."""
        share = _validate.number(self.mean_share, "mean_share", low=0, high=1)
        most = _validate.whole(self.most_labels, "most_labels")
        settings = {"dimension": self.dimension, "most_labels": most}
        return plan_of("moment_density", settings, private_features.queries(share, 1 - share, most), promise, facts)

    def released(self, data: Data, releases: Releases, stream: Stream) -> MomentModel:
        """Return the model, computed from the releases alone."""
        width = next(chunks(data)).inputs.shape[1]
        public = private_features.sketch(width, self.dimension, self.seed)
        embedding, means = private_features.private_projection(data, releases, public, None)
        return MomentModel(width, embedding, means)

    def _promised(self, plan: Plan, notes: tuple[str, ...]) -> SpentPrivacy:
        return of_plan(plan, 2.0, ADD_REMOVE, notes)
