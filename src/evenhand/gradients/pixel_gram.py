"""Norms of a convolution's gradients from inner products of pixels, for few pixels and many channels.

The squared norm is the sum over all pairs of output pixels of ``<g_t, g_s> <patch_t, patch_s>``, and the products of
patches are sums of products of pixels, shifted along with the kernel. No patch is copied and no gradient is made.
Everything is float64: inner products of what cancels in the sum keep too few digits in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evenhand.gradients.measuring import chunks, lies_last
from evenhand.gradients.patches import Geometry
from evenhand.gradients.rooms import Room

CHUNK = 1 << 19
"""Elements of all buffers of float64 used at a time, per thread."""


def gram_lengths(geometry: Geometry, x: Tensor, grad: Tensor, groups: int, room: Room) -> tuple[Tensor, Tensor]:
    """Each record's gradient norm, and the sum of the norms of its terms with one added to the patch for the bias."""
    pixels, places = math.prod(geometry.size), math.prod(geometry.out)
    width = x.shape[1] * pixels + grad.shape[1] * places + groups * (2 * pixels**2 + 2 * places**2)
    norms = torch.empty(len(x), dtype=torch.float64, device=x.device)
    reach = torch.empty_like(norms)
    for rows in chunks(len(x), width, CHUNK * torch.get_num_threads()):
        inner = _gram("inputs", x[rows], groups, room)
        outer = _gram("outputs", grad[rows], groups, room)
        inner = _shifted(inner, geometry, room)
        pairs = len(inner) // groups
        squares = torch.linalg.vecdot(inner.view(pairs, -1), outer.view(pairs, -1))
        norms[rows] = squares.clamp_(min=0.0).sqrt_()
        lengths = [gram.diagonal(dim1=1, dim2=2).clamp(min=0.0) for gram in (inner, outer)]
        reach[rows] = ((lengths[0] + 1) * lengths[1]).sqrt_().view(pairs, -1).sum(1)
    return norms, reach


def _gram(name: str, x: Tensor, groups: int, room: Room) -> Tensor:
    """Inner products of pixels, over the channels of a group: (n * groups, pixels, pixels)."""
    pixels = math.prod(x.shape[2:])
    if groups == 1 and lies_last(x):
        last = x.movedim(1, -1)
        wide = room.empty(name, last.shape, x, torch.float64).copy_(last).view(len(x), pixels, -1).mT
    else:
        wide = room.empty(name, x.shape, x, torch.float64).copy_(x).view(len(x) * groups, -1, pixels)
    out = room.empty(f"{name} gram", (len(wide), pixels, pixels), wide)
    return torch.bmm(wide.mT, wide, out=out)


def _shifted(gram: Tensor, geometry: Geometry, room: Room) -> Tensor:
    """Inner products of patches from those of pixels, one dimension of space after the other."""
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
    """Which outputs see a pixel rather than padding through one element of the kernel, and which pixels those are."""
    stride, shift = geometry.stride[axis], offset * geometry.dilation[axis] - geometry.before[axis]
    low = max(0, -(shift // stride))
    high = min(geometry.out[axis], (geometry.size[axis] - 1 - shift) // stride + 1)
    high = max(low, high)
    first = low * stride + shift
    return slice(low, high), slice(first, first + (high - low - 1) * stride + 1 if high > low else first, stride)
