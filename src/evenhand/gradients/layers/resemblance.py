"""Kernels for layers that look like known ones: subclasses, and layers of other libraries with the usual parameters.

What such a layer computes is not known from its type, so its kernel is on trial: on a first batch, which is compared
with autograd, the kernel's output is also compared with the layer's own (`alike`), and one that differs is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenhand.gradients.layers.base import _KERNELS, Kernel, shadowed

Looks = Callable[[nn.Module], bool]
_LOOKS: list[tuple[Looks, Kernel[Any]]] = []
K = TypeVar("K", bound=type)
CLOSE = 1e-4
"""How far the outputs of a layer and of its kernel may be apart, in parts of the largest one, in float32."""


def register_looks(looks: Looks) -> Callable[[K], K]:
    """Try the decorated kernel class for every module without a kernel of its own that ``looks`` like its layer."""

    def add(kernel: K) -> K:
        _LOOKS.append((looks, kernel()))
        return kernel

    return add


def resembling(module: nn.Module) -> Kernel[Any] | None:
    """Return a kernel that may serve the module, to be tried, or None.

    >>> class Mine(nn.Linear): pass
    >>> type(resembling(Mine(1, 1))).__name__, resembling(nn.ReLU()) is None
    ('LinearKernel', True)
    """
    if module._modules or shadowed(module) or _hooked(module) or type(module) in _KERNELS:
        return None
    parents = [_KERNELS[kind] for kind in type(module).__mro__ if kind in _KERNELS]
    for kernel in (*parents[:1], *[kernel for looks, kernel in _LOOKS if looks(module)]):
        if kernel.serves(module):
            return kernel
    return None


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def alike(output: Any, expected: Any) -> bool:
    """Return whether a kernel's output is that of its layer, up to rounding.

    >>> alike(torch.ones(2), torch.ones(2) + 1e-7), alike(torch.ones(2), torch.ones(2) + 1e-2)
    (True, False)
    """
    if not isinstance(expected, Tensor) or (output.shape, output.dtype) != (expected.shape, expected.dtype):
        return False
    coarse = max(CLOSE, 64 * torch.finfo(output.dtype).eps)
    usual = torch.isfinite(expected)
    most = expected.detach()[usual].abs().max() if bool(usual.any()) else 1.0
    return torch.allclose(output, expected, rtol=0.0, atol=float(most) * coarse, equal_nan=True)
