"""Kernels beside plain autograd: before they are believed, and now and then afterwards."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients.batch_utils import LossFn, buffers_restored, cast, finite_rows, take
from evenhand.gradients.model_layout import Layout, Trainable
from evenhand.gradients.pass_context import lowered, means, preserved
from evenhand.gradients.record_blocks import Blocks, PerRecordGradients
from evenhand.gradients.record_by_record import Fold, apart, fold_of, norms_and_folds, plain_norms

Taped = Callable[[Any, Any, int], PerRecordGradients | None]
KINK = 0.1
"""How far from autograd kernels may be in float32, in parts of a norm, if they are right in float64."""
FINE = 1e-6
"""How far from autograd kernels may be in float64."""
_CHOICE = random.Random()
"""A generator of our own: a comparison must not move the one that a user's augmentation draws from."""


class Comparison:
    """``taped`` runs a few records by kernels; None if a parameter was used past them.

    ``precise`` gives the same for a copy of the model in float64, or None if there can be none. Where a model
    multiplies rounding, a ReLU may be on at one time and off at another; kernels that are right there are believed, if
    what they add to a sum is as long as they say.
    ``writes`` says whether forward might write into buffers or parameters, which are then copied and put back.
    ``most`` records are compared: a number that a model has otherwise too can look like that of the records.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        layout: Layout,
        taped: Taped,
        precise: Callable[[], Taped | None],
        writes: bool = True,
        most: int = 4,
    ):
        self._model, self._loss_fn, self._layout, self._taped, self._writes = model, loss_fn, layout, taped, writes
        self._precise, self._most = precise, most

    def agree(self, inputs: Any, targets: Any, size: int) -> bool | None:
        """Return whether the kernels agree with plain autograd on a few records, in two orders and another batch size.

        Kernels take the first dimension of a layer's input for the records in their order. A layer fed with
        (time, batch, features), or with records that the model has sorted, would pass for that by coincidence.
        None if nothing can be told: a record that is not finite, the only one, or gradients so small that they are
        rounding in the parameters' precision.
        """
        if size == 1:  # the same record several times cannot show an order
            return None
        some = _some(inputs, targets, size, self._most)
        with preserved(self._model), buffers_restored(self._model), means():
            verdict, furthest = self._verdict(self._taped, inputs, targets, some, self._tolerance())
            if verdict is not False or not furthest <= KINK:
                return verdict
            precise = self._precise()
            if precise is None:
                return False
            doubled = cast(inputs, torch.float64), cast(targets, torch.float64)
            return self._verdict(precise, *doubled, some, FINE)[0] is True and self._adds_its_norm(
                inputs, targets, some
            )

    def _adds_its_norm(self, inputs: Any, targets: Any, some: Tensor) -> bool:
        """Return whether each record adds as much to a sum as its norm says, which is what a bound on it rests on."""
        gradients = self._taped(take(inputs, some), take(targets, some), len(some))
        if gradients is None:
            return False
        norms, floor = gradients.norm.double(), norm_floor(self._layout.trainable)
        slip = torch.zeros_like(norms) if gradients.slip is None else gradients.slip.double()
        for row in torch.isfinite(norms).nonzero().squeeze(1).tolist():
            weights = torch.zeros_like(gradients.norm)
            weights[row] = 1.0
            with torch.no_grad():
                total = gradients.weighted_sum(weights, None, Blocks(len(weights)))
            added = math.hypot(*(float(part.double().norm()) for part in total.values()))
            if not abs(added - norms[row]) <= self._tolerance() * norms[row] + 10 * slip[row] + floor:
                return False
        return True

    def _verdict(
        self, taped: Taped, inputs: Any, targets: Any, some: Tensor, tolerance: float
    ) -> tuple[bool | None, float]:
        """Return whether some records agree in both orders, and the largest error of a norm, in parts of it."""
        right, conclusive, furthest = True, True, 0.0
        floor = norm_floor(self._layout.trainable)
        for rows in (some, some.flip(0)):
            x, y = take(inputs, rows), take(targets, rows)
            gradients = taped(x, y, len(rows))
            if gradients is None:
                return False, math.inf
            seeds = {name: _CHOICE.getrandbits(64) for name in self._layout.trainable}
            norm, exact = norms_and_folds(self._model, self._loss_fn, x, y, seeds)
            slip = torch.zeros_like(norm) if gradients.slip is None else gradients.slip
            finite = torch.isfinite(norm) & torch.isfinite(gradients.norm) & torch.isfinite(slip)
            error, slack = (gradients.norm - norm).abs(), tolerance * norm + 10 * slip
            wrong = (error > slack + floor) & finite
            right &= not bool(wrong.any())
            furthest = max([furthest, *(error / (norm + floor))[wrong].tolist()])
            conclusive &= bool((finite & ((error <= slack) | wrong)).all())
            if conclusive:
                moved = self._sum_error(gradients, exact, seeds)
                right &= moved <= float((slack + floor).sum())
                furthest = max(furthest, moved / float((norm + floor).sum()))
        return (None if right and not conclusive else right), furthest

    def still_agree(self, inputs: Any, targets: Any, size: int) -> bool | None:
        """Compare on a later batch, without touching the model; what float32 puts in doubt, float64 decides.

        None if another way past the kernels has opened, so that they can no longer be used.
        """
        if size == 1:
            return True
        some = _some(inputs, targets, size, self._most)
        restored = buffers_restored(self._model) if self._writes else nullcontext()
        with preserved(self._model), restored, means():
            plain = plain_norms(self._model, self._loss_fn, take(inputs, some), take(targets, some)).flip(0)
            for rows in (some, some.flip(0)):
                plain = plain.flip(0)
                gradients = self._taped(take(inputs, rows), take(targets, rows), len(rows))
                if gradients is None:
                    return None
                if not bool(((gradients.norm - plain).abs() <= self._tolerance() * plain).all()):
                    break
            else:
                return True
        return self.agree(inputs, targets, size) is not False

    def _sum_error(self, gradients: PerRecordGradients, exact: dict[str, Fold], seeds: Mapping[str, int]) -> float:
        """Return how far the kernels' sum over all records is from that of autograd.

        It is infinite for another shape, or if one of them is not finite.
        """
        trainable = self._layout.trainable
        with torch.no_grad():
            sums = gradients.weighted_sum(torch.ones_like(gradients.norm), None, Blocks(len(gradients.norm)))
        if any(total.shape != trainable[name].shape for name, total in sums.items()):
            return math.inf
        moved = apart({name: fold_of(sums.pop(name), seeds[name]) for name in list(sums)}, exact)
        return moved if math.isfinite(moved) else math.inf

    def _tolerance(self) -> float:
        """Return how far norms may be from those of autograd; a kernel that is wrong is further off."""
        coarse = (16 * torch.finfo(p.dtype).eps for p in self._layout.trainable.values())
        return max(0.1 if lowered() else 1e-3, *coarse)


def _some(inputs: Any, targets: Any, size: int, most: int) -> Tensor:
    """Return a few rows, not as many as there are; rows that are not finite only where there are too few others.

    Such a row makes a comparison tell nothing, and the whole batch would then be computed record by record: the last
    digits of all others would depend on one record.
    """
    if size == 2:
        return torch.tensor([0, 1, 1])
    usable = finite_rows(inputs, targets).tolist()
    rows = usable if len(usable) > 1 else range(size)
    return torch.tensor(_CHOICE.sample(rows, min(len(rows), size - 1, most)))


def norm_floor(trainable: Trainable) -> float:
    """Return the norm below which all is rounding: a record that fits well leaves ``1 - p``, which cancels."""
    return max(1000 * torch.finfo(parameter.dtype).eps for parameter in trainable.values())
