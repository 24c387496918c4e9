"""Conv2d: the gradient of a record is its output gradient times the patches that the kernel saw."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.kernels import KEPT_BYTES, chunks, register_kernel, row_squares

CHUNK = 1 << 19
"""Elements of patches unfolded at a time; a few of them fit the cache."""


def _pads(module: nn.Conv2d) -> tuple[int, int, int, int]:
    """Zeros added left, right, above and below, as ``functional.pad`` takes them."""
    sides = []
    for axis in (1, 0):
        if module.padding == "valid":
            sides += [0, 0]
        elif module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(module.padding[axis])] * 2
    return sides[0], sides[1], sides[2], sides[3]


class _Patches:
    """Padded input (B, C, H, W) and output gradient (B, O, h, w); patches are unfolded a few records at a time.

    Gram matrices over the pixels where they are few and the layer is wide, else the product itself, kept if it fits.
    """

    def __init__(self, module: nn.Conv2d, x: Tensor, grad: Tensor, trainable: frozenset[str]):
        self.module, self.x, self.grad, self.trainable = module, x, grad, trainable
        self.groups, self.shape = module.groups, module.weight.shape
        columns, pixels = self.shape[1] * self.shape[2] * self.shape[3], grad.shape[2] * grad.shape[3]
        self.terms, parameters = pixels, self.shape[0] * columns
        ghost_cost = 2 * pixels**2 * (columns * self.groups + self.shape[0]) + 200 * pixels**2
        self.summed = "weight" not in trainable or ghost_cost >= 20 * parameters
        self._row = columns * self.groups * pixels
        self._kept: Tensor | None = None

    def _unfold(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Output gradients (b * groups, O / groups, T) and patches (b * groups, columns, T) of some records."""
        x, grad, module = self.x[rows].contiguous(), self.grad[rows], self.module
        (sb, sc, sh, sw), (kh, kw) = x.stride(), module.kernel_size
        (dh, dw), (th, tw) = module.dilation, module.stride
        view = x.as_strided((len(x), x.shape[1], kh, kw, *grad.shape[2:]), (sb, sc, sh * dh, sw * dw, sh * th, sw * tw))
        pixels = grad.shape[2] * grad.shape[3]
        count = len(x) * self.groups
        patches = view.reshape(count, -1, pixels)
        return grad.reshape(count, -1, pixels), patches

    def squares(self) -> Tensor:
        total = torch.zeros(len(self.x), dtype=torch.float64, device=self.x.device)
        if "bias" in self.trainable:
            total += row_squares(self.grad.sum((2, 3)))
        if "weight" not in self.trainable:
            return total
        keep = self.summed and len(self.x) * self.shape.numel() * self.x.element_size() <= KEPT_BYTES
        kept = self.x.new_empty(len(self.x), *self.shape) if keep else None
        for rows in chunks(len(self.x), self._row, CHUNK):
            grad, patches = self._unfold(rows)
            count = rows.stop - rows.start
            if not self.summed:
                grams = torch.bmm(patches.mT, patches).mul_(torch.bmm(grad.mT, grad))
                total[rows] += grams.view(count, -1).sum(1, dtype=torch.float64).clamp_(min=0.0)
                continue
            out = None if kept is None else kept[rows].view(len(grad), grad.shape[1], -1)
            total[rows] += row_squares(torch.bmm(grad, patches.mT, out=out).view(count, -1))
        self._kept = kept
        return total

    def reach(self) -> Tensor:
        reach = row_squares(self.grad)  # Cauchy-Schwarz over the pixels; measured 1.0 to 1.4 times the sum itself
        if "weight" not in self.trainable:
            return reach * self.terms
        sizes = zip(self.module.kernel_size, self.module.stride, strict=True)
        overlap = math.prod(-(-size // stride) for size, stride in sizes)
        energy = row_squares(self.x).mul_(overlap)
        return reach.mul_(energy.add_(self.terms) if "bias" in self.trainable else energy)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        sums = {}
        if "weight" in self.trainable and self._kept is not None:
            sums["weight"] = (weights @ self._kept.flatten(1)).view(self.shape)
        if "bias" in self.trainable:
            sums["bias"] = weights @ self.grad.sum((2, 3))
        if "weight" in self.trainable and self._kept is None:
            scaled = self.grad * weights.view(-1, 1, 1, 1)
            wanted = [False, True, False]
            sums["weight"] = torch.ops.aten.convolution_backward(
                scaled,
                self.x,
                self.module.weight.to(scaled.dtype),
                None,
                self.module.stride,
                (0, 0),
                self.module.dilation,
                False,
                (0, 0),
                self.groups,
                wanted,
            )[1]
        return sums

    def instantiate(self) -> dict[str, Tensor]:
        rows = {}
        if "weight" in self.trainable:
            grad, patches = self._unfold(slice(0, len(self.x)))
            rows["weight"] = torch.bmm(grad, patches.mT).view(len(self.x), *self.shape)
        if "bias" in self.trainable:
            rows["bias"] = self.grad.sum((2, 3))
        return rows


@register_kernel(nn.Conv2d)
class Conv2dKernel:
    """``nn.Conv2d`` with zero padding of any amount, stride, dilation and groups."""

    def serves(self, module: nn.Conv2d) -> bool:
        """Zero padding; other padding modes take the fallback."""
        return set(module._parameters) == {"weight", "bias"} and module.padding_mode == "zeros"

    def accepts(self, module: nn.Conv2d, x: Tensor) -> bool:
        """A batch of images; a single image has no batch dimension."""
        return x.dim() == 4

    def forward(self, module: nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the layer itself."""
        out = functional.conv2d(
            x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups
        )
        return out, ()

    def input_gradient(self, module: nn.Conv2d, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """By the transposed convolution; uneven padding is added first and cut off again."""
        left, right, top, bottom = pads = _pads(module)
        even = left == right and top == bottom
        wanted = [True, False, False]
        dx: Tensor = torch.ops.aten.convolution_backward(
            grad,
            x if even else functional.pad(x, pads),
            module.weight.to(grad.dtype),
            None,
            module.stride,
            (top, left) if even else (0, 0),
            module.dilation,
            False,
            (0, 0),
            module.groups,
            wanted,
        )[0]
        return dx if even else functional.pad(dx, tuple(-side for side in pads))

    def share(
        self, module: nn.Conv2d, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]
    ) -> _Patches:
        """Output gradients times patches."""
        pads = _pads(module)
        return _Patches(module, functional.pad(x, pads) if any(pads) else x, grad, trainable)
