"""Convolutions in one, two and three dimensions: a record's gradient is its output gradient times the patches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.layers.base import WeightAndBias, register_kernel
from evenhand.gradients.layers.conv_patches import Geometry, Patches, gram_lengths, patches_of
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms, chunks

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Pads = Sequence[tuple[int, int]]
"""Before and after the input along each dimension."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that is no layer: its weight may be made of parameters.

    >>> Convolution(torch.ones(4, 2, 3), (1,), (1,), 1).kernel_size
    (3,)
    """

    weight: Tensor
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Return the sizes of the kernel along each dimension."""
        return tuple(self.weight.shape[2:])


Convolves = Conv | Convolution


def flat(pads: Pads) -> list[int]:
    """Return the pads as ``functional.pad`` takes them: the last dimension first.

    >>> flat([(1, 2), (3, 4)])
    [3, 4, 1, 2]
    """
    return [side for pair in reversed(pads) for side in pair]


def pads_of(module: Conv) -> Pads:
    """Return what is added before and after the input along each dimension.

    >>> pads_of(nn.Conv2d(1, 1, (2, 3), padding="same"))
    [(0, 1), (1, 1)]
    """
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in module.padding]


def surrounded(module: Conv, x: Tensor) -> tuple[Tensor, Pads]:
    """Return the input, and the zeros that belong around it; padding that is not zero is added now.

    >>> surrounded(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), torch.tensor([[[1.0, 2.0]]]))
    (tensor([[[2., 1., 2., 1.]]]), [(0, 0)])
    """
    pads = pads_of(module)
    if module.padding_mode == "zeros":
        return x, pads
    return functional.pad(x, flat(pads), mode=module.padding_mode), [(0, 0)] * len(pads)


SCALED = 1 << 21
"""Elements of the output gradient scaled at a time."""


def ghost_is_cheaper(geometry: Geometry, channels: int, outputs: int, groups: int, keep: bool) -> bool:
    """Return whether inner products of pixels and one more convolution cost less than the gradients of all records.

    The figures are nanoseconds per record, measured with one thread for the layers of usual networks.

    >>> few, many = (Geometry((n, n), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (n, n)) for n in (4, 32))
    >>> ghost_is_cheaper(few, 512, 512, 1, keep=True), ghost_is_cheaper(many, 64, 64, 1, keep=True)
    (True, False)
    """
    pixels, places = math.prod(geometry.size), math.prod(geometry.out)
    parameters = channels // groups * outputs * math.prod(geometry.kernel)
    convolution = parameters * places / 60
    squares = (pixels**2 * channels + places**2 * outputs) / 27
    ghost = squares + 6 * groups * pixels * places + channels * pixels + outputs * places + convolution
    return ghost < parameters * places / 55 + (0.8 * parameters if keep else 0.3 * parameters + convolution)


