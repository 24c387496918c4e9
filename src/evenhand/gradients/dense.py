"""Bookkeeping for models that are chains of matrices: nothing is summed within a record, so nothing can cancel.

The norm of a record is ``sqrt(sum |g|^2 (|x|^2 + 1))`` over the layers, in one call of the compiled loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from evenhand.gradients.blocks import Blocks, add_up
from evenhand.gradients.bookkeeping import emptied
from evenhand.gradients.loops import NARROW, DenseLoops, fits, loops
from evenhand.gradients.tape import Call

_BOTH = ("weight", "bias")


class DenseBook:
    """As `Bookkeeping`, from calls of linear layers on vectors, each with parameters of its own."""

    slip: Tensor | None = None
    """One term per record."""

    def __init__(self, loss: Tensor, calls: list[Call], names: Mapping[int, str], compiled: DenseLoops):
        self.loss, self._calls, self._names, self._loops = loss, calls, names, compiled
        layers = [(*call.tensors, "weight" in (own := call.site.parameters), "bias" in own) for call in calls]
        self.norm, self.clean = compiled.norms(layers)  # type: ignore[arg-type]

    @classmethod
    def of(cls, loss: Tensor, calls: list[Call], names: Mapping[int, str]) -> DenseBook | None:
        """None if compiled loops cannot help: they are missing, for other numbers, or a parameter is used twice.

        >>> import torch
        >>> DenseBook.of(torch.zeros(1), [], {}) is None
        True
        """
        compiled = loops()
        held = [id(p) for call in calls for p in call.site.parameters.values()]
        if compiled is None or not held or len(set(held)) < len(held):
            return None
        if not all(fits(x) and fits(grad) for x, grad in [call.tensors for call in calls]):
            return None
        return cls(loss.double(), calls, names, compiled)

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Sum as `Book` says."""
        total: dict[str, Tensor] = {}
        weights = weights.double().resolve_neg().contiguous()
        parts = blocks.of(blocks.rows)
        exact, runs = blocks.exact(parts), blocks.runs(parts, usable)
        for call in emptied(self._calls) if last else self._calls:
            call.check()
            x, grad = call.tensors
            sums = add_up(runs, weights, partial(_exact_sums if exact else self._block_sums, call, x, grad, last))
            for local, part in sums.items():
                total[self._names[id(call.site.parameters[local])]] = part
        return total

    def _block_sums(
        self, call: Call, x: Tensor, grad: Tensor, last: bool, weights: Tensor, rows: slice
    ) -> dict[str, Tensor]:
        """Return the sums over some rows. If ``last``, these rows of ``grad`` are written over."""
        if rows.stop - rows.start < x.shape[0]:
            x, grad = x[rows], grad[rows]
        names, found = call.site.parameters, {}
        if grad.shape[1] <= NARROW:
            both = self._loops.sums(x, grad, weights, "weight" in names, "bias" in names)
            return {name: both[name == "bias"] for name in names}
        if last and len(names) == len(_BOTH):
            bias = self._loops.scaled(grad, weights)
            return {"weight": grad.t() @ x, "bias": bias}
        single = weights.float()
        if "weight" in names:
            scale, wide = single.unsqueeze(1), grad.shape[1] > x.shape[1]
            found["weight"] = grad.t() @ (x * scale) if wide else (grad * scale).t() @ x
        if "bias" in names:
            found["bias"] = single @ grad
        return found


def _exact_sums(call: Call, x: Tensor, grad: Tensor, last: bool, weights: Tensor, rows: slice) -> dict[str, Tensor]:
    """Return the sums over some rows in float64."""
    scaled = grad[rows].double() * weights.unsqueeze(1)
    both = {"weight": lambda: scaled.t() @ x[rows].double(), "bias": lambda: scaled.sum(0)}
    return {name: both[name]() for name in call.site.parameters}
