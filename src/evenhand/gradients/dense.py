"""Bookkeeping for models that are chains of matrices: nothing is summed within a record, so nothing can cancel.

The norm of a record is ``sqrt(sum |g|^2 (|x|^2 + 1))`` over the layers, in one call of the compiled loops.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

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

    def weighted_sum(self, weights: Tensor, usable: Tensor | None, last: bool = False) -> dict[str, Tensor]:
        """As `Book` says."""
        total: dict[str, Tensor] = {}
        weights = weights.double().resolve_neg().contiguous()
        rows = None if usable is None else usable.nonzero().squeeze(1)
        if rows is not None:
            weights = weights[rows]
        single = weights.float()
        for call in emptied(self._calls) if last else self._calls:
            call.check()
            x, grad = call.tensors if rows is None else [table[rows] for table in call.tensors]
            for local, part in self._summed(call, x, grad, weights, single, last).items():
                total[self._names[id(call.site.parameters[local])]] = part
        return total

    def _summed(
        self, call: Call, x: Tensor, grad: Tensor, weights: Tensor, single: Tensor, last: bool
    ) -> dict[str, Tensor]:
        """For the last time in the memory of ``grad``, which is then nobody's any more."""
        names, found = call.site.parameters, {}
        if grad.shape[1] <= NARROW:
            both = self._loops.sums(x, grad, weights, "weight" in names, "bias" in names)
            return {name: both[name == "bias"] for name in names}
        if last and len(names) == len(_BOTH):
            bias = self._loops.scaled(grad, weights)
            return {"weight": grad.t() @ x, "bias": bias}
        if "weight" in names:
            scale, wide = single.unsqueeze(1), grad.shape[1] > x.shape[1]
            found["weight"] = grad.t() @ (x * scale) if wide else (grad * scale).t() @ x
        if "bias" in names:
            found["bias"] = single @ grad
        return found
