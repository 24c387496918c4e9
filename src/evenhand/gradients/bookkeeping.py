"""From what the layers saw to norms and weighted sums, with rounding errors watched.

A record's norm must never come out too small. Sums within a record (over time, pixels, repeated calls) can cancel, and
then float32 keeps few digits of what is left; ``reach`` of a share says how large the terms were. Rows in doubt are
computed apart in float64, their norms and their part of the sum. Sums over records are taken block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from evenhand.gradients.blocks import Blocks, add_up, chunks_of
from evenhand.gradients.kernels import Share
from evenhand.gradients.measuring import CarefulGauge, Gauge, chunks, roundings
from evenhand.gradients.rooms import Room
from evenhand.gradients.tape import Call
from evenhand.summation import JOINT, UNIT, joint_rows

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Relative error of a norm above which a record is computed apart."""
CHUNK = 1 << 22


class Book(Protocol):
    """Norms of all records and their weighted sum.

    ``slip`` is how far rounding may have moved a record's gradient (None: nowhere), ``clean`` says that every norm is
    finite and in the range of float32.
    """

    loss: Tensor
    norm: Tensor
    slip: Tensor | None
    clean: bool

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Return ``sum_i weights_i g_i`` by parameter name over the rows where ``usable`` is true (None: everywhere).

        What is added up over several blocks is float64. After the ``last`` sum there can be no other: what a layer saw
        is let go once it is added up.
        """


class _Group:
    """Calls that share parameters (most often one call), whose gradients are added before a norm is taken."""

    def __init__(self, calls: list[Call], rooms: list[Room]):
        self._recorded = calls
        self.calls = calls = _joined(calls)
        self.dtype = calls[0].site.dtype
        self.shares: list[Share] = [call.share(room) for call, room in zip(calls, rooms, strict=False)]

    def measure(self, gauge: Gauge) -> tuple[list[Tensor], Tensor | None]:
        """Lengths whose squares add up, and how far rounding may have moved the gradient."""
        if len(self.shares) == 1:
            share = self.shares[0]
            lengths, reach = share.lengths(gauge), share.reach(gauge)
            if reach is None:
                return lengths, None
            return lengths, reach.double() * (roundings(share.terms) * torch.finfo(self.dtype).eps)
        eps = torch.finfo(self.dtype).eps
        reaches = [share.reach(gauge) for share in self.shares]
        extents = [
            torch.stack([part.double() for part in s.lengths(gauge)]).norm(dim=0) if r is None else r.double()
            for s, r in zip(self.shares, reaches, strict=True)
        ]
        every = torch.arange(len(extents[0]), device=extents[0].device)
        parts = (self._joint(every[rows], self.dtype) for rows in chunks(len(every), self._row(), CHUNK))
        careful = CarefulGauge()
        lengths = [careful(torch.cat([g.reshape(len(g), -1) for g in part.values()], dim=1)) for part in parts]
        terms = sum(share.terms for share in self.shares)
        return [torch.cat(lengths)], torch.stack(extents).sum(0) * (roundings(terms) * eps)

    @property
    def joint(self) -> int:
        """Return how many vectors a record adds to the sum over all records; those of several calls may cancel."""
        return sum([share.joint for share in self.shares])

    @property
    def most(self) -> int | None:
        """Return the most records of a block if they add several vectors each, else None."""
        return joint_rows(self.joint) if self.dtype != torch.float64 and self.joint > 1 else None

    def chained(self, slip: Tensor | None, lengths: list[Tensor]) -> Tensor | None:
        """Return how far the rounding of a sum over a block can go for each of its records; None if that is known.

        ``slip`` and ``lengths`` are what ``measure`` gave. The proof in docs/proofs/float_sums.md uses this bound.
        """
        if self.most is None:
            return None
        if slip is None:  # nothing cancels within a record
            reach = lengths[0].double() if len(lengths) == 1 else torch.stack(lengths).norm(dim=0).double()
        else:
            terms = sum(share.terms for share in self.shares)
            reach = slip / (roundings(terms) * torch.finfo(self.dtype).eps)
        return reach * (self.most**2 * self.joint * UNIT)

    def weighted_sum(self, weights: Tensor, blocks: Blocks, usable: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yield a parameter's identity and its sum over all usable rows, call after call."""
        parts = [slice(0, blocks.size)] if self.dtype == torch.float64 else blocks.of(self.most or blocks.rows)
        exact, runs = blocks.exact(parts), blocks.runs(parts, usable)
        own = weights if exact else weights.to(self.dtype)
        for call, share in zip(self.calls, self.shares, strict=True):
            if exact:
                sums = _exact_sum(call, own, blocks, usable, max(1, CHUNK // self._row()))
            else:
                sums = add_up(runs, own, share.weighted_sum)
            for local, part in sums.items():
                yield id(call.site.parameters[local]), part

    def exactly(self, rows: Tensor) -> Iterator[tuple[slice, dict[int, Tensor]]]:
        """The gradients of some rows in float64, a few rows at a time, by the identity of the parameter."""
        for part in chunks(len(rows), self._row(), CHUNK):
            yield part, self._joint(rows[part], torch.float64)

    def check(self) -> None:
        """Raise if an input was changed in place since the backward."""
        for call in self._recorded:
            call.check()

    def _row(self) -> int:
        return sum(p.numel() for call in self.calls for p in call.site.parameters.values())

    def _joint(self, rows: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        total: dict[int, Tensor] = {}
        for call in self.calls:
            for local, gradient in call.share(Room(lean=False), rows, dtype).instantiate().items():
                key = id(call.site.parameters[local])
                total[key] = total[key] + gradient if key in total else gradient
        return total


class Bookkeeping:
    """The book of one tape. ``names`` maps the identity of each trainable parameter to its name in the model."""

    def __init__(self, loss: Tensor, calls: list[Call], names: Mapping[int, str], rooms: list[Room]):
        self.loss, self._names = loss, names
        members = _connected(calls)
        self._groups = [_Group([calls[i] for i in own], [rooms[i] for i in own]) for own in members]
        gauge = Gauge()
        self._measure(gauge)
        self.clean = gauge.trusted()
        if not self.clean:
            self._measure(CarefulGauge())
        self._doubtful: Tensor | None = None
        doubtful: Tensor | None = None
        if self.slip is not None:
            tolerance = max(TOLERANCE[group.dtype] for group in self._groups)
            doubtful = ~(self._slips <= tolerance * self.norm.square())
        if self._chained is not None:
            far = ~(self._chained <= JOINT * self.norm)
            doubtful = far if doubtful is None else doubtful | far
        if doubtful is not None and bool(doubtful.any()):
            self._set_apart(doubtful.nonzero().squeeze(1))

    def _measure(self, gauge: Gauge) -> None:
        every: list[Tensor] = []
        slips: list[Tensor] = []
        sizes: list[Tensor] = []
        chained: list[Tensor] = []
        for group in self._groups:
            lengths, slip = group.measure(gauge)
            every += lengths
            far = group.chained(slip, lengths)
            if far is not None:
                chained.append(far)
            if slip is not None:
                slips.append(slip)
                sizes.append(lengths[0] if len(lengths) == 1 else torch.stack(lengths).norm(dim=0))
        self.norm = gauge.joint(every) if every else torch.zeros_like(self.loss)
        self.slip: Tensor | None = None
        if slips:
            moved = torch.stack(slips)
            self.slip = moved.sum(0)
            self._slips = (moved * torch.stack(sizes)).sum(0)
        self._chained: Tensor | None = None
        if chained:
            kinds = len({group.most for group in self._groups if group.most is not None})
            self._chained = torch.stack(chained).norm(dim=0) * math.sqrt(kinds)

    def _set_apart(self, rows: Tensor) -> None:
        squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        measure = CarefulGauge()
        for group in self._groups:
            for part, gradients in group.exactly(rows):
                for gradient in gradients.values():
                    squares[part] += measure(gradient).square()
        self.norm[rows] = squares.sqrt_()
        self._doubtful = rows

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks, last: bool = False
    ) -> dict[str, Tensor]:
        """Sum as `Book` says; rows in doubt are computed from what all layers saw, which is held until then."""
        apart = self._doubtful
        quick = weights if apart is None else weights.index_fill(0, apart, 0.0)
        total: dict[str, Tensor] = {}
        for group in emptied(self._groups) if last and apart is None else self._groups:
            group.check()
            for key, part in group.weighted_sum(quick, blocks, usable):
                name = self._names[key]
                total[name] = total[name] + part if name in total else part
        if apart is not None:
            self._add_apart(total, weights, apart if usable is None else apart[usable[apart]])
        return total

    def _add_apart(self, total: dict[str, Tensor], weights: Tensor, rows: Tensor) -> None:
        for group in self._groups:
            for part, gradients in group.exactly(rows):
                for key, gradient in gradients.items():
                    name = self._names[key]
                    own = (weights[rows[part]].double() @ gradient.reshape(len(gradient), -1)).view(gradient.shape[1:])
                    total[name] = total[name].double() + own


def _exact_sum(call: Call, weights: Tensor, blocks: Blocks, usable: Tensor | None, most: int) -> dict[str, Tensor]:
    """Return the sum of one call over all usable records in float64, of at most ``most`` records at a time."""
    every = torch.arange(blocks.size, device=weights.device)
    rows = every if usable is None else every[usable[: blocks.size]]

    def some(own: Tensor, part: slice) -> dict[str, Tensor]:
        share = call.share(Room(lean=True), rows[part], torch.float64)
        return share.weighted_sum(own.double(), slice(0, len(own)))

    return add_up(chunks_of(len(rows), most), weights[rows], some)


T = TypeVar("T")


def emptied(items: list[T]) -> Iterator[T]:
    """Each of them in turn, and let go of when the next is asked for.

    >>> items = [1, 2]
    >>> [(item, len(items)) for item in emptied(items)]
    [(1, 1), (2, 0)]
    """
    items.reverse()
    while items:
        yield items.pop()


def _joined(calls: list[Call]) -> list[Call]:
    """Calls of one layer as a single one with more terms, where its kernel can do that."""
    if len(calls) == 1:
        return calls
    site = calls[0].site
    join = getattr(site.kernel, "join", None)
    if join is None or any(call.site is not site for call in calls):
        return calls
    return [replace(calls[0], tensors=join(site.module, [call.tensors for call in calls]))]


def _connected(calls: list[Call]) -> list[list[int]]:
    """Indices of calls grouped so that no parameter occurs in two groups."""
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