class Convolved(WeightAndBias):
    """Input (B, C, *size) and output gradient (B, O, *out) of a convolution with zero padding.

    Three forms, chosen by cost: inner products of pixels where they are few and the layer is wide; the gradients of all
    records, kept for the weighted sum; or the gradients for the norm only and the sum by a convolution, where memory
    counts.
    """

    def __init__(
        self, module: Convolves, x: Tensor, pads: Pads, grad: Tensor, trainable: frozenset[str], room: ScratchBuffers
    ):
        self.grad, self.trainable, self._room = grad, trainable, room
        self._module, self._groups, self._shape = module, module.groups, module.weight.shape
        before, after = zip(*pads, strict=True)
        steps = module.kernel_size, module.stride, module.dilation
        whole = Geometry(tuple(x.shape[2:]), *steps, before, after, tuple(grad.shape[2:]))
        self.x, self._geometry = _seen(x, whole, room)
        self.terms = math.prod(grad.shape[2:])
        self._weighs, self._biased = "weight" in trainable, "bias" in trainable
        self._keep = room.keeps(len(x), self._shape.numel(), x)
        self._ghost = ghost_is_cheaper(self._geometry, x.shape[1], grad.shape[1], self._groups, self._keep)
        self._kept: Tensor | None = None
        self._reach: Tensor | None = None
        self._sums: Tensor | None = None

    @property
    def by_pixels(self) -> bool:
        """Return whether the weight is measured by inner products in float64."""
        return self._ghost

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure by the chosen form."""
        lengths = [gauge(self._bias())] if self._biased else []
        if not self._weighs:
            return lengths
        if not self._ghost:
            return [*lengths, *self._by_product(gauge)]
        norms, self._reach = gram_lengths(self._geometry, self.x, self.grad, self._groups, self._room)
        return [*lengths, gauge(norms.unsqueeze(1))]

    def _by_product(self, gauge: RowNorms) -> list[Tensor]:
        """Compute everything about a few records while they are in the cache."""
        measure = gauge if self._keep else gauge.passing
        lengths, inputs, outputs = [], [], []
        buffer, parts = self._products(self._keep)
        for rows, product in parts:
            size = rows.stop - rows.start
            if product.is_contiguous():
                lengths.append(measure(product.view(len(product) * size, -1)).view(len(product), -1))
            else:
                lengths.append(torch.stack([measure(kernel_row.view(size, -1)) for kernel_row in product]))
            inputs.append(gauge(self.x[rows]))
            outputs.append(gauge(self.grad[rows]))
        self._kept = buffer if self._keep else None
        self._reach = self.bound(torch.cat(inputs), torch.cat(outputs))
        return list(torch.cat(lengths, dim=1).unbind())

    def _patches(self) -> Patches:
        return patches_of(self._geometry, self.x, self.grad, self._groups, self._room)

    def _products(self, apart: bool) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        """Return a buffer (kernel rows, records * groups, ...), and what fills it with a few records at a time.

        Each record is in memory of its own if ``apart``; else all parts are written to the same place.
        """
        patches = self._patches()
        parts = patches.parts()
        each = patches.shape(1)[1]
        buffer = self._room.empty("products", patches.shape(len(self.x) if apart else parts[0].stop), self.x)

        def filled() -> Iterator[tuple[slice, Tensor]]:
            for rows in parts:
                start = rows.start if apart else 0
                target = buffer[:, start * each : (start + rows.stop - rows.start) * each]
                yield rows, patches.multiply(rows, target)

        return buffer, filled()

    def _bias(self) -> Tensor:
        if self._sums is None:
            self._sums = self.grad.flatten(2).sum(2)
        return self._sums

    def reach(self, gauge: RowNorms) -> Tensor:
        """Bound by Cauchy-Schwarz over the pixels: measured 1.0 to 1.4 times the sum itself."""
        if self._reach is not None:
            return self._reach
        if not self._weighs:
            return gauge(self.grad).double() * math.sqrt(self.terms)
        return self.bound(gauge(self.x), gauge(self.grad))

    def bound(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the reach of records whose inputs and output gradients have these lengths."""
        energy = inputs.double().square_().mul_(self._geometry.overlap)
        return outputs.double() * (energy + self.terms).sqrt_()

    @property
    def joint(self) -> int:
        """Return 1 where the gradients are kept, else the number of pixels."""
        return 1 if self._kept is not None or not self._weighs else self.terms

    def _weight_sum(self, weights: Tensor, rows: slice) -> Tensor:
        """Sum the kept gradients, or take torch's own weight gradient."""
        gradients = self._kept
        return self._convolution(weights, rows) if gradients is None else self._combined(weights, rows, gradients)

    def _combined(self, weights: Tensor, rows: slice, gradients: Tensor) -> Tensor:
        """Take one product with the gradients of these records for every kernel row."""
        block = gradients.view(len(gradients), len(self.x), -1)[:, rows]
        return self._patches().weight(torch.bmm(weights.expand(len(gradients), 1, -1), block))[0]

    def _convolution(self, weights: Tensor, rows: slice) -> Tensor:
        """Return torch's weight gradient of the scaled output gradient, a few records at a time."""
        column, x, grad = weights.view(-1, *[1] * (self.grad.dim() - 1)), self.x[rows], self.grad[rows]
        parts = chunks(len(weights), grad[0].numel(), SCALED)
        of = self._geometry
        pads = list(zip(of.before, of.after, strict=True))
        total: Tensor | None = None
        for part in parts:
            block = grad[part]
            scaled = torch.mul(block, column[part], out=self._room.like("scaled", block))
            sums = _backward(self._module, x[part], scaled, of.stride, pads, 1)
            total = sums if total is None else total.add_(sums)
        return torch.zeros(self._shape, dtype=self.x.dtype, device=self.x.device) if total is None else total

    def _weight_gradients(self) -> Tensor:
        patches = self._patches()
        parts = [patches.weight(p.view(len(p), r.stop - r.start, -1)) for r, p in self._products(apart=True)[1]]
        return torch.cat(parts)


