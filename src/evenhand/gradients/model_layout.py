"""A model as the engine sees it: its modules, its trainable parameters, and which layers have kernels.

It is read once and compared before every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.doctor.refusals import refuse
from evenhand.gradients.layers.base import Composite, Kernel, Piece, Share, composite_for, kernel_for, shadowed
from evenhand.gradients.layers.resemblance import resembling
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.pass_context import RandomState
from evenhand.gradients.row_norms import working_dtype
from evenhand.gradients.views import rows_of, share_of

Modules: TypeAlias = list[tuple[str, nn.Module]]
Trainable: TypeAlias = dict[str, nn.Parameter]


def modules_of(model: nn.Module) -> Modules:
    """Return names and modules, each module once, parents first; the inside of a ScriptModule is not entered.

    >>> [name for name, _ in modules_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()))]
    ['', '0', '0.0', '1']
    """
    modules: Modules = []
    seen: set[int] = set()
    stack: Modules = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append((name, module))
        if not isinstance(module, torch.jit.ScriptModule):
            prefix = name + "." if name else ""
            children = [(prefix + child, m) for child, m in module._modules.items() if m is not None]
            stack.extend(reversed(children))
    return modules


def trainable_of(modules: Modules) -> Trainable:
    """Return the parameters that require a gradient, each once, under the name that ``named_parameters`` gives it.

    >>> list(trainable_of(modules_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)))))
    ['0.weight', '0.bias', '1.weight']
    """
    trainable: Trainable = {}
    seen: set[int] = set()
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                trainable[f"{prefix}.{name}" if prefix else name] = parameter
    return trainable


@dataclass(frozen=True)
class ServedLayer:
    """A served module or a piece of one, its trainable parameters by the module's own names, and their precision.

    ``all_parameters`` are all its parameters, frozen ones too. ``trial``: that the kernel computes what the module does
    is not known from its type, see ``layers/resemblance.py``. ``inner``: how many dimensions, the last ones, make a
    place of a layer that does the same at every place; None for others.
    """

    module: nn.Module
    kernel: Any
    parameters: dict[str, nn.Parameter]
    all_parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    piece: bool = False
    trial: bool = False
    inner: int | None = None

    def share(self, tensors: tuple[Tensor, ...], room: ScratchBuffers, views: int = 1) -> Share:
        """Return the records' gradients from what a call left; with several ``views`` per record, added up over them.

        The share may keep what it computes in ``room``.
        """
        if views > 1:
            return share_of(self, tensors, views, room)
        trainable = frozenset(self.parameters)
        if self.piece:
            piece: Piece[Any] = self.kernel
            return piece.share(self.module, tensors, trainable, room)
        kernel: Kernel[Any] = self.kernel
        x, *saved, grad = tensors
        return kernel.share(self.module, x, tuple(saved), grad, trainable, room)


@dataclass(frozen=True)
class Call:
    """One call of a layer: tensors for its share, with the batch in their first dimension."""

    site: ServedLayer
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    views: int = 1

    @classmethod
    def of(cls, site: ServedLayer, tensors: tuple[Tensor, ...]) -> Call:
        """Return a call whose tensors are watched from now on.

        They are detached: with its graph an input would hold the node that holds the recorder, until a collection.
        """
        seen = tuple([t.detach() for t in tensors])
        return cls(site, seen, tuple([t._version for t in seen]))

    def share_tensors(self, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the tensors for a share: of some rows and in another precision if asked."""
        tensors = self.tensors
        if rows is not None:
            rows = rows if self.views == 1 else rows_of(rows, self.views)
            tensors = tuple([t[rows] for t in tensors])
        wanted = dtype or self.site.dtype
        return tuple([t.to(wanted) if t.dtype != wanted and t.is_floating_point() else t for t in tensors])

    def check(self) -> None:
        """Raise if what the layer saw was changed in place since the backward."""
        if tuple([t._version for t in self.tensors]) != self.versions:
            raise UsageError("inputs were changed in place after the pass; ask for the weighted sum before that")


@dataclass(frozen=True)
class ServedComposite:
    """A module that is served piece by piece; pieces whose parameters are all frozen are sites too."""

    module: nn.Module
    composite: Composite[Any]
    sites: dict[str, ServedLayer]


Served = Sequence[ServedLayer | ServedComposite]


