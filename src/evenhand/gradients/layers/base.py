"""Layer kernels: what one must do, and the table of them.

A kernel computes one layer type without autograd for its weights: forward, gradient of the input, and from input and
output gradient each record's share of the norm and of the weighted sum. Everything that is not in the table is
differentiated record by record instead (``record_by_record.py``), which is exact too, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.row_norms import RowNorms


class Share(Protocol):
    """The part that one call of a layer adds to the gradients of all records, for the layer's trainable parameters.

    A record's gradient is a sum of ``terms`` terms (times, pixels) whose rounding error grows with ``reach``.
    ``joint`` is how many of them ``weighted_sum`` adds up over records and terms in one sum: 1 if it adds gradients of
    whole records, whose lengths were measured as they are.
    """

    terms: int

    @property
    def joint(self) -> int:
        """Return how many terms of a record enter the sum over all records; known once lengths were asked for."""

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return columns of shape (B,) whose squares add up to the squared norm of each record's gradient.

        Measure rows with ``gauge`` and take products of lengths, never of squares. Lengths must not suffer from
        cancellation beyond what ``terms`` and ``reach`` say: Gram matrices belong in float64.
        """

    def reach(self, gauge: RowNorms) -> Tensor | None:
        """Return an upper bound, shape (B,), on the sum of the norms of the terms; None if there is only one term."""

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Return ``sum_i weights_i g_i`` over the records of ``rows``, by the layer's own parameter names.

        ``weights`` are those of these records. The sum is in memory of its own.
        """

    def instantiate(self) -> dict[str, Tensor]:
        """Return each record's gradient, shape (B, *parameter), by the layer's own parameter names."""


@runtime_checkable
class MeasuredShare(Share, Protocol):
    """A share whose gradients come from more than sums of what was recorded: from means, or from a second run.

    In another precision they may be other gradients, such as beyond the kink of a ReLU. So no sum may have any but
    those whose lengths were measured.
    """

    def measured(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the gradients of some records, in the precision in which they were measured."""


M = TypeVar("M", bound=nn.Module, contravariant=True)


