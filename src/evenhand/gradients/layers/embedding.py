"""Embeddings: a record's gradient has one row per distinct index, the sum of the output gradients at its places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.layers.base import register_kernel
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms


def _first(index: Tensor, entries: int, room: ScratchBuffers) -> Tensor:
    """Return for each place of a row a number below T, equal for places of the same index and no others.

    >>> _first(torch.tensor([[7, 7, 3], [1, 2, 3]]), 1 << 20, ScratchBuffers(lean=True))
    tensor([[1, 1, 0],
            [0, 1, 2]])
    """
    size, times = index.shape
    if room.keeps(size, entries, index):
        # Only what has been written is read, so the table need not be cleared.
        table = room.empty("places", (size, entries), index)
        return table.scatter_(1, index, torch.arange(times, device=index.device).expand(size, -1)).gather(1, index)
    ordered, order = index.sort(dim=1)
    runs = torch.zeros_like(index)
    runs[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    return torch.empty_like(index).scatter_(1, order, runs)


def _table(index: Tensor, rows: Tensor, entries: int) -> Tensor:
    """Return rows (B, T, d) added up by their index (B, T)."""
    place = index.reshape(-1, 1).expand(-1, rows.shape[2])
    return rows.new_zeros(entries, rows.shape[2]).scatter_add_(0, place, rows.reshape(-1, rows.shape[2]))


class _TableRows:
    """Gradients of a table that add numbers to some of its rows."""

    entries: int

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Add scaled rows to those of the table."""
        return {"weight": _table(*self._scaled(weights, rows), self.entries)}

    def _scaled(self, weights: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return indices (B, T) of some records, and what they add there (B, T, d), times the record's weight."""
        raise NotImplementedError


class Lookup(_TableRows):
    """Indices (B, T) and output gradients (B, T, d); places of the padding index carry a zero gradient."""

    joint = 1

    def __init__(self, index: Tensor, grad: Tensor, entries: int, room: ScratchBuffers):
        self.terms = grad.shape[1]
        self.index, self.grad, self.entries, self._room = index, grad, entries, room
        self._summed: tuple[Tensor, Tensor] | None = None

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure the sums over all places of an index."""
        return [gauge(self._sums()[1].flatten(1))]

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Return indices (B, T) and the sums of their places (B, T, d): each index of a record once, with zeros after.

        A sum over records then adds one row per record to a row of the table.
        """
        if self._summed is None and self.terms == 1:
            self._summed = self.index, self.grad
        elif self._summed is None:
            size, times, width = self.grad.shape
            first = _first(self.index, self.entries, self._room)
            rows = torch.arange(size, device=self.index.device).unsqueeze(1) * times
            place = (first + rows).view(-1, 1).expand(-1, width)
            sums = self._room.empty("sums", (size * times, width), self.grad).zero_()
            sums.scatter_add_(0, place, self.grad.reshape(-1, width))
            self._summed = torch.zeros_like(self.index).scatter_(1, first, self.index), sums.view(size, times, width)
        return self._summed

    def reach(self, gauge: RowNorms) -> Tensor | None:
        """Return lengths of all places, added."""
        if self.terms == 1:
            return None
        lengths: Tensor = torch.linalg.vector_norm(self.grad, dim=2)
        return lengths.sum(1, dtype=torch.float64)

    def _scaled(self, weights: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index, sums = (column[rows] for column in self._sums())
        return index, torch.mul(sums, weights.view(-1, 1, 1), out=self._room.empty("scaled", sums.shape, sums))

    def instantiate(self) -> dict[str, Tensor]:
        """Return a table per record."""
        size, _, width = self.grad.shape
        table = self.grad.new_zeros(size, self.entries, width)
        place = self.index.unsqueeze(2).expand(-1, -1, width)
        return {"weight": table.scatter_add_(1, place, self.grad)}


def lookup(index: Tensor, grad: Tensor, entries: int, padding: int | None, room: ScratchBuffers) -> Lookup:
    """Return the share of a table, given indices (B, ...) and the gradients of what was looked up (B, ..., d)."""
    index, grad = index.reshape(len(index), -1), grad.reshape(len(index), -1, grad.shape[-1])
    if padding is not None:
        grad = grad.masked_fill((index == padding).unsqueeze(2), 0.0)
    return Lookup(index.long(), grad, entries, room)


@register_kernel(nn.Embedding)
class EmbeddingKernel:
    """``nn.Embedding`` with indices (B, ...), also with ``padding_idx``."""

    streams = True

    def serves(self, module: nn.Embedding) -> bool:
        """Return whether the layer does not rescale its rows."""
        return set(module._parameters) == {"weight"} and module.max_norm is None

    def inner(self, module: nn.Embedding) -> int:
        """Return 0: a place is an index."""
        return 0

    def accepts(self, module: nn.Embedding, x: Tensor) -> bool:
        """Accept one or more indices per record."""
        return x.dim() >= 1

    def forward(self, module: nn.Embedding, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes."""
        return functional.embedding(x, module.weight), ()

    def input_gradient(self, module: nn.Embedding, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Raise: indices have no gradient."""
        raise AssertionError("indices have no gradient")

    def share(
        self,
        module: nn.Embedding,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Lookup:
        """Return sums over all places of an index."""
        return lookup(x, grad, module.num_embeddings, module.padding_idx, room)


class _Bag(_TableRows):
    """Indices (B, T), output gradients (B, d), and what the gradient is multiplied with at each place (B, T).

    A record's rows are its output gradient times numbers of one sign, so nothing can cancel.
    """

    terms = 1

    def __init__(self, index: Tensor, grad: Tensor, scale: Tensor, entries: int, room: ScratchBuffers):
        self.index, self.grad, self.scale, self.entries, self._room = index, grad, scale, entries, room

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return ``|g|`` times the length of the multiples."""
        place = _first(self.index, self.entries, self._room)
        multiples = torch.zeros_like(self.scale).scatter_add_(1, place, self.scale)
        return [gauge(self.grad).double() * torch.linalg.vector_norm(multiples, dim=1)]

    def reach(self, gauge: RowNorms) -> None:
        """Return None: nothing cancels."""
        return None

    @property
    def joint(self) -> int:
        """Return the size of a bag: every place is added by itself."""
        return self.index.shape[1]

    def _scaled(self, weights: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        scale = self.scale[rows] * weights.unsqueeze(1)
        return self.index[rows], self.grad[rows].unsqueeze(1) * scale.unsqueeze(2)

    def instantiate(self) -> dict[str, Tensor]:
        """Return a table per record."""
        multiples = self.scale.new_zeros(len(self.grad), self.entries).scatter_add_(1, self.index, self.scale)
        return {"weight": multiples.unsqueeze(2) * self.grad.unsqueeze(1)}


@register_kernel(nn.EmbeddingBag)
class EmbeddingBagKernel:
    """``nn.EmbeddingBag`` that adds or averages bags of one size: indices (B, T) and nothing else."""

    def serves(self, module: nn.EmbeddingBag) -> bool:
        """Serve sums and means."""
        return (
            set(module._parameters) == {"weight"}
            and module.mode in ("sum", "mean")
            and module.max_norm is None
            and not module.scale_grad_by_freq
            and not module.sparse
        )

    def accepts(self, module: nn.EmbeddingBag, x: Tensor) -> bool:
        """Accept a bag per record."""
        return x.dim() == 2 and x.shape[1] > 0

    def forward(self, module: nn.EmbeddingBag, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes."""
        return functional.embedding_bag(x, module.weight, mode=module.mode, padding_idx=module.padding_idx), ()

    def input_gradient(self, module: nn.EmbeddingBag, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Raise: indices have no gradient."""
        raise AssertionError("indices have no gradient")

    def share(
        self,
        module: nn.EmbeddingBag,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> _Bag:
        """Return multiples of the output gradient; places of the padding index count for nothing."""
        scale = torch.ones_like(x, dtype=grad.dtype)
        if module.padding_idx is not None:
            scale = (x != module.padding_idx).to(grad.dtype)
        if module.mode == "mean":
            scale = scale / scale.sum(1, keepdim=True).clamp_(min=1.0)
        return _Bag(x.long(), grad, scale, module.num_embeddings, room)
