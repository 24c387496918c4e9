"""Normalisation within a record. The gradients are as small as the activations' channels, so each record's is held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.gradients.layers.base import Instantiated, register_kernel
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import ROW_LIMIT, RowNorms, chunks, working_dtype

CHUNK = 1 << 17
"""Elements of activations normalised at a time, per thread: they stay in the cache until they are summed."""
FAR = 2.0
"""Means further from zero than this many deviations are subtracted before anything is summed, not after."""
Shape = Sequence[int]
Instance = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def _by_place(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    grad: Tensor,
    trainable: frozenset[str],
    shape: Shape,
    room: ScratchBuffers,
) -> Instantiated:
    """Return ``sum grad * (x - mean) * rstd`` and ``sum grad`` over the places before the parameters' ``shape``."""
    size, width = len(grad), math.prod(shape)
    places, inputs, rstd = grad.reshape(size, -1, width), x.reshape(size, -1, width), rstd.reshape(size, -1, 1)
    offset = None if mean is None else mean.reshape(rstd.shape)
    sums = {name: grad.new_empty(size, width) for name in sorted(trainable)}
    extents = {name: grad.new_empty(size, width) for name in ("weight", "bias")}
    for rows in chunks(size, places[0].numel(), CHUNK * torch.get_num_threads()):
        block = places[rows]
        terms = room.empty("terms", block.shape, block)
        torch.sum(torch.abs(block, out=terms), 1, out=extents["bias"][rows])
        if "bias" in sums:
            torch.sum(block, 1, out=sums["bias"][rows])
        if "weight" in sums:
            normal = inputs[rows] if offset is None else torch.sub(inputs[rows], offset[rows], out=terms)
            torch.mul(normal, rstd[rows], out=terms).mul_(block)
            torch.sum(terms, 1, out=sums["weight"][rows])
            torch.sum(terms.abs_(), 1, out=extents["weight"][rows])
    if offset is not None:  # the mean was rounded too
        extents["weight"].addcmul_(extents["bias"], (offset * rstd).abs_().amax(1))

    def reach(gauge: RowNorms) -> Tensor:
        return _joined([gauge(extents[name]) for name in sums])

    gradients = {name: rows.view(size, *shape) for name, rows in sums.items()}
    return Instantiated(gradients, places.shape[1], reach if places.shape[1] > 1 else None)


def _joined(lengths: list[Tensor]) -> Tensor:
    """Return length of vectors that are made of several parts."""
    joined: Tensor = torch.linalg.vector_norm(torch.stack(lengths), dim=0, dtype=torch.float64)
    return joined


