"""Turn what the layers saw into norms and weighted sums, and bound the rounding errors.

A record's norm must never come out too small. Sums within a record (over time, pixels, repeated calls) can cancel, and
then float32 keeps few digits of what is left; ``reach`` of a share says how large the terms were. Rows in doubt are
computed apart in float64, their norms and their part of the sum. Sums over records are taken block by block; rows whose
norms are good, but whose terms are too long for a float32 sum with those of others, are added up in float64.

`RescuedPass` is a pass as rules and the step see it: extreme rows are computed again, superseded passes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import LossFn, take
from evenhand.gradients.layers.base import MeasuredShare, Share, combined
from evenhand.gradients.layers.tied_tables import tied_norms
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.model_layout import Call, Layout
from evenhand.gradients.pass_context import exclusive, highest, plain, preserved
from evenhand.gradients.record_blocks import Blocks, PerRecordGradients, add_up, chunks_of, drain
from evenhand.gradients.record_by_record import HeldGradients, reference
from evenhand.gradients.row_norms import (
    ROW_LIMIT,
    CarefulRowNorms,
    RowNorms,
    chunks,
    finite,
    roundings,
    within,
    working_dtype,
)
from evenhand.summation import JOINT, UNIT, joint_rows
from evenhand.types import Pass

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Relative error of a norm above which a record is computed apart."""
CHUNK = 1 << 22
"""Numbers of records' gradients, or of what layers saw, that are held in float64 at a time."""
GRAM = 8
"""How much longer terms may be where they are measured by inner products in float64, before a record is set apart."""
MANY = 64
"""Terms of a record from which on they may be so long: of few, inner products would lose digits of a small part."""
EXACT = 1024
"""Records that are added up in float64 at a time at most, so that long terms meet few of each other."""


