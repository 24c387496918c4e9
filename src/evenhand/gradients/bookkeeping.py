"""From what the layers saw to norms and weighted sums, with rounding errors watched.

A record's norm must never come out too small. Sums within a record (over time, pixels, repeated calls) can cancel, and
then float32 keeps few digits of what is left; ``reach`` of a share says how large the terms were. Rows in doubt are
measured again in float64; rows where even their part of a float32 sum is in doubt are marked ``unsure`` for the caller.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evenhand.gradients.kernels import Share, chunks, row_squares
from evenhand.gradients.tape import Call

NORM_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}
"""Relative error of a squared norm above which it is measured again."""
SUM_TOLERANCE = 1e-3
"""Relative error of a record's part of the weighted sum above which the record is computed apart."""
CHUNK = 1 << 22


def roundings(terms: int, summed: bool) -> float:
    """How many units of rounding, times reach (or reach squared), a norm may be wrong by.

    Measured on inputs made to cancel: a block of terms is added in order, so the error of a summed gradient grows with
    their number until a block is full; Gram matrices do not sum over terms.

    >>> roundings(16, True), roundings(4096, True), roundings(4096, False)
    (2.0, 20.0, 3.0)
    """
    return min(1 + terms / 16, 20.0) if summed else 3.0


class _Group:
    """Calls that share parameters (most often one call), whose gradients are added before a norm is taken."""

    def __init__(self, calls: list[Call]):
        self.calls = calls
        self.shares: list[Share] = [call.share() for call in calls]
        self.dtype = calls[0].site.dtype

    def measure(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Squared norms, their possible error, and the possible error of the gradients themselves."""
        eps = torch.finfo(self.dtype).eps
        if len(self.shares) == 1:
            share = self.shares[0]
            squares, reach = share.squares(), share.reach()
            if reach is None:
                return squares, None, None
            slip = roundings(share.terms, True) * eps * reach.sqrt()
            error = 2 * slip * squares.sqrt() if share.summed else roundings(share.terms, False) * eps * reach
            return squares, error, slip
        reaches = [share.reach() for share in self.shares]
        lengths = [(s.squares() if r is None else r).sqrt() for s, r in zip(self.shares, reaches, strict=True)]
        squares = self.joint_squares(torch.arange(len(lengths[0]), device=lengths[0].device), self.dtype)
        slip = roundings(sum(s.terms for s in self.shares), True) * eps * torch.stack(lengths).sum(0)
        return squares, 2 * slip * squares.sqrt(), slip

    def exact_squares(self, rows: Tensor) -> Tensor:
        """Squared norms of some rows in float64."""
        if len(self.calls) == 1:
            share = self.calls[0].share(rows, torch.float64)
            if share.summed:
                return share.squares()
        return self.joint_squares(rows, torch.float64)

    def joint_squares(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Squared norms of the instantiated and added gradients of some rows."""
        per_row = sum(p.numel() for call in self.calls for p in call.site.parameters.values())
        squares = []
        for part in chunks(len(rows), per_row, CHUNK):
            total: dict[int, Tensor] = {}
            for call in self.calls:
                for local, gradient in call.share(rows[part], dtype).instantiate().items():
                    key = id(call.site.parameters[local])
                    total[key] = total[key] + gradient if key in total else gradient
            squares.append(torch.stack([row_squares(gradient) for gradient in total.values()]).sum(0))
        return torch.cat(squares)


class Bookkeeping:
    """Norms of all records, and their weighted sum, from one tape.

    ``names`` maps the identity of each trainable parameter to its name in the model. ``slip`` is how far rounding may
    have moved a record's gradient.
    """

    def __init__(self, loss: Tensor, calls: list[Call], names: Mapping[int, str]):
        self.loss, self._names = loss, names
        self._groups = [_Group(members) for members in _connected(calls)]
        squares = torch.zeros_like(loss)
        errors, slips = [], []
        for group in self._groups:
            own, error, slip = group.measure()
            squares += own
            if error is not None and slip is not None:
                errors.append(error)
                slips.append(slip)
        self.unsure: Tensor | None = None
        self.slip = torch.stack(slips).sum(0) if slips else torch.zeros_like(loss)
        if errors:
            tolerance = max(NORM_TOLERANCE[group.dtype] for group in self._groups)
            doubtful = ~(torch.stack(errors).sum(0) <= tolerance * squares)
            if bool(doubtful.any()):
                rows = doubtful.nonzero().squeeze(1)
                squares[rows] = torch.stack([group.exact_squares(rows) for group in self._groups]).sum(0)
                self.unsure = ~(self.slip <= SUM_TOLERANCE * squares.sqrt()) & doubtful
        self.norm = squares.sqrt_()

    def weighted_sum(self, weights: Tensor, usable: Tensor | None) -> dict[str, Tensor]:
        """``sum_i weights_i g_i`` by parameter name over the rows where ``usable`` is true (None: everywhere)."""
        total: dict[str, Tensor] = {}
        rows = None if usable is None else usable.nonzero().squeeze(1)
        if rows is not None:
            weights = weights[rows]
            if not len(rows):
                return total
        for group in self._groups:
            for call, whole in zip(group.calls, group.shares, strict=True):
                share = whole if rows is None else call.share(rows)
                call.check()
                for local, part in share.weighted_sum(weights.to(group.dtype)).items():
                    name = self._names[id(call.site.parameters[local])]
                    total[name] = total[name] + part if name in total else part
        return total


def _connected(calls: list[Call]) -> list[list[Call]]:
    """Calls grouped so that no parameter occurs in two groups."""
    groups: list[tuple[set[int], list[Call]]] = []
    for call in calls:
        keys, members = {id(p) for p in call.site.parameters.values()}, [call]
        apart = []
        for group in groups:
            if group[0] & keys:
                keys, members = keys | group[0], group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (keys, members)]
    return [members for _, members in groups]