class Kernel(Protocol[M]):
    """Serves one layer type with one input and one output.

    All methods run without autograd; the first dimension of every tensor is the batch. A kernel may also have
    ``inner`` if it does the same at every place, ``join`` (for both see ``LinearKernel``), and ``backward``, which
    gives the input gradient and tensors for ``share`` at once (see ``GroupNormKernel``).
    """

    def serves(self, module: M) -> bool:
        """Return whether this configuration of the layer is computed exactly."""

    def accepts(self, module: M, x: Tensor) -> bool:
        """Return whether an input of this shape has the batch in its first dimension."""

    def forward(self, module: M, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and what else the other methods need, each with the batch in its first dimension."""

    def input_gradient(self, module: M, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Return gradient of the layer's input, given that of its output."""

    def share(
        self,
        module: M,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Share:
        """Return the records' gradients of the parameters in ``trainable``, in a form that need not be materialised."""


class Piece(Protocol[M]):
    """A part of a composite module, with any number of inputs and outputs.

    All methods run without autograd; the first dimension of every tensor is the batch.
    """

    def forward(self, module: M, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs, and what else ``backward`` needs."""

    def backward(
        self,
        module: M,
        inputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        needed: tuple[bool, ...],
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Return gradients of the inputs that need one (None for the others), and what ``share`` needs.

        ``grads`` has the gradient of every output, zeros for an output that was not used.
        """

    def share(self, module: M, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers) -> Share:
        """Return the records' gradients of the parameters named in ``trainable``, from what ``backward`` kept."""


Serve = Callable[..., tuple[Tensor, ...]]
"""``serve(piece name, *inputs)``: run a piece of the module and record it."""


class Composite(Protocol[M]):
    """Serves a module with inputs of its own kind (recurrent layers, attention), piece by piece.

    What the pieces leave over (activations, softmax, dropout, transposes) is ordinary autograd.
    """

    def serves(self, module: M) -> bool:
        """Return whether this configuration of the module is computed exactly."""

    def pieces(self, module: M) -> Mapping[str, tuple[Piece[Any], tuple[str, ...]]]:
        """Return each piece by name, with the module's own names of the parameters that it covers."""

    def forward(self, module: M, serve: Serve, size: int, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns for ``size`` records; NotImplemented if pieces cannot do it."""


_KERNELS: dict[type[nn.Module], Kernel[Any]] = {}
_COMPOSITES: dict[type[nn.Module], Composite[Any]] = {}
_FORWARDS: dict[type[nn.Module], Any] = {}
K = TypeVar("K", bound=type)


def register_kernel(module_type: type[nn.Module]) -> Callable[[K], K]:
    """Serve every module of exactly this type with the decorated kernel class (see `Kernel`).

    Subclasses are not served by their parent's kernel: they may compute something else. A kernel that is wrong makes
    norms wrong, so `probe` compares the engine with plain autograd before training.

    >>> import torch
    >>> from evenhand.gradients.layers.linear import LinearKernel
    >>> class MyLinear(torch.nn.Linear):
    ...     "Computes what nn.Linear computes."
    >>> register_kernel(MyLinear)(LinearKernel).__name__
    'LinearKernel'
    """

    def add(kernel: K) -> K:
        _KERNELS[module_type] = kernel()
        _FORWARDS[module_type] = module_type.forward
        return kernel

    return add


def register_composite(module_type: type[nn.Module]) -> Callable[[K], K]:
    """Serve every module of exactly this type with the decorated class (see `Composite`)."""

    def add(composite: K) -> K:
        _COMPOSITES[module_type] = composite()
        _FORWARDS[module_type] = module_type.forward
        return composite

    return add


def kernel_for(module: nn.Module) -> Kernel[Any] | None:
    """Return the kernel that serves this module, or None: unknown type, own forward, hooks, foreign parameter.

    >>> kernel_for(torch.nn.Linear(2, 3)) is not None, kernel_for(torch.nn.Bilinear(2, 3, 4)) is None
    (True, True)
    """
    kernel = _KERNELS.get(type(module))
    if kernel is None or module._modules or touched(module):
        return None
    return kernel if kernel.serves(module) else None


def composite_for(module: nn.Module) -> Composite[Any] | None:
    """Return the composite that serves this very module, or None.

    >>> composite_for(torch.nn.Linear(2, 3)) is None
    True
    """
    composite = _COMPOSITES.get(type(module))
    if composite is None or touched(module):
        return None
    return composite if composite.serves(module) else None


def shadowed(module: nn.Module) -> bool:
    """Return whether something on the instance stands before what its class or its parameters would give.

    >>> layer = torch.nn.Linear(1, 1); layer.forward = lambda x: x
    >>> shadowed(layer), shadowed(torch.nn.Linear(1, 1))
    (True, False)
    """
    inside = module.__dict__
    return "forward" in inside or "_call_impl" in inside or not inside.keys().isdisjoint(module._parameters)


def touched(module: nn.Module) -> bool:
    """Return whether the module's forward was replaced or has hooks, so that no kernel may stand in."""
    return bool(
        shadowed(module)
        or type(module).forward is not _FORWARDS.get(type(module), type(module).forward)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def combined(weights: Tensor, gradients: Tensor) -> Tensor:
    """Return the weighted sum of gradients that are held one per record.

    >>> combined(torch.tensor([1.0, 2.0]), torch.ones(2, 3))
    tensor([3., 3., 3.])
    """
    return (weights @ gradients.reshape(len(gradients), -1)).view(gradients.shape[1:])


class Instantiated:
    """A share whose gradients are small enough to hold: ``rows`` by name, and the reach of the sums behind them."""

    joint = 1

    def __init__(self, rows: dict[str, Tensor], terms: int, reach: Callable[[RowNorms], Tensor] | None):
        self._rows, self.terms, self._reach = rows, terms, reach

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return one column per parameter."""
        return [gauge(rows) for rows in self._rows.values()]

    def reach(self, gauge: RowNorms) -> Tensor | None:
        """Return what was given at construction."""
        return None if self._reach is None else self._reach(gauge)

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Take one matrix-vector product per parameter."""
        return {name: combined(weights, gradients[rows]) for name, gradients in self._rows.items()}

    def instantiate(self) -> dict[str, Tensor]:
        """Return the held gradients."""
        return self._rows

    def measured(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the held gradients of these records."""
        return {name: gradients[rows] for name, gradients in self._rows.items()}


class WeightAndBias:
    """Sums and gradients of a share with two parameters, of which those named in ``trainable`` are wanted.

    A subclass says what a weight's gradients are made of; those of a bias are one row per record.
    """

    trainable: frozenset[str]

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Sum the weight as the subclass does; the bias is a matrix-vector product."""
        sums = {}
        if "weight" in self.trainable:
            sums["weight"] = self._weight_sum(weights, rows)
        if "bias" in self.trainable:
            sums["bias"] = weights @ self._bias()[rows]
        return sums

    def instantiate(self) -> dict[str, Tensor]:
        """Return the gradients of all records."""
        gradients = {}
        if "weight" in self.trainable:
            gradients["weight"] = self._weight_gradients()
        if "bias" in self.trainable:
            gradients["bias"] = self._bias()
        return gradients

    def _weight_sum(self, weights: Tensor, rows: slice) -> Tensor:
        raise NotImplementedError

    def _weight_gradients(self) -> Tensor:
        raise NotImplementedError

    def _bias(self) -> Tensor:
        """Return the gradient of the bias, one row per record."""
        raise NotImplementedError


def by_name(parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Return the results of shares that have no name in common.

    >>> by_name([{"a": torch.ones(1)}, {"b": torch.zeros(1)}], 0)
    {'a': tensor([1.]), 'b': tensor([0.])}
    """
    return {name: value for part in parts for name, value in part.items()}


class Shares:
    """Shares of different parameters of one layer, or of different rows of them, as one share.

    Args:
      shares: at least one.
      assemble: gives the layer's parameters from the results of all shares; ``assemble(parts, dim)`` finds the first
        dimension of a parameter at ``dim``.
      demand: called before a gradient is computed; raises if the memory behind the shares was taken back.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        assemble: Callable[[Sequence[dict[str, Tensor]], int], dict[str, Tensor]] = by_name,
        demand: Callable[[], None] | None = None,
    ) -> None:
        self._shares, self._assemble, self._demand = shares, assemble, demand
        self.terms = max(share.terms for share in shares)

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Return the columns of all shares."""
        return [column for share in self._shares for column in share.lengths(gauge)]

    def reach(self, gauge: RowNorms) -> Tensor | None:
        """Take the reaches as sides of a box: errors of different parameters are at right angles."""
        reaches = [reach for share in self._shares if (reach := share.reach(gauge)) is not None]
        if len(reaches) > 1:
            box: Tensor = torch.stack([reach.double() for reach in reaches]).norm(dim=0)
            return box
        return reaches[0] if reaches else None

    @property
    def by_gram(self) -> bool:
        """Return whether all are measured by inner products in float64."""
        return all(getattr(share, "by_gram", False) for share in self._shares)

    @property
    def joint(self) -> int:
        """Return the most of all shares."""
        return max(share.joint for share in self._shares)

    def weighted_sum(self, weights: Tensor, rows: slice) -> dict[str, Tensor]:
        """Assemble the sums of all shares."""
        if self._demand is not None:
            self._demand()
        return self._assemble([share.weighted_sum(weights, rows) for share in self._shares], 0)

    def instantiate(self) -> dict[str, Tensor]:
        """Assemble the gradients of all shares."""
        if self._demand is not None:
            self._demand()
        return self._assemble([share.instantiate() for share in self._shares], 1)
