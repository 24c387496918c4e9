"""Mark losses of training records, so that whoever prints one sees that no epsilon covers it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RawLosses(Tensor):
    """Losses of training records: NOT private. No epsilon holds for a choice that is made by looking at them.

    It is an ordinary tensor otherwise, and what is computed from it (a mean, a sum) is marked too. ``item``, ``tolist``
    and ``numpy`` give plain numbers, which bear no mark.

    Examples:
      >>> import torch
      >>> losses = torch.tensor([0.5, 1.5]).as_subclass(RawLosses)
      >>> losses.mean()
      RawLosses(tensor(1.), not private)
      >>> float(losses.mean())
      1.0
    """

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub names no keyword
        return f"RawLosses({self.as_subclass(Tensor)!r}, not private)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a copy on disk is made from: a plain tensor, so that a checkpoint with one can be read again."""
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec) if spec else repr(self)
