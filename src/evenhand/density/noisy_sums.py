"""Noisy sums over all records: full-batch Gaussian releases, one after another, each charged before it is drawn.

A release is one step of a plan with sampling rate 1. Several compose exactly as one Gaussian release with noise
multiplier ``(sum z_i^-2)^-1/2``, also when a later sum depends on earlier noisy ones (docs/proofs/density.md).
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand import _validate, durable
from evenhand.accounting.budgets import Budgets, Promise
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data, wrap
from evenhand.errors import BudgetExhausted, DataError, UsageError
from evenhand.mechanism import noise_grid
from evenhand.mechanism.add_noise import release
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import noise_std
from evenhand.methods.catalogue import DENSITIES
from evenhand.methods.composition import Method
from evenhand.methods.rules import Clip
from evenhand.methods.schedules import Table
from evenhand.runs.folder import Folder, write_durably
from evenhand.runs.ledger import Ledger, acquire_lock
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
    """Plan these releases over all records, calibrated to the promise; adjacency add/remove one record.

    Owners with budgets of their own get their own bound, a multiple of each query's, as idp_scale does.

    Examples:
      >>> from evenhand import Privacy
      >>> facts = Facts(1000, (("all", 1000),))
      >>> plan = plan_of("sums", {}, [Query("a", 0.5, 1.0), Query("b", 0.5, 2.0)], Privacy(1.0, 1e-5), facts)
      >>> plan.steps, plan.rates, 0.999 < plan.epsilons[0] <= 1
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
    refuse_persons(facts)
    plan = make_plan(method, promise, data=facts, epochs=len(queries), batch_size=facts.records)
    return dataclasses.replace(plan, guarantee="proved and tested", rule={"name": name, "settings": dict(settings)})


def refuse_persons(facts: Facts) -> None:
    """Raise if rows are persons: a density releases sums over single records.

    Examples:
      >>> refuse_persons(Facts(9, (("all", 9),)))
    """
    if facts.promised == "person":
        raise UsageError(
            "Densities promise for single records, and these data are by person: take a method of gradient steps, such "
            "as dpsgd, or wrap the data without persons=."
        )


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add up the vectors of the chunks, one at a time."""
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
        """Return ``scale_k min(1, bound / norm)`` for the next release; 0 where a norm is not finite."""
        bound = self.plan.level_at(self.position).bound
        usable = torch.isfinite(norms)
        return torch.where(usable, self._scales[owner] * bound / norms.clamp(min=bound), 0.0)

    def _stored(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return the next release if it was charged before and is on disk; a file that was not charged is not used."""
        if self._sums is None or self._ledger is None or self.position >= self._ledger.reserved:
            return None
        return self._sums.read(self.position)

    def beside(self, name: str, value: Tensor) -> Tensor:
        """Store a public value with the next release; return the stored one if that release is on disk already."""
        stored = self._stored()
        self._beside[name] = value if stored is None else stored[1][name]
        return self._beside[name]

    def release(self, summed: Tensor, *, dimension: int | None = None) -> Tensor:
        """Charge the next release, then return the sum with noise on the grid; float64.

        ``dimension`` is how many coordinates one record can change, if not all.
        """
        stored = self._stored()
        if stored is None and not bool(torch.isfinite(summed).all()):
            raise UsageError("The bounded sum is not finite: nothing was released.")
        level = self.plan.level_at(self.position)
        if stored is None and self._ledger is not None:
            self._ledger.reserve(1)
        sensitivity = self._scales * level.bound
        spacing = noise_grid.grid(float(sensitivity.max()))
        size, records = summed.numel() if dimension is None else dimension, float(self.plan.facts.records)
        column = sensitivity.numpy()
        charged = noise_grid.charged(column, spacing, size, records, float(column.max()))
        covered, std = noise_std(level, charged, self._scales.numpy())
        if stored is None:
            noisy = release(summed.double(), std, spacing, self._stream, "gradient", self.position)
            if self._sums is not None:
                self._sums.write(self.position, noisy, self._beside)
        else:
            noisy = stored[0]
        self.commits.append(Commit(self.position, 1, covered, std))
        if self._ledger is not None and self.position >= self._committed:
            self._ledger.commit(self.commits[-1:])
        self.position, self._beside = self.position + 1, {}
        return noisy


CHUNK = 2048


