"""Plain Python state of a model and its loss: attributes, closure cells and what they hold, pictured and put back.

Reached are buffers and attributes of modules and of other objects, what functions close over, their attributes and
defaults, and lists, dicts, sets and deques of these. Not reached are global variables, class attributes, files, and the
inside of objects of other libraries.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

LARGEST = 1 << 22
"""Numbers of a tensor whose values are compared; of a larger one only place and version are."""
OBJECTS = 20_000
"""Objects that are looked at, at most: a loss may hold a whole dataset."""
Picture: TypeAlias = dict[str, Any]
"""Values by the way to them."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CLOSED = (type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device)
_FOREIGN = ("torch", "numpy", "evenhand.data", "builtins", "collections")
_TABLES = ("_modules", "_parameters", "_buffers")
_KNOWN = frozenset((*_TABLES, "training", "_is_full_backward_hook", "_non_persistent_buffers_set"))
_INTERNAL = frozenset((*_KNOWN, *nn.Module().__dict__))
"""Attributes that every module has: hooks are looked into where there are any."""


class PlainState:
    """Whatever can be reached from ``roots``, except the parameters of a root that is a model.

    Examples:
      >>> class Mean:
      ...     def __init__(self): self.seen = [0.0]
      ...     def __call__(self, out, y): self.seen.append(float(out.sum())); return out
      >>> loss = Mean(); state = PlainState({"loss": loss}); before = state.snapshot(); first = state.picture()
      >>> _ = loss(torch.ones(2), None); changes(first, state.picture())
      ['loss.seen', 'loss.seen[1]']
      >>> before.restore(); loss.seen
      [0.0]
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._models = [root for root in self._roots.values() if isinstance(root, nn.Module)]

    def _reached(self) -> Iterator[tuple[str, Any]]:
        parameters = {id(parameter) for model in self._models for parameter in model.parameters()}
        return _walk(self._roots, parameters)

    def snapshot(self) -> Snapshot:
        """Return copies of all containers, tensors and generators, to be put back."""
        return Snapshot([(node, copy) for _, node in self._reached() if (copy := _copy(node)) is not None])

    def generators(self) -> list[Any]:
        """Return states of the random generators that are held, to be compared."""
        generators = [node for _, node in self._reached() if isinstance(node, _GENERATORS)]
        return [copy.tolist() if isinstance(copy, Tensor) else repr(copy) for copy in map(_copy, generators)]

    def picture(self) -> Picture:
        """Return values by path, to be compared by `changes`."""
        seen = ((path, _seen(node)) for path, node in self._reached())
        return {path: value for path, value in seen if value is not None}


class Snapshot:
    """Containers, tensors and generators beside what they held."""

    def __init__(self, copies: list[tuple[Any, Any]]) -> None:
        self._copies = copies

    def restore(self) -> None:
        """Put everything back in place; what did not change is not written."""
        for node, copy in self._copies:
            _put_back(node, copy)


def changes(before: Picture, after: Picture) -> list[str]:
    """Return every path whose value differs, or that only one of the two has; not-a-number equals itself.

    >>> changes({"a": ("float", "nan")}, {"a": ("float", "nan"), "b": ("int", "1")})
    ['b']
    """
    both = {**before, **after}
    return [path for path in both if path not in before or path not in after or not _same(before[path], after[path])]


def _walk(roots: Mapping[str, Any], without: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield paths and objects, each object once, parents first; ``without`` some, by identity."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[str, Any]] = deque(roots.items())
    while waiting and len(seen) < OBJECTS:
        path, node = waiting.popleft()
        if type(node) in _PLAIN:
            yield path, node
        elif id(node) not in seen and id(node) not in without and not isinstance(node, _CLOSED):
            seen[id(node)] = node
            yield path, node
            waiting.extend(_children(path, node))


def _children(path: str, node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, (Tensor, np.ndarray, *_GENERATORS)):
        return ()
    if isinstance(node, dict):
        return [(f"{path}.{key}", value) for key, value in list(node.items())]
    if isinstance(node, list | tuple | deque | set | frozenset):
        return [(f"{path}[{i}]", value) for i, value in enumerate(list(node))]
    if isinstance(node, CellType):
        return [(path, _inside(node))]
    if isinstance(node, FunctionType):
        cells = zip(node.__code__.co_freevars, node.__closure__ or (), strict=False)
        values = (*(node.__defaults__ or ()), node.__kwdefaults__, node.__dict__)
        return [
            *((f"{path}.{name}", cell) for name, cell in cells),
            *((f"{path}({i})", v) for i, v in enumerate(values)),
        ]
    if isinstance(node, MethodType):
        return [(path, node.__self__), (f"{path}()", node.__func__)]
    if isinstance(node, partial):
        return [(f"{path}()", node.func), (f"{path}(args)", node.args), (f"{path}(keywords)", node.keywords)]
    if isinstance(node, nn.Module):
        again = "_flat_weights" if isinstance(node, nn.RNNBase) else ""  # its parameters, listed anew by each forward
        reached = [(key, value) for key, value in node.__dict__.items() if key != again and _looked_into(key, value)]
        attributes = [(f"{path}.{key}", value) for key, value in reached]
        return [*attributes, *((path, table) for key in _TABLES if (table := node.__dict__.get(key)))]
    if type(node).__module__.partition(".")[0] in _FOREIGN or type(node).__module__.startswith(_FOREIGN):
        return ()
    slots = [name for name in getattr(type(node), "__slots__", ()) if isinstance(name, str) and hasattr(node, name)]
    return [(path, getattr(node, "__dict__", None)), *((f"{path}.{name}", getattr(node, name)) for name in slots)]


def _looked_into(key: str, value: Any) -> bool:
    return key not in _INTERNAL or (key not in _KNOWN and bool(value))


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _copy(node: Any) -> Any:
    """Return what is needed to put an object back; None where nothing is."""
    if isinstance(node, Tensor):
        return node.detach().clone() if _readable(node) else None
    if isinstance(node, np.ndarray):
        return node.copy() if node.size <= LARGEST and node.flags.writeable else None
    if isinstance(node, torch.Generator):
        return node.get_state()
    if isinstance(node, np.random.RandomState):
        return node.get_state()
    if isinstance(node, np.random.Generator):
        return node.bit_generator.state
    if isinstance(node, random.Random):
        return node.getstate()
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, list | deque | set):
        return list(node)
    if isinstance(node, CellType):
        return (_inside(node),)
    return node.__dict__.copy() if _owns_attributes(node) else None


def _owns_attributes(node: Any) -> bool:
    return isinstance(node, nn.Module)


def _put_back(node: Any, copy: Any) -> None:
    if isinstance(node, Tensor):
        if not same_bits(node, copy):
            with torch.no_grad():
                node.copy_(copy)
    elif isinstance(node, np.ndarray):
        node[...] = copy
    elif isinstance(node, torch.Generator | np.random.RandomState):
        node.set_state(copy)
    elif isinstance(node, np.random.Generator):
        node.bit_generator.state = copy
    elif isinstance(node, random.Random):
        node.setstate(copy)
    elif isinstance(node, nn.Module):
        _refill(node.__dict__, list(copy.items()))
    elif isinstance(node, CellType):
        if _inside(node) is not copy[0]:
            node.cell_contents = copy[0]
    elif isinstance(node, dict):
        _refill(node, copy)
    elif len(node) != len(copy) or any(a is not b for a, b in zip(node, copy, strict=True)):
        node.clear()
        (node.update if isinstance(node, set) else node.extend)(copy)


def _refill(table: dict[Any, Any], copy: list[tuple[Any, Any]]) -> None:
    now = list(table.items())
    if len(now) != len(copy) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, copy, strict=True)):
        table.clear()
        table.update(copy)


def _readable(tensor: Tensor) -> bool:
    """Return whether its values can be copied: not those of a large one, nor of one that a transform left behind."""
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and tensor.numel() <= LARGEST and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _seen(node: Any) -> Any:
    """Return a value to compare; None for what is only a way to others."""
    if type(node) in _PLAIN:
        return type(node).__name__, repr(node)
    if isinstance(node, Tensor):
        return node.detach().clone() if _readable(node) else (id(node), node._version)
    if isinstance(node, np.ndarray):
        return node.copy() if node.size <= LARGEST and not node.dtype.hasobject else (id(node), node.shape)
    if isinstance(node, list | deque | set | frozenset | tuple):
        return type(node).__name__, len(node)
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same values; not-a-number equals itself.

    >>> same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    True
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    return (
        a.is_floating_point()
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        and torch.equal(torch.isnan(a), torch.isnan(b))
    )
