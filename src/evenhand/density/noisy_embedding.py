"""``NoisyEmbeddingDensity``: every record released once with noise for its own budget; densities over those rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from evenhand import _validate
from evenhand.accounting.budgets import FixedNoise, Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density import private_features
from evenhand.density.base_estimator import ADD_REMOVE, REPLACE_ONE, PrivateDensity, SpentPrivacy, of_plan
from evenhand.density.kernel_density import Bandwidth
from evenhand.density.noisy_sums import Query, Releases, chunks, plan_of
from evenhand.density.private_features import Embedding
from evenhand.density.torch_models import NoisyEmbeddingModel
from evenhand.errors import UsageError
from evenhand.mechanism.random_streams import Stream
from evenhand.types import Facts

_LABELS = "LABELS ARE PUBLIC: they were released as they are and nothing protects them (labels='public')."
_RELATION = (
    "Replace one: a record is exchanged for any other of the same owner. Add/remove holds for a public number of rows "
    "per owner, where a missing record leaves a row of zeros. Which owner a row belongs to is public."
)


class NoisyEmbeddingDensity(PrivateDensity):
    """Paper 002's idea made sound: noise on each record's embedding, as much as that record's budget needs.

    The embedding is public (random directions, norm 1); the label is protected in the same vector. Everything after
    the release (bandwidths, densities, predictions) is free. Each record protects itself, without the help of a crowd,
    so small budgets cost far more accuracy than in ``RandomFeatureDensity``.

    The promise is for REPLACE ONE record by default, unlike in the rest of evenhand; ``privacy_`` always gives the
    add/remove figure too. Ledger and statement of a run folder count in add/remove, with the number of rows public; a
    warning in the statement says so and gives the epsilon of replacing one.

    Args:
      epsilon: promise to every record under ``adjacency``; or budgets in ``fit``, one per record even, or ``noise``.
      delta: default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier (add/remove) instead of a promise.
      adjacency: "replace one" or "add/remove".
      dimension: public random directions that features are reduced to (None: all).
      labels: "protected", or "public" where everybody knows them; the statement then says so.
      label_weight: k, how large the label is beside the embedding of norm 1.
      most_labels: L, labels of one record that are counted in full.
      bandwidth: of the kernel, in units of the row's noise.
      extra: extra bandwidth of rows in sparse places, see ``Bandwidth``; 0 for none (needs all pairs of rows).
      k: neighbours that tell how sparse a place is.
      quantile: which share of rows counts as sparse.
      classes: the classes, declared public.
      seed: public: the directions. Never the noise.
      insecure_seed: reproducible noise, for research only.
      out: folder for plan, ledger, model and statement.
      compose: add this run up with earlier ones on the same data (with ``out``).

    Guarantee:
      Proved and tested (docs/proofs/density.md), for each record by its own budget.

    Examples:
      >>> import numpy as np
      >>> generator = np.random.default_rng(0)
      >>> y = generator.integers(0, 2, 3000)
      >>> X = generator.normal(size=(3000, 2)) + 5 * (2 * y[:, None] - 1)
      >>> fitted = NoisyEmbeddingDensity(delta=1e-5, insecure_seed=0).fit(X, y, budgets=[4.0, 8.0] * 1500)
      >>> bool(fitted.score(X, y) > 0.9), fitted.privacy_.adjacency
      (True, 'replace one')
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise: float | None = None,
        adjacency: Literal["replace one", "add/remove"] = "replace one",
        dimension: int | None = 16,
        labels: Literal["protected", "public"] = "protected",
        label_weight: float = 1.0,
        most_labels: int = 1,
        bandwidth: float = 1.0,
        extra: float = 0.0,
        k: int = 5,
        quantile: float = 0.5,
        classes: Sequence[Any] | None = None,
        seed: int = 0,
        insecure_seed: int | None = None,
        out: str | Path | None = None,
        compose: bool = True,
    ) -> None:
        self.epsilon, self.delta, self.noise, self.adjacency = epsilon, delta, noise, adjacency
        self.dimension, self.labels, self.label_weight, self.most_labels = dimension, labels, label_weight, most_labels
        self.bandwidth, self.extra, self.k, self.quantile, self.classes = bandwidth, extra, k, quantile, classes
        self.seed, self.insecure_seed, self.out, self.compose = seed, insecure_seed, out, compose

    @property
    def _weight(self) -> float:
        return float(self.label_weight) if self.labels == "protected" else 0.0

    def plan(self, facts: Facts, promise: Promise | None) -> Plan:
        """Plan one release of all rows; its noise is raised where replacing a record was promised."""
        _validate.known(self.adjacency, (REPLACE_ONE, ADD_REMOVE), "adjacency")
        _validate.known(self.labels, ("protected", "public"), "way to treat labels")
        _validate.number(self.label_weight, "label_weight", low=0)
        _validate.number(self.bandwidth, "bandwidth", low=0)
        most = _validate.whole(self.most_labels, "most_labels")
        settings = {
            name: getattr(self, name)
            for name in ("adjacency", "dimension", "labels", "bandwidth", "extra", "k", "quantile")
        } | {"label_weight": self._weight, "most_labels": most}
        factor = replacing(self._weight, most)
        settings["replacing_factor"] = factor
        plan = plan_of("noisy_embedding_density", settings, [query(self._weight, most)], promise, facts)
        if self.labels == "public":
            if self.out is not None:
                raise UsageError(
                    "A run folder's statement covers whole records, and here labels would be public: fit without out= "
                    "and share privacy_, or protect them with labels='protected'."
                )
            plan = dataclasses.replace(plan, unit="one record's features; labels are public")
        strict = self.adjacency == REPLACE_ONE and not isinstance(promise, FixedNoise)
        return stricter(plan, factor) if strict else plan

    def released(self, data: Data, releases: Releases, stream: Stream) -> NoisyEmbeddingModel:
        """Return the model, computed from the releases alone."""
        width = next(chunks(data)).inputs.shape[1]
        public = private_features.Embedding(private_features.sketch(width, self.dimension, self.seed))
        points, labels, owner = noisy_rows(data, releases, public, self._weight, stream)
        scales = torch.tensor(releases.plan.scales, dtype=torch.float64)[owner]
        variance = (self.bandwidth * releases.commits[0].std / scales) ** 2
        if self.extra:
            if len(points) <= self.k:
                raise UsageError(f"{self.k} neighbours need more than {self.k} records: pass a smaller k.")
            variance = variance * Bandwidth(1.0, self.k, self.quantile, self.extra).variances(points.float())
        return NoisyEmbeddingModel(width, public, points, labels, variance, 2 * scales.log())

    def _promised(self, plan: Plan, notes: tuple[str, ...]) -> SpentPrivacy:
        more = (_RELATION,) if self._weight else (_RELATION, _LABELS)
        return of_plan(plan, replacing(self._weight, int(self.most_labels)), self.adjacency, notes + more)


