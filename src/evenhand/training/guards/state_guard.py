"""Notice changes of a model's state between private steps, by comparing its contents.

The version of a tensor does not change when somebody writes through ``.data``, so contents are compared. Up to
``COPIED`` numbers are copied and compared exactly before every step. Of larger models, address and version are compared
before every step, and a keyed digest of the contents at the ends of blocks, at secret steps, at checkpoints and at
release: copies would take several percent of the time of a small step.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenhand.gradients.doctor.python_state import same_bits
from evenhand.gradients.model_layout import Layout

COPIED = 1 << 14
"""Numbers, trained or fixed, of which a copy is kept."""
_PIECE = 1 << 15


class Digest:
    """A hash of tensors' bits with a secret key.

    Every 32 bits are multiplied by a secret odd 64-bit number of their place in a piece, modulo 2^64, and every piece
    by a power of another: a change that does not depend on the key passes unseen with probability about 2^-31.

    Examples:
      >>> digest, values = Digest(), torch.zeros(3)
      >>> before = digest(values); values.data[1] = 1.0
      >>> digest(values) == before
      False
    """

    def __init__(self) -> None:
        draw = np.random.default_rng(secrets.randbits(128))
        self._key = draw.integers(0, 1 << 64, _PIECE + 1, dtype=np.uint64) | np.uint64(1)

    def __call__(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return shape, type and hash of the contents."""
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        words = raw.view(np.uint32) if len(raw) % 4 == 0 else raw
        total, factor = 0, int(self._key[_PIECE])
        for start in range(0, len(words), _PIECE):
            piece = words[start : start + _PIECE].astype(np.uint64)
            total = (total * factor + int((piece * self._key[: len(piece)]).sum(dtype=np.uint64))) % (1 << 64)
        return tuple(tensor.shape), tensor.dtype, total


class _Sum(NamedTuple):
    """Digest of a tensor (None if it was not computed), with its address and version."""

    digest: tuple[Any, ...] | None
    mark: tuple[int, int]


@dataclass(frozen=True)
class Changed:
    """Names of trained and of fixed tensors that other code wrote, added or removed."""

    trained: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    late: bool = False
    """Whether steps may have been taken since a fixed one was written."""