class _Group:
    """Calls that share parameters (most often one call), whose gradients are added before a norm is taken."""

    joint: int
    """How many vectors a record adds to the sum over all records; those of several calls may cancel."""
    most: int | None
    """The most records of a block if they add several vectors each, else None. Like ``joint`` set by `measure`."""
    by_gram: bool
    """Whether the norm is that of inner products in float64, which rounding of terms does not move; set likewise."""

    def __init__(self, recorded: list[Call], calls: list[Call], shares: list[Share]):
        self._recorded, self.calls, self.shares = recorded, calls, shares
        self.dtype = calls[0].site.dtype

    def measure(self, gauge: RowNorms) -> tuple[list[Tensor], Tensor | None]:
        """Return lengths whose squares add up, and how far rounding may have moved the gradient."""
        eps = torch.finfo(self.dtype).eps
        slip: Tensor | None = None
        if len(self.shares) == 1:
            share = self.shares[0]
            lengths, reach = share.lengths(gauge), share.reach(gauge)
            self.by_gram = getattr(share, "by_gram", False)
            if reach is not None:
                slip = reach.double() * (roundings(share.terms) * eps)
        else:
            reaches = [share.reach(gauge) for share in self.shares]
            extents = [
                torch.stack([part.double() for part in s.lengths(gauge)]).norm(dim=0) if r is None else r.double()
                for s, r in zip(self.shares, reaches, strict=True)
            ]
            norms = tied_norms(self.shares, self.row() // len(self.calls)) if self._one() else None
            self.by_gram = norms is not None
            if norms is None:
                every = torch.arange(len(extents[0]), device=extents[0].device)
                parts = (self._added(every[rows], self.dtype) for rows in chunks(len(every), self.row(), CHUNK))
                careful = CarefulRowNorms()
                columns = [careful(torch.cat([g.reshape(len(g), -1) for g in part.values()], dim=1)) for part in parts]
                norms = torch.cat(columns)
            lengths, slip = [norms], torch.stack(extents).sum(0) * (roundings(self.terms) * eps)
        self.joint = sum([share.joint for share in self.shares])
        self.most = joint_rows(self.joint) if self.dtype != torch.float64 and self.joint > 1 else None
        return lengths, slip

    def _one(self) -> bool:
        """Return whether all calls share one weight, in the same shape, and nothing else."""
        every = [list(call.site.parameters.items()) for call in self.calls]
        weights = {id(p) for parameters in every for _, p in parameters}
        alike = all(len(parameters) == 1 and parameters[0][0] == "weight" for parameters in every)
        return alike and len(weights) == 1 and all(call.views == 1 for call in self.calls)

    def chained(self, slip: Tensor | None, lengths: list[Tensor]) -> Tensor | None:
        """Return how far the rounding of a sum over a block can go for each of its records; None if that is known.

        ``slip`` and ``lengths`` are what ``measure`` gave. The proof in docs/proofs/float_sums.md uses this bound.
        """
        if self.most is None:
            return None
        if slip is None:  # nothing cancels within a record
            reach = lengths[0].double() if len(lengths) == 1 else torch.stack(lengths).norm(dim=0).double()
        else:
            reach = slip / (roundings(self.terms) * torch.finfo(self.dtype).eps)
        return reach * (self._longest(self.most) * UNIT)

    def _longest(self, most: int) -> float:
        """Return how many roundings of the terms of one record are counted: those of a block, once for each record.

        What is added up within a record before it enters the sum (a look-up beside a linear layer) is not counted by
        ``joint``. It then has to stay below an eighth of the bound, whatever the size of the blocks.
        """
        block = most * (most * self.joint + 2)
        return max(block, 8 * self.terms) if self.terms > self.joint else block

    def alone(self, chained: Tensor) -> Tensor:
        """Return how far rounding within a record can have moved its norm at most; ``chained`` is what that gave.

        A norm by inner products is not moved; an eighth of that keeps many terms short enough for float64 sums.
        """
        assert self.most is not None
        measured = GRAM if self.by_gram and self.terms >= MANY else 1
        return chained * (max(self.joint, self.terms) / (self._longest(self.most) * measured))

    @property
    def terms(self) -> int:
        """Return how many terms a record's gradient adds up."""
        return sum(share.terms for share in self.shares)

    def at_once(self, call: Call) -> int:
        """Return how many records of a call are added up in float64 at a time."""
        each = sum(t[0].numel() for t in call.tensors) if getattr(call.site.kernel, "streams", False) else self.row()
        return min(EXACT, max(1, max(CHUNK, self.row()) // max(1, each)))

    def exactly(self, rows: Tensor) -> Iterator[tuple[slice, dict[int, Tensor]]]:
        """Yield the gradients of some rows in float64, a few rows at a time, by the identity of the parameter."""
        for part in chunks(len(rows), self.row(), CHUNK):
            yield part, self._added(rows[part], torch.float64)

    def check(self) -> None:
        """Raise if an input was changed in place since the backward."""
        for call in self._recorded:
            call.check()

    def row(self) -> int:
        """Return how many numbers the gradients of one record have, call by call."""
        return sum(p.numel() for call in self.calls for p in call.site.parameters.values())

    def _added(self, rows: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the gradients of some rows, added up over the calls, by the identity of the parameter."""
        total: dict[int, Tensor] = {}
        for call in self.calls:
            share = call.site.share(call.share_tensors(rows, dtype), ScratchBuffers(lean=False), call.views)
            for local, gradient in share.instantiate().items():
                key = id(call.site.parameters[local])
                total[key] = total[key] + gradient if key in total else gradient
        return total


class RecordedGradients:
    """Norms and sums of one recorded pass. ``names`` maps the identity of a trainable parameter to its name."""

    def __init__(self, loss: Tensor, calls: list[Call], names: Mapping[int, str], rooms: list[ScratchBuffers]):
        self.loss, self._names = loss.detach().double(), names
        self._groups: list[_Group] = []
        for indices in _connected(calls):
            recorded = [calls[i] for i in indices]
            merged = _joined(recorded)
            places = zip(merged, indices, strict=False)
            shares = [call.site.share(call.share_tensors(), rooms[i], call.views) for call, i in places]
            self._groups.append(_Group(recorded, merged, shares))
        gauge = RowNorms()
        self._join(gauge, [group.measure(gauge) for group in self._groups])
        self.clean = gauge.trusted()
        if not self.clean:
            gauge = CarefulRowNorms()
            self._join(gauge, [group.measure(gauge) for group in self._groups])
        self._doubtful: Tensor | None = None
        self._far: Tensor | None = None
        doubtful: Tensor | None = None
        if self.slip is not None:
            tolerance = max(TOLERANCE[group.dtype] for group in self._groups)
            doubtful = ~(self._slips <= tolerance * self.norm.square())
        if self._chained is not None:
            far = ~(self._chained <= JOINT * self.norm)
            moved = far & ~(self._alone <= JOINT / 4 * self.norm)
            doubtful = moved if doubtful is None else doubtful | moved
            far &= ~doubtful
            self._far = far.nonzero().squeeze(1) if bool(far.any()) else None
        if doubtful is not None and bool(doubtful.any()):
            self._set_apart(doubtful.nonzero().squeeze(1))

    def _join(self, gauge: RowNorms, measured: list[tuple[list[Tensor], Tensor | None]]) -> None:
        """Set norms and bounds of all parameters together from what was measured in each group."""
        every: list[Tensor] = []
        slips: list[Tensor] = []
        sizes: list[Tensor] = []
        chained: list[Tensor] = []
        alone: list[Tensor] = []
        for group, (lengths, slip) in zip(self._groups, measured, strict=True):
            every += lengths
            far = group.chained(slip, lengths)
            if far is not None:
                chained.append(far)
                alone.append(group.alone(far))
            if slip is not None:
                slips.append(slip)
                sizes.append(lengths[0] if len(lengths) == 1 else torch.stack(lengths).norm(dim=0))
        self.norm = gauge.joint(every) if every else torch.zeros_like(self.loss)
        self.slip: Tensor | None = None
        if slips:
            moved = torch.stack(slips)
            self.slip = moved.sum(0)
            self._slips = (moved * (torch.stack(sizes) + moved)).sum(0)
        self._chained: Tensor | None = None
        if chained:
            kinds = len({group.most for group in self._groups if group.most is not None})
            self._chained = torch.stack(chained).norm(dim=0) * math.sqrt(kinds)
            self._alone = torch.stack(alone).norm(dim=0)

    def _set_apart(self, rows: Tensor) -> None:
        squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        measure = CarefulRowNorms()
        for group in self._groups:
            for part, gradients in group.exactly(rows):
                for gradient in gradients.values():
                    squares[part] += measure(gradient).square()
        self.norm[rows] = squares.sqrt_()
        self._doubtful = rows

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Sum as `PerRecordGradients` says; rows in doubt are computed from what all layers saw, held until then.

        Where a group adds several vectors for each record, rows that are too long for its blocks are left out of them
        and added up in float64.
        """
        every = torch.arange(blocks.size, device=weights.device)
        every = every if usable is None else every[usable[: blocks.size]]
        apart, far = (
            rows if rows is None or usable is None else rows[usable[rows]] for rows in (self._doubtful, self._far)
        )
        quick = weights if apart is None else weights.index_fill(0, apart, 0.0)
        near = quick if far is None else quick.index_fill(0, far, 0.0)
        total: dict[str, Tensor] = {}
        for group in drain(self._groups) if last and apart is None else self._groups:
            group.check()
            parts = [slice(0, blocks.size)] if group.dtype == torch.float64 else blocks.of(group.most or blocks.rows)
            exact = blocks.exact(parts)
            wide = every if exact else far if group.most is not None else None
            runs = [] if exact else blocks.runs(parts, usable)
            if wide is not None:
                runs = [rows for rows in runs if bool(near[rows].any())]
            factors = (quick if wide is None else near).to(group.dtype)
            for call, share in zip(group.calls, group.shares, strict=True):
                sums = add_up(runs, factors, share.weighted_sum)
                if wide is not None:
                    _add(sums, _exact_sum(call, share, quick, wide, group.at_once(call)))
                _add(total, {self._names[id(call.site.parameters[local])]: part for local, part in sums.items()})
        if apart is not None:
            self._add_apart(total, weights, apart)
        return total

    def _add_apart(self, total: dict[str, Tensor], weights: Tensor, rows: Tensor) -> None:
        for group in self._groups:
            for part, gradients in group.exactly(rows):
                for key, gradient in gradients.items():
                    _add(total, {self._names[key]: combined(weights[rows[part]].double(), gradient)})


def _add(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add sums by name to a total, in the wider of both precisions.

    >>> total = {"a": torch.ones(1)}
    >>> _add(total, {"a": torch.ones(1, dtype=torch.float64), "b": torch.ones(1)}); total
    {'a': tensor([2.], dtype=torch.float64), 'b': tensor([1.])}
    """
    for name, part in more.items():
        total[name] = total[name] + part if name in total else part


def _exact_sum(call: Call, share: Share, weights: Tensor, rows: Tensor, most: int) -> dict[str, Tensor]:
    """Return the sum of one call over some records in float64, of at most ``most`` records at a time.

    ``share`` is what was measured of the call; ``rows`` ascend.
    """

    def some(factors: Tensor, part: slice) -> dict[str, Tensor]:
        if isinstance(share, MeasuredShare):
            return {name: combined(factors.double(), g.double()) for name, g in share.measured(rows[part]).items()}
        again = call.site.share(call.share_tensors(rows[part], torch.float64), ScratchBuffers(lean=True), call.views)
        return again.weighted_sum(factors.double(), slice(0, len(factors)))

    return add_up(chunks_of(len(rows), most), weights[rows], some)


def _joined(calls: list[Call]) -> list[Call]:
    """Return calls of one layer as a single one with more terms, where its kernel can do that."""
    if len(calls) == 1:
        return calls
    site = calls[0].site
    join = getattr(site.kernel, "join", None)
    if join is None or any(call.site is not site for call in calls):
        return calls
    return [replace(calls[0], tensors=join(site.module, [call.tensors for call in calls]))]


def _connected(calls: list[Call]) -> list[list[int]]:
    """Return indices of calls grouped so that no parameter occurs in two groups."""
    every = [id(p) for call in calls for p in call.site.parameters.values()]
    if len(set(every)) == len(every):
        return [[i] for i in range(len(calls))]
    groups: list[tuple[set[int], list[int]]] = []
    for i, call in enumerate(calls):
        keys, members = {id(p) for p in call.site.parameters.values()}, [i]
        apart = []
        for group in groups:
            if group[0] & keys:
                keys, members = keys | group[0], group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (keys, members)]
    return [members for _, members in groups]


Raw: TypeAlias = PerRecordGradients | HeldGradients


class RescuedPass:
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
        self._rescued: tuple[Tensor, Tensor, HeldGradients] | None = None
        usual = finite(self.loss)
        if usual and not isinstance(raw, HeldGradients) and raw.clean:
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
                rescued = HeldGradients(
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
        """Return the pass that rules and the step see."""
        return Pass(self.loss, self.norm, self.weighted_sum, self._usable is None, self.spend)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return ``sum_i weights_i g_i`` by parameter name; rows whose norm is not finite are left out."""
        raw, usual = self._usual(weights)
        return self._summed(raw, usual, last=False)

    def spend(self, weights: Tensor) -> dict[str, Tensor]:
        """Sum like `weighted_sum`, freeing what the layers saw. May be called once; the caller owns the sums."""
        raw, usual = self._usual(weights)
        self._raw = None
        total = self._summed(raw, usual, last=True)
        return total if self._layout.all_builtin else {name: part.clone() for name, part in total.items()}

    def _usual(self, weights: Tensor) -> tuple[Raw, Tensor]:
        """Return what the layers saw, and the weights on that device; raises unless both can be used."""
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
        swaps = isinstance(raw, HeldGradients) or self._rescued is not None
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
    """Return the sum over no records.

    >>> zero(nn.Parameter(torch.ones(2)))
    tensor([0., 0.])
    """
    return torch.zeros_like(parameter, dtype=working_dtype(parameter.dtype))