@dataclass(frozen=True)
class Chunk:
    """Some records. A row that is not finite is all zero and not ``present``: it must contribute nothing (law 5).

    Its labels stay: where labels are public, one that vanished would tell of such a row.
    """

    inputs: Tensor
    labels: Tensor
    owner: Tensor
    present: Tensor

    def usable(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return one float64 row per record, and 1 for each record that is present and whose row is finite.

        The others become rows of zeros. A weight of 0 would not do: 0 times NaN is NaN, and a sum that is not finite
        would tell that such a record is there.

        Examples:
          >>> part = Chunk(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2), torch.ones(2))
          >>> part.usable(torch.tensor([[0.5, 1.0], [0.5, float("nan")]]))[0].tolist()
          [[0.5, 1.0], [0.0, 0.0]]
        """
        mask = torch.isfinite(rows).all(1) & (self.present > 0)
        return torch.where(mask.unsqueeze(1), rows.double(), 0.0), mask.double()


def chunks(data: Data) -> Iterator[Chunk]:
    """Yield all records in order, each read once; class numbers become one column per class."""
    classes = len(data.facts.labels)
    for rows in torch.split(torch.arange(len(data)), CHUNK):
        inputs, targets = data.fetch(rows)
        flat = inputs.detach().cpu().flatten(1).float()
        columns = targets.double() if targets.dim() == 2 else torch.nn.functional.one_hot(targets, classes).double()
        labelled = _finite(columns)
        present = _finite(flat) & labelled
        if not bool(present.all()):
            pairs = (present, flat), (labelled, columns)
            flat, columns = (torch.where(mask.unsqueeze(1), part, 0.0) for mask, part in pairs)
        yield Chunk(flat, (columns > 0).double(), data.owner[rows], present.double())


def _finite(rows: Tensor) -> Tensor:
    """Return a mask of the finite rows.

    A finite sum shows at once that its row is finite; a sum that is not finite may also have overflowed.
    """
    finite = torch.isfinite(rows.sum(1))
    return finite if bool(finite.all()) else torch.isfinite(rows).all(1)


def as_data(
    inputs: Any, labels: Any, *, owners: Any = None, classes: Sequence[Any] | None = None
) -> tuple[Data, tuple[Any, ...]]:
    """Return arrays as Data, and the classes as the caller named them.

    ``labels`` is one class per record, or one column of 0 and 1 per class where a record may have several.

    Examples:
      >>> data, names = as_data(np.zeros((4, 2)), ["a", "b", "b", "a"])
      >>> names, data.facts.records
      (('a', 'b'), 4)
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    with _reading():
        if values.ndim == 1:
            known = tuple(np.unique(values).tolist() if classes is None else classes)
            return wrap(inputs, values, owners=owners, labels=classes), known
        if values.ndim != 2:
            raise DataError("Labels must be one class per record, or one column of 0 and 1 per class.")
        known = tuple(range(values.shape[1]) if classes is None else classes)
        if len(known) != values.shape[1]:
            raise DataError(f"There are {values.shape[1]} label columns but {len(known)} classes: name each column.")
        data = wrap(inputs, values.astype(np.float32), owners=owners)
    derived = tuple(fact for fact in data.facts.derived if fact != "labels")
    return replace(data, facts=replace(data.facts, labels=tuple(map(str, known)), derived=derived)), known


def as_rows(inputs: Any, width: int) -> Tensor:
    """Return new records as flat float32 rows; refuse another width than that of the fitted records."""
    with _reading():
        values = inputs.detach().cpu() if isinstance(inputs, Tensor) else torch.from_numpy(np.ascontiguousarray(inputs))
    flat = values.flatten(1).float()
    if flat.shape[1] != width:
        raise DataError(f"These records have {flat.shape[1]} features, those that were fitted had {width}.")
    return flat


@contextmanager
def _reading() -> Iterator[None]:
    """Ignore torch's warning about arrays that cannot be written, such as memory maps: they are only read here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        yield


def seconds(data: Data) -> float:
    """Estimate how long one pass over all records takes: the time of the first chunk, times their number."""
    started = time.perf_counter()
    next(chunks(data))
    return (time.perf_counter() - started) * -(-len(data) // CHUNK)


_NOISY = "noisy"


@dataclass(frozen=True)
class Sums:
    """The noisy sums of one run folder, by the number of their release."""

    folder: Folder

    def write(self, position: int, noisy: Tensor, beside: Mapping[str, Tensor]) -> None:
        """Write a release to disk, with public values that belong to it; durable on return."""
        from safetensors.torch import save

        write_durably(self._file(position), save({_NOISY: noisy.contiguous(), **beside}))

    def read(self, position: int) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return a release and the values that belong to it, None if it is not on disk."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = self._file(position)
        if not file.exists():
            return None
        try:
            tensors = load(file.read_bytes())
            return tensors.pop(_NOISY), tensors
        except (SafetensorError, KeyError):
            raise UsageError(f"private/{file.name} is damaged or was exchanged: this density cannot go on.") from None

    def refuse_lost(self, plan: Plan, charged: int) -> None:
        """Raise where a release was charged whose noisy sum is not on disk: it can never be made again.

        The other sums are removed then, with what the dead process was writing: nothing can be made of them alone.

        Raises:
          BudgetExhausted: the sum is lost.
          LedgerError: another process is still making it.
        """
        if self._lost(charged) is None:
            return
        with acquire_lock(self.folder.ledger_file):
            lost = self._lost(charged)
            if lost is None or self.folder.ledger().released:
                return
            self.forget()
            durable.clean(self.folder.private)
        names = DENSITIES[plan.method].releases
        raise BudgetExhausted(
            f"This density died after its release {lost + 1} of {plan.steps} ({names[lost - plan.steps]}) was "
            "charged and before the noisy sum was on disk: the sum is lost, what it cost stays spent, and the "
            "folder cannot be finished. Train again with another --out; both budgets add up."
        )

    def _lost(self, charged: int) -> int | None:
        """Return the number of the last charged release that is not on disk; None if all are."""
        return next((step for step in reversed(range(charged)) if not self._file(step).exists()), None)

    def forget(self) -> None:
        """Remove the sums after the model computed from them was published."""
        for file in self.folder.private.glob("release-*.safetensors"):
            file.unlink()

    def _file(self, position: int) -> Path:
        return self.folder.private / f"release-{position}.safetensors"
