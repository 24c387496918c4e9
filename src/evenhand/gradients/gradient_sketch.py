"""Gradients compared without holding two of them: folded to a few numbers, one parameter after the other.

A look at a large model before training would otherwise need several copies of its gradient at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.gradients.row_norms import numbers

WIDTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
"""Numbers that stand for a longer tensor, one of these; shorter ones stay as they are.

Primes, since layers are often as wide as a power of two: a column of a matrix would fall on few of so many numbers,
where it could cancel.
"""
PIECE = 1 << 16
"""Numbers that are folded at a time, at most; of a small tensor an eighth."""
Fold: TypeAlias = NDArray[np.float64]
_NOTHING = np.zeros(1)


def folded(values: Tensor, seed: int) -> tuple[Fold, Fold]:
    """Return sums of the numbers with random signs, and sums that mark places that are not finite (counted as 0).

    The fold of a sum is the sum of the folds. Its length is that of the values, give or take some 4 %, whatever they
    are: the signs are independent. So the fold of a difference tells how large that is.

    >>> one, other = torch.randn(2, 50_000)
    >>> length = np.linalg.norm(folded(one, 7)[0] - folded(other, 7)[0]) / float((one - other).norm())
    >>> bool(0.8 < length < 1.2)
    True
    """
    flat = values.detach().reshape(-1)
    every = numbers(flat if flat.dtype in (torch.float32, torch.float64) else flat.double())
    count, draw = len(every), np.random.default_rng(seed)
    width = int(draw.choice(WIDTHS))
    total, odd = np.zeros((2, min(width, count)))
    step = max(1, min(PIECE, count // 8) // width) * width
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, step):
            piece = every[start : start + step].astype(np.float64)
            signs = _signs(draw, len(piece)) if count > width else np.ones(count)
            finite = np.isfinite(piece)
            if not finite.all():
                _add(odd, (2.0 + signs) * ~finite)  # of one sign, so that no two of them make none
                piece[~finite] = 0.0
            _add(total, signs * piece)
    return total, odd


def fold_of(values: Tensor, seed: int) -> Fold:
    """Return the fold of finite numbers; if one is not finite, none of it is a number.

    >>> fold_of(torch.tensor([1.0, torch.inf]), 0)
    array([nan, nan])
    """
    total, odd = folded(values, seed)
    return np.full_like(total, np.nan) if odd.any() else total


def _signs(draw: np.random.Generator, count: int) -> Fold:
    bits = np.unpackbits(np.frombuffer(draw.bytes(-(-count // 8)), np.uint8))[:count]
    return bits.astype(np.float64) * 2.0 - 1.0


def _add(total: Fold, signed: Fold) -> None:
    """Add every number at its place modulo the width; pieces begin at the first."""
    whole = len(signed) // len(total) * len(total)
    total += signed[:whole].reshape(-1, len(total)).sum(0)
    total[: len(signed) - whole] += signed[whole:]


def apart(some: Mapping[str, Fold], others: Mapping[str, Fold]) -> float:
    """Return the length of the difference over all names; what one of the two does not have is zero.

    >>> apart({"a": np.array([3.0]), "b": np.array([1.0])}, {"b": np.array([-3.0])})
    5.0
    """
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = [(some.get(name, _NOTHING), others.get(name, _NOTHING)) for name in {**some, **others}]
        return math.hypot(*[float(np.linalg.norm(own - other)) for own, other in pairs])


def each_gradient(loss: Tensor, leaves: Mapping[str, Tensor], use: Callable[[str, Tensor], None]) -> None:
    """Hand the gradient of every leaf that the loss depends on to ``use``, dense, and let go of it at once.

    >>> leaves = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(1, requires_grad=True)}
    >>> each_gradient((leaves["a"] * 3).sum(), leaves, lambda name, gradient: print(name, gradient))
    a tensor([3., 3.])
    """

    def hand_over(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            use(name, gradient.to_dense() if gradient.is_sparse else gradient)

    held = [_after(leaf, partial(hand_over, name)) for name, leaf in leaves.items()]
    try:
        loss.backward(inputs=list(leaves.values()))  # type: ignore[no-untyped-call]
    finally:
        for handle, leaf in zip(held, leaves.values(), strict=True):
            handle.remove()
            leaf.grad = None


def _after(leaf: Tensor, use: Callable[[Tensor], None]) -> Any:
    return leaf.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]
