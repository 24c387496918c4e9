"""Frozen features: what a record becomes before training, computed from that record alone, so that nothing is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from evenhand import _user_code, _validate
from evenhand._user_code import described, is_own
from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.models.scattering import scattering

__all__ = ["extract", "names"]

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
        compute = load(name)
        check(compute, inputs[:batch], name)
    with torch.no_grad():
        return torch.cat([compute(part) for part in torch.split(inputs, batch)])


ROWS = 8
ROUNDING = 1e-4
"""Computing a record in another company may change its features by this much of their largest, and no more."""

MIXED = (
    ": it mixes the records of a batch, or draws random numbers. Then a record would reach the features of others, and "
    "no bound on it would hold. Usual reasons: BatchNorm without running statistics, a mean over the batch, dropout "
    "called as a function."
)


def parts(features: str) -> tuple[Path, str]:
    """File and factory of ``file.py:factory``."""
    return _user_code.parts(features, "--features", "nets.py:body")


def load(features: str) -> nn.Module:
    """Execute the file and call its factory; the module is frozen and in eval mode."""
    path, name = parts(features)
    what = f"{path.name}:{name}"
    factory = _attribute(path, name)
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"{what} failed with {described(error)}. Nothing was spent.") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"{what} returned {type(made).__name__}: it must return a torch.nn.Module with its weights.")
    return made.eval().requires_grad_(False)


def check(module: Callable[[Tensor], Tensor], records: Tensor, what: str) -> None:
    """Refuse a module that gives a record other features in other company, or that changes while it computes.

    A few records are computed in company, and then each alone. This can refute that records are independent. It cannot
    prove it.
    """
    what, before = Path(what).name, _state(module)
    rows = sorted({*range(min(ROWS, len(records))), len(records) - 1})
    with torch.no_grad():
        try:
            together = module(records)
        except Exception as error:
            shape = tuple(records.shape[1:])
            raise UsageError(f"{what} cannot take inputs of shape {shape} ({type(error).__name__}).") from None
        if not isinstance(together, Tensor) or together.dim() < 2 or len(together) != len(records):
            raise UsageError(f"{what} must return one tensor with a row of features per record.")
        try:
            alone = [module(records[row : row + 1]) for row in rows]
        except Exception as error:
            kind = type(error).__name__  # what it says may quote the record
            raise UnsupportedModelError(f"{what} cannot compute a record alone ({kind}){MIXED}") from None
    if any(not torch.equal(old, new) for old, new in zip(before, _state(module), strict=True)):
        raise UnsupportedModelError(
            f"{what} changes while it computes, so later records would carry something of earlier ones, and no bound "
            "on a record would hold. Return a module without running statistics, or with them in eval mode."
        )
    for row, single in zip(rows, alone, strict=True):
        if single.shape != together[row : row + 1].shape or not _same(together[row], single[0]):
            raise UnsupportedModelError(f"{what} gives a record other features in other company{MIXED}")


def _same(together: Tensor, alone: Tensor) -> bool:
    if not (bool(together.isfinite().all()) and bool(alone.isfinite().all())):
        return bool(torch.equal(together.isfinite(), alone.isfinite()))
    size = max(float(together.abs().max()), float(alone.abs().max()))
    return float((together - alone).abs().max()) <= ROUNDING * size


def _state(module: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()] if isinstance(module, nn.Module) else []


def _attribute(path: Path, name: str) -> Callable[[], object]:
    factory = getattr(_user_code.executed(path, "features"), name, None)
    if not callable(factory):
        raise UsageError(f"{path.name} has no function {name!r}: write `def {name}(): return ...` with the weights.")
    found: Callable[[], object] = factory
    return found
