"""Features by name, in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.features import backbone
from evenhand.features.scattering import scattering
from evenhand.usercode import is_own

_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"scattering": scattering}


def names() -> tuple[str, ...]:
    """Names that `extract` takes, besides ``file.py:factory``."""
    return tuple(_FEATURES)


def extract(name: str, inputs: Tensor, batch: int = 512) -> Tensor:
    """The features of every record, in the order of the records.

    A record's features depend on nothing but the record and on what is frozen, so training on them promises the same as
    training on the records. The promise does not cover the data that a frozen network was trained on.

    Args:
      name: one of `names`, or ``file.py:factory``: a function without arguments that returns a trained module.
      inputs: one row per record.
      batch: how many records are computed at a time.

    Examples:
      >>> extract("scattering", torch.rand(3, 1, 8, 8)).shape
      torch.Size([3, 81, 2, 2])
    """
    _validate.whole(batch, "batch")
    if not isinstance(inputs, Tensor) or inputs.dim() < 1 or not len(inputs):
        raise UsageError("Features are computed from one tensor with a row per record, and at least one row.")
    compute = _FEATURES.get(name)
    if compute is None:
        if not is_own(name):
            _validate.known(name, _FEATURES, "features")
        compute = backbone.load(name)
        backbone.check(compute, inputs[:batch], name)
    with torch.no_grad():
        return torch.cat([compute(part) for part in torch.split(inputs, batch)])
