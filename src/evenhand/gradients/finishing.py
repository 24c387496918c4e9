"""A pass as rules and the step see it: extreme rows computed again, superseded ones refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.blocks import Blocks
from evenhand.gradients.bookkeeping import Book
from evenhand.gradients.fallback import Instances
from evenhand.gradients.locking import exclusive
from evenhand.gradients.measuring import ROW_LIMIT, finite, within, working_dtype
from evenhand.gradients.precision import highest, plain
from evenhand.gradients.randomness import preserved
from evenhand.gradients.records import LossFn, take
from evenhand.gradients.reference import reference
from evenhand.gradients.serving import Layout
from evenhand.types import Pass

Raw: TypeAlias = Book | Instances


class Finished:
    """A differentiated batch with its extreme rows computed again in float64."""

    def __init__(
        self,
        layout: Layout,
        loss_fn: LossFn,
        raw: Raw,
        inputs: Any,
        targets: Any,
        newest: Callable[[], bool],
        blocks: Blocks,
    ):
        self._layout, self._newest, self._blocks = layout, newest, blocks
        self._raw: Raw | None = raw
        self._model, self._trainable = layout.model, layout.trainable
        self.loss, self.norm = raw.loss.double(), raw.norm
        self._usable: Tensor | None = None
        self._rescued: tuple[Tensor, Tensor, Instances] | None = None
        usual = finite(self.loss)
        if usual and not isinstance(raw, Instances) and raw.clean:
            return
        limit = ROW_LIMIT if any(p.dtype != torch.float64 for p in self._trainable.values()) else 1e150
        if usual and within(self.norm, 0.0, limit):
            return
        extreme = ~(self.norm <= limit) | ~torch.isfinite(self.loss)
        self._usable = ~extreme
        self._rescue(loss_fn, extreme, inputs, targets)

    def _rescue(self, loss_fn: LossFn, extreme: Tensor, inputs: Any, targets: Any) -> None:
        rows = extreme.nonzero().squeeze(1)
        with preserved(self._model):
            try:
                rescued = Instances(
                    self._model,
                    lambda x, y: reference(self._model, loss_fn, x, y, torch.float64),
                    take(inputs, rows),
                    take(targets, rows),
                )
            except RuntimeError:  # code that insists on float32: the rows count as not finite and contribute nothing
                self.norm = self.norm.masked_fill(extreme, torch.nan)
                return
        good = torch.isfinite(rescued.loss) & torch.isfinite(rescued.norm)
        self.loss[rows] = rescued.loss
        self.norm[rows] = torch.where(good | ~torch.isfinite(rescued.norm), rescued.norm, torch.nan)
        self._rescued = (rows, good, rescued)

    def result(self) -> Pass:
        """The pass that rules and the step see."""
        return Pass(self.loss, self.norm, self.weighted_sum, self._usable is None, self.spend)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``sum_i weights_i g_i`` by parameter name; rows whose norm is not finite are left out."""
        raw, usual = self._usual(weights)
        return self._summed(raw, usual, last=False)

    def spend(self, weights: Tensor) -> dict[str, Tensor]:
        """The same for the last time, giving back what the layers saw; the sums belong to the caller."""
        raw, usual = self._usual(weights)
        self._raw = None
        total = self._summed(raw, usual, last=True)
        return total if self._layout.ours else {name: part.clone() for name, part in total.items()}

    def _usual(self, weights: Tensor) -> tuple[Raw, Tensor]:
        """What the layers saw, and the weights where that is; raises unless both can be used."""
        if weights.shape != self.norm.shape:
            expected, got = tuple(self.norm.shape), tuple(weights.shape)
            raise UsageError(f"expected one weight per record, shape {expected}, got {got}")
        if not self._newest():
            raise UsageError(
                "this pass was superseded: its engine has run another batch in the same memory; ask for the weighted "
                "sum before the next run, or use per_sample, which keeps its own"
            )
        if self._raw is None:
            raise UsageError("this pass was spent: it gave back what the layers saw with its last weighted sum")
        weights = weights.detach()
        if not (weights.is_cpu and self.norm.is_cpu):
            weights = weights.to(self.norm.device)
        if not finite(weights) and bool((~torch.isfinite(weights) & torch.isfinite(self.norm)).any()):
            raise UsageError("a weight of a row with a finite norm is not finite; a rule must give every row a number")
        return self._raw, weights

    def _summed(self, raw: Raw, weights: Tensor, *, last: bool) -> dict[str, Tensor]:
        swaps = isinstance(raw, Instances) or self._rescued is not None
        with exclusive(self._layout.identities) if swaps else nullcontext(), plain(), highest():
            total = raw.weighted_sum(weights, self._usable, self._blocks, last)
            if self._rescued is not None:
                rows, good, rescued = self._rescued
                for name, part in rescued.weighted_sum(weights[rows].double(), good).items():
                    total[name] = total[name].double() + part if name in total else part
        return {
            name: self._rounded(total[name], p) if name in total else zero(p) for name, p in self._trainable.items()
        }

    def _rounded(self, total: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return a total in the precision of its parameter, or in float64 if it has too many records for that."""
        if total.dtype != torch.float64 or not self._blocks.rounds:
            return total
        return total.to(working_dtype(parameter.dtype))


def zero(parameter: nn.Parameter) -> Tensor:
    """The sum over no records.

    >>> zero(nn.Parameter(torch.ones(2)))
    tensor([0., 0.])
    """
    return torch.zeros_like(parameter, dtype=working_dtype(parameter.dtype))
