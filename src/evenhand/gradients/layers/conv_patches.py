"""Gradients of a convolution record by record: the patches that the kernel saw, times the output gradient.

Copying every patch costs more than multiplying where channels are many. So only the columns of a kernel row are copied,
shifted for each kernel column; every kernel row then finds its patches in that one copy, at another offset. Where a
kernel row is too narrow for a good matrix product the whole patch is a row. With the channels last, patches are copied
in long runs and the product is the quickest one; with few channels the transposition costs more than that.

For few pixels and many channels norms come from inner products of pixels: the squared norm is the sum over all pairs of
output pixels of ``<g_t, g_s> <patch_t, patch_s>``, and the products of patches are sums of products of pixels, shifted
along with the kernel. No patch is copied and no gradient is made. Everything there is float64: inner products of what
cancels in the sum keep too few digits in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import chunks, lies_last

CHUNK = 1 << 18
"""Elements of patches copied at a time, per thread: they stay in the cache until they are multiplied."""
NARROW = 8
"""Kernel rows with fewer elements than this are not multiplied one by one."""
WIDE = 96
"""With the channels last: kernel rows with fewer elements than this are not multiplied one by one."""
MANY = 8
"""Channels that are worth putting last."""


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
        """Return size of the input with its zeros.

        >>> Geometry((5,), (3,), (1,), (1,), (1,), (1,), (5,)).padded
        (7,)
        """
        return tuple(map(sum, zip(self.before, self.size, self.after, strict=True)))

    @property
    def overlap(self) -> int:
        """Return in how many patches one place of the input lies at most.

        >>> Geometry((9,), (3,), (2,), (1,), (0,), (0,), (4,)).overlap
        2
        """
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        return math.prod(-(-size // (stride // math.gcd(stride, dilation))) for size, stride, dilation in steps)

    def led(self) -> Geometry:
        """Return the geometry with another dimension of size one in front.

        >>> Geometry((5,), (3,), (1,), (1,), (1,), (1,), (5,)).led().kernel
        (1, 3)
        """
        ones = {field.name: (1, *getattr(self, field.name)) for field in fields(self)}
        return replace(Geometry(**ones), before=(0, *self.before), after=(0, *self.after))


@dataclass(frozen=True)
class _Plan:
    """Views of the buffers for so many records: where the input goes, what is copied then, and each row's patches."""

    inside: Tensor
    copies: list[tuple[Tensor, Tensor]]
    patches: list[Tensor]


