"""Models that are wrapped, compiled or spread over processes: refused, since the step does not sum over ranks."""

from __future__ import annotations

import torch
from torch import nn

from evenhand.errors import UnsupportedModelError

_RANKS = (
    "each process would draw its own sample and add its own noise, and their weights would drift apart: no promise "
    "covers that"
)
_ONE = "Train in one process, without torchrun; with several devices in one, on one of them."


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
    """Raise `UnsupportedModelError` for a wrapped or sharded model, or where several processes train together.

    It looks at the module and all inside it, and at torch.distributed: a process group with more than one rank is
    refused whatever the model is. It touches no data and spends nothing.

    >>> refuse_wrapped(nn.Linear(2, 2))
    >>> refuse_wrapped(nn.DataParallel(nn.Linear(2, 2)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenhand.errors.UnsupportedModelError: The model (DataParallel) spreads a batch ... Pass model.module...
    """
    for name, module in model.named_modules():
        reason = wrapping(module)
        if reason:
            raise UnsupportedModelError(f"{repr(name) if name else 'The model'} ({type(module).__name__}) {reason}")
    ranks = _ranks()
    if ranks > 1:
        raise UnsupportedModelError(
            f"This process is one of {ranks} in a torch.distributed process group: {_RANKS}. {_ONE} If the group "
            "serves something else, call torch.distributed.destroy_process_group() first."
        )


def _ranks() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def _sharded(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter is spread over ranks: a DTensor or an older ShardedTensor, told without importing either."""
    names = {base.__name__ for base in type(parameter).__mro__} | {type(getattr(parameter, "data", None)).__name__}
    return bool(names & {"DTensor", "ShardedTensor", "FlatParameter"})