class StateGuard:
    """A guard of a model's tensors: only private steps may write trained ones, and nothing may write fixed ones.

    Fixed are frozen parameters and all buffers, also those that a ``state_dict`` leaves out. Excepted are the
    ``moving`` buffers, which every pass changes in the same way whatever the records. A ``lean`` guard copies nothing.

    Examples:
      >>> from torch import nn
      >>> model = nn.BatchNorm1d(2); layout = Layout.read(model.eval()); guard = StateGuard()
      >>> guard.begin(layout)
      >>> _ = model.running_mean.data.fill_(3.0)
      >>> guard.changed(layout, thorough=False)
      Changed(trained=(), fixed=('running_mean',), late=False)
    """

    def __init__(self, lean: bool = False) -> None:
        self._digest, self._most = Digest(), 0 if lean else COPIED
        self._noted: dict[str, Tensor | _Sum] = {}
        self._layout: Layout | None = None
        self._trained: list[_Place] = []
        self._fixed: list[_Place] = []
        self._copies = False
        self._trained_marks: list[_NamedMark] | None = None
        self._fixed_marks: list[_NamedMark] = []
        self.moving: frozenset[str] = frozenset()

    @property
    def begun(self) -> bool:
        """Return whether a state was noted yet."""
        return bool(self._noted)

    def begin(self, layout: Layout) -> None:
        """Note the whole state as it is, the first time."""
        if not self._noted:
            self._read(layout)
            self._note(self._trained, thorough=True)
            self._note(self._fixed, thorough=True)
            self._fixed_marks = _named_marks(self._fixed)

    def changed(self, layout: Layout, *, thorough: bool) -> Changed:
        """Return the names of tensors that are not as the last private step left them; none before `begin`."""
        if not self._noted:
            return _NOTHING
        if not thorough and layout is self._layout and self._marks_hold():
            return _NOTHING
        self._take_marks()
        if layout is not self._layout:
            self._read(layout)
        trained = self._differing(self._trained, thorough)
        fixed = self._differing(self._fixed, thorough)
        places = len(self._trained) + len(self._fixed)
        if not trained and not fixed and len(self._noted) == places:
            return _NOTHING
        gone = self._noted.keys() - {place[0] for place in (*self._trained, *self._fixed)}
        late = any(self._unmoved(name, tensor) for name, tensor in _tensors(self._fixed) if name in fixed)
        return Changed(tuple(trained), (*fixed, *sorted(gone)), late)

    def _unmoved(self, name: str, tensor: Tensor) -> bool:
        """Return whether address and version are as noted, so that only the digest tells of a change."""
        noted = self._noted.get(name)
        return isinstance(noted, _Sum) and noted.mark == _mark(tensor)

    def updated(self, *, thorough: bool) -> None:
        """Note the trained tensors as a private step left them."""
        if thorough or self._copies:
            self._trained_marks = None
            self._note(self._trained, thorough)
        else:
            self._trained_marks = _named_marks(self._trained)

    def _marks_hold(self) -> bool:
        """Return whether only marks need to be compared, and none has changed: the quick answer of most steps."""
        return (
            self._trained_marks is not None
            and self._trained_marks == _named_marks(self._trained)
            and self._fixed_marks == _named_marks(self._fixed)
        )

    def _take_marks(self) -> None:
        """Note the marks that the last private step left, for the comparison tensor by tensor."""
        if self._trained_marks is not None:
            self._noted.update((name, _Sum(None, mark)) for name, mark in self._trained_marks)
            self._trained_marks = None

    def _read(self, layout: Layout) -> None:
        self._layout = layout
        self._trained, self._fixed = _places(layout, self.moving)
        counts = [sum(t.numel() for _, t in _tensors(places)) for places in (self._trained, self._fixed)]
        self._copies = any(0 < count <= self._most for count in counts)

    def _note(self, places: list[_Place], thorough: bool) -> None:
        tensors, noted = _tensors(places), self._noted
        if sum([t.numel() for _, t in tensors]) > self._most:
            for name, tensor in tensors:
                noted[name] = _Sum(self._digest(tensor) if thorough else None, _mark(tensor))
            return
        copies = [copy for name, t in tensors if isinstance(copy := noted.get(name), Tensor) and _alike(copy, t)]
        if copies and len(copies) == len(tensors):
            with torch.no_grad():
                torch._foreach_copy_(copies, [t for _, t in tensors])
            return
        noted.update((name, t.detach().clone()) for name, t in tensors)

    def _differing(self, places: list[_Place], thorough: bool) -> list[str]:
        return [name for name, tensor in _tensors(places) if not self._holds(name, tensor, thorough)]

    def _holds(self, name: str, tensor: Tensor, thorough: bool) -> bool:
        noted = self._noted.get(name)
        if isinstance(noted, Tensor):
            return _alike(noted, tensor) and _equal(noted, tensor)
        if noted is None:
            return False
        moved = _mark(tensor) != noted.mark
        if noted.digest is not None and (thorough or moved):
            return self._digest(tensor) == noted.digest
        return not moved


_NOTHING = Changed()
_Place: TypeAlias = tuple[str, dict[str, Any], str]
"""Name, and the table of a module that holds the tensor under a key."""


def _tensors(places: list[_Place]) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, table, key in places if (t := table.get(key)) is not None]


_NamedMark: TypeAlias = tuple[str, tuple[int, int]]


def _named_marks(places: list[_Place]) -> list[_NamedMark]:
    return [(name, _mark(t)) for name, table, key in places if (t := table.get(key)) is not None]


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _equal(copy: Tensor, tensor: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, by the quickest comparison there is."""
    if _memcmp is not None and tensor.is_cpu and tensor.is_contiguous() and copy.is_contiguous():
        return not _memcmp(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return same_bits(copy, tensor.detach())


def _library() -> Any:
    """Return C's memcmp, None where it is not available."""
    try:
        memcmp = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    memcmp.argtypes, memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return memcmp


_memcmp = _library()


def _alike(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype is tensor.dtype and copy.device == tensor.device


def _places(layout: Layout, moving: frozenset[str]) -> tuple[list[_Place], list[_Place]]:
    """Return where trained and fixed tensors are stored; each parameter once."""
    trained: list[_Place] = []
    fixed: list[_Place] = []
    seen: set[int] = set()
    for prefix, module in layout.modules:
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for key, tensor in table.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or id(tensor) in seen or name in moving:
                    continue
                seen.add(id(tensor))
                (trained if table is module._parameters and tensor.requires_grad else fixed).append((name, table, key))
    return trained, fixed
