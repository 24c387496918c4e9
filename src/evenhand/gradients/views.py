"""Several views of a record: one loss, their mean, so that the record still has one gradient and one bound.

Inputs have the views in their second dimension. The model sees them as ``records * views`` rows, the views of a record
next to each other, and what a layer leaves of them is added up before a norm is taken. The records of a person are
such views too, with a share of the mean for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import LossFn, logits, reads_logits, unwrapped
from evenhand.gradients.layers.base import Instantiated, Share
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms, chunks

if TYPE_CHECKING:
    from evenhand.gradients.model_layout import ServedLayer

CHUNK = 1 << 20
"""Elements of instantiated gradients at a time."""


class Viewed(nn.Module):
    """A model over inputs (B, K, ...): outputs are (B, K, ...) too. Parameters stay those of the model.

    >>> Viewed(nn.Linear(3, 2), 4)(torch.ones(5, 4, 3)).shape
    torch.Size([5, 4, 2])
    """

    takes_shared = True
    """What all records share comes wrapped: it has no views."""

    def __init__(self, model: nn.Module, views: int):
        super().__init__()
        self.model, self.views = model, views

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return all views as rows of one batch."""
        args, kwargs = unwrapped(tree_map_only(Tensor, self._flat, (args, kwargs)))
        outputs = self.model(*args, **kwargs)
        outputs = outputs if isinstance(outputs, Tensor | dict | tuple | list) else logits(outputs)
        return tree_map_only(Tensor, lambda out: _split(out, self.views), outputs)

    def _flat(self, value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != self.views:
            raise UsageError(f"inputs must have {self.views} views in their second dimension")
        return value.flatten(0, 1)


def mean_loss(loss_fn: LossFn, views: int) -> LossFn:
    """Return the mean over the views of a record, for the outputs of `Viewed`.

    >>> mean_loss(lambda out, y: (out[:, 0] - y).abs(), 2)(torch.tensor([[[1.0], [3.0]]]), torch.tensor([1.0]))
    tensor([1.])
    """

    def loss(outputs: Any, targets: Any) -> Tensor:
        outputs = logits(outputs) if reads_logits(loss_fn) else outputs
        flat = tree_map_only(Tensor, lambda out: out.flatten(0, 1), outputs)
        each = tree_map_only(Tensor, lambda wanted: wanted.repeat_interleave(views, 0), targets)
        values = loss_fn(flat, each)
        return values.view(-1, views).mean(1) if values.dim() == 1 else values

    return loss


def mean_of_persons(loss_fn: LossFn, slots: int, views: int = 1) -> LossFn:
    """Return the mean over the records of a person, for the outputs of `Viewed` and targets ``(targets, shares)``.

    ``targets`` have ``slots`` records of each person in their second dimension, and ``shares`` what each of them counts
    in the person's mean: 0 for a place that is not used. Every record has ``views`` views.

    >>> targets, shares = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> outputs = torch.tensor([[[3.0], [9.0]], [[2.0], [5.0]]])
    >>> mean_of_persons(lambda out, y: (out[:, 0] - y).abs(), 2)(outputs, (targets, shares))
    tensor([2., 3.])
    """

    def loss(outputs: Any, targets: Any) -> Tensor:
        wanted, shares = targets
        outputs = logits(outputs) if reads_logits(loss_fn) else outputs
        flat = tree_map_only(Tensor, lambda out: out.flatten(0, 1), outputs)
        each = tree_map_only(Tensor, lambda part: part.flatten(0, 1).repeat_interleave(views, 0), wanted)
        values = loss_fn(flat, each)
        if values.dim() != 1:
            return values
        weighted: Tensor = values.view(-1, slots, views).mean(2) * shares.to(values.dtype)
        return weighted.sum(1)

    return loss


def rows_of(rows: Tensor, views: int) -> Tensor:
    """Return the rows that the views of some records are.

    >>> rows_of(torch.tensor([2, 0]), 3)
    tensor([6, 7, 8, 0, 1, 2])
    """
    return (rows.unsqueeze(1) * views + torch.arange(views, device=rows.device)).flatten()


def share_of(site: ServedLayer, tensors: tuple[Tensor, ...], views: int, room: ScratchBuffers) -> Share:
    """Return what a call of a layer on all views adds to the gradients of the records."""
    if site.inner is not None:  # it does the same at every place: views are further places of a record
        return site.share(tuple(_split(t, views) for t in tensors), room)
    added = _Added(site, tensors, views, room)
    if room.keeps(added.size, added.row, tensors[0]):
        return Instantiated(added.instantiate(), added.terms, added.reach)
    return added


def _split(rows: Tensor, views: int) -> Tensor:
    return rows.reshape(-1, views, *rows.shape[1:])


class _Added:
    """Gradients of a layer's rows, added up over the views of each record, and not held."""

    def __init__(self, site: ServedLayer, tensors: tuple[Tensor, ...], views: int, room: ScratchBuffers):
        self._site, self._tensors, self._views, self._room = site, tensors, views, ScratchBuffers(lean=True)
        self._rows = site.share(tensors, room)
        self.terms = self._rows.terms * views
        self.size, self.row = len(tensors[0]) // views, sum(p.numel() for p in site.parameters.values())

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure the gradients of a few records at a time."""
        parts = [[gauge.passing(rows) for rows in self._summed(part).values()] for part in self._parts()]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _parts(self) -> list[slice]:
        return chunks(self.size, self._views * self.row, CHUNK)

    def _summed(self, part: slice) -> dict[str, Tensor]:
        rows = slice(part.start * self._views, part.stop * self._views)
        gradients = self._site.share(tuple(t[rows] for t in self._tensors), self._room).instantiate()
        return {name: _split(g, self._views).sum(1) for name, g in gradients.items()}

    def reach(self, gauge: RowNorms) -> Tensor:
        """Add up over the views."""
        reach = self._rows.reach(gauge)
        if reach is None:
            reach = torch.linalg.vector_norm(torch.stack([part.double() for part in self._rows.lengths(gauge)]), dim=0)
        return reach.double().view(-1, self._views).sum(1)

    @property
    def joint(self) -> int:
        """Return the terms of all views."""
        return self._views * self._rows.joint

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Sum each view with the weight of its record."""
        every = slice(rows.start * self._views, rows.stop * self._views)
        return self._rows.weighted_sum(weights.repeat_interleave(self._views), every)

    def measured(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the gradients of these records, by the operations that measured them."""
        every = rows_of(rows, self._views)
        gradients = self._site.share(tuple(t[every] for t in self._tensors), self._room).instantiate()
        return {name: _split(g, self._views).sum(1) for name, g in gradients.items()}

    def instantiate(self) -> dict[str, Tensor]:
        """Return all records."""
        parts = [self._summed(part) for part in self._parts()]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