def _seen(x: Tensor, geometry: Geometry, room: ScratchBuffers) -> tuple[Tensor, Geometry]:
    """Return the input without what a kernel of size one steps over."""
    steps = _skips(geometry.kernel, geometry.before, geometry.stride)
    if math.prod(steps) == 1:
        return x, geometry
    view = x[:, :, *_hit(steps, geometry.out, geometry.size)]
    stride = tuple(distance // step for distance, step in zip(geometry.stride, steps, strict=True))
    seen = room.empty("seen", view.shape, x).copy_(view)
    return seen, replace(geometry, size=tuple(view.shape[2:]), stride=stride)


def _unseen(module: Conv, x: Tensor, grad: Tensor, pads: Pads) -> Tensor:
    """Return gradient of the input; what a kernel of size one steps over has none and is not computed."""
    steps = _skips(module.kernel_size, [before for before, _ in pads], module.stride)
    if math.prod(steps) == 1:
        return _backward(module, x, grad, module.stride, pads, 0)
    places = _hit(steps, grad.shape[2:], x.shape[2:])
    stride = [distance // step for distance, step in zip(module.stride, steps, strict=True)]
    whole = torch.zeros_like(x, dtype=grad.dtype)
    whole[:, :, *places] = _backward(module, x[:, :, *places].to(grad.dtype), grad, stride, pads, 0)
    return whole


def _skips(kernel: Sequence[int], before: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return steps of the dimensions where the kernel has size one and nothing is added, one for the others."""
    rows = zip(kernel, before, stride, strict=True)
    return [step if (size, added) == (1, 0) else 1 for size, added, step in rows]


def _hit(steps: Sequence[int], out: Sequence[int], size: Sequence[int]) -> list[slice]:
    spans = zip(steps, out, size, strict=True)
    return [slice(0, (count - 1) * step + 1 if step > 1 else length, step) for step, count, length in spans]


def _backward(module: Convolves, x: Tensor, grad: Tensor, stride: Sequence[int], pads: Pads, which: int) -> Tensor:
    """Return gradient of the input (``which`` 0) or the weight (1); uneven padding is added first and cut off again."""
    even = all(before == after for before, after in pads)
    none = [0] * len(pads)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad,
        x if even else functional.pad(x, flat(pads)),
        module.weight.to(grad.dtype),
        None,
        stride,
        [before for before, _ in pads] if even else none,
        module.dilation,
        False,
        none,
        module.groups,
        [which == 0, which == 1, False],
    )[which]
    return gradient if even or which else functional.pad(gradient, [-side for side in flat(pads)])


@register_kernel(nn.Conv1d)
@register_kernel(nn.Conv2d)
@register_kernel(nn.Conv3d)
class ConvKernel:
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with any stride, padding, dilation and groups.

    ``last`` leaves the channels of pictures last in memory. What follows keeps to that: torch pools such pictures
    several times as fast on a CPU, and their patches are copied in long runs.
    """

    def __init__(self, last: bool = False) -> None:
        self._last = last

    def channels_last(self, module: Conv) -> ConvKernel | None:
        """Return the kernel of the same layer that leaves the channels last; None where that is not known to pay."""
        return _LAST if isinstance(module, nn.Conv2d) else None

    def serves(self, module: Conv) -> bool:
        """Return whether the layer has its own two parameters."""
        return set(module._parameters) == {"weight", "bias"}

    def accepts(self, module: Conv, x: Tensor) -> bool:
        """Accept a batch of images; a single image has no batch dimension."""
        return x.dim() == len(module.kernel_size) + 2

    def forward(self, module: Conv, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes."""
        padding = module.padding
        if module.padding_mode != "zeros":
            x, padding = surrounded(module, x)[0], (0,) * len(module.kernel_size)
        convolve = _FORWARD[len(module.kernel_size)]
        last, weight = self._last and x.is_cpu, module.weight
        if last and weight.shape[1] > 1:  # then torch leaves the output like that by itself
            weight = weight.contiguous(memory_format=torch.channels_last)
        out = convolve(x, weight, module.bias, module.stride, padding, module.dilation, module.groups)
        return out.contiguous(memory_format=torch.channels_last) if last else out, ()

    def input_gradient(self, module: Conv, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Take the transposed convolution, and go back through padding that is not zero."""
        padded, pads = surrounded(module, x)
        gradient = _unseen(module, padded, grad, pads)
        if padded is x:
            return gradient
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(surrounded(module, leaf)[0], leaf, gradient)[0]

    def share(
        self,
        module: Conv,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Convolved:
        """Multiply output gradients by patches."""
        return Convolved(module, *surrounded(module, x), grad, trainable, room)


_LAST = ConvKernel(last=True)
_FORWARD = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
