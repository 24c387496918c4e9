"""Value types that the parts of evenhand share; the parts themselves never import each other.

Nothing here imports torch at run time, so that ``evenhand verify`` and ``evenhand epsilon`` stay light.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Guarantee: TypeAlias = Literal["by construction", "proved and tested", "not established", "not private"]
Event: TypeAlias = tuple[float, float, int]
"""(sampling rate, noise multiplier, count): ``count`` Poisson-subsampled Gaussians, add/remove one record."""
Unit: TypeAlias = Literal["record", "person"]
"""Whom a row of the data, and so the promise, is about."""
PriorKind: TypeAlias = Literal["labels", "labels by group", "each label"]
"""What counts are of: one of several labels per record; that for each group; several labels per record, each present or
absent."""
PRIOR_KINDS: tuple[PriorKind, ...] = ("labels", "labels by group", "each label")


@dataclass(frozen=True)
class Facts:
    """Public facts about a dataset: every number here may be printed, and the plan relies on it.

    ``owners`` are budget classes with their number of records; ``groups`` are the names that rules and reports use.
    ``derived`` names the facts that nobody declared and that were read off the data. ``ordered`` says that the labels
    have an order, from the lowest to the highest. ``features`` names the public network that made the inputs, with its
    licence and the data that it was trained on. ``unit`` says whom a row stands for: a record, or a person with all of
    their records; then ``records`` and ``owners`` count persons, whom the column ``told_apart`` tells apart, and a step
    uses at most ``records_per_person`` records of each drawn person. With a ``person_cap`` rows are records, at most so
    many of each of ``persons`` persons, and the promise is about a person all the same.
    """

    records: int
    owners: tuple[tuple[str, int], ...]
    groups: tuple[str, ...] = ("all",)
    labels: tuple[str, ...] = ()
    inputs: str = ""
    derived: tuple[str, ...] = ()
    ordered: bool = False
    features: str = ""
    unit: Unit = "record"
    told_apart: str = ""
    records_per_person: int = 1
    person_cap: int = 0
    persons: int = 0

    @property
    def units(self) -> str:
        """Return the word for several of them: records or persons."""
        return f"{self.unit}s"

    @property
    def promised(self) -> Unit:
        """Return whom the promise is about: a person also where rows are records, at most so many of each person."""
        return "person" if self.person_cap else self.unit

    @property
    def owner_names(self) -> tuple[str, ...]:
        """Names of the budget classes, in the order of ``Stats.owner``."""
        return tuple(name for name, _ in self.owners)


@dataclass(frozen=True)
class Stats:
    """All that a rule may see of a batch: columns with one row per sampled record (law 1: never a gradient).

    ``owner`` is the index of the record's budget class. ``record`` is its number, which may break ties and decide
    nothing else: when a record goes, those behind it have other numbers. Rules and queries that see one row at a time,
    and are not ours, get 0 in its place.
    """

    norm: Tensor
    loss: Tensor
    group: Tensor
    owner: Tensor
    record: Tensor


@dataclass(frozen=True)
class Public:
    """Constants of the plan that rules and queries may use; the same at every step.

    ``batch`` is the EXPECTED batch size. ``rate`` and ``expected`` have one entry per owner class: its sampling rate
    and how many of its records a step is expected to draw (a column like ``State.bound``).
    """

    batch: float = 1.0
    steps_per_epoch: float = 1.0
    groups: int = 1
    rate: Tensor | Sequence[float] = (1.0,)
    expected: Tensor | Sequence[float] = (1.0,)


@dataclass(frozen=True)
class State:
    """All that a rule may use besides its rows: public constants and answers that are already private.

    ``bound`` has one clip bound per owner class. ``answers`` holds the noisy side queries of this step by name,
    ``memory`` what the rule itself derived from earlier answers, ``public`` the constants of the plan.
    """

    step: int
    bound: Tensor
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    public: Public = field(default_factory=Public)

    @property
    def epoch(self) -> int:
        """Whole epochs before this step, counted as schedules count them."""
        return int((self.step + 1e-9) / self.public.steps_per_epoch)


@dataclass(frozen=True)
class Level:
    """One stretch of a schedule: noise multiplier (relative until calibrated) and clip bound."""

    noise: float
    bound: float


@dataclass(frozen=True)
class Pass:
    """Result of one forward and one backward pass; every gradient engine returns this.

    ``loss`` and ``norm`` have one entry per record (norm over all trainable parameters). ``weighted_sum(w)`` gives
    ``sum_i w_i g_i`` by parameter name. A row whose norm is not finite is left out of the sum whatever its weight.
    ``finite`` says that no row is such. ``spend``, if there is one, is ``weighted_sum`` for the last time: it gives
    back what the layers saw as it goes, and the caller may write over the sums.
    """

    loss: Tensor
    norm: Tensor
    weighted_sum: Callable[[Tensor], dict[str, Tensor]]
    finite: bool = False
    spend: Callable[[Tensor], dict[str, Tensor]] | None = None

    def last_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the weighted sum, when no other will be asked for."""
        return (self.spend or self.weighted_sum)(weights)


