"""A model that is one dense layer after the other, without autograd: its calls would cost more than its sums.

Only where nothing can come between the layers: torch's own classes, no hooks, vectors for inputs. Everything else
goes through the layer recorder. The results are compared with plain autograd as those of the recorder are.

Nothing is summed within a record, so nothing can cancel. The norm of a record is ``sqrt(sum |g|^2 (|x|^2 + 1))`` over
the layers, in one call of the compiled loops. The gradient of the usual loss at the outputs comes from its formula, of
every other loss from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import starmap
from operator import is_
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.nn import functional
from torch.nn.modules import module as torch_module

from evenhand.errors import EvenhandError
from evenhand.gradients.batch_utils import LossFn, losses
from evenhand.gradients.fast.dense_native import NARROW, DenseLoops, fits, loops
from evenhand.gradients.fast_paths import UnsuitedError
from evenhand.gradients.layers.base import touched
from evenhand.gradients.layers.linear import LinearKernel, linear, times
from evenhand.gradients.memory import out_of_memory
from evenhand.gradients.model_layout import Call, Layout, ServedLayer
from evenhand.gradients.pass_context import lowered, plain, watched
from evenhand.gradients.record_blocks import Blocks, add_up, drain

_BOTH = ("weight", "bias")


class DenseGradients:
    """Norms and sums from calls of linear layers on vectors, each with parameters of its own."""

    slip: Tensor | None = None
    """One term per record."""

    def __init__(self, loss: Tensor, calls: list[Call], names: Mapping[int, str], compiled: DenseLoops):
        self.loss, self._calls, self._names, self._loops = loss, calls, names, compiled
        layers = [
            (*call.tensors, "weight" in (parameters := call.site.parameters), "bias" in parameters) for call in calls
        ]
        self.norm, self.clean = compiled.norms(layers)  # type: ignore[arg-type]

    @classmethod
    def of(cls, loss: Tensor, calls: list[Call], names: Mapping[int, str]) -> DenseGradients | None:
        """Return the gradients; None if loops are missing, are for other numbers, or a parameter is used twice.

        >>> import torch
        >>> DenseGradients.of(torch.zeros(1), [], {}) is None
        True
        """
        compiled = loops()
        identities = [id(p) for call in calls for p in call.site.parameters.values()]
        if compiled is None or not identities or len(set(identities)) < len(identities):
            return None
        if not all(fits(x) and fits(grad) for x, grad in [call.tensors for call in calls]):
            return None
        return cls(loss.double(), calls, names, compiled)

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Sum as `PerRecordGradients` says."""
        total: dict[str, Tensor] = {}
        weights = weights.double().resolve_neg().contiguous()
        parts = blocks.of(blocks.rows)
        exact, runs = blocks.exact(parts), blocks.runs(parts, usable)
        for call in drain(self._calls) if last else self._calls:
            call.check()
            x, grad = call.tensors
            sums = add_up(runs, weights, partial(_exact_sums if exact else self._block_sums, call, x, grad, last))
            for local, part in sums.items():
                total[self._names[id(call.site.parameters[local])]] = part
        return total

    def _block_sums(
        self, call: Call, x: Tensor, grad: Tensor, last: bool, weights: Tensor, rows: slice
    ) -> dict[str, Tensor]:
        """Return the sums over some rows. If ``last``, these rows of ``grad`` are written over."""
        if rows.stop - rows.start < x.shape[0]:
            x, grad = x[rows], grad[rows]
        names, sums = call.site.parameters, {}
        if grad.shape[1] <= NARROW:
            both = self._loops.sums(x, grad, weights, "weight" in names, "bias" in names)
            return {name: both[name == "bias"] for name in names}
        if last and len(names) == len(_BOTH):
            bias = self._loops.scaled(grad, weights)
            return {"weight": grad.t() @ x, "bias": bias}
        single = weights.float()
        if "weight" in names:
            scale, wide = single.unsqueeze(1), grad.shape[1] > x.shape[1]
            sums["weight"] = grad.t() @ (x * scale) if wide else (grad * scale).t() @ x
        if "bias" in names:
            sums["bias"] = single @ grad
        return sums


