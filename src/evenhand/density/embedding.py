"""Noisy embedding: every record released on its own, with noise for its own budget. All that follows is free.

A record is ``(x, k y)``: its embedding of norm 1 and its labels. Two relations between neighbouring datasets:

* replace one: one record's row changes; the row moves by at most ``sqrt(4 + 2 L k^2)``. This is the usual reading.
* add/remove, with a PUBLIC number of rows per owner: a missing record leaves a row of zeros, and rows are shuffled by a
  secret order, so that they do not tell who came before whom; a row moves by at most ``sqrt(1 + L k^2)``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.density.chunks import chunks
from evenhand.density.moments import Embedding
from evenhand.density.summing import Query, Releases
from evenhand.mechanism.random_streams import Stream


def query(label_weight: float, most_labels: int) -> Query:
    """The norm of a record's row, which is also how far adding or removing it moves the released rows."""
    return Query("rows", 1.0, math.sqrt(1 + most_labels * label_weight**2))


def replacing(label_weight: float, most_labels: int) -> float:
    """How much further replacing a record moves the rows than adding or removing it.

    Examples:
      >>> replacing(0.0, 1)  # without labels: 2, from one end of the ball to the other
      2.0
    """
    return math.sqrt((4 + 2 * most_labels * label_weight**2) / (1 + most_labels * label_weight**2))


def stricter(plan: Plan, factor: float) -> Plan:
    """The plan with so many times the noise: what was calibrated for add/remove then holds for replace one.

    Examples:
      >>> from evenhand.density.promises import replaced
      >>> from evenhand.density.summing import plan_of
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
