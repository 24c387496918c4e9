"""Normalisation within a record: GroupNorm and LayerNorm. The gradients are as small as the activations' channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from evenhand.gradients.kernels import Instantiated, register_kernel, row_squares


def _share(normal: Tensor, grad: Tensor, inner: range, trainable: frozenset[str]) -> Instantiated:
    """Sum ``grad * normal`` and ``grad`` over the ``inner`` dimensions, which the parameters do not have."""
    places = {"weight": grad * normal if "weight" in trainable else grad, "bias": grad}
    terms = {name: places[name] for name in places if name in trainable}
    if not inner:
        return Instantiated(terms, 1, None)
    reach = torch.stack([row_squares(t.abs().sum(tuple(inner))) for t in terms.values()]).sum(0)
    count = math.prod(grad.shape[dim] for dim in inner)
    return Instantiated({name: t.sum(tuple(inner)) for name, t in terms.items()}, count, reach)


@register_kernel(nn.LayerNorm)
class LayerNormKernel:
    """``nn.LayerNorm`` over the last dimensions, with or without bias."""

    def serves(self, module: nn.LayerNorm) -> bool:
        """Every affine configuration."""
        return set(module._parameters) == {"weight", "bias"}

    def accepts(self, module: nn.LayerNorm, x: Tensor) -> bool:
        """At least one dimension before those that are normalised."""
        return x.dim() > len(module.normalized_shape)

    def forward(self, module: nn.LayerNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the layer itself; mean and reciprocal deviation are saved."""
        out, mean, rstd = torch.native_layer_norm(
            x, list(module.normalized_shape), module.weight, module.bias, module.eps
        )
        return out, (mean, rstd)

    def input_gradient(self, module: nn.LayerNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """By torch."""
        mean, rstd = saved
        wanted = [True, False, False]
        dx: Tensor = torch.ops.aten.native_layer_norm_backward(
            grad, x, list(module.normalized_shape), mean, rstd, module.weight, module.bias, wanted
        )[0]
        return dx

    def share(
        self, module: nn.LayerNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]
    ) -> Instantiated:
        """Sums over all places that share a parameter."""
        mean, rstd = saved
        return _share((x - mean) * rstd, grad, range(1, x.dim() - len(module.normalized_shape)), trainable)


@register_kernel(nn.GroupNorm)
class GroupNormKernel:
    """``nn.GroupNorm`` with input (B, C, ...)."""

    def serves(self, module: nn.GroupNorm) -> bool:
        """Every affine configuration."""
        return set(module._parameters) == {"weight", "bias"}

    def accepts(self, module: nn.GroupNorm, x: Tensor) -> bool:
        """At least one dimension before those that are normalised."""
        return x.dim() >= 2

    def forward(self, module: nn.GroupNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the layer itself; mean and reciprocal deviation are saved."""
        out, mean, rstd = torch.native_group_norm(
            x.contiguous(), module.weight, module.bias, *_sizes(x), module.num_groups, module.eps
        )
        return out, (mean, rstd)

    def input_gradient(self, module: nn.GroupNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """By torch."""
        mean, rstd = saved
        wanted = [True, False, False]
        dx: Tensor = torch.ops.aten.native_group_norm_backward(
            grad.contiguous(), x.contiguous(), mean, rstd, module.weight, *_sizes(x), module.num_groups, wanted
        )[0]
        return dx

    def share(
        self, module: nn.GroupNorm, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]
    ) -> Instantiated:
        """Sums over all places that share a parameter."""
        mean, rstd = (s.unsqueeze(2) for s in saved)
        normal = ((x.reshape(len(x), module.num_groups, -1) - mean) * rstd).view(x.shape)
        return _share(normal, grad, range(2, x.dim()), trainable)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x[0, 0].numel()
