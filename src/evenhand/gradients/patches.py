"""Gradients of a convolution record by record: the patches that the kernel saw, times the output gradient.

Copying every patch costs more than multiplying where channels are many. So only the columns of a kernel row are copied,
shifted for each kernel column; every kernel row then finds its patches in that one copy, at another offset. Where a
kernel row is too narrow for a good matrix product the whole patch is a row. Where the output is narrow, so that such
copies go by a few elements at a time, whole patches are copied channels last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from evenhand.gradients.measuring import chunks
from evenhand.gradients.rooms import Room

CHUNK = 1 << 18
"""Elements of patches copied at a time, per thread: they stay in the cache until they are multiplied."""
NARROW = 8
"""Kernel rows with fewer elements than this are not multiplied one by one."""
SHORT = 8
"""Output rows up to this long are better copied channels last, if there are at least as many channels."""


@dataclass(frozen=True)
class Geometry:
    """Sizes along each dimension of space: input, kernel, its steps, zeros added on both sides, output."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """Size of the input with its zeros.

        >>> Geometry((5,), (3,), (1,), (1,), (1,), (1,), (5,)).padded
        (7,)
        """
        return tuple(map(sum, zip(self.before, self.size, self.after, strict=True)))

    @property
    def overlap(self) -> int:
        """In how many patches one place of the input lies at most.

        >>> Geometry((9,), (3,), (2,), (1,), (0,), (0,), (4,)).overlap
        2
        """
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        return math.prod(-(-size // (stride // math.gcd(stride, dilation))) for size, stride, dilation in steps)

    def led(self) -> Geometry:
        """The same with another dimension of size one in front.

        >>> Geometry((5,), (3,), (1,), (1,), (1,), (1,), (5,)).led().kernel
        (1, 3)
        """
        ones = {field.name: (1, *getattr(self, field.name)) for field in fields(self)}
        return replace(Geometry(**ones), before=(0, *self.before), after=(0, *self.after))


class KernelRows:
    """Input (B, C, *size) and output gradient (B, O, *out), multiplied a few records at a time.

    Products have the shape (kernel rows, B * groups, elements of a kernel row, O / groups).
    """

    def __init__(self, geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: Room):
        wide = x.shape[1] // groups * math.prod(geometry.kernel[1:]) >= NARROW
        self._led = not wide and geometry.kernel[0] > 1
        self._of = geometry.led() if self._led else geometry
        self._x = x.unsqueeze(2) if self._led else x
        self._grad, self._groups, self._room = grad, groups, room
        self._kernel = geometry.kernel
        first, rest = self._of.kernel[0], math.prod(self._of.kernel[1:])
        self.row = (x.shape[1] // groups * rest, grad.shape[1] // groups)
        self._inner = math.prod(self._of.out[1:])
        stride, dilation = self._of.stride[0], self._of.dilation[0]
        places = [divmod(i * dilation, stride) for i in range(first)]
        self._phases = sorted({phase for _, phase in places})
        self._height = places[-1][0] + self._of.out[0]
        self._starts = [(self._phases.index(phase) * self._height + row) * self._inner for row, phase in places]
        self._bare = rest == 1 and math.prod(self._of.stride) == 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the products of all records."""
        return (len(self._starts), len(self._x) * self._groups, *self.row)

    def parts(self) -> list[slice]:
        """Records whose patches fit the cache together."""
        elements = self._x.shape[1] * math.prod(self._of.kernel[1:]) * len(self._phases) * self._height * self._inner
        return chunks(len(self._x), elements, CHUNK * torch.get_num_threads())

    def multiply(self, rows: slice, out: Tensor) -> Tensor:
        """The products of some records, written to ``out``, which has their shape."""
        count = (rows.stop - rows.start) * self._groups
        patches = self._unfold(rows).view(count, self.row[0], -1)
        grad = self._grad[rows].reshape(count, self.row[1], -1).mT
        for start, product in zip(self._starts, out, strict=True):
            torch.bmm(patches[:, :, start : start + grad.shape[1]], grad, out=product)
        return out

    def weight(self, products: Tensor) -> Tensor:
        """Products (kernel rows, n, groups, *row) in the order of the layer's weight: (n, O, C / groups, *kernel)."""
        lead = products.shape[1]
        apart = products.view(len(products), lead, self._groups, -1, math.prod(self._of.kernel[1:]), self.row[1])
        ordered = apart.permute(1, 2, 5, 3, 0, 4)
        return ordered.reshape(lead, self._groups * self.row[1], -1, *self._kernel)

    def _unfold(self, rows: slice) -> Tensor:
        """Kernel rows side by side: (n, C, *kernel[1:], phases of the stride, rows of a phase, *out[1:])."""
        of, x = self._of, self._pad(rows)
        if self._bare and x.is_contiguous():
            return x
        inner, n = of.out[1:], len(x)
        steps = x.stride()
        near = [step * dilation for step, dilation in zip(steps[3:], of.dilation[1:], strict=True)]
        far = [step * stride for step, stride in zip(steps[2:], of.stride, strict=True)]
        shape = (n, x.shape[1], *of.kernel[1:], len(self._phases), self._height, *inner)
        columns = self._room.empty("columns", shape, x)
        axis = 1 + len(of.kernel)
        for place, phase in enumerate(self._phases):
            high = min(self._height, -(-(of.padded[0] - phase) // of.stride[0]))
            view = (n, x.shape[1], *of.kernel[1:], high, *inner)
            source = x.as_strided(view, (*steps[:2], *near, *far), x.storage_offset() + phase * steps[2])
            columns.select(axis, place).narrow(axis, 0, high).copy_(source)
        return columns

    def _pad(self, rows: slice) -> Tensor:
        """Some records of the input with zeros around them; the zeros are written once for all parts."""
        of, x = self._of, self._x[rows]
        if of.padded == of.size:
            return x
        padded = self._room.empty("padded", (len(x), x.shape[1], *of.padded), x)
        if not rows.start:
            padded.zero_()
        inside = [slice(start, start + length) for start, length in zip(of.before, of.size, strict=True)]
        padded[:, :, *inside] = x
        return padded


class WholePatches:
    """The same for few output pixels in a row and many channels: patches (places, kernel, channels), one product."""

    def __init__(self, geometry: Geometry, x: Tensor, grad: Tensor, room: Room):
        self._of, self._x, self._grad, self._room = geometry, x, grad, room
        self.row = (x.shape[1] * math.prod(geometry.kernel), grad.shape[1])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the products of all records."""
        return (1, len(self._x), *self.row)

    def parts(self) -> list[slice]:
        """Records whose patches fit the cache together."""
        return chunks(len(self._x), self.row[0] * math.prod(self._of.out), CHUNK * torch.get_num_threads())

    def multiply(self, rows: slice, out: Tensor) -> Tensor:
        """The products of some records, written to ``out``, which has their shape."""
        of, x = self._of, self._pad(rows)
        steps = x.stride()
        near = [step * dilation for step, dilation in zip(steps[1:], of.dilation, strict=False)]
        far = [step * stride for step, stride in zip(steps[1:], of.stride, strict=False)]
        view = x.as_strided(
            (len(x), *of.out, *of.kernel, x.shape[-1]), (steps[0], *far, *near, steps[-1]), x.storage_offset()
        )
        patches = self._room.empty("columns", view.shape, x).copy_(view)
        torch.bmm(patches.view(len(x), -1, self.row[0]).mT, self._grad[rows].flatten(2).mT, out=out[0])
        return out

    def weight(self, products: Tensor) -> Tensor:
        """Products (1, n, *row) in the order of the layer's weight: (n, O, C, *kernel)."""
        apart = products.view(products.shape[1], *self._of.kernel, -1, self.row[1])
        return apart.movedim((-1, -2), (1, 2)).contiguous()

    def _pad(self, rows: slice) -> Tensor:
        """Some records of the input, channels last, with zeros around them that are written once for all parts."""
        of, x = self._of, self._x[rows].movedim(1, -1)
        if of.padded == of.size and x.is_contiguous():
            return x
        padded = self._room.empty("padded", (len(x), *of.padded, x.shape[-1]), x)
        if not rows.start:
            padded.zero_()
        inside = [slice(start, start + length) for start, length in zip(of.before, of.size, strict=True)]
        padded[:, *inside] = x
        return padded


Patches = KernelRows | WholePatches


def patches_of(geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: Room) -> Patches:
    """The quicker of the two ways to copy."""
    short = geometry.out[-1] <= SHORT <= x.shape[1] and math.prod(geometry.kernel) > 1
    if groups == 1 and short:
        return WholePatches(geometry, x, grad, room)
    return KernelRows(geometry, x, grad, groups, room)