def _exact_sums(call: Call, x: Tensor, grad: Tensor, last: bool, weights: Tensor, rows: slice) -> dict[str, Tensor]:
    """Return the sums over some rows in float64."""
    scaled = grad[rows].double() * weights.unsqueeze(1)
    both = {"weight": lambda: scaled.t() @ x[rows].double(), "bias": lambda: scaled.sum(0)}
    return {name: both[name]() for name in call.site.parameters}


_ops = torch.ops.aten
Back: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _straightened(grad: Tensor, out: Tensor) -> Tensor:
    compiled = loops()
    if compiled is not None and fits(grad) and fits(out):
        return compiled.straighten(grad, out)
    back: Tensor = _ops.threshold_backward.grad_input(grad, out, 0, grad_input=grad)
    return back


_BENDS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Back]] = {
    nn.ReLU: (torch.relu_, _straightened),
    nn.Tanh: (torch.tanh_, lambda grad, out: _ops.tanh_backward.grad_input(grad, out, grad_input=grad)),
    nn.Sigmoid: (torch.sigmoid_, lambda grad, out: _ops.sigmoid_backward.grad_input(grad, out, grad_input=grad)),
}
"""Activations in place; and in place of the gradient of the output that of the input, from it and the output."""
_KINDS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, *_BENDS)
_FORWARDS = {kind: kind.forward for kind in _KINDS}
_PLACES: tuple[tuple[Any, str], ...] = (
    *((kind, "__call__") for kind in (*_KINDS, nn.CrossEntropyLoss)),
    *((nn.Module, "_call_impl"), (nn.CrossEntropyLoss, "forward")),
    *((functional, name) for name in ("linear", "relu", "cross_entropy")),
)
_ORIGINALS = [getattr(owner, name) for owner, name in _PLACES]
"""Functions that a chain stands in for: who has replaced one of these wants to be called."""