@register_kernel(nn.LayerNorm)
class LayerNormKernel:
    """``nn.LayerNorm`` over the last dimensions, with or without bias."""

    def serves(self, module: nn.LayerNorm) -> bool:
        """Return whether the layer is affine, with its own parameters."""
        return set(module._parameters) == {"weight", "bias"}

    def inner(self, module: nn.LayerNorm) -> int:
        """Return the dimensions that are normalised together."""
        return len(module.normalized_shape)

    def accepts(self, module: nn.LayerNorm, x: Tensor) -> bool:
        """Accept at least one dimension before those that are normalised."""
        return x.dim() > len(module.normalized_shape)

    def forward(self, module: nn.LayerNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes; mean and reciprocal deviation are saved."""
        out, mean, rstd = torch.native_layer_norm(
            x, list(module.normalized_shape), module.weight, module.bias, module.eps
        )
        return out, (mean, rstd)

    def input_gradient(self, module: nn.LayerNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Compute it by torch."""
        mean, rstd = saved
        wanted = [True, False, False]
        dx: Tensor = torch.ops.aten.native_layer_norm_backward(
            grad, x, list(module.normalized_shape), mean, rstd, module.weight, module.bias, wanted
        )[0]
        return dx

    def share(
        self,
        module: nn.LayerNorm,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Instantiated:
        """Return sums over all places that share a parameter.

        Rows in doubt are computed again in float64, where statistics saved in float32 would spoil them.
        """
        shape = list(module.normalized_shape)
        again = x.dtype == torch.float64
        mean, rstd = torch.native_layer_norm(x, shape, None, None, module.eps)[1:] if again else saved
        return _by_place(x, mean, rstd, grad, trainable, shape, room)


@register_kernel(nn.RMSNorm)
class RMSNormKernel:
    """``nn.RMSNorm`` over the last dimensions."""

    def serves(self, module: nn.RMSNorm) -> bool:
        """Return whether the layer is affine, with its own parameters."""
        return set(module._parameters) == {"weight"}

    def inner(self, module: nn.RMSNorm) -> int:
        """Return the dimensions that are normalised together."""
        return len(module.normalized_shape)

    def accepts(self, module: nn.RMSNorm, x: Tensor) -> bool:
        """Accept at least one dimension before those that are normalised."""
        return x.dim() > len(module.normalized_shape)

    def forward(self, module: nn.RMSNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes; the reciprocal root of the mean square is saved."""
        wide = x.to(working_dtype(x.dtype))
        eps = torch.finfo(wide.dtype).eps if module.eps is None else module.eps
        root = wide.square().mean(_last(module.normalized_shape), keepdim=True).add_(eps).rsqrt_()
        return functional.rms_norm(x, module.normalized_shape, module.weight, module.eps), (root,)

    def input_gradient(self, module: nn.RMSNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Compute it: what points along the normalised input does not change the output."""
        normal, scaled = x * saved[0], grad * module.weight
        along = (scaled * normal).mean(_last(module.normalized_shape), keepdim=True)
        return torch.mul(scaled - normal * along, saved[0]).to(x.dtype)

    def share(
        self,
        module: nn.RMSNorm,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Instantiated:
        """Return sums over all places that share a parameter."""
        return _by_place(x, None, saved[0], grad, trainable, module.normalized_shape, room)


def _last(shape: Shape) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


@register_kernel(nn.GroupNorm)
class GroupNormKernel:
    """``nn.GroupNorm`` with input (B, C, ...)."""

    channels_first = True
    """Sums over the places of a channel want them side by side, so that pictures had better stay like that."""

    def serves(self, module: nn.GroupNorm) -> bool:
        """Return whether the layer is affine, with its own parameters."""
        return set(module._parameters) == {"weight", "bias"}

    def accepts(self, module: nn.GroupNorm, x: Tensor) -> bool:
        """Accept at least one dimension before those that are normalised."""
        return x.dim() >= 2

    def forward(self, module: nn.GroupNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what the layer computes; mean and reciprocal deviation are saved."""
        return _grouped(x, self._groups(module), module.eps, module.weight, module.bias)

    def input_gradient(self, module: nn.GroupNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Compute it by torch."""
        mean, rstd = saved
        wanted = [True, False, False]
        dx: Tensor = torch.ops.aten.native_group_norm_backward(
            grad.contiguous(), x.contiguous(), mean, rstd, module.weight, *_sizes(x), self._groups(module), wanted
        )[0]
        return dx

    def backward(
        self, module: nn.GroupNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the input's gradient, and sums over places for `share`, which torch computes on the way."""
        mean, rstd = saved
        full = x.dtype == grad.dtype == module.weight.dtype == torch.float32
        if not full or not x.is_contiguous() or math.prod(x.shape[2:]) == 1:
            return self.input_gradient(module, x, saved, grad), ()
        grad = grad.contiguous()
        inputs, mean = _centred(x, mean, rstd)
        dx, weight, bias = _apart(inputs, mean, rstd, grad, module.weight.repeat(len(x)), [True, True, True])
        lengths = [torch.linalg.vector_norm(t.flatten(2), dim=2) for t in (grad, inputs)]
        return dx.view_as(x), (weight, bias, *lengths)

    def share(
        self,
        module: nn.GroupNorm,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Instantiated:
        """Return sums over all places of a channel, unless `backward` left them.

        Rows in doubt are computed again in float64, where statistics saved in float32 would spoil them.
        """
        again = x.dtype == torch.float64
        mean, rstd, *known = _grouped(x, self._groups(module), module.eps)[1] if again else saved
        return _by_channel(x.contiguous(), mean, rstd, grad.contiguous(), trainable, room, known)

    def _groups(self, module: nn.GroupNorm) -> int:
        return module.num_groups


@register_kernel(nn.InstanceNorm1d)
@register_kernel(nn.InstanceNorm2d)
@register_kernel(nn.InstanceNorm3d)
class InstanceNormKernel(GroupNormKernel):
    """Instance normalisation: every channel is a group of its own."""

    def serves(self, module: Instance) -> bool:  # type: ignore[override]
        """Return whether the record's own statistics are used; running ones take the fallback."""
        return set(module._parameters) == {"weight", "bias"} and not module.track_running_stats

    def accepts(self, module: Instance, x: Tensor) -> bool:  # type: ignore[override]
        """Accept a batch; a single record has no batch dimension. Torch says what is wrong with other inputs."""
        batched = x.dim() == module._get_no_batch_dim() + 1
        return batched and x.shape[1] == module.num_features and x[0, 0].numel() > 1

    def _groups(self, module: Instance) -> int:  # type: ignore[override]
        return module.num_features


def _centred(x: Tensor, mean: Tensor, rstd: Tensor, room: ScratchBuffers | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs and means, the means of records that lie far from zero subtracted from both.

    That is decided for each record alone, and the others stay as they are to the last digit.

    >>> x, mean = torch.tensor([[[9.0, 11.0]], [[1.0, 3.0]]]), torch.tensor([[10.0], [2.0]])
    >>> [part.tolist() for part in _centred(x, mean, torch.ones(2, 1))]
    [[[[-1.0, 1.0]], [[1.0, 3.0]]], [[0.0], [2.0]]]
    """
    far = ~((mean * rstd).abs_().amax(1, keepdim=True) <= (FAR if math.prod(x.shape[2:]) > 1 else -1.0))
    if not bool(far.any()):
        return x, mean
    grouped = x.view(*mean.shape, -1)
    out = None if room is None else room.empty("centred", grouped.shape, x)
    centred = torch.sub(grouped, mean.masked_fill(~far, 0.0).unsqueeze(2), out=out)
    return centred.view_as(x), mean.masked_fill(far, 0.0)


def _apart(
    x: Tensor, mean: Tensor, rstd: Tensor, grad: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradient of the input, ``sum grad * (x - mean) * rstd`` and ``sum grad`` over the places of a channel.

    Torch sums over the batch too; records that pose as channels of a single one are kept apart.
    """
    size, channels, places = _sizes(x)
    one = (1, size * channels, places)
    dx, scales, shifts = torch.ops.aten.native_group_norm_backward(
        grad.view(one), x.view(one), mean.view(1, -1), rstd.view(1, -1), weight, *one, mean.numel(), wanted
    )
    return dx, scales.view(size, channels), shifts.view(size, channels)


def _by_channel(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad: Tensor,
    trainable: frozenset[str],
    room: ScratchBuffers,
    known: Sequence[Tensor],
) -> Instantiated:
    """Sum over the places of each channel; ``known`` is what `GroupNormKernel.backward` left, or empty."""
    (size, channels, places), groups = _sizes(x), mean.shape[1]
    original_mean = mean
    x, mean = _centred(x, mean, rstd, room)
    if known:
        weight, bias = known[:2]
    else:
        like = x.new_empty(size * channels)  # only the shape of the weight is looked at
        _, weight, bias = _apart(x, mean, rstd, grad, like, [False, True, True])
    sums = {"weight": weight, "bias": bias}

    def reach(gauge: RowNorms) -> Tensor:
        apart, root = (size, groups, -1), places**0.5
        lengths = (_carried(known[2], grad) if known else gauge(grad.view(-1, places)).double()).view(apart)
        extents = [lengths * root] if "bias" in trainable else []
        if "weight" in trainable:
            inputs = (_carried(known[3], x) if known else gauge(x.view(-1, places)).double()).view(apart)
            inputs = inputs + mean.abs().mul_(root).unsqueeze(2)
            rounded = original_mean.abs().unsqueeze(2) * bias.view(apart).abs()  # the mean was rounded too
            extents.append((lengths * inputs + rounded) * rstd.unsqueeze(2))
        return _joined([gauge(extent.flatten(1)) for extent in extents])

    gradients = {name: rows for name, rows in sums.items() if name in trainable}
    return Instantiated(gradients, places, reach if places > 1 else None)


def _carried(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return lengths of the channels of all records in float64, measured again where float32 cannot carry them."""
    odd = ~((lengths >= 1 / ROW_LIMIT) & (lengths <= ROW_LIMIT))
    if not bool(odd.any()):
        return lengths.double()
    again = torch.linalg.vector_norm(rows.flatten(2)[odd], dim=1, dtype=torch.float64)
    return lengths.double().masked_scatter_(odd, again)


def _grouped(
    x: Tensor, groups: int, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, mean, rstd = torch.native_group_norm(x.contiguous(), weight, bias, *_sizes(x), groups, eps)
    return out, (mean, rstd)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])
