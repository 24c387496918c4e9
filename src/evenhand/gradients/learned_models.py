"""The memory of `per_sample`: what it learned about a model, from call to call, without keeping the model alive.

Comparing kernels with autograd on a first batch costs as much as several steps. An engine that is kept does it once; a
call that makes a new engine would do it every time. What was learned is therefore kept by names, beside a description
of the model as it was: modules, their types, forwards, modes, hooks, parameters and buffers by identity. A model that
differs in any of these, or another loss, is looked at anew. The guards of every batch, and comparisons at the 2nd, 4th,
8th ... batch go on as in an engine that is kept.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from evenhand.gradients.layer_recorder import LearnedUse
from evenhand.gradients.model_layout import Layout
from evenhand.gradients.unserved.module_fallback import Apart

Key: TypeAlias = tuple[bool, bool, tuple[str, ...]]
"""Decides how a batch is run: by a speed path or not, training or not, and the names of the trained parameters."""
Habits: TypeAlias = dict[Key, LearnedUse | None]
_REMEMBERED: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Named:
    """A `LearnedUse` with names in the place of modules; ``rest`` is what has none."""

    rest: LearnedUse
    batch: dict[str, int | None]
    apart: dict[str, tuple[tuple[str, ...], Apart]]
    unlike: tuple[str, ...]

    @classmethod
    def of(cls, use: LearnedUse, names: dict[nn.Module, str]) -> Named:
        """Return what was learned, by the names of modules."""
        nothing = nn.Identity()
        apart = {name: (one.names, replace(one, module=nothing, parameters={})) for name, one in use.apart.items()}
        batch = {names[module]: axis for module, axis in use.batch.items()}
        rest = replace(use, batch={}, apart={}, unlike=set())
        return cls(rest, batch, apart, tuple(names[module] for module in use.unlike))

    def use(self, layout: Layout) -> LearnedUse:
        """Return what was learned, for the modules of a model like the one that it was learned from."""
        modules = dict(layout.modules)
        apart = {
            name: replace(one, module=modules[name], parameters={n: layout.trainable[n] for n in names})
            for name, (names, one) in self.apart.items()
        }
        batch = {modules[name]: axis for name, axis in self.batch.items()}
        return replace(self.rest, batch=batch, apart=apart, unlike={modules[name] for name in self.unlike})


def in_float64(layout: Layout, use: LearnedUse) -> tuple[Layout, LearnedUse] | None:
    """Return a copy of a model in float64 and what was learned, for its modules; None if there can be no such copy.

    >>> copied = in_float64(Layout.read(nn.Linear(1, 1)), LearnedUse())
    >>> copied[0].model.weight.dtype, in_float64(*copied) is None
    (torch.float64, True)
    """
    if all(p.dtype == torch.float64 for p in layout.parameters):
        return None
    try:
        doubled = Layout.read(copy.deepcopy(layout.model).double())
    except Exception:  # whatever the model's own attributes raise
        return None
    names = {module: name for name, module in layout.modules}
    return doubled, replace(Named.of(use, names).use(doubled), learning=False, weights={})


@dataclass(frozen=True)
class Memory:
    """The experience of an engine with a model and a loss; ``since`` counts its batches, ``flags`` are its own."""

    description: tuple[Any, ...]
    loss: Callable[[], Any]
    habits: dict[Key, Named | None]
    since: int
    flags: tuple[Any, ...]


def remember(
    model: nn.Module, loss_fn: Any, layout: Layout, habits: Habits, since: int, flags: tuple[Any, ...]
) -> None:
    """Keep what was learned for as long as the model lives; nothing if model or loss cannot be referred to weakly."""
    names = {module: name for name, module in layout.modules}
    named = {key: None if use is None else Named.of(use, names) for key, use in habits.items()}
    try:
        _REMEMBERED[model] = Memory(layout.description(), weakref.ref(loss_fn), named, since, flags)
    except TypeError:
        return


def recall(model: nn.Module, loss_fn: Any, layout: Layout) -> tuple[Habits, int, tuple[Any, ...]] | None:
    """Return what was learned about this model and loss, if the model is still as it was.

    >>> model, loss = nn.Linear(1, 1), nn.MSELoss(reduction="none")
    >>> layout = Layout.read(model)
    >>> remember(model, loss, layout, {}, 3, ()); recall(model, loss, layout)
    ({}, 3, ())
    >>> recall(model, loss, Layout.read(model.eval())) is None
    True
    """
    try:
        memory = _REMEMBERED.get(model)
    except TypeError:
        return None
    if memory is None or memory.loss() is not loss_fn or memory.description != layout.description():
        return None
    habits = {key: None if named is None else named.use(layout) for key, named in memory.habits.items()}
    return habits, memory.since, memory.flags
