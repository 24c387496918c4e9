"""Noisy sums over all records: full-batch Gaussian releases, one after another, each charged before it is made.

A release is one step of a plan with sampling rate 1. Several compose exactly as one Gaussian release with noise
multiplier ``(sum z_i^-2)^-1/2``, also when a later sum depends on earlier noisy ones (docs/proofs/density.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from evenhand import _validate
from evenhand.accounting.budgets import Budgets, Promise
from evenhand.accounting.plan import Plan
from evenhand.density.sums import Sums
from evenhand.errors import UsageError
from evenhand.mechanism import noise_grid
from evenhand.mechanism.add_noise import release
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import noise_std
from evenhand.methods.composition import Method
from evenhand.methods.rules import Clip
from evenhand.methods.schedules import Table
from evenhand.runs.ledger import Ledger
from evenhand.types import Commit, Facts


@dataclass(frozen=True)
class Query:
    """A sum that will be released: its share of the privacy (of z^-2), and the norm that no record's vector exceeds."""

    name: str
    share: float
    bound: float


def plan_of(
    name: str, settings: Mapping[str, Any], queries: Sequence[Query], promise: Promise | None, facts: Facts
) -> Plan:
    """The plan of these releases over all records, calibrated to the promise; adjacency add/remove one record.

    Owners with budgets of their own get their own bound, a multiple of each query's, as idp_scale does.

    Examples:
      >>> from evenhand import Privacy
      >>> facts = Facts(1000, (("all", 1000),))
      >>> made = plan_of("sums", {}, [Query("a", 0.5, 1.0), Query("b", 0.5, 2.0)], Privacy(1.0, 1e-5), facts)
      >>> made.steps, made.rates, 0.999 < made.epsilons[0] <= 1
      (2, (1.0,), True)
    """
    if promise is None:
        raise UsageError(f"{name!r} is a private method: say what was promised, for example epsilon=3.")
    shares = [_validate.number(query.share, f"share of {query.name}", low=0) for query in queries]
    if not math.isclose(sum(shares), 1.0, rel_tol=1e-9):
        raise UsageError("The shares of the releases must add up to 1: they divide one budget.")
    levels = Table(tuple(1 / math.sqrt(share) for share in shares), tuple(query.bound for query in queries))
    apart = "owner" if isinstance(promise, Budgets) else "uniform"
    method = Method(Clip(), schedule=levels, bounds=apart, name=name)  # type: ignore[arg-type]
    made = make_plan(method, promise, data=facts, epochs=len(queries), batch_size=facts.records)
    return dataclasses.replace(made, guarantee="proved and tested", rule={"name": name, "settings": dict(settings)})


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of chunks' vectors, one at a time."""
    return reduce(torch.add, parts)


class Releases:
    """The releases of a plan, in order. Each sum's record vectors must be weighted by ``weights`` for its norms.

    With ``sums`` each is on disk before it is returned, and one that is there already is returned as it is: nothing is
    charged or drawn for it again. ``committed`` is how many the ledger says to have been made.

    Guarantee:
      With record vectors v_i whose weights are ``weights(norm of v_i)``, adding or removing a record of class k moves
      ``sum_i w_i v_i`` by at most ``scale_k * bound``; the noise covers that, float rounding and the grid
      (``mechanism.noise_grid.charged``), and its standard deviation is what the ledger records (law 2).
    """

    def __init__(
        self, plan: Plan, stream: Stream, ledger: Ledger | None = None, sums: Sums | None = None, committed: int = 0
    ) -> None:
        self.plan, self._stream, self._ledger = plan, stream, ledger
        self._sums, self._committed, self._beside = sums, committed, dict[str, Tensor]()
        self._scales = torch.tensor(plan.scales, dtype=torch.float64)
        self.position = 0
        self.commits: list[Commit] = []

    def weights(self, norms: Tensor, owner: Tensor) -> Tensor:
        """``scale_k min(1, bound / norm)`` for the next release; 0 where a norm is no number."""
        bound = self.plan.level_at(self.position).bound
        usable = torch.isfinite(norms)
        return torch.where(usable, self._scales[owner] * bound / norms.clamp(min=bound), 0.0)

    def _held(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The next release, if it was charged before and is on disk; a file that nobody paid for is not used."""
        if self._sums is None or self._ledger is None or self.position >= self._ledger.reserved:
            return None
        return self._sums.read(self.position)

    def beside(self, name: str, value: Tensor) -> Tensor:
        """Keep a public value with the next release; returns the one that was kept with it, if that is on disk."""
        held = self._held()
        self._beside[name] = value if held is None else held[1][name]
        return self._beside[name]

    def release(self, summed: Tensor, *, dimension: int | None = None) -> Tensor:
        """Charge the next release, then the sum with noise on the grid; float64.

        ``dimension`` is how many coordinates one record can change, if not all.
        """
        held = self._held()
        if held is None and not bool(torch.isfinite(summed).all()):
            raise UsageError("The bounded sum is not finite: nothing was released.")
        level = self.plan.level_at(self.position)
        if held is None and self._ledger is not None:
            self._ledger.reserve(1)
        sensitivity = self._scales * level.bound
        spacing = noise_grid.grid(float(sensitivity.max()))
        size, records = summed.numel() if dimension is None else dimension, float(self.plan.facts.records)
        column = sensitivity.numpy()
        charged = noise_grid.charged(column, spacing, size, records, float(column.max()))
        covered, std = noise_std(level, charged, self._scales.numpy())
        if held is None:
            noisy = release(summed.double(), std, spacing, self._stream, "gradient", self.position)
            if self._sums is not None:
                self._sums.write(self.position, noisy, self._beside)
        else:
            noisy = held[0]
        self.commits.append(Commit(self.position, 1, covered, std))
        if self._ledger is not None and self.position >= self._committed:
            self._ledger.commit(self.commits[-1:])
        self.position, self._beside = self.position + 1, {}
        return noisy