class _Unfolded:
    """Input and output gradient of a convolution, multiplied a few records at a time."""

    def __init__(self, geometry: Geometry, led: bool, x: Tensor, grad: Tensor, room: ScratchBuffers):
        self._of = geometry.led() if led else geometry
        self._x, self._grad, self._room, self._kernel = x, grad, room.aside(), geometry.kernel
        self._phases, self._height, self._starts = _offsets(self._of)
        self._places, self._rest = math.prod(geometry.out), math.prod(self._of.kernel[1:])
        self._bare = self._rest * math.prod(self._of.stride) == 1
        self._direct = self._of.padded == self._of.size and x.is_contiguous()
        self._plans: dict[int, _Plan] = {}

    def parts(self) -> list[slice]:
        """Return records whose patches fit the cache together."""
        elements = self._channels() * self._rest * len(self._phases) * self._height * math.prod(self._of.out[1:])
        return chunks(len(self._x), elements, CHUNK * torch.get_num_threads())

    def _channels(self) -> int:
        raise NotImplementedError

    def _planned(self, x: Tensor) -> _Plan:
        raise NotImplementedError

    def _patches(self, rows: slice) -> list[Tensor]:
        """Return the patches of each kernel row; the views of the buffers are made once for all parts of a size."""
        x, size = self._x[rows], rows.stop - rows.start
        if self._direct:
            plan = self._planned(x)
        else:
            if size not in self._plans:
                whole = self._room.empty("padded", self._padded(size), x)
                if not self._plans and self._of.padded != self._of.size:
                    whole.zero_()
                self._plans[size] = self._planned(whole)
            plan = self._plans[size]
            plan.inside.copy_(x)
        for target, source in plan.copies:
            target.copy_(source)
        return plan.patches

    def _padded(self, size: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _sources(self, x: Tensor, first: int) -> Iterator[tuple[int, int, list[int], list[int], int]]:
        """Yield for each phase of the stride: place, rows, steps within the kernel and between outputs, offset."""
        of, steps = self._of, x.stride()[first:]
        near = [step * dilation for step, dilation in zip(steps[1:], of.dilation[1:], strict=False)]
        far = [step * stride for step, stride in zip(steps, of.stride, strict=False)]
        for place, phase in enumerate(self._phases):
            high = min(self._height, -(-(of.padded[0] - phase) // of.stride[0]))
            yield place, high, near, far, int(x.storage_offset()) + phase * steps[0]


class KernelRows(_Unfolded):
    """Products have the shape (kernel rows, B * groups, elements of a kernel row, O / groups)."""

    def __init__(self, geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: ScratchBuffers):
        wide = x.shape[1] // groups * math.prod(geometry.kernel[1:]) >= NARROW
        led = not wide and geometry.kernel[0] > 1
        super().__init__(geometry, led, x.unsqueeze(2) if led else x, grad, room)
        self._groups = groups
        self._row = (x.shape[1] // groups * self._rest, grad.shape[1] // groups)

    def _channels(self) -> int:
        return self._x.shape[1]

    def shape(self, size: int) -> tuple[int, int, int, int]:
        """Return the shape of the products of so many records."""
        return (len(self._starts), size * self._groups, *self._row)

    def multiply(self, rows: slice, out: Tensor) -> Tensor:
        """Return the products of some records, written to ``out``, which has their shape."""
        grad = self._grad[rows].reshape(-1, self._row[1], self._places).mT
        for patches, product in zip(self._patches(rows), out, strict=True):
            torch.bmm(patches, grad, out=product)
        return out

    def weight(self, products: Tensor) -> Tensor:
        """Return products (kernel rows, n, groups, *row) as the layer's weight: (n, O, C / groups, *kernel)."""
        lead = products.shape[1]
        apart = products.view(len(products), lead, self._groups, -1, self._rest, self._row[1])
        ordered = apart.permute(1, 2, 5, 3, 0, 4)
        return ordered.reshape(lead, self._groups * self._row[1], -1, *self._kernel)

    def _padded(self, size: int) -> tuple[int, ...]:
        return (size, self._x.shape[1], *self._of.padded)

    def _planned(self, x: Tensor) -> _Plan:
        """Lay kernel rows side by side: (n, C, *kernel[1:], phases of the stride, rows of a phase, *out[1:])."""
        of, columns, copies = self._of, x, []
        if not self._bare:
            shape, axis = (*x.shape[:2], *of.kernel[1:]), 1 + len(of.kernel)
            columns = self._room.empty("columns", (*shape, len(self._phases), self._height, *of.out[1:]), x)
            for place, high, near, far, offset in self._sources(x, 2):
                source = x.as_strided((*shape, high, *of.out[1:]), (*x.stride()[:2], *near, *far), offset)
                copies.append((columns.select(axis, place).narrow(axis, 0, high), source))
        flat = columns.view(len(x) * self._groups, self._row[0], -1)
        return _Plan(x[:, :, *_inside(of)], copies, [flat[:, :, s : s + self._places] for s in self._starts])


class ChannelsLast(_Unfolded):
    """Patches with the channels last: products have the shape (kernel rows, B, O, elements of a kernel row)."""

    def __init__(self, geometry: Geometry, x: Tensor, grad: Tensor, room: ScratchBuffers):
        led = x.shape[1] * math.prod(geometry.kernel[1:]) < WIDE and geometry.kernel[0] > 1
        last = x.movedim(1, -1)
        super().__init__(geometry, led, last.unsqueeze(1) if led else last, grad, room)
        self._row = (grad.shape[1], x.shape[1] * self._rest)

    def _channels(self) -> int:
        return self._x.shape[-1]

    def shape(self, size: int) -> tuple[int, int, int, int]:
        """Return the shape of the products of so many records."""
        return (len(self._starts), size, *self._row)

    def multiply(self, rows: slice, out: Tensor) -> Tensor:
        """Return the products of some records, written to ``out``, which has their shape."""
        grad = self._grad[rows].reshape(-1, self._row[0], self._places)
        for patches, product in zip(self._patches(rows), out, strict=True):
            torch.bmm(grad, patches, out=product)
        return out

    def weight(self, products: Tensor) -> Tensor:
        """Return products (kernel rows, n, *row) in the order of the layer's weight: (n, O, C, *kernel)."""
        apart = products.view(len(products), -1, self._row[0], *self._of.kernel[1:], self._x.shape[-1])
        ordered = apart.movedim((1, 2, -1), (0, 1, 2))
        return ordered.reshape(*ordered.shape[:3], *self._kernel)

    def _padded(self, size: int) -> tuple[int, ...]:
        return (size, *self._of.padded, self._x.shape[-1])

    def _planned(self, x: Tensor) -> _Plan:
        """Lay kernel rows side by side: (n, phases of the stride, rows of a phase, *out[1:], *kernel[1:], C)."""
        of, columns, copies = self._of, x, []
        if not self._bare:
            tail = (*of.out[1:], *of.kernel[1:], x.shape[-1])
            columns = self._room.empty("columns", (len(x), len(self._phases), self._height, *tail), x)
            for place, high, near, far, offset in self._sources(x, 1):
                source = x.as_strided(
                    (len(x), high, *tail), (x.stride(0), *far, *near[: len(of.kernel) - 1], 1), offset
                )
                copies.append((columns[:, place, :high], source))
        flat = columns.view(len(x), -1, self._row[1])
        return _Plan(x[:, *_inside(of)], copies, [flat[:, s : s + self._places] for s in self._starts])


def _offsets(of: Geometry) -> tuple[list[int], int, list[int]]:
    """Return the stride's phases in which kernel rows begin, rows of a phase, and where each begins."""
    places = [divmod(i * of.dilation[0], of.stride[0]) for i in range(of.kernel[0])]
    phases = sorted({phase for _, phase in places})
    height = places[-1][0] + of.out[0]
    inner = math.prod(of.out[1:])
    return phases, height, [(phases.index(phase) * height + row) * inner for row, phase in places]


def _inside(of: Geometry) -> list[slice]:
    return [slice(start, start + length) for start, length in zip(of.before, of.size, strict=True)]


Patches = KernelRows | ChannelsLast


def patches_of(geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: ScratchBuffers) -> Patches:
    """Return the quicker of the two ways to copy."""
    if groups == 1 and x.shape[1] >= MANY:
        return ChannelsLast(geometry, x, grad, room)
    return KernelRows(geometry, x, grad, groups, room)


PIXEL_CHUNK = 1 << 19
"""Elements of all buffers of float64 used at a time, per thread."""


def gram_lengths(
    geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: ScratchBuffers
) -> tuple[Tensor, Tensor]:
    """Return gradient norms, and the sums of the norms of the terms with one added to the patch for the bias."""
    pixels, places = math.prod(geometry.size), math.prod(geometry.out)
    width = x.shape[1] * pixels + grad.shape[1] * places + groups * (2 * pixels**2 + 2 * places**2)
    norms = torch.empty(len(x), dtype=torch.float64, device=x.device)
    reach = torch.empty_like(norms)
    for rows in chunks(len(x), width, PIXEL_CHUNK * torch.get_num_threads()):
        inner = _gram("inputs", x[rows], groups, room)
        outer = _gram("outputs", grad[rows], groups, room)
        inner = _shifted(inner, geometry, room)
        pairs = len(inner) // groups
        squares = torch.linalg.vecdot(inner.view(pairs, -1), outer.view(pairs, -1))
        norms[rows] = squares.clamp_(min=0.0).sqrt_()
        lengths = [gram.diagonal(dim1=1, dim2=2).clamp(min=0.0) for gram in (inner, outer)]
        reach[rows] = ((lengths[0] + 1) * lengths[1]).sqrt_().view(pairs, -1).sum(1)
    return norms, reach


def _gram(name: str, x: Tensor, groups: int, room: ScratchBuffers) -> Tensor:
    """Return inner products of pixels, over the channels of a group: (n * groups, pixels, pixels)."""
    pixels = math.prod(x.shape[2:])
    if groups == 1 and lies_last(x):
        last = x.movedim(1, -1)
        wide = room.empty(name, last.shape, x, torch.float64).copy_(last).view(len(x), pixels, -1).mT
    else:
        wide = room.empty(name, x.shape, x, torch.float64).copy_(x).view(len(x) * groups, -1, pixels)
    out = room.empty(f"{name} gram", (len(wide), pixels, pixels), wide)
    return torch.bmm(wide.mT, wide, out=out)


def _shifted(gram: Tensor, geometry: Geometry, room: ScratchBuffers) -> Tensor:
    """Return inner products of patches from those of pixels, one dimension of space after the other."""
    sizes, count = list(geometry.size), len(geometry.size)
    for axis in range(count):
        steps = (geometry.kernel[axis], geometry.stride[axis], geometry.dilation[axis], geometry.before[axis])
        if steps == (1, 1, 1, 0) and geometry.out[axis] == sizes[axis]:
            continue
        source = gram.view(-1, *sizes, *sizes)
        sizes[axis] = geometry.out[axis]
        target = room.empty(f"shifted {axis}", (len(source), *sizes, *sizes), source).zero_()
        for offset in range(steps[0]):
            into, out_of = _meeting(geometry, axis, offset)
            every = [slice(None)] * (1 + 2 * count)
            for place in (1 + axis, 1 + axis + count):
                every[place] = into
            part = target[tuple(every)]
            for place in (1 + axis, 1 + axis + count):
                every[place] = out_of
            part += source[tuple(every)]
        gram = target
    places = math.prod(sizes)
    return gram.view(-1, places, places)


def _meeting(geometry: Geometry, axis: int, offset: int) -> tuple[slice, slice]:
    """Return which outputs see a pixel, not padding, through one element of the kernel, and which pixels."""
    stride, shift = geometry.stride[axis], offset * geometry.dilation[axis] - geometry.before[axis]
    low = max(0, -(shift // stride))
    high = min(geometry.out[axis], (geometry.size[axis] - 1 - shift) // stride + 1)
    high = max(low, high)
    first = low * stride + shift
    return slice(low, high), slice(first, first + (high - low - 1) * stride + 1 if high > low else first, stride)
