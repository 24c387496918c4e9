"""Promises: one epsilon for all records, one per owner class, or a fixed noise whose cost is reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand import _notebook, _validate
from evenhand.errors import UsageError


@dataclass(frozen=True)
class Privacy:
    """One promise for all records alike: (epsilon, delta), adjacency add/remove one record.

    ``delta=None`` takes ``default_delta`` of the number of records, which the plan prints.

    Examples:
      >>> Privacy(3.0, 1e-5)
      Privacy(epsilon=3.0, delta=1e-05)
    """

    epsilon: float
    delta: float | None = None

    def __post_init__(self) -> None:
        _validate.number(self.epsilon, "epsilon", low=0)
        if self.delta is not None:
            _validate.delta(self.delta)

    def _repr_html_(self) -> str:
        return _notebook.facts("Promise to every record", {"epsilon": self.epsilon, "delta": _shown(self.delta)})


@dataclass(frozen=True)
class Budgets:
    """One epsilon per owner class, one delta for all: "each record of owner X is promised epsilon_X".

    ``per_record`` makes them from one epsilon for each record, ``named`` for owners that are called by their epsilon.

    Examples:
      >>> Budgets({"strict": 1, "usual": 3}, delta=1e-5).epsilons["strict"]
      1
    """

    epsilons: Mapping[str, float]
    delta: float | None = None
    owners: Sequence[str] | None = field(default=None, repr=False, compare=False)
    """The owner class of every record, where the budgets were given record by record: pass it as ``owners=``."""

    def __post_init__(self) -> None:
        if not self.epsilons:
            raise UsageError("Budgets needs at least one owner: pass for example Budgets({'strict': 1, 'usual': 3}).")
        for owner, epsilon in self.epsilons.items():
            _validate.number(epsilon, f"epsilon of owner {owner!r}", low=0)
        if self.delta is not None:
            _validate.delta(self.delta)

    def _repr_html_(self) -> str:
        rows = [[name, epsilon] for name, epsilon in self.epsilons.items()]
        return _notebook.table("Promises by owner", ("owner", "epsilon"), rows, [f"delta: {_shown(self.delta)}"])

    @classmethod
    def per_record(cls, epsilons: Iterable[Any], delta: float | None = None) -> Budgets:
        """Return budgets from one epsilon for each record, in the order of the data: a list, an array or a column.

        Every distinct value becomes an owner class that is called by it. The values, and how many records have each,
        become public facts of the plan.

        Examples:
          >>> budgets = Budgets.per_record([1, 3, 3], delta=1e-5)
          >>> budgets.epsilons, budgets.owners
          ({'1': 1.0, '3': 3.0}, ('1', '3', '3'))
        """
        owners = _validate.epsilon_names(epsilons)
        return cls({name: float(name) for name in sorted(set(owners), key=float)}, delta, tuple(owners))

    @classmethod
    def named(cls, owners: Iterable[str], delta: float | None = None) -> Budgets:
        """Return budgets for owner classes that are called by their epsilon, like those of ``per_record``.

        Examples:
          >>> Budgets.named(["1", "2.5"]).epsilons
          {'1': 1.0, '2.5': 2.5}
        """
        try:
            return cls({name: float(name) for name in owners}, delta)
        except ValueError:
            raise UsageError(
                "Budgets by record name every owner by its epsilon, and these owners have other names. Give the "
                "budgets by owner: NAME=NUMBER,NAME=NUMBER."
            ) from None


@dataclass(frozen=True)
class FixedNoise:
    """A noise multiplier chosen by hand; the plan reports what it costs instead of meeting a promise.

    Examples:
      >>> FixedNoise(1.1, delta=1e-5).noise
      1.1
    """

    noise: float
    delta: float | None = None

    def __post_init__(self) -> None:
        _validate.number(self.noise, "noise", low=0)
        if self.delta is not None:
            _validate.delta(self.delta)


Promise = Privacy | Budgets | FixedNoise


def _shown(delta: float | None) -> str:
    return "the default for so many records" if delta is None else f"{delta:g}"


def default_delta(records: int) -> float:
    """Return the largest power of ten that is at most 1/(10 N).

    Examples:
      >>> default_delta(1000), default_delta(1001), default_delta(9900)
      (0.0001, 1e-05, 1e-05)
    """
    return float(f"1e-{len(str(10 * records - 1))}")


def delta_warnings(delta: float, records: int) -> list[str]:
    """Return what a delta above 1/(10 N) allows, and which one to take; nothing up to there.

    Examples:
      >>> delta_warnings(1e-4, 1000)
      []
      >>> delta_warnings(1e-3, 1000)[0][:42]
      'delta 0.001 is above 1/(10 N) and not belo'
    """
    if delta <= (1 + 1e-9) / (10 * records):
        return []
    far = " and not below 1/N" if delta >= 1 / records else ""
    return [
        f"delta {delta:g} is above 1/(10 N){far}: a mechanism that publishes every record in full with that chance, "
        f"{delta * records:.2g} of the {records} on average, would pass. Take at most delta {default_delta(records):g}."
    ]
