"""Inputs of models: plain dicts and tuples, whose tensors have one row per record, and what all records share.

What is shared is declared with `Shared`; nothing is guessed from a dimension of one, since a guess could hand one
record's data to all others. Models are called, and their outputs read, in ``gradients/batch_utils.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, eq=False)
class Shared:
    """A public constant among a model's inputs: position ids, a mask, a flag. It belongs to no record.

    It is handed to the model as it is, whatever the number of records, and must not be made from private data.

    Examples:
      >>> Shared(torch.arange(4)[None]).value.shape
      torch.Size([1, 4])
    """

    value: Any


def plain(inputs: Any) -> Any:
    """Return inputs as a tensor, a tuple (positional arguments) or a dict (keyword arguments).

    Any Mapping, such as a ``BatchEncoding``, becomes a dict, and a list a tuple; tensors are not copied.

    Examples:
      >>> from collections import UserDict
      >>> plain(UserDict(x=1)), plain([1, 2]), plain(3)
      ({'x': 1}, (1, 2), 3)
    """
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        return {name: _nested(value) for name, value in inputs.items()}
    if isinstance(inputs, list) or type(inputs) is tuple:
        return tuple(_nested(value) for value in inputs)
    return inputs


def _nested(value: Any) -> Any:
    return {name: _nested(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def on_device(tree: Any, device: torch.device) -> Any:
    """Return tensors on another device, in plain dicts and tuples; those that all records share too.

    Examples:
      >>> on_device({"x": torch.ones(1), "flag": Shared(True)}, torch.device("cpu"))["x"]
      tensor([1.])
    """
    return tree_map_only((Tensor, Shared), lambda leaf: moved(leaf, device), plain(tree))


def picked(nested: Tensor, rows: Any) -> Tensor:
    """Return some rows of a nested tensor, whose rows are records of different length.

    Examples:
      >>> rows = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3), torch.ones(2)], layout=torch.jagged)
      >>> [len(row) for row in picked(rows, torch.tensor([2, 0])).unbind()]
      [2, 1]
    """
    records = nested.unbind()
    chosen = records[rows] if isinstance(rows, slice) else [records[row] for row in _numbers(rows)]
    return _nested_again(list(chosen), nested)


def concatenated(leaves: Sequence[Tensor]) -> Tensor:
    """Return the rows of several nested tensors, one after the other; those without a row may be plain ones.

    Examples:
      >>> rows = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
      >>> [len(row) for row in concatenated([rows, rows]).unbind()]
      [1, 3, 1, 3]
    """
    return _nested_again([row for leaf in leaves if leaf.is_nested for row in leaf.unbind()], leaves[0])


def of_one_width(leaf: Tensor) -> Tensor:
    """Return 16 numbers for each record of a nested tensor, equal for equal records, and not finite if they are not.

    Examples:
      >>> rows = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3), torch.ones(1)], layout=torch.jagged)
      >>> marks = of_one_width(rows)
      >>> marks.shape, bool((marks[0] == marks[2]).all()), bool((marks[0] == marks[1]).all())
      (torch.Size([3, 16]), True, False)
    """
    return torch.stack([_mark(row.detach().cpu().contiguous()) for row in leaf.unbind()])


def _mark(row: Tensor) -> Tensor:
    content = f"{tuple(row.shape)} {row.dtype}".encode() + row.view(-1).view(torch.uint8).numpy().tobytes()
    mark = torch.tensor(list(hashlib.blake2b(content, digest_size=16).digest()), dtype=torch.float32)
    return mark if not row.is_floating_point() or bool(torch.isfinite(row).all()) else mark * torch.nan


def _numbers(rows: Tensor) -> list[int]:
    found: list[int] = (rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows).tolist()
    return found


def _nested_again(records: list[Tensor], like: Tensor) -> Tensor:
    """Return records as a nested tensor; of none, a tensor without rows."""
    if not records:
        return like.unbind()[0][:0][None][:0] if like.shape[0] else like
    return torch.nested.as_nested_tensor(records, layout=torch.jagged)


def moved(leaf: Tensor | Shared, to: torch.device | torch.dtype) -> Any:
    """Return a tensor on another device, or in another precision if it is a floating one; what is shared likewise.

    Examples:
      >>> moved(Shared(torch.ones(1)), torch.float64).value, moved(torch.tensor([1]), torch.float64)
      (tensor([1.], dtype=torch.float64), tensor([1]))
    """
    if isinstance(leaf, Shared):
        return Shared(moved(leaf.value, to)) if isinstance(leaf.value, Tensor) else leaf
    return leaf.to(to) if isinstance(to, torch.device) or leaf.is_floating_point() else leaf