def with_channels_last(served: Served) -> list[ServedLayer | ServedComposite]:
    """Replace convolution kernels by channels-last ones if every layer supports that; else return a copy.

    >>> kernels = [site.kernel for site in sites([("", nn.Conv2d(1, 2, 3))])]
    >>> kernels == [site.kernel for site in with_channels_last(sites([("", nn.Conv2d(1, 2, 3))]))]
    False
    """
    if any(isinstance(site, ServedLayer) and getattr(site.kernel, "channels_first", False) for site in served):
        return list(served)
    return [_turned(site) if isinstance(site, ServedLayer) else site for site in served]


def _turned(site: ServedLayer) -> ServedLayer:
    turn = getattr(site.kernel, "channels_last", None)
    kernel = None if turn is None else turn(site.module)
    return site if kernel is None else replace(site, kernel=kernel)


def sites(modules: Modules) -> list[ServedLayer | ServedComposite]:
    """Return the modules with trainable parameters that a kernel or a composite serves.

    >>> [type(site.module).__name__ for site in sites([("a", nn.Linear(2, 2)), ("b", nn.Bilinear(1, 1, 1))])]
    ['Linear']
    """
    served: list[ServedLayer | ServedComposite] = []
    for _, module in modules:
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        if not any(p.requires_grad for p in parameters.values()):
            continue
        kernel = kernel_for(module)
        if kernel is not None:
            served.append(_site(module, kernel, parameters, piece=False))
            continue
        kernel = resembling(module)
        if kernel is not None:
            served.append(replace(_site(module, kernel, parameters, piece=False), trial=True))
            continue
        composite = composite_for(module)
        if composite is not None:
            pieces = {
                name: _site(module, piece, {n: parameters[n] for n in names}, piece=True)
                for name, (piece, names) in composite.pieces(module).items()
            }
            served.append(ServedComposite(module, composite, pieces))
    return served


def _site(module: nn.Module, kernel: Any, parameters: dict[str, nn.Parameter], *, piece: bool) -> ServedLayer:
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    all_parameters = tuple(parameters.values())
    dtype, places = working_dtype(all_parameters[0].dtype), getattr(kernel, "inner", None)
    inner = None if places is None else places(module)
    return ServedLayer(module, kernel, trainable, all_parameters, dtype, piece, inner=inner)


