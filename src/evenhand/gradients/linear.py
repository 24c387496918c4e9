"""Linear layers: a rank-one product per record, or a sum of them over further leading dimensions (time)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.kernels import KEPT_BYTES, chunks, register_kernel, row_squares


class _Rank1:
    """Input (B, in): ``|g_i|^2 (|a_i|^2 + 1)``; nothing is summed within a record, so nothing can cancel."""

    terms = 1
    summed = True

    def __init__(self, x: Tensor, grad: Tensor, trainable: frozenset[str]):
        self.x, self.grad, self.trainable = x, grad, trainable

    def squares(self) -> Tensor:
        squares = row_squares(self.grad)
        if "weight" not in self.trainable:
            return squares
        lengths = row_squares(self.x)
        return squares.mul_(lengths.add_(1.0) if "bias" in self.trainable else lengths)

    def reach(self) -> None:
        return None

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        scaled = self.grad * weights.unsqueeze(1)
        sums = {}
        if "weight" in self.trainable:
            sums["weight"] = scaled.t() @ self.x
        if "bias" in self.trainable:
            sums["bias"] = scaled.sum(0)
        return sums

    def instantiate(self) -> dict[str, Tensor]:
        rows = {}
        if "weight" in self.trainable:
            rows["weight"] = self.grad.unsqueeze(2) * self.x.unsqueeze(1)
        if "bias" in self.trainable:
            rows["bias"] = self.grad
        return rows


class _Summed:
    """Gradients that are sums of outer products: columns (B, T, in) and grad (B, T, out) -> (B, out, in).

    The form is chosen by cost (engine.md): Gram matrices over T when T is short, else the product itself, kept for the
    weighted sum while it fits.
    """

    def __init__(self, x: Tensor, grad: Tensor, trainable: frozenset[str]):
        self.x, self.grad, self.trainable = x, grad, trainable
        self.terms = time = x.shape[1]
        parameters = x.shape[2] * grad.shape[2]
        ghost_cost = 2 * time * time * (x.shape[2] + grad.shape[2]) + 200 * time * time
        self.summed = "weight" not in trainable or ghost_cost >= (0.8 * time + 40) * parameters
        self._kept: Tensor | None = None

    def squares(self) -> Tensor:
        total = torch.zeros(len(self.x), dtype=torch.float64, device=self.x.device)
        if "bias" in self.trainable:
            total += row_squares(self.grad.sum(1))
        if "weight" not in self.trainable:
            return total
        if not self.summed:
            grams = torch.bmm(self.x, self.x.mT), torch.bmm(self.grad, self.grad.mT)
            return total + (grams[0] * grams[1]).sum((1, 2), dtype=torch.float64).clamp_(min=0.0)
        size, shape = len(self.x), (self.grad.shape[2], self.x.shape[2])
        keep = size * shape[0] * shape[1] * self.x.element_size() <= KEPT_BYTES
        buffer = self.x.new_empty((size, *shape)) if keep else None
        for rows in chunks(size, shape[0] * shape[1], 1 << 18):
            out = None if buffer is None else buffer[rows]
            total[rows] += row_squares(torch.bmm(self.grad[rows].mT, self.x[rows], out=out))
        self._kept = buffer
        return total

    def reach(self) -> Tensor:
        reach = row_squares(self.grad)  # Cauchy-Schwarz over time
        if "weight" not in self.trainable:
            return reach * self.terms
        energy = row_squares(self.x)
        return reach.mul_(energy.add_(self.terms) if "bias" in self.trainable else energy)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        sums = {}
        if "weight" in self.trainable and self._kept is not None:
            sums["weight"] = (weights @ self._kept.flatten(1)).view(self._kept.shape[1:])
        scaled = None
        if "bias" in self.trainable or "weight" not in sums:
            scaled = self.grad * weights.view(-1, 1, 1)
        if scaled is not None and "weight" in self.trainable and "weight" not in sums:
            sums["weight"] = scaled.flatten(0, 1).t() @ self.x.flatten(0, 1)
        if scaled is not None and "bias" in self.trainable:
            sums["bias"] = scaled.sum((0, 1))
        return sums

    def instantiate(self) -> dict[str, Tensor]:
        rows = {}
        if "weight" in self.trainable:
            rows["weight"] = torch.bmm(self.grad.mT, self.x)
        if "bias" in self.trainable:
            rows["bias"] = self.grad.sum(1)
        return rows


@register_kernel(nn.Linear)
class LinearKernel:
    """``nn.Linear`` with input (B, ..., in)."""

    def serves(self, module: nn.Linear) -> bool:
        """Every configuration with its own two parameters."""
        return set(module._parameters) == {"weight", "bias"}

    def accepts(self, module: nn.Linear, x: Tensor) -> bool:
        """A batch of vectors or of sequences of them."""
        return x.dim() >= 2

    def forward(self, module: nn.Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the layer itself."""
        return functional.linear(x, module.weight, module.bias), ()

    def input_gradient(self, module: nn.Linear, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """``grad @ weight``."""
        return grad @ module.weight.to(grad.dtype)

    def share(
        self, module: nn.Linear, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]
    ) -> _Rank1 | _Summed:
        """One outer product per record, or a sum of them."""
        if x.dim() == 2:
            return _Rank1(x, grad, trainable)
        return _Summed(x.flatten(1, -2), grad.flatten(1, -2), trainable)
