"""The ordered mechanism (INO-SGM): records in an order, those in the tail counting less, at no cost in sensitivity.

Clip mass is counted from the LEAST important record. At mass y the importance is ``g(y / h)`` for y < h and 1 beyond,
where g rises from the end of the tail to its beginning. A record's score is its mean importance over its own mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.rules.tails import Beta, Column, Tail

if TYPE_CHECKING:
    from torch import Tensor


def scores(masses: Column | Sequence[float], length: float, tail: Tail) -> Column:
    """Mean importance of each record; ``masses`` are clip bounds, from the least important record on.

    Guarantee:
      Inserting a record of mass C anywhere raises the scores of those after it and leaves the others, and
      ``sum_j |change of score_j| mass_j + score C <= C``: docs/proofs/ordered.md.

    Examples:
      >>> scores([1.0, 1.0, 1.0, 1.0], 2.0, Beta())
      array([0.25, 0.75, 1.  , 1.  ])
    """
    masses = np.asarray(masses, dtype=np.float64)
    knots = np.zeros(len(masses) + 1)
    masses.cumsum(out=knots[1:])
    knots /= length
    inside = np.minimum(knots, 1.0)
    area = tail.integral(inside) + (knots - inside)
    found = (area[1:] - area[:-1]) * length / masses
    found[knots[:-1] >= 1.0] = 1.0
    return np.minimum(np.maximum(found, 0.0), 1.0)


def shuffled(record: NDArray[np.int64], step: int) -> NDArray[np.uint64]:
    """A place for every record id, another one at every step, without ties: no data value enters it.

    Examples:
      >>> [int(np.argmin(shuffled(np.arange(10), step))) for step in range(4)]
      [1, 8, 7, 9]
    """
    return _mixed(record.astype(np.uint64) ^ _mixed(np.array([step], dtype=np.uint64)))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64 bits."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def ordered_sum(
    vectors: Tensor, order: Tensor, bounds: Tensor | float, length: float, tail: Tail | None = None
) -> Tensor:
    """The ordered mechanism outside training (INO-SGM): a sum of bounded vectors in which low ``order`` counts less.

    Rows are clipped to ``bounds`` (one, or one per row). ``length`` is in the same units and, like the bounds, must not
    depend on the rows. Ties keep their order. A row with a value that is not finite is left out.

    Guarantee:
      Adding or removing row i moves the sum by at most ``bounds[i]``: add N(0, s^2) noise with s from the largest.

    Examples:
      >>> import torch
      >>> ordered_sum(torch.tensor([[3.0], [0.5], [1.0]]), torch.tensor([9.0, 1.0, 5.0]), 1.0, length=1.0)
      tensor([2.2500], dtype=torch.float64)
    """
    import torch

    kept = torch.isfinite(vectors).all(1) & torch.isfinite(order)
    clip = torch.as_tensor(bounds, dtype=torch.float64).expand(vectors.shape[0])[kept]
    if not bool(((clip > 0) & torch.isfinite(clip)).all()):
        raise UsageError("Every bound must be finite and greater than 0: it is how far its row may move the sum.")
    rows, place = vectors[kept].to(torch.float64), torch.argsort(order[kept], stable=True)
    score = torch.from_numpy(scores(clip[place].numpy(), _validate.number(length, "length", low=0), tail or Beta()))
    norms = torch.linalg.vector_norm(rows[place], dim=1)
    total: Tensor = ((score * (clip[place] / norms).clamp(max=1.0))[:, None] * rows[place]).sum(0)
    return total
