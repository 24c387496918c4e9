"""Which module mixes records: the outputs of every module for a record alone, beside those for it in company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenhand.gradients.randomness import preserved
from evenhand.gradients.records import batch_size, call


@dataclass(frozen=True)
class _Seen:
    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def first_coupled_module(model: nn.Module, alone: Any, company: Any, place: int, tolerance: float) -> str | None:
    """Name of the first module whose output for a record differs in company although its input does not.

    If already the input differs, records were mixed by the code of the module around it, and that one is named. None
    if no output differs.

    >>> class Centred(nn.Module):
    ...     def forward(self, x): return x - x.mean(0)
    >>> x = torch.eye(2)
    >>> first_coupled_module(nn.Sequential(nn.Linear(2, 2), Centred()), x[:1], x, 0, 1e-3)
    "'1' (Centred)"
    """
    one, many = _watch(model, alone, 0), _watch(model, company, place)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for a, b in zip(one, many, strict=False):
        if a.name != b.name:
            return _title(a.name, a.kind)
        if _differ(a.outputs, b.outputs, tolerance):
            name = a.name if a.name == "" or not _differ(a.inputs, b.inputs, tolerance) else a.name.rpartition(".")[0]
            return _title(name, kinds[name])
    return None


def _title(name: str, kind: str) -> str:
    return f"{name!r} ({kind})" if name else f"the model's own forward ({kind})"


def _watch(model: nn.Module, inputs: Any, place: int) -> list[_Seen]:
    """What each module took in and gave out for the record at ``place``, in the order in which modules finished."""
    size = batch_size(inputs, None)
    seen: list[_Seen] = []

    def rows(tree: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.dim() and t.shape[0] % size == 0]
        return [t.detach().clone().reshape(size, -1)[place] for t in tensors if t.shape[0]]

    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            seen.append(_Seen(name, type(module).__name__, rows((args, kwargs)), rows(output)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with preserved(model):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _differ(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
    if [t.shape for t in a] != [t.shape for t in b]:
        return True
    floats = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return any(bool(torch.norm(x - y) > tolerance * (torch.norm(x) + 1e-6)) for x, y in floats)