def query(label_weight: float, most_labels: int) -> Query:
    """Return the query of all rows; its bound is a row's norm: so far adding or removing a record moves the rows."""
    return Query("rows", 1.0, math.sqrt(1 + most_labels * label_weight**2))


def replacing(label_weight: float, most_labels: int) -> float:
    """Return how much further replacing a record moves the rows than adding or removing it.

    Examples:
      >>> replacing(0.0, 1)  # without labels: 2, from one end of the ball to the other
      2.0
    """
    return math.sqrt((4 + 2 * most_labels * label_weight**2) / (1 + most_labels * label_weight**2))


def stricter(plan: Plan, factor: float) -> Plan:
    """Return the plan with ``factor`` times the noise: its add/remove promise then holds for replace one.

    Examples:
      >>> from evenhand.density.base_estimator import replaced
      >>> from evenhand.density.noisy_sums import plan_of
      >>> from evenhand import Privacy
      >>> from evenhand.types import Facts
      >>> plan = plan_of("rows", {}, [query(0.0, 1)], Privacy(1.0, 1e-5), Facts(100, (("all", 100),)))
      >>> 2.1 < replaced(plan, 2.0)[0] < 2.3, replaced(stricter(plan, 2.0), 2.0)[0] <= 1
      (True, True)
    """
    levels = tuple(dataclasses.replace(level, noise=factor * level.noise) for level in plan.levels)
    louder = dataclasses.replace(plan, levels=levels)
    return dataclasses.replace(louder, epsilons=louder.spent_by_owner())


def noisy_rows(
    data: Data, releases: Releases, embedding: Embedding, label_weight: float, stream: Stream
) -> tuple[Tensor, Tensor, Tensor]:
    """Release every record's row once: (points, labels, owner), in a secret order; labels as unbiased estimates.

    Rows of owner class k carry ``std / scale_k`` of noise in each coordinate. ``label_weight`` 0 releases no labels:
    the true ones come back, and the statement must say that labels are public. The embedding alone is clipped to norm 1
    too: the bound for replace one rests on that.
    """
    scales = torch.tensor(releases.plan.scales, dtype=torch.float64)
    rows, owners, true = [], [], []
    for part in chunks(data):
        points, present = part.usable(embedding.centred(part.inputs))
        short = points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp(min=1.0)
        both = torch.cat([short, label_weight * part.labels], dim=1)
        weights = releases.weights(torch.linalg.vector_norm(both, dim=1), part.owner) * present
        rows.append(both * weights.unsqueeze(1))
        owners.append(part.owner)
        true.append(part.labels)
    order = torch.from_numpy(np.argsort(stream.uniforms("sampling", 0, len(data)), kind="stable"))
    table, owner, labels = (torch.cat(column)[order] for column in (rows, owners, true))
    width = table.shape[1] - labels.shape[1]
    released = table if label_weight else table[:, :width]
    owner = releases.beside("owner", owner)
    noisy = releases.release(released, dimension=released.shape[1]) / scales[owner].unsqueeze(1)
    return noisy[:, :width], noisy[:, width:] / label_weight if label_weight else labels, owner
