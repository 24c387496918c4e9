"""A model that is one dense layer after the other, without autograd: its calls would cost more than its sums.

Only where nothing can come between the layers: torch's own classes, no hooks, vectors for inputs. Everything else is
recorded on a tape. What comes out is held against plain autograd like a tape, on the first batches and now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from operator import is_
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from evenhand.errors import EvenhandError
from evenhand.gradients.footprint import out_of_memory
from evenhand.gradients.kernels import touched
from evenhand.gradients.linear import LinearKernel
from evenhand.gradients.loops import NARROW, fits, loops
from evenhand.gradients.narrow import linear, times
from evenhand.gradients.precision import lowered, plain
from evenhand.gradients.randomness import watched
from evenhand.gradients.records import LossFn
from evenhand.gradients.serving import Layout, Site
from evenhand.gradients.slopes import slope
from evenhand.gradients.tape import Call

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
"""What a chain stands in for: who has replaced one of these wants to be called."""


class Unchained(Exception):  # noqa: N818 - nothing is wrong with the model
    """The loss looks at more than the outputs, or cannot be computed like this: a tape tells what is the matter."""


@dataclass(frozen=True)
class _Dense:
    """A linear layer; ``site`` is None if it is frozen, and ``first`` says that nothing before it is trained.

    ``last`` says that the loss sees what comes out: few outputs are then computed with one row per output, which is
    quicker.
    """

    module: nn.Linear
    site: Site | None
    first: bool
    last: bool

    def __call__(self, x: Tensor) -> Tensor:
        """As the layer itself."""
        held = self.module._parameters
        weight, bias = cast("Tensor", held["weight"]), held["bias"]
        if not self.last or len(weight) > NARROW:
            return linear(x, weight, bias)
        compiled, tables = loops(), (x, weight) if bias is None else (x, weight, bias)
        if compiled is not None and x.shape[1] == self.module.in_features and all(map(fits, tables)):
            return compiled.outputs(x, weight, bias).t()
        return linear(x, weight, bias)


_Part: TypeAlias = _Dense | nn.Module


class Chain:
    """The layers of a model in their order.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> chain = Chain.of(Layout.read(model))
    >>> loss, calls = chain.run(nn.CrossEntropyLoss(reduction="none"), torch.ones(4, 2), torch.zeros(4).long(), 4)
    >>> [[tuple(t.shape) for t in call.tensors] for call in calls]
    [[(4, 3), (4, 2)], [(4, 2), (4, 3)]]
    """

    def __init__(self, parts: list[_Part], layout: Layout):
        self._parts, self._parameters = parts, tuple(layout.trainable.values())

    @classmethod
    def of(cls, layout: Layout) -> Chain | None:
        """The model as a chain; None if it is none. Good for as long as the layout is."""
        served = {id(site.module): site for site in layout.served if isinstance(site, Site)}
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
        """Whether this batch can be run like that: one tensor of vectors or what a layer flattens, nobody watching."""
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

    def run(self, loss_fn: LossFn, inputs: Tensor, targets: Tensor, size: int) -> tuple[Tensor, list[Call]]:
        """One loss per record, and what every layer saw. Raises `Unchained` if only a tape can tell."""
        with plain():
            outputs, seen = self._forward(inputs)
            try:
                found = slope(loss_fn, outputs, targets, size, self._parameters)
            except EvenhandError:
                raise
            except Exception as error:
                if out_of_memory(error):
                    raise
                raise Unchained from error
            if found is None:
                raise Unchained
            loss, grad = found
            return loss, list(self._backward(seen, grad))

    def _forward(self, x: Tensor) -> tuple[Tensor, list[tuple[_Part, Tensor]]]:
        """The outputs; and of every layer its input, of every activation its output."""
        seen: list[tuple[_Part, Tensor]] = []
        free = False  # whether nobody needs what is in x
        for part in self._parts:
            if isinstance(part, _Dense):
                seen.append((part, x))
                x, free = part(x), True
            elif type(part) is nn.Flatten:
                if part.start_dim != 1 or part.end_dim != -1:
                    raise Unchained
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
    """The layers in the order of their calls; None for one that is not known or that somebody has touched."""
    if module is None or _FORWARDS.get(type(module)) is not type(module).forward or touched(module):
        yield None
    elif type(module) is nn.Sequential:
        for child in module._modules.values():
            yield from _leaves(child)
    else:
        yield module


def _plain(module: nn.Linear) -> bool:
    """Whether the layer's weights are its own two parameters, as torch makes them; they keep their shapes."""
    held, shapes = (
        module._parameters,
        {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)},
    )
    return held.keys() == shapes.keys() and all(
        type(p) is nn.Parameter and p.shape == shapes[name] for name, p in held.items() if p is not None
    )
