"""``RandomFeatureDensity``: class sums of random features, released once after a private projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenhand import _validate
from evenhand.accounting.budgets import Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density import private_features
from evenhand.density.base_estimator import ADD_REMOVE, PrivateDensity, SpentPrivacy, of_plan
from evenhand.density.noisy_sums import Query, Releases, chunks, plan_of
from evenhand.density.torch_models import RandomFeatureModel
from evenhand.errors import UsageError
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts


class RandomFeatureDensity(PrivateDensity):
    """A kernel density per class from one Gaussian release of class sums and counts; predictions are free.

    With ``private_projection`` two releases come first: the mean of the bounded records, and their second moments with
    class sums, from which the directions are made that tell classes apart. ``shares`` divides the budget between mean,
    moments and densities. The score's noise does not grow with the number of predictions or iterations.

    Args:
      epsilon: promise to every record (add/remove one record); or budgets in ``fit``, or ``noise``.
      delta: default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier instead of a promise.
      dimension: public random directions that features are reduced to first (None: all features). The noise in second
        moments grows with it.
      private_projection: False uses the reduced features as they are, and gives the densities the whole budget.
      shares: of mean, moments and densities in the budget (in z^-2).
      components: directions kept; default one fewer than classes.
      features: random frequencies; twice as many numbers per class are released.
      bandwidth: h of the kernel, where records of a class vary by about 1 in each direction.
      smoothing: how much wider the kernel of a record in a sparse place is (instance-level smoothing), 0 for none.
      count_weight: k, how large a record's count is beside its features.
      most_labels: L, labels of one record that are counted in full; a record with more is scaled down.
      classes: the classes, declared public; default those in the data, printed as a fact.
      seed: public: directions and frequencies. Never the noise.
      insecure_seed: reproducible noise, for research only.
      out: folder for plan, ledger, model and statement, which ``evenhand verify`` checks.
      compose: add this run up with earlier ones on the same data (with ``out``).

    Guarantee:
      Proved and tested (docs/proofs/density.md), add/remove one record.

    Examples:
      >>> import numpy as np
      >>> generator = np.random.default_rng(0)
      >>> y = generator.integers(0, 2, 2000)
      >>> X = generator.normal(size=(2000, 5)) + 3 * y[:, None]
      >>> fitted = RandomFeatureDensity(epsilon=1.0, delta=1e-5, features=100, insecure_seed=0).fit(X, y)
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
        private_projection: bool = True,
        shares: Sequence[float] = (0.03, 0.7, 0.27),
        components: int | None = None,
        features: int = 1000,
        bandwidth: float = 3.0,
        smoothing: float = 0.0,
        count_weight: float = 0.3,
        most_labels: int = 1,
        classes: Sequence[Any] | None = None,
        seed: int = 0,
        insecure_seed: int | None = None,
        out: str | Path | None = None,
        compose: bool = True,
    ) -> None:
        self.epsilon, self.delta, self.noise = epsilon, delta, noise
        self.dimension, self.private_projection, self.shares = dimension, private_projection, shares
        self.components, self.features, self.bandwidth, self.smoothing = components, features, bandwidth, smoothing
        self.count_weight, self.most_labels, self.classes = count_weight, most_labels, classes
        self.seed, self.insecure_seed, self.out, self.compose = seed, insecure_seed, out, compose

    def plan(self, facts: Facts, promise: Promise | None) -> Plan:
        """Plan two releases for the projection if it is private, and one for the densities."""
        _validate.whole(self.features, "features")
        _validate.number(self.bandwidth, "bandwidth", low=1e-6)  # narrower, angles would be made of rounding
        _validate.number(self.count_weight, "count_weight", low=0)
        most = _validate.whole(self.most_labels, "most_labels")
        if self.smoothing and not self.private_projection:
            raise UsageError("smoothing needs private_projection=True: sparse places are told by the released moments.")
        settings = {
            **{name: getattr(self, name) for name in ("dimension", "components", "features", "bandwidth")},
            **{name: getattr(self, name) for name in ("smoothing", "count_weight", "most_labels")},
            **{name: getattr(self, name) for name in ("private_projection",)},
        }
        return plan_of("random_feature_density", settings, self._queries(most), promise, facts)

    def _queries(self, most: int) -> list[Query]:
        if not self.private_projection:
            return [private_features.query(1.0, self.count_weight, most)]
        if len(self.shares) != 3:
            raise UsageError("shares are three numbers that add up to 1: of mean, moments and densities.")
        first, second, third = (float(share) for share in self.shares)
        last = private_features.query(third, self.count_weight, most)
        return [*private_features.queries(first, second, most), last]

    def released(self, data: Data, releases: Releases, stream: Stream) -> RandomFeatureModel:
        """Return the model, computed from the releases alone."""
        width = next(chunks(data)).inputs.shape[1]
        public = private_features.sketch(width, self.dimension, self.seed)
        embedding, means = private_features.Embedding(public), None
        if self.private_projection:
            embedding, means = private_features.private_projection(data, releases, public, self.components)
        inner = width if public is None else public.shape[1]
        size = inner if embedding.matrix is None else embedding.matrix.shape[1]
        features = private_features.Features.public(
            size, self.features, self.bandwidth, self.seed + 1, self.smoothing, means
        )
        sums, counts = private_features.class_sums(data, releases, embedding, features, self.count_weight)
        return RandomFeatureModel(width, embedding, features, sums, counts)

    def _promised(self, plan: Plan, notes: tuple[str, ...]) -> SpentPrivacy:
        return of_plan(plan, 2.0, ADD_REMOVE, notes)


def total_noise(plan: Plan, owner: int = 0) -> float:
    """Return the noise multiplier of one Gaussian release that equals all releases of a plan, for an owner class.

    Examples:
      >>> from evenhand import FixedNoise
      >>> plan = RandomFeatureDensity().plan(Facts(10, (("all", 10),)), FixedNoise(2.0, 1e-5))
      >>> round(total_noise(plan), 9)
      2.0
    """
    return 1 / math.sqrt(sum(count / noise**2 for _, noise, count in plan.events(owner)))