@dataclass(frozen=True)
class _Dense:
    """A linear layer; ``site`` is None if it is frozen, and ``first`` says that nothing before it is trained.

    ``last`` says that the loss sees what comes out: few outputs are then computed with one row per output, which is
    quicker.
    """

    module: nn.Linear
    site: ServedLayer | None
    first: bool
    last: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Compute what the layer computes."""
        parameters = self.module._parameters
        weight, bias = cast("Tensor", parameters["weight"]), parameters["bias"]
        if not self.last or len(weight) > NARROW:
            return linear(x, weight, bias)
        compiled, tables = loops(), (x, weight) if bias is None else (x, weight, bias)
        if compiled is not None and x.shape[1] == self.module.in_features and all(map(fits, tables)):
            return compiled.outputs(x, weight, bias).t()
        return linear(x, weight, bias)


_Part: TypeAlias = _Dense | nn.Module


class DenseChain:
    """The layers of a model in their order.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> chain = DenseChain.of(Layout.read(model))
    >>> loss, calls = chain.differentiate(
    ...     nn.CrossEntropyLoss(reduction="none"), torch.ones(4, 2), torch.zeros(4).long(), 4
    ... )
    >>> [[tuple(t.shape) for t in call.tensors] for call in calls]
    [[(4, 3), (4, 2)], [(4, 2), (4, 3)]]
    """

    def __init__(self, parts: list[_Part], layout: Layout):
        self._parts, self._parameters, self._names = parts, tuple(layout.trainable.values()), layout.names

    @classmethod
    def of(cls, layout: Layout) -> DenseChain | None:
        """Return the model as a chain, or None if it is none. Valid as long as the layout is."""
        served = {id(site.module): site for site in layout.served if isinstance(site, ServedLayer)}
        if len(served) != len(layout.served):
            return None
        leaves = list(_leaves(layout.model))
        parts: list[_Part] = []
        covered: set[int] = set()
        for module in leaves:
            if module is None:
                return None
            if not isinstance(module, nn.Linear):
                parts.append(module)
                continue
            site = served.get(id(module))
            if not _plain(module) or (site is not None and type(site.kernel) is not LinearKernel):
                return None
            parts.append(_Dense(module, site, first=not covered, last=module is leaves[-1]))
            covered.update([id(p) for p in site.parameters.values()] if site else [])
        return cls(parts, layout) if covered and covered == layout.names.keys() else None

    def suits(self, inputs: Any, targets: Any) -> bool:
        """Return whether the path applies: one 2-D tensor (or an input to nn.Flatten), no autocast, hooks or modes."""
        return (
            type(inputs) is Tensor
            and type(targets) is Tensor
            and not inputs.requires_grad
            and (inputs.dim() == 2 or (inputs.dim() > 2 and type(self._parts[0]) is nn.Flatten))
            and not lowered()
            and not watched()
            and all(map(is_, starmap(getattr, _PLACES), _ORIGINALS))
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and not torch_module._global_backward_hooks
            and not torch_module._global_backward_pre_hooks
        )

    def differentiate(self, loss_fn: LossFn, inputs: Tensor, targets: Tensor, size: int) -> tuple[Tensor, list[Call]]:
        """Return one loss per record, and what every layer saw; raises `UnsuitedError` if only a recorder can tell."""
        with plain():
            outputs, seen = self._forward(inputs)
            try:
                loss_and_gradient = slope(loss_fn, outputs, targets, size, self._parameters)
            except EvenhandError:
                raise
            except Exception as error:
                if out_of_memory(error):
                    raise
                raise UnsuitedError from error
            if loss_and_gradient is None:
                raise UnsuitedError
            loss, grad = loss_and_gradient
            return loss, list(self._backward(seen, grad))

    def measure(self, loss: Tensor, calls: list[Call]) -> DenseGradients | None:
        """Return norms and sums by compiled loops; None if those are missing or cannot do these tensors."""
        return DenseGradients.of(loss, calls, self._names)

    def _forward(self, x: Tensor) -> tuple[Tensor, list[tuple[_Part, Tensor]]]:
        """Return the outputs; and of every layer its input, of every activation its output."""
        seen: list[tuple[_Part, Tensor]] = []
        free = False  # whether nobody needs what is in x
        for part in self._parts:
            if isinstance(part, _Dense):
                seen.append((part, x))
                x, free = part(x), True
            elif type(part) is nn.Flatten:
                if part.start_dim != 1 or part.end_dim != -1:
                    raise UnsuitedError
                x = x.flatten(1)
            elif type(part) is not nn.Identity:
                x, free = _BENDS[type(part)][0](x if free else x.clone()), False
                seen.append((part, x))
        return x, seen

    def _backward(self, seen: list[tuple[_Part, Tensor]], grad: Tensor) -> Iterator[Call]:
        for part, tensor in reversed(seen):
            if not isinstance(part, _Dense):
                grad = _BENDS[type(part)][1](grad, tensor)
                continue
            if part.site is not None:
                yield Call(part.site, (tensor, grad), (tensor._version, grad._version))
            if part.first:
                return
            grad = times(grad, cast("Tensor", part.module._parameters["weight"]))


def _leaves(module: nn.Module | None) -> Iterator[nn.Module | None]:
    """Yield the layers in the order of their calls; None for one that is not known or that somebody has touched."""
    if module is None or _FORWARDS.get(type(module)) is not type(module).forward or touched(module):
        yield None
    elif type(module) is nn.Sequential:
        for child in module._modules.values():
            yield from _leaves(child)
    else:
        yield module


def _plain(module: nn.Linear) -> bool:
    """Return whether the layer's weights are its own two parameters, as torch makes them; they keep their shapes."""
    parameters, shapes = (
        module._parameters,
        {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)},
    )
    return parameters.keys() == shapes.keys() and all(
        type(p) is nn.Parameter and p.shape == shapes[name] for name, p in parameters.items() if p is not None
    )


