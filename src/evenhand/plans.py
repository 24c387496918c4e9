"""A plan: every number that decides privacy, frozen, printable, hashed. Nothing here needs torch or data."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenhand.errors import UsageError
from evenhand.privacy import accountants
from evenhand.privacy.owners import owner_epsilons
from evenhand.types import Event, Facts, Guarantee

SCHEMA = 1


@dataclass(frozen=True)
class PlannedLevel:
    """A stretch of steps with the calibrated noise multipliers of the gradient and of each side query."""

    count: int
    noise: float
    bound: float
    queries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What will be done and what it costs. Columns follow ``facts.owners``: one entry per budget class.

    ``scales`` multiplies the clip bound per class; ``budgets`` is what was promised (None: nothing was), ``epsilons``
    what the whole plan spends (None: no finite epsilon is established).
    """

    method: str
    guarantee: Guarantee
    rule: Mapping[str, Any]
    queries: tuple[Mapping[str, Any], ...]
    schedule: Mapping[str, Any]
    facts: Facts
    delta: float
    budgets: tuple[float | None, ...]
    steps: int
    expected_batch: float
    rates: tuple[float, ...]
    scales: tuple[float, ...]
    levels: tuple[PlannedLevel, ...]
    epsilons: tuple[float | None, ...]
    accountant: str = "pld"
    unit: str = "one record"
    adjacency: str = "add/remove"

    @property
    def certified(self) -> bool:
        """Whether a finite epsilon may be printed for this plan."""
        return self.guarantee in ("by construction", "proved and tested")

    @property
    def digest(self) -> str:
        """Hash of the whole plan. Speed settings are not part of a plan, so they cannot change it (law 3)."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def level_at(self, position: int) -> PlannedLevel:
        """The level of step ``position`` (from 0)."""
        if not 0 <= position < self.steps:
            raise IndexError(f"the plan has {self.steps} steps")
        return self.levels[bisect.bisect_right(self._ends, position)]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(level.count for level in self.levels))

    def noise_seen(self, level: PlannedLevel, owner: int) -> float:
        """Noise multiplier of a whole step for a record of this class, side queries merged in (law 6)."""
        return self._merged(level, self.scales[owner])

    def _merged(self, level: PlannedLevel, scale: float) -> float:
        return accountants.merged(level.noise / scale, level.queries)

    def events(self, owner: int = 0, steps: int | None = None) -> list[Event]:
        """What a record of this class is exposed to in the first ``steps`` steps (all of them by default)."""
        left, result = self.steps if steps is None else steps, []
        for level in self.levels:
            count = min(level.count, left)
            left -= count
            if count:
                result.append((self.rates[owner], self.noise_seen(level, owner), count))
        return result

    def spent(self, steps: int, owner: int = 0) -> float | None:
        """Epsilon after ``steps`` steps for a record of this class; None if none is established."""
        return accountants.epsilon(self.events(owner, steps), self.delta) if self.certified else None

    def spent_by_owner(self, steps: int | None = None) -> tuple[float | None, ...]:
        """``spent`` for every class: exact for a few distinct ones, certified upper bounds for tens of thousands."""
        if not self.certified:
            return (None,) * len(self.rates)
        done = self.steps if steps is None else steps
        if not done:
            return (0.0,) * len(self.rates)
        by_rate = len(set(self.scales)) == 1
        if not by_rate and len(set(self.rates)) > 1:
            raise UsageError("Owners differ in their sampling rate or in their clip bound, not in both.")
        points = self.rates if by_rate else self.scales

        def events(point: float) -> list[Event]:
            return [
                (point, noise, count) if by_rate else (rate, self._merged(level, point), count)
                for level, (rate, noise, count) in zip(self.levels, self.events(0, done), strict=False)
            ]

        return tuple(owner_epsilons(points, events, self.delta, by_rate=by_rate, tries=self.budgets))

    def spending(self, owner: int = 0, points: int = 64) -> list[tuple[int, float]]:
        """(steps, epsilon) over the whole plan, for progress and charts; empty if no epsilon is established."""
        return accountants.curve(self.events(owner), self.delta, points=points) if self.certified else []

    def warnings(self) -> list[str]:
        """What a privacy engineer should look at before signing."""
        found = []
        if self.facts.derived:
            found.append(
                f"{' and '.join(self.facts.derived)} were read off the data and are printed as public facts: declare "
                "them (labels=, group_names=) if they are not public knowledge."
            )
        if self.certified and self.delta >= 1 / self.facts.records:
            found.append(
                f"delta {self.delta:g} is not below 1/N: a mechanism that publishes one record at random would pass."
            )
        if self.certified and min(level.noise for level in self.levels) < 0.3:
            found.append("a noise multiplier below 0.3 protects single steps hardly at all.")
        if any(epsilon is not None and epsilon > 20 for epsilon in self.epsilons):
            found.append("an epsilon above 20 promises next to nothing.")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data for plan.json. Meanings never change; a new meaning gets a new key and schema number."""
        return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote; unknown or missing keys are errors."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if data.get("schema") != SCHEMA or set(data) != fields | {"schema"}:
            raise UsageError("plan.json was not written by this version of evenhand, or was edited.")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key in fields
        }
        facts = data["facts"]
        values["facts"] = Facts(
            records=facts["records"],
            owners=tuple((str(name), int(count)) for name, count in facts["owners"]),
            groups=tuple(facts["groups"]),
            labels=tuple(facts["labels"]),
            inputs=facts["inputs"],
            derived=tuple(facts.get("derived", ())),
        )
        values["levels"] = tuple(
            PlannedLevel(**{**level, "queries": tuple(level["queries"])}) for level in data["levels"]
        )
        return cls(**values)

    def __str__(self) -> str:
        from evenhand.describing import describe

        return describe(self)
