"""Modules for which a record's own gradient does not exist, refused by name with what to use instead."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.structure import Modules
from evenhand.gradients.wrapped import wrapping


def refuse(modules: Modules) -> None:
    """Raise `UnsupportedModelError` for the first module that mixes records, hides its weights or updates them itself.

    >>> from evenhand.gradients.structure import modules_of
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
