"""A private projection: class means and second moments of bounded records, released once; directions from them.

Two releases: the mean (to centre by), then second moments with class sums and counts in one vector. What
follows, linear discriminant directions with a ridge for the noise, is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.data.dataset import Data
from evenhand.density.noisy_sums import Chunk, Query, Releases, chunks, total
from evenhand.density.projection_network import orthogonal

CLASS_SUMS = 1.0
COUNTS = 0.3
"""How large class sums and counts are beside the second moments (1) in the released vector."""
RIDGE = 0.25
"""How much of the noise's largest eigenvalue is added to what varies within classes. Found on MNIST, not theory."""
LEAST = 1e-4
"""Rows that reduction or centring leaves shorter than this are divided by it instead of by their norm."""


@dataclass(frozen=True)
class Embedding:
    """From raw features to the space of the density, record by record: ``(unit(x) Q - mean) T``, in float64.

    ``sketch`` (Q) are public random directions, None for all features; ``mean`` and ``matrix`` (T) come from private
    releases, or are absent. After Q and after the mean rows are divided by their norm again (``lengthened``). Fitting
    and prediction both come through here.
    """

    sketch: Tensor | None
    mean: Tensor | None = None
    matrix: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Embed rows of raw features; float64."""
        rows = self.centred(inputs)
        return rows if self.matrix is None else rows @ self.matrix.double()

    def centred(self, inputs: Tensor) -> Tensor:
        """Return the rows before the directions are applied: norm at most 1; float64."""
        if self.sketch is None:
            rows = unit(inputs)
        else:
            wide, norms = _lengths(inputs)
            rows = lengthened((wide @ self.sketch.double()).div_(norms))
        return rows if self.mean is None else lengthened(rows - self.mean.double())


def unit(rows: Tensor) -> Tensor:
    """Divide every row by its norm, so that any record is bounded without a bound to choose; zeros stay zeros.

    In float64 no square of a float32 is lost or overflows, however small or large the row.

    Examples:
      >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e38, 3e38], [1e-45, 0.0]]))
      tensor([[0.6000, 0.8000],
              [0.0000, 0.0000],
              [0.7071, 0.7071],
              [1.0000, 0.0000]], dtype=torch.float64)
    """
    wide, norms = _lengths(rows)
    return wide.div_(norms)


def _lengths(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 rows as new float64 rows, and their norms; 1 for a row of zeros."""
    wide = rows.to(torch.float64, copy=True)
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return wide, norms.masked_fill_(norms == 0, 1.0)


def lengthened(rows: Tensor) -> Tensor:
    """Divide rows by their norm, or by ``LEAST`` if that is larger: rows that are only rounding error stay near zero.

    A record that lies across all directions of the sketch would otherwise become a row of norm 1 that rounding alone
    has chosen, and could choose anew when another record is removed and the chunks change.

    Examples:
      >>> lengthened(torch.tensor([[0.3, 0.4], [1e-17, 0.0]])).norm(dim=1) > 0.5
      tensor([ True, False])
    """
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / norms.clamp(min=LEAST)


def sketch(width: int, dimension: int | None, seed: int) -> Tensor | None:
    """Return public random orthonormal directions, None where all features are kept."""
    if dimension is None or dimension >= width:
        return None
    return orthogonal(width, dimension, torch.Generator().manual_seed(seed))


def queries(mean_share: float, moments_share: float, most_labels: int) -> list[Query]:
    """Return the two queries of a private projection, with their bounds."""
    return [
        Query("mean", mean_share, 1.0),
        Query("moments", moments_share, math.sqrt(1 + most_labels * (CLASS_SUMS**2 + COUNTS**2))),
    ]


def private_projection(
    data: Data, releases: Releases, public: Tensor | None, components: int | None
) -> tuple[Embedding, Tensor]:
    """Make both releases; return the directions that separate the classes best, and the class means in them.

    The vector of a record v with labels y is ``(upper triangle of v v^T with sqrt(2) off the diagonal, v y^T, k y)``:
    its norm is ``sqrt(|v|^4 + |v|^2 |y|^2 + k^2 |y|^2)``, bounded for norm 1 and at most L labels.
    """
    centred = Embedding(public, _mean(data, releases, public))
    second, sums, counts = _moments(data, releases, centred)
    matrix, means = discriminants(second, sums, counts, releases.commits[-1].std, components)
    return Embedding(public, centred.mean, matrix.float()), means.float()