@dataclass(frozen=True)
class Layout:
    """A model as the engine sees it; valid while ``marks`` stay what they were."""

    model: nn.Module
    modules: Modules
    identities: frozenset[int]
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[tuple[dict[str, Tensor | None], str], ...]
    trainable: Trainable
    served: list[ServedLayer | ServedComposite]
    marks: tuple[_Mark, ...]
    names: dict[int, str]

    @classmethod
    def read(cls, model: nn.Module) -> Layout:
        """Look at every module; raises `UnsupportedModelError` for one that cannot be trained privately.

        >>> list(Layout.read(nn.Linear(2, 1)).trainable)
        ['weight', 'bias']
        """
        modules = modules_of(model)
        marks = tuple(_Mark.of(module) for _, module in modules)
        refuse(modules)
        identities = frozenset(id(module) for _, module in modules)
        parameters = tuple(p for _, module in modules for p in module._parameters.values() if p is not None)
        buffers = tuple((module._buffers, name) for _, module in modules for name in module._buffers)
        trainable = trainable_of(modules)
        names = {id(p): name for name, p in trainable.items()}
        return cls(model, modules, identities, parameters, buffers, trainable, sites(modules), marks, names)

    @cached_property
    def channels_last(self) -> list[ServedLayer | ServedComposite]:
        """Return what is served, by channels-last kernels; ``served`` itself if there are none."""
        turned = with_channels_last(self.served)
        return self.served if turned == self.served else turned

    @cached_property
    def all_builtin(self) -> bool:
        """Return whether all kernels are our own: what another one returns may still be used by its author.

        >>> Layout.read(nn.Linear(2, 1)).all_builtin
        True
        """
        kernels = [site.kernel if isinstance(site, ServedLayer) else site.composite for site in self.served]
        return all(type(kernel).__module__.startswith("evenhand.") for kernel in kernels)

    def description(self) -> tuple[Any, ...]:
        """Return what ``marks`` compare, without a reference to a module or a parameter.

        >>> model = nn.Linear(2, 1); before = Layout.read(model).description()
        >>> before == Layout.read(model).description(), before == Layout.read(model.requires_grad_(False)).description()
        (True, False)
        """
        return tuple(mark.description() for mark in self.marks)

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return identity and version of every buffer and parameter: a write in place or a replacement changes them.

        >>> layout = Layout.read(nn.Linear(2, 1)); before = layout.state()
        >>> with torch.no_grad(): _ = layout.model.weight.add_(1)
        >>> layout.state() == before
        False
        """
        buffers = [t for t in [places.get(name) for places, name in self.buffers] if t is not None]
        return tuple([(id(t), t._version) for t in (*buffers, *self.parameters)])

    def current(self) -> Layout:
        """Return this layout, or a new one if modules, parameters, modes or hooks have changed."""
        for mark in self.marks:
            if not mark.holds():
                return Layout.read(self.model)
        for site in self.served:
            part = site.kernel if isinstance(site, ServedLayer) else site.composite
            if not part.serves(site.module):
                return Layout.read(self.model)
        return self


class ModelSnapshot:
    """Random numbers and buffers before an attempt that may fail, so that the next one finds what this one found.

    >>> layout = Layout.read(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    >>> before = ModelSnapshot(layout); first = layout.model(torch.ones(1, 1)); before.restore()
    >>> bool((first == layout.model(torch.ones(1, 1))).all())
    True
    """

    def __init__(self, layout: Layout):
        self._random = RandomState(layout.model)
        buffers = [(places, name, places.get(name)) for places, name in layout.buffers]
        self._buffers = [(places, name, t, t.detach().clone()) for places, name, t in buffers if t is not None]

    def restore(self) -> None:
        """Put everything back."""
        self._random.restore()
        with torch.no_grad():
            for places, name, tensor, copy in self._buffers:
                places[name] = tensor
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Everything that decides how a module is served, compared before every batch rather than read again.

    The marks of a model's modules name each module's children, so together they hold exactly if a walk over the model
    would find the same modules.
    """

    module: nn.Module
    script: bool
    forward: Any
    training: Any
    shadowed: bool
    compiled: bool
    hooks: tuple[int, int, int, int]
    children: list[int]
    parameters: list[Any]
    places: list[int]
    flags: list[tuple[Any, ...]]
    buffers: list[bool]

    @classmethod
    def of(cls, module: nn.Module) -> _Mark:
        """Return the module as it is now."""
        script, inside = isinstance(module, torch.jit.ScriptModule), module.__dict__
        parameters = list(module._parameters.values())
        return cls(
            module,
            script,
            None if script else type(module).forward,
            inside.get("training"),
            False if script else shadowed(module),
            inside.get("_compiled_call_impl") is not None,
            _hooks(module),
            [] if script else [*map(id, module._modules.values())],
            [p for p in parameters if p is not None],
            [*map(id, parameters)],
            [_flags(p) for p in parameters if p is not None],
            [buffer is None for buffer in module._buffers.values()],
        )

    def description(self) -> tuple[Any, ...]:
        """Return it as plain values, with identities in the place of objects."""
        module = (id(self.module), type(self.module), self.script, self.forward, self.training, self.shadowed)
        lists = (tuple(self.children), tuple(self.places), tuple(self.flags), tuple(self.buffers))
        return *module, self.compiled, self.hooks, *lists

    def holds(self) -> bool:
        """Return whether the module is still as it was."""
        module = self.module
        inside = module.__dict__
        return (
            inside.get("training") is self.training
            and (self.script or shadowed(module) is self.shadowed)
            and (inside.get("_compiled_call_impl") is not None) is self.compiled
            and (self.script or type(module).forward is self.forward)
            and _hooks(module) == self.hooks
            and (self.script or [*map(id, module._modules.values())] == self.children)
            and [*map(id, module._parameters.values())] == self.places
            and [*map(_flags, self.parameters)] == self.flags
            and [buffer is None for buffer in module._buffers.values()] == self.buffers
        )


def _flags(parameter: nn.Parameter) -> tuple[Any, ...]:
    shape = parameter.shape if type(parameter) is nn.Parameter else None  # some have none yet
    return parameter.requires_grad, bool(parameter._backward_hooks), shape, parameter.dtype


def _hooks(module: nn.Module) -> tuple[int, int, int, int]:
    return (
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
        len(module._backward_hooks),
        len(module._backward_pre_hooks),
    )
