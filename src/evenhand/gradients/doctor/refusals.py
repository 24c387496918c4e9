"""Refuse models that cannot be trained privately, by name and with what to use instead.

There are two kinds: models that are wrapped, compiled or spread over processes by something else than the private step;
and modules for which a record's own gradient does not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from evenhand.errors import UnsupportedModelError

if TYPE_CHECKING:
    from evenhand.gradients.model_layout import Modules

_RANKS = (
    "each process would draw its own sample and add its own noise, and their weights would drift apart: no promise "
    "covers that"
)
_ONE = "In several processes every step divides its batch over them by itself; with several devices in one, use one."


def wrapping(module: nn.Module) -> str | None:
    """Say why a module that is compiled, or spreads a model over devices or processes, is refused; else None.

    >>> wrapping(nn.Linear(2, 2)) is None, wrapping(nn.DataParallel(nn.Linear(2, 2)))[:28]
    (True, 'spreads a batch over devices')
    """
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "is compiled, so its layers cannot be observed; pass the module before torch.compile"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return f"averages gradients over processes by itself, while {_RANKS}. Pass model.module. {_ONE}"
    if isinstance(module, nn.DataParallel):
        return (
            "spreads a batch over devices and adds up gradients by itself, so that no record's own gradient can be "
            "observed. Pass model.module, on one device."
        )
    names = {base.__name__ for base in type(module).__mro__}
    if names & {"FullyShardedDataParallel", "FSDPModule"} or any(map(_sharded, module._parameters.values())):
        return (
            f"holds shards of its parameters (FSDP or DTensor), while {_RANKS}. Pass the module as it was before it "
            f"was sharded. {_ONE}"
        )
    if names & {"DeepSpeedEngine", "PipelineStage", "ShardedDataParallel"}:
        return f"spreads a model over processes by itself, while {_RANKS}. Pass model.module. {_ONE}"
    return None


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a wrapped or sharded model.

    It looks at the module and all inside it. It touches no data and spends nothing.

    >>> refuse_wrapped(nn.Linear(2, 2))
    >>> refuse_wrapped(nn.DataParallel(nn.Linear(2, 2)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenhand.errors.UnsupportedModelError: The model (DataParallel) spreads a batch ... Pass model.module...
    """
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise UnsupportedModelError(
            "The model must be a torch.nn.Module: pass an object such as nn.Linear(4, 2), not a class."
        )
    for name, module in model.named_modules():
        reason = wrapping(module)
        if reason:
            raise UnsupportedModelError(f"{repr(name) if name else 'The model'} ({type(module).__name__}) {reason}")


def _sharded(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter is spread over ranks (DTensor or ShardedTensor), without importing either."""
    names = {base.__name__ for base in type(parameter).__mro__} | {type(getattr(parameter, "data", None)).__name__}
    return bool(names & {"DTensor", "ShardedTensor", "FlatParameter"})


def refuse(modules: Modules) -> None:
    """Raise `UnsupportedModelError` for the first module that mixes records, hides its weights or updates them itself.

    >>> from evenhand.gradients.model_layout import modules_of
    >>> refuse(modules_of(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))))
    >>> refuse(modules_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenhand.errors.UnsupportedModelError: '1' (BatchNorm1d) normalises with statistics ... use nn.GroupNorm ...
    """
    for name, module in modules:
        reason = _reason(module)
        if reason:
            raise UnsupportedModelError(f"{repr(name) if name else 'the model'} ({type(module).__name__}) {reason}")


def _reason(module: nn.Module) -> str | None:
    wrapped = wrapping(module)
    if wrapped is not None:
        return wrapped
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, whose layers cannot be observed; pass the Python module it was made from"
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return (
            "normalises with statistics of the whole batch, so a record's gradient depends on the others; "
            "use nn.GroupNorm or nn.LayerNorm instead, or freeze it with .eval()"
        )
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return "keeps running statistics of the data without noise; pass track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return "rescales the rows it looks up in place, which tells without noise who was looked up; drop max_norm"
        if module.scale_grad_by_freq:
            return "scales gradients by frequencies in the batch, so records are coupled; drop scale_grad_by_freq"
        if module.sparse:
            return "asks for sparse gradients, but noise is dense and must cover every row; pass sparse=False"
    for parameter in module._parameters.values():
        lazy = parameter is not None and is_lazy(parameter)
        if lazy:
            return "is not initialised yet; run one forward on data that may be public before training"
        if parameter is not None and parameter.is_complex():
            return "has complex parameters, for which clipping is not defined here; use two real ones"
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            return (
                "has a parameter with a hook on its gradient, which would see one sum rather than each record's "
                "gradient; remove the hook (to train part of a parameter, split it and freeze the rest)"
            )
    return None
