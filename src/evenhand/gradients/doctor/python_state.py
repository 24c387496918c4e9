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
        own = {id(parameter) for model in self._models for parameter in model.parameters()}
        return _walk(self._roots, own)

    def snapshot(self) -> Snapshot:
        """Return copies of all containers, tensors and generators, to be put back."""
        return Snapshot([(found, copy) for _, found in self._reached() if (copy := _copy(found)) is not None])

    def generators(self) -> list[Any]:
        """Return states of the random generators that are held, to be compared."""
        held = [found for _, found in self._reached() if isinstance(found, _GENERATORS)]
        return [copy.tolist() if isinstance(copy, Tensor) else repr(copy) for copy in map(_copy, held)]

    def picture(self) -> Picture:
        """Return values by path, to be compared by `changes`."""
        seen = ((path, _seen(found)) for path, found in self._reached())
        return {path: value for path, value in seen if value is not None}


class Snapshot:
    """Containers, tensors and generators beside what they held."""

    def __init__(self, held: list[tuple[Any, Any]]) -> None:
        self._held = held

    def restore(self) -> None:
        """Put everything back in place; what did not change is not written."""
        for found, copy in self._held:
            _put_back(found, copy)


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
        path, found = waiting.popleft()
        if type(found) in _PLAIN:
            yield path, found
        elif id(found) not in seen and id(found) not in without and not isinstance(found, _CLOSED):
            seen[id(found)] = found
            yield path, found
            waiting.extend(_children(path, found))


def _children(path: str, found: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(found, (Tensor, np.ndarray, *_GENERATORS)):
        return ()
    if isinstance(found, dict):
        return [(f"{path}.{key}", value) for key, value in list(found.items())]
    if isinstance(found, list | tuple | deque | set | frozenset):
        return [(f"{path}[{i}]", value) for i, value in enumerate(list(found))]
    if isinstance(found, CellType):
        return [(path, _inside(found))]
    if isinstance(found, FunctionType):
        cells = zip(found.__code__.co_freevars, found.__closure__ or (), strict=False)
        held = (*(found.__defaults__ or ()), found.__kwdefaults__, found.__dict__)
        return [*((f"{path}.{name}", cell) for name, cell in cells), *((f"{path}({i})", v) for i, v in enumerate(held))]
    if isinstance(found, MethodType):
        return [(path, found.__self__), (f"{path}()", found.__func__)]
    if isinstance(found, partial):
        return [(f"{path}()", found.func), (f"{path}(args)", found.args), (f"{path}(keywords)", found.keywords)]
    if isinstance(found, nn.Module):
        own = [(f"{path}.{key}", value) for key, value in found.__dict__.items() if _looked_into(key, value)]
        return [*own, *((path, table) for key in _TABLES if (table := found.__dict__.get(key)))]
    if type(found).__module__.partition(".")[0] in _FOREIGN or type(found).__module__.startswith(_FOREIGN):
        return ()
    slots = [name for name in getattr(type(found), "__slots__", ()) if isinstance(name, str) and hasattr(found, name)]
    return [(path, getattr(found, "__dict__", None)), *((f"{path}.{name}", getattr(found, name)) for name in slots)]


def _looked_into(key: str, value: Any) -> bool:
    return key not in _INTERNAL or (key not in _KNOWN and bool(value))


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _copy(found: Any) -> Any:
    """Return what is needed to put an object back; None where nothing is."""
    if isinstance(found, Tensor):
        return found.detach().clone() if _readable(found) else None
    if isinstance(found, np.ndarray):
        return found.copy() if found.size <= LARGEST and found.flags.writeable else None
    if isinstance(found, torch.Generator):
        return found.get_state()
    if isinstance(found, np.random.RandomState):
        return found.get_state()
    if isinstance(found, np.random.Generator):
        return found.bit_generator.state
    if isinstance(found, random.Random):
        return found.getstate()
    if isinstance(found, dict):
        return list(found.items())
    if isinstance(found, list | deque | set):
        return list(found)
    if isinstance(found, CellType):
        return (_inside(found),)
    return found.__dict__.copy() if _owns_attributes(found) else None


def _owns_attributes(found: Any) -> bool:
    return isinstance(found, nn.Module)


def _put_back(found: Any, copy: Any) -> None:
    if isinstance(found, Tensor):
        if not same_bits(found, copy):
            with torch.no_grad():
                found.copy_(copy)
    elif isinstance(found, np.ndarray):
        found[...] = copy
    elif isinstance(found, torch.Generator | np.random.RandomState):
        found.set_state(copy)
    elif isinstance(found, np.random.Generator):
        found.bit_generator.state = copy
    elif isinstance(found, random.Random):
        found.setstate(copy)
    elif isinstance(found, nn.Module):
        _refill(found.__dict__, list(copy.items()))
    elif isinstance(found, CellType):
        if _inside(found) is not copy[0]:
            found.cell_contents = copy[0]
    elif isinstance(found, dict):
        _refill(found, copy)
    elif len(found) != len(copy) or any(a is not b for a, b in zip(found, copy, strict=True)):
        found.clear()
        (found.update if isinstance(found, set) else found.extend)(copy)


def _refill(found: dict[Any, Any], copy: list[tuple[Any, Any]]) -> None:
    now = list(found.items())
    if len(now) != len(copy) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, copy, strict=True)):
        found.clear()
        found.update(copy)


def _readable(tensor: Tensor) -> bool:
    """Return whether its values can be copied: not those of a large one, nor of one that a transform left behind."""
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and tensor.numel() <= LARGEST and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _seen(found: Any) -> Any:
    """Return a value to compare; None for what is only a way to others."""
    if type(found) in _PLAIN:
        return type(found).__name__, repr(found)
    if isinstance(found, Tensor):
        return found.detach().clone() if _readable(found) else (id(found), found._version)
    if isinstance(found, np.ndarray):
        return found.copy() if found.size <= LARGEST and not found.dtype.hasobject else (id(found), found.shape)
    if isinstance(found, list | deque | set | frozenset | tuple):
        return type(found).__name__, len(found)
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
