"""What a layer kernel is, and the table of them.

A kernel computes one layer type without autograd for its weights: forward, gradient of the input, and from input and
output gradient each record's share of the squared norm and of the weighted sum. Everything that is not in the table is
differentiated record by record instead (``fallback.py``), which is exact too, only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

ROW_LIMIT = 1e15
"""Row norms outside [1/ROW_LIMIT, ROW_LIMIT] leave the range where float32 squares keep their precision."""

KEPT_BYTES = 1 << 28
"""Instantiated gradients larger than this are not kept for the weighted sum; it is then computed again."""


class Share(Protocol):
    """What one call of a layer adds to the gradients of all records, for the layer's trainable parameters.

    A record's gradient is a sum of ``terms`` terms (times, pixels). ``summed`` says that ``squares`` is taken from that
    sum, so that its rounding error grows with ``reach`` times the norm; in ghost forms (inner products of all pairs of
    terms) it grows with ``reach`` squared.
    """

    terms: int
    summed: bool

    def squares(self) -> Tensor:
        """Squared norm of each record's gradient, float64, shape (B,)."""

    def reach(self) -> Tensor | None:
        """Squared sum of the norms of the terms (or more), float64, shape (B,); None if there is only one term."""

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``sum_i weights_i g_i`` by the layer's own parameter names."""

    def instantiate(self) -> dict[str, Tensor]:
        """Each record's gradient, shape (B, *parameter), by the layer's own parameter names."""


M = TypeVar("M", bound=nn.Module, contravariant=True)


class Kernel(Protocol[M]):
    """How one layer type is served. All methods run without autograd; the first dimension is the batch."""

    def serves(self, module: M) -> bool:
        """Whether this configuration of the layer is computed exactly."""

    def accepts(self, module: M, x: Tensor) -> bool:
        """Whether an input of this shape has the batch in its first dimension."""

    def forward(self, module: M, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output and what else the other methods need, each with the batch in its first dimension."""

    def input_gradient(self, module: M, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Gradient of the layer's input, given that of its output."""

    def share(self, module: M, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor, trainable: frozenset[str]) -> Share:
        """The records' gradients of the parameters named in ``trainable``, in a form that need not be materialised."""


_KERNELS: dict[type[nn.Module], Kernel[Any]] = {}
K = TypeVar("K", bound=type)


def register_kernel(module_type: type[nn.Module]) -> Callable[[K], K]:
    """Serve every module of exactly this type with the decorated kernel class (see `Kernel`).

    Subclasses are not served by their parent's kernel: they may compute something else. A kernel that is wrong makes
    norms wrong, so `probe` compares the engine with plain autograd before training.

    >>> import torch
    >>> from evenhand.gradients.linear import LinearKernel
    >>> class MyLinear(torch.nn.Linear):
    ...     "Computes what nn.Linear computes."
    >>> register_kernel(MyLinear)(LinearKernel).__name__
    'LinearKernel'
    """

    def add(kernel: K) -> K:
        _KERNELS[module_type] = kernel()
        return kernel

    return add


def kernel_for(module: nn.Module) -> Kernel[Any] | None:
    """The kernel that serves this very module, or None: unknown type, own forward, hooks, or a foreign parameter.

    >>> kernel_for(torch.nn.Linear(2, 3)) is not None, kernel_for(torch.nn.Bilinear(2, 3, 4)) is None
    (True, True)
    """
    kernel = _KERNELS.get(type(module))
    if kernel is None or "forward" in module.__dict__ or module._modules:
        return None
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    return kernel if kernel.serves(module) else None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are never taken in half precision.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return dtype if dtype == torch.float64 else torch.float32


def row_squares(x: Tensor) -> Tensor:
    """Squared norm of each row in float64, precise also where float32 squares would overflow or vanish.

    >>> [f"{n:.3g}" for n in row_squares(torch.tensor([[3.0, 4.0], [3e-30, 4e-30], [3e30, 4e30]])).sqrt().tolist()]
    ['5', '5e-30', '5e+30']
    """
    flat = x.flatten(1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1).double()
    if x.dtype != torch.float64 and not within(norms, 1 / ROW_LIMIT, ROW_LIMIT):
        odd = ~((norms >= 1 / ROW_LIMIT) & (norms <= ROW_LIMIT))
        norms[odd] = torch.linalg.vector_norm(flat[odd], dim=1, dtype=torch.float64)
    return norms.square_()


def within(values: Tensor, low: float, high: float) -> bool:
    """Whether all values lie between the two; false if one is not a number.

    >>> within(torch.ones(2), 0, 1), within(torch.tensor([torch.nan]), 0, 1), within(torch.ones(0), 0, 1)
    (True, False, True)
    """
    if not values.numel():
        return True
    least, most = torch.aminmax(values)
    return low <= float(least) and float(most) <= high


def chunks(size: int, row_elements: int, limit: int) -> list[slice]:
    """Slices of ``range(size)`` that hold about ``limit`` elements each.

    >>> chunks(5, 10, 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, min(size, limit // max(1, row_elements)))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


class Instantiated:
    """A share whose gradients are small enough to hold: ``rows`` by name, and the reach of the sums behind them."""

    summed = True

    def __init__(self, rows: dict[str, Tensor], terms: int, reach: Tensor | None):
        self._rows, self.terms, self._reach = rows, terms, reach

    def squares(self) -> Tensor:
        """Squared norms of the held gradients."""
        return torch.stack([row_squares(rows) for rows in self._rows.values()]).sum(0)

    def reach(self) -> Tensor | None:
        """As given at construction."""
        return self._reach

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """One matrix-vector product per parameter."""
        return {name: (weights @ rows.flatten(1)).view(rows.shape[1:]) for name, rows in self._rows.items()}

    def instantiate(self) -> dict[str, Tensor]:
        """The held gradients."""
        return self._rows
