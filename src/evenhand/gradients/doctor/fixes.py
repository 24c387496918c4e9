"""Layers that cannot be trained privately, replaced by the nearest ones that can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from evenhand.gradients.model_layout import modules_of

GROUPS = 32
VALUES = 16
"""A group of a layer that may see vectors holds at least so many channels: of one or two, only signs would be left."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Change:
    """A replacement that `fix` makes: where, by what, and what gets lost."""

    name: str
    before: str
    after: str
    note: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.before} -> {self.after} ({self.note})"


def fix(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose layers can be trained privately; `changes` says what that replaces.

    BatchNorm becomes GroupNorm with the same channels, weight and bias; its running statistics are dropped, so a
    pretrained model needs training again. A subclass keeps the modules that it applies afterwards. InstanceNorm loses
    its running statistics, Embedding and EmbeddingBag lose ``max_norm``, ``scale_grad_by_freq`` and ``sparse``, and a
    module wrapped by ``torch.compile`` is unwrapped. A BatchNorm that is in eval mode inside a model in training mode
    was frozen on purpose and stays.

    The given model is left alone. Shared modules stay shared, modes, devices and precisions stay as they were.

    >>> fix(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    copied = copy.deepcopy(model)
    everything = [module for _, module in modules_of(copied)]  # alive to the end, so that no identity is used twice
    done: dict[int, nn.Module] = {}
    for parent in everything:
        for name, child in () if isinstance(parent, torch.jit.ScriptModule) else parent._modules.items():
            if child is not None:
                parent._modules[name] = _fixed(child, copied.training, done)
    return _fixed(copied, copied.training, done)


def changes(model: nn.Module) -> tuple[Change, ...]:
    """Return what `fix` would replace, in the order of the modules.

    >>> print(*changes(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))))  # doctest: +ELLIPSIS
    1: BatchNorm1d(8) -> GroupNorm(1, 8) (running statistics are dropped...)
    """
    replacements = []
    for name, module in modules_of(model):
        repair = _repair(name, module, model.training)
        if repair is not None:
            replacements.append(repair[0])
    return tuple(replacements)


def groups(channels: int, least: int = 1) -> int:
    """Return the largest divisor of ``channels`` up to 32 that leaves at least ``least`` channels a group, or 1.

    >>> groups(64), groups(48), groups(17), groups(128, least=16), groups(8, least=16)
    (32, 24, 17, 8, 1)
    """
    divisors = (g for g in range(1, min(GROUPS, channels) + 1) if channels % g == 0 and channels // g >= least)
    return max(divisors, default=1)


Repair: TypeAlias = tuple[Change, Callable[[], nn.Module]]


def _fixed(module: nn.Module, training: bool, done: dict[int, nn.Module]) -> nn.Module:
    """Return the module or what replaces it; the same for every place where it is used."""
    if id(module) not in done:
        inner = _wrapped(module)
        repair = _repair("", module, training)
        done[id(module)] = (
            _fixed(inner, training, done) if inner is not None else module if repair is None else repair[1]()
        )
    return done[id(module)]


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what ``torch.compile`` was given."""
    inner: nn.Module | None = getattr(module, "_orig_mod", None)
    return inner


def _repair(name: str, module: nn.Module, training: bool) -> Repair | None:
    """Return the replacement in words and the function that makes it, or None if the module may stay."""
    kind = type(module).__name__
    if isinstance(module, _BATCH_NORMS) and (module.training or not training or module.running_mean is None):
        return _group_norm(name, module)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        words = f"{kind}(track_running_stats=True)", f"{kind}(track_running_stats=False)"
        return Change(name, *words, "running statistics are dropped"), lambda: _without_statistics(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        odd = [option for option in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, option)]
        note = "the same table" if odd == ["sparse"] else "the same table, trained without this constraint"
        change = Change(name, f"{kind} with {', '.join(odd)}", kind, note)
        return (change, lambda: _plain_embedding(module)) if odd else None
    inner = _wrapped(module)
    if inner is not None:
        return Change(name, "compiled module", type(inner).__name__, "compile it again after training"), lambda: inner
    return None


def _group_norm(name: str, module: Any) -> Repair | None:
    """Return a GroupNorm; None for a lazy layer (unknown channels) and for one channel that may be one value."""
    channels, vectors = module.num_features, isinstance(module, nn.BatchNorm1d)
    if channels < (2 if vectors else 1):
        return None
    number = groups(channels, VALUES if vectors else 1)

    after = _after(module)
    if after is None:
        return None

    def make() -> nn.Module:
        tensor = next((t for t in (module.weight, module.running_mean) if t is not None), None)
        placed = {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}
        norm = nn.GroupNorm(number, channels, module.eps, module.affine, **placed).train(module.training)
        norm.weight, norm.bias = module.weight, module.bias
        return nn.Sequential(norm, *after).train(module.training) if after else norm

    note = "running statistics are dropped; weight and bias are kept"
    words = ", then ".join([f"GroupNorm({number}, {channels})", *[type(each).__name__ for each in after]])
    return Change(name, f"{type(module).__name__}({channels})", words, note), make


def _after(module: Any) -> list[nn.Module] | None:
    """Return what a subclass of BatchNorm applies to what it normalised; None if it computes something else.

    A layer such as timm's ``BatchNormAct2d`` holds the modules that it applies afterwards. Whether it does no more than
    that is seen on numbers of our own, with fixed statistics.
    """
    if type(module) in _BATCH_NORMS:
        return []
    after = [each for each in module._modules.values() if each is not None]
    pixels = () if isinstance(module, nn.BatchNorm1d) else (2, 2, 2) if isinstance(module, nn.BatchNorm3d) else (4, 4)
    alone = copy.deepcopy(module).eval()
    alone.running_mean = alone.running_var = alone.num_batches_tracked = None
    draw, dtype = torch.Generator().manual_seed(0), torch.float32
    alone = alone.to("cpu", dtype)
    alone.running_mean = torch.randn(module.num_features, generator=draw)
    alone.running_var = 0.5 + torch.rand(module.num_features, generator=draw)
    x = torch.randn(3, module.num_features, *pixels, generator=draw)
    with torch.no_grad():
        expected = torch.batch_norm(
            x, alone.weight, alone.bias, alone.running_mean, alone.running_var, False, 0.0, alone.eps, False
        )
        for each in alone._modules.values():
            expected = expected if each is None else each(expected)
        try:
            same = torch.allclose(alone(x), expected, rtol=1e-4, atol=1e-5)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
    return [each for each in after if not isinstance(each, nn.Identity)] if same else None


def _without_statistics(module: _InstanceNorm) -> nn.Module:
    module.track_running_stats = False
    module.running_mean = module.running_var = module.num_batches_tracked = None
    return module


def _plain_embedding(module: nn.Embedding | nn.EmbeddingBag) -> nn.Module:
    module.max_norm, module.scale_grad_by_freq, module.sparse = None, False, False
    return module