_IGNORED = nn.CrossEntropyLoss().ignore_index
_VECTORS = 2
"""Dimensions of a batch of vectors."""


def slope(
    loss_fn: LossFn, outputs: Tensor, targets: Any, size: int, parameters: Iterable[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return one loss per record, and its gradient at ``outputs``, which belong to the caller and have no graph.

    None if the loss depends on a parameter as well, or on nothing, or writes into the outputs. What a loss raises is
    raised. The gradient belongs to the caller too.

    >>> loss, grad = slope(nn.CrossEntropyLoss(reduction="none"), torch.zeros(1, 2), torch.tensor([1]), 1, [])
    >>> loss.float(), grad
    (tensor([0.6931]), tensor([[ 0.5000, -0.5000]]))
    """
    if _usual(loss_fn) and outputs.dim() == _VECTORS and targets.dim() == 1 and targets.dtype == torch.long:
        offsets = _offsets(loss_fn)
        if not offsets:
            return _cross_entropy(outputs, targets)
        if len(offsets) == outputs.shape[1]:
            return _cross_entropy(outputs + _row(offsets, outputs.dtype, outputs.device), targets)
    version = outputs._version
    with torch.enable_grad():
        loss = losses(loss_fn, outputs.requires_grad_(), targets, size)
        if not loss.requires_grad:
            return None
        grad, *past = gradients_of_sum(loss, [outputs, *parameters])
    if grad is None or any(gradient is not None for gradient in past) or outputs._version != version:
        return None
    # A copy: autograd may give out one number for many places, or what belongs to somebody else.
    return loss.detach(), grad.clone(memory_format=torch.contiguous_format)


def _usual(loss_fn: Any) -> bool:
    """Return whether this is plain cross-entropy; a loss of ours says which one of torch's it is."""
    known = loss_fn.as_torch if "as_torch" in vars(type(loss_fn)) else loss_fn
    return (
        type(known) is nn.CrossEntropyLoss
        and known.reduction == "none"
        and known.weight is None
        and not known.label_smoothing
        and known.ignore_index == _IGNORED
        and not touched(known)
    )


def _offsets(loss_fn: Any) -> tuple[float, ...]:
    """Return the constants that a loss of ours adds to the outputs before cross-entropy; none for most."""
    return loss_fn.offsets if "offsets" in vars(type(loss_fn)) else ()


@lru_cache(16)
def _row(offsets: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the offsets as a tensor, which no caller writes into."""
    return torch.tensor(offsets, dtype=dtype, device=device)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``-log p`` of the label, and ``p`` less one at the label; raises for a label without an output.

    Few classes are handled side by side, over all records at once: torch is ten times quicker that way round.
    """
    turned, compiled = outputs.t(), loops()
    plain = fits(turned) and targets.is_contiguous() and targets.is_cpu and not targets.is_neg()
    if compiled is not None and plain and 0 < len(turned) <= NARROW:
        loss_and_gradient = compiled.slopes(turned, targets)
        if loss_and_gradient is None:
            raise RuntimeError("a label has no output")
        return loss_and_gradient
    across = 0 if turned.is_contiguous() else 1
    table, labels = (turned, targets.unsqueeze(0)) if across == 0 else (outputs, targets.unsqueeze(1))
    likely = torch.log_softmax(table, across)
    loss = likely.gather(across, labels).neg_().squeeze(across)
    grad = likely.exp_().scatter_add_(across, labels, torch.full_like(labels, -1, dtype=likely.dtype))
    return loss, grad.t().contiguous() if across == 0 else grad


def gradients_of_sum(loss: Tensor, asked: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``loss.sum()`` at tensors or edges of the graph; None where it does not depend on them.

    ``torch.autograd.grad`` does the same, but looks at its arguments for a good part of a small model's step.

    >>> x = torch.ones(2, requires_grad=True)
    >>> gradients_of_sum(x * 3, [x])
    (tensor([3., 3.]),)
    """
    answers: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(asked), allow_unreachable=True, accumulate_grad=False
    )
    return answers