def _mean(data: Data, releases: Releases, public: Tensor | None) -> Tensor:
    def vector(part: Chunk) -> Tensor:
        rows, present = part.usable(Embedding(public).centred(part.inputs))
        return (releases.weights(torch.linalg.vector_norm(rows, dim=1), part.owner) * present) @ rows

    return (releases.release(total(vector(part) for part in chunks(data))) / releases.plan.facts.records).float()


def _moments(data: Data, releases: Releases, centred: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy second moments, class sums and counts, from one release."""

    def vector(part: Chunk) -> Tensor:
        rows, present = part.usable(centred.centred(part.inputs))
        weights = releases.weights(moment_norms(rows, part.labels), part.owner) * present
        rooted, weighted = rows * weights.sqrt().unsqueeze(1), part.labels * weights.unsqueeze(1)
        sums = (rows.T @ weighted).reshape(-1) * CLASS_SUMS
        return torch.cat([upper_triangle(rooted.T @ rooted), sums, weighted.sum(0) * COUNTS])

    noisy = releases.release(total(vector(part) for part in chunks(data)))
    classes, size = len(data.facts.labels), 0 if centred.mean is None else len(centred.mean)
    second, sums, counts = torch.split(noisy, [size * (size + 1) // 2, size * classes, classes])
    return symmetric(second, size), sums.view(size, classes) / CLASS_SUMS, counts / COUNTS


def upper_triangle(square: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix as a vector of equal norm: off-diagonal entries times sqrt(2).

    Examples:
      >>> upper_triangle(torch.tensor([[3.0, 1.0], [1.0, 2.0]]))
      tensor([3.0000, 1.4142, 2.0000])
    """
    rows, columns = torch.triu_indices(len(square), len(square))
    return square[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(square.dtype)


def symmetric(triangle: Tensor, size: int) -> Tensor:
    """Return the matrix of which ``upper_triangle`` gave this triangle.

    Examples:
      >>> symmetric(torch.tensor([3.0, 2.0**0.5, 2.0]), 2)
      tensor([[3., 1.],
              [1., 2.]])
    """
    rows, columns = torch.triu_indices(size, size)
    square = torch.zeros(size, size, dtype=triangle.dtype)
    square[rows, columns] = square[columns, rows] = triangle / torch.where(rows == columns, 1.0, math.sqrt(2.0))
    return square


def moment_norms(rows: Tensor, labels: Tensor) -> Tensor:
    """Compute the norm of every record's vector of second moments, class sums and count.

    Examples:
      >>> moment_norms(torch.tensor([[0.6, 0.8]]), torch.tensor([[1.0, 0.0]])).item() ** 2  # 1 + 1 + 0.09
      2.09...
    """
    squares, many = rows.square().sum(1), labels.square().sum(1)
    return (squares.square() + many * (CLASS_SUMS**2 * squares + COUNTS**2)).sqrt()


def discriminants(
    second: Tensor, sums: Tensor, counts: Tensor, noise: float, components: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute directions in which classes lie apart while records of a class vary by about 1, and class means there.

    Linear discriminant analysis on noisy moments: what is left within classes, its eigenvalues raised by the size of
    the noise (a part of its largest eigenvalue, ``noise sqrt(2 d)``), whitens; the means then span the space.

    Args:
      second: noisy sum of ``v v^T``, symmetric.
      sums: noisy class sums, (d, classes).
      counts: noisy class counts.
      noise: standard deviation of the noise in these sums.
      components: number of directions; default one fewer than classes.
    """
    known = counts.clamp(min=1.0)
    means = sums / known
    total = float(known.sum())
    within = (second - (means * known) @ means.T) / total
    ridge = max(RIDGE * noise * math.sqrt(2 * len(second)) / total, 1e-6 * float(second.diagonal().mean()) / total)
    values, vectors = torch.linalg.eigh(within)
    whiten = vectors / (values.clamp(min=0.0) + ridge).sqrt()
    apart = whiten.T @ (means - means.mean(1, keepdim=True))
    directions = torch.linalg.svd(apart, full_matrices=False)[0][:, : components or max(1, means.shape[1] - 1)]
    matrix = whiten @ directions
    return matrix, means.T @ matrix


@dataclass(frozen=True)
class Features:
    """``z(t) = m^(-1/2) [cos(t w); sin(t w)]`` with public frequencies w ~ N(0, 1/h^2): ``z(s) z(t)`` is about
    ``exp(-|s - t|^2 / (2 h^2))``, and ``|z| = 1`` for every record.

    ``smoothing`` widens the kernel of a record that lies in a sparse place, as paper 002 wants: z is multiplied by
    ``exp(-h'^2 |w|^2 / 2)`` with ``h' = smoothing * h * max(0, r / sqrt(p) - 1)``, where r is the distance to the
    nearest released class mean. The norm can only fall, and h' depends on the record and on private releases alone.

    Examples:
      >>> features = Features.public(2, 500, 1.0, seed=0)
      >>> z = features(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
      >>> bool((z.norm(dim=1) - 1).abs().max() < 1e-6), abs(float(z[0] @ z[1]) - math.exp(-0.5)) < 0.1
      (True, True)
    """

    frequencies: Tensor
    h: float
    smoothing: float = 0.0
    means: Tensor | None = None

    @classmethod
    def public(
        cls, dimension: int, count: int, h: float, seed: int, smoothing: float = 0.0, means: Tensor | None = None
    ) -> Features:
        """Return features with ``count`` frequencies drawn from a public seed."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(dimension, count, generator=generator) / h, h, smoothing, means)

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the features of new records, without extra smoothing."""
        angles = rows @ self.frequencies.to(rows.dtype)
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1) / math.sqrt(self.frequencies.shape[1])

    def smoothed(self, rows: Tensor) -> Tensor:
        """Compute the features of training records; those in sparse places are smoothed more."""
        plain = self(rows)
        if not self.smoothing or self.means is None:
            return plain
        exactly = "donot_use_mm_for_euclid_dist"  # by default more than 25 rows are compared in a cruder way than fewer
        nearest = torch.cdist(rows, self.means.to(rows.dtype), compute_mode=exactly).min(1).values
        extra = self.smoothing * self.h * (nearest / math.sqrt(rows.shape[1]) - 1).clamp(min=0.0)
        damping = torch.exp(-0.5 * extra.square().unsqueeze(1) * self.frequencies.to(rows.dtype).square().sum(0))
        return plain * damping.repeat(1, 2)


def query(share: float, count_weight: float, most_labels: int) -> Query:
    """Return the query of class sums and ``k`` times the counts: its bound is ``sqrt(L (1 + k^2))`` for L labels."""
    return Query("densities", share, math.sqrt(most_labels * (1 + count_weight**2)))


def class_sums(
    data: Data, releases: Releases, embedding: Embedding, features: Features, count_weight: float
) -> tuple[Tensor, Tensor]:
    """Return noisy sums of features, (classes, 2 m), and noisy counts, from one release.

    A record with labels y adds ``(z y^T, k y)``, of norm ``|y| sqrt(|z|^2 + k^2)``: every class that it belongs to is
    counted.
    """

    def vector(part: Chunk) -> Tensor:
        rows, present = part.usable(features.smoothed(embedding(part.inputs)))
        weights = releases.weights(sum_norms(rows, part.labels, count_weight), part.owner) * present
        weighted = part.labels * weights.unsqueeze(1)
        return torch.cat([(weighted.T @ rows).reshape(-1), weighted.sum(0) * count_weight])

    noisy = releases.release(total(vector(part) for part in chunks(data)))
    classes = len(data.facts.labels)
    return noisy[:-classes].view(classes, -1), noisy[-classes:] / count_weight


def sum_norms(rows: Tensor, labels: Tensor, count_weight: float) -> Tensor:
    """Compute the norm of every record's share in the class sums and counts.

    Examples:
      >>> sum_norms(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), 1.0)  # two labels: sqrt(2 (1 + 1))
      tensor([2.])
    """
    return (labels.square().sum(1) * (rows.square().sum(1) + count_weight**2)).sqrt()
