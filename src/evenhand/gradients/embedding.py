"""Embeddings: a record's gradient has one row per distinct index, the sum of the output gradients at its places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.kernels import register_kernel, row_squares


class _Lookup:
    """Indices (B, T) and output gradients (B, T, d); places of the padding index carry a zero gradient."""

    summed = True

    def __init__(self, index: Tensor, grad: Tensor, entries: int):
        self.terms = grad.shape[1]
        self.index, self.grad, self.entries = index, grad, entries

    def squares(self) -> Tensor:
        size, _, width = self.grad.shape
        if self.terms == 1:
            return row_squares(self.grad)
        rows = torch.arange(size, device=self.index.device).unsqueeze(1)
        keys, place = torch.unique((rows * self.entries + self.index).flatten(), return_inverse=True)
        sums = self.grad.new_zeros(len(keys), width).index_add_(0, place, self.grad.reshape(-1, width))
        total = torch.zeros(size, dtype=torch.float64, device=self.grad.device)
        return total.index_add_(0, keys.div(self.entries, rounding_mode="floor"), row_squares(sums))

    def reach(self) -> Tensor | None:
        if self.terms == 1:
            return None
        lengths: Tensor = torch.linalg.vector_norm(self.grad, dim=2)
        return lengths.sum(1, dtype=torch.float64).square_()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        scaled = (self.grad * weights.view(-1, 1, 1)).flatten(0, 1)
        table = scaled.new_zeros(self.entries, scaled.shape[1])
        return {"weight": table.index_add_(0, self.index.flatten(), scaled)}

    def instantiate(self) -> dict[str, Tensor]:
        size, _, width = self.grad.shape
        table = self.grad.new_zeros(size, self.entries, width)
        place = self.index.unsqueeze(2).expand(-1, -1, width)
        return {"weight": table.scatter_add_(1, place, self.grad)}


@register_kernel(nn.Embedding)
class EmbeddingKernel:
    """``nn.Embedding`` with indices (B, ...), also with ``padding_idx``."""

    def serves(self, module: nn.Embedding) -> bool:
        """Every configuration that does not rescale its rows."""
        return set(module._parameters) == {"weight"} and module.max_norm is None

    def accepts(self, module: nn.Embedding, x: Tensor) -> bool:
        """One or more indices per record."""
        return x.dim() >= 1

    def forward(self, module: nn.Embedding, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the layer itself."""
        return functional.embedding(x, module.weight), ()

    def input_gradient(self, module: nn.Embedding, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Never asked for."""
        raise AssertionError("indices have no gradient")

    def share(
        self, module: nn.Embedding, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]
    ) -> _Lookup:
        """Sums over all places of an index."""
        index, grad = x.reshape(len(x), -1), grad.reshape(len(x), -1, grad.shape[-1])
        if module.padding_idx is not None:
            grad = grad.masked_fill((index == module.padding_idx).unsqueeze(2), 0.0)
        return _Lookup(index.long(), grad, module.num_embeddings)