@dataclass(frozen=True)
class Batch:
    """The rows that one Poisson draw selected, for one position of the plan. May be empty.

    It unpacks as a pair, ``inputs, targets = batch``, and gives its parts by name: ``batch["inputs"]``, the columns of
    inputs that are a dict, ``batch["targets"]`` (or ``"labels"``). ``dict(batch)`` and ``model(**batch)`` take the
    names of ``keys()``. ``len(batch)`` is the number of records, and iterating gives the pair: it is no Mapping.

    ``record_keys`` are secret random numbers of the records, ascending: they decide which records are summed together.

    Examples:
      >>> batch = Batch({"ids": [[5, 7]]}, [1], group=[0], owner=[0], record=[3], position=0, token=0)
      >>> inputs, targets = batch
      >>> inputs, dict(batch), batch["targets"]
      ({'ids': [[5, 7]]}, {'ids': [[5, 7]], 'labels': [1]}, [1])
    """

    inputs: Any
    targets: Any
    group: Tensor
    owner: Tensor
    record: Tensor
    position: int
    token: int
    record_keys: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return int(self.record.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inputs, self.targets))

    def __getitem__(self, name: str | int) -> Any:
        """Return a part by name, or one of the pair by its place."""
        if isinstance(name, int):
            return (self.inputs, self.targets)[name]
        return {"inputs": self.inputs, "targets": self.targets, **self._named}[name]

    def __contains__(self, name: object) -> bool:
        return name in ("inputs", "targets") or name in self._named

    @property
    def _named(self) -> dict[str, Any]:
        columns = self.inputs if isinstance(self.inputs, Mapping) else {"inputs": self.inputs}
        return {**columns, "labels": self.targets}

    def keys(self) -> Collection[str]:
        """Return the names of the inputs, if they have some, else "inputs"; then "labels"."""
        return self._named.keys()

    def values(self) -> Collection[Any]:
        """Return the parts in the order of ``keys``."""
        return self._named.values()

    def items(self) -> Collection[tuple[str, Any]]:
        """Return pairs of name and part in the order of ``keys``."""
        return self._named.items()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a part by name, or ``default`` if there is none."""
        try:
            return self[name]
        except KeyError:
            return default

    def to(self, *where: Any, **options: Any) -> Batch:
        """Return this batch with inputs and targets on a device, as ``Tensor.to`` takes it; it is stepped like this."""
        return replace(self, inputs=_to(self.inputs, where, options), targets=_to(self.targets, where, options))


def _to(value: Any, where: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return every tensor of a structure on another device; what holds no tensor stays."""
    if isinstance(value, dict):
        return {key: _to(part, where, options) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(part, where, options) for part in value)
    return value.to(*where, **options) if hasattr(value, "to") else value


@dataclass(frozen=True)
class Commit:
    """Record what ``count`` equal steps from ``first`` on used, as a row of the ledger names it.

    ``sensitivity`` has one entry per owner class, or one per unit of relative bound for many; ``std`` is the standard
    deviation of the noise. ``queries`` holds (sensitivity, std) of each side query.
    """

    first: int
    count: int
    sensitivity: tuple[float, ...]
    std: float
    queries: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class PriorRow:
    """The noisy counts of labels that a run released once, as a row of the ledger names them.

    ``sensitivity`` is how far one record can move the table (L2), rounding included, and ``std`` the standard deviation
    of the noise in every count. ``counts`` has one row for all records, or one per group.
    """

    kind: PriorKind
    sensitivity: float
    std: float
    counts: tuple[tuple[float, ...], ...]
