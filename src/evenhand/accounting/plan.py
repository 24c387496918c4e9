"""A plan: every number that decides privacy, frozen, printable, hashed. Nothing here needs torch or data."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenhand import untrusted
from evenhand.accounting import accountant, stages
from evenhand.accounting.stages import PlannedLevel, Stage
from evenhand.errors import UsageError
from evenhand.types import Event, Facts, Guarantee

SCHEMA = 1
_LARGE = 1e12
_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_LEVELS: untrusted.Shape = [{"count": int, "noise": _NUMBER, "bound": _NUMBER, "queries": [_NUMBER]}]
_SHAPE: untrusted.Shape = {
    "method": str,
    "guarantee": str,
    "rule": {"name": str, "settings": dict},
    "queries": [dict],
    "schedule": dict,
    "facts": {"records": int, "owners": [list], "groups": [str], "labels": [str], "inputs": str},
    "delta": _NUMBER,
    "budgets": [_MAYBE],
    "steps": int,
    "expected_batch": _NUMBER,
    "rates": [_NUMBER],
    "scales": [_NUMBER],
    "levels": _LEVELS,
    "epsilons": [_MAYBE],
    "accountant": str,
    "unit": str,
    "adjacency": str,
}
"""What plan.json holds; see ``untrusted.fits``."""


@dataclass(frozen=True)
class Plan:
    """What will be done and what it costs. Columns follow ``facts.owners``: one entry per budget class.

    ``scales`` multiplies the clip bound per class; ``budgets`` is what was promised (None: nothing was), ``epsilons``
    what the whole plan spends (None: no finite epsilon is established). ``rates``, ``scales`` and ``levels`` hold for
    the steps after those of ``earlier``: what was charged before budgets changed.
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
    earlier: tuple[Stage, ...] = ()

    @property
    def certified(self) -> bool:
        """Whether a finite epsilon may be printed for this plan."""
        return self.guarantee in ("by construction", "proved and tested")

    @cached_property
    def digest(self) -> str:
        """Hash of the whole plan. Speed settings are not part of a plan, so they cannot change it (law 3)."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def from_here(self) -> Plan:
        """The steps after the last change of budgets alone, as a plan of their own."""
        if not self.earlier:
            return self
        alone = dataclasses.replace(self, earlier=(), steps=sum(level.count for level in self.levels))
        return dataclasses.replace(alone, epsilons=alone.spent_by_owner())

    def level_at(self, position: int) -> PlannedLevel:
        """The level of step ``position`` (from 0)."""
        if not 0 <= position < self.steps:
            raise IndexError(f"the plan has {self.steps} steps")
        return self._levels[bisect.bisect_right(self._ends, position)]

    def scales_at(self, position: int) -> tuple[float, ...]:
        """The relative bounds per class that held at step ``position``."""
        for stage in self._stages:
            position -= stage.steps
            if position < 0:
                return stage.scales
        return self.scales

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return (*self.earlier, Stage(self.rates, self.scales, self.levels))

    @cached_property
    def _levels(self) -> list[PlannedLevel]:
        return [level for stage in self._stages for level in stage.levels]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(level.count for level in self._levels))

    def noise_seen(self, level: PlannedLevel, owner: int) -> float:
        """Noise multiplier of a whole step for a record of this class, side queries merged in (law 6)."""
        return accountant.merged(level.noise / self.scales[owner], level.queries)

    def events(self, owner: int = 0, steps: int | None = None) -> list[Event]:
        """What a record of this class is exposed to in the first ``steps`` steps (all of them by default)."""
        parts = self._stages if steps is None else stages.until(self._stages, steps)
        return [event for part in parts for event in part.events(part.rates[owner], part.scales[owner])]

    def spent(self, steps: int, owner: int = 0) -> float | None:
        """Epsilon after ``steps`` steps for a record of this class; None if none is established."""
        return accountant.epsilon(self.events(owner, steps), self.delta) if self.certified else None

    def spent_by_owner(self, steps: int | None = None) -> tuple[float | None, ...]:
        """``spent`` for every class: exact for a few distinct ones, certified upper bounds for tens of thousands."""
        if not self.certified:
            return (None,) * len(self.rates)
        parts = stages.until(self._stages, self.steps if steps is None else steps)
        return stages.spent(parts, self.delta, self.budgets) if parts else (0.0,) * len(self.rates)

    def spending(self, owner: int = 0, points: int = 64) -> list[tuple[int, float]]:
        """(steps, epsilon) over the whole plan, for progress and charts; empty if no epsilon is established."""
        return accountant.curve(self.events(owner), self.delta, points=points) if self.certified else []

    def warnings(self) -> list[str]:
        """What a privacy engineer should look at before signing."""
        found = []
        if self.facts.derived:
            found.append(
                f"{' and '.join(self.facts.derived)} were read off the data and are printed as public facts: declare "
                "them (labels=, group_names=) if they are not public knowledge."
            )
        found += delta_warnings(self.delta, self.facts.records) if self.certified else []
        if self.certified and min(level.noise for level in self.levels) < 0.3:
            found.append("a noise multiplier below 0.3 protects single steps hardly at all.")
        if any(epsilon is not None and epsilon > 20 for epsilon in self.epsilons):
            found.append("an epsilon above 20 promises next to nothing.")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data for plan.json. Meanings never change; a new meaning gets a new key and schema number."""
        plain = json.loads(json.dumps(self, default=_fields))
        return {"schema": SCHEMA, **{key: value for key, value in plain.items() if key != "earlier" or value}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote; unknown or missing keys are errors."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if data.get("schema") != SCHEMA or set(data) | {"earlier"} != fields | {"schema"}:
            raise UsageError("plan.json was not written by this version of evenhand, or was edited.")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key in fields
        }
        if not untrusted.fits(dict(data), _SHAPE) or not untrusted.fits(data["facts"].get("derived", []), [str]):
            raise UsageError("plan.json holds something of another kind than a plan does: it was damaged or edited.")
        facts = data["facts"]
        values["facts"] = Facts(
            records=facts["records"],
            owners=tuple((str(name), int(count)) for name, count in facts["owners"]),
            groups=tuple(facts["groups"]),
            labels=tuple(facts["labels"]),
            inputs=facts["inputs"],
            derived=tuple(facts.get("derived", ())),
        )
        values["levels"] = _levels(data["levels"])
        values["earlier"] = tuple(
            Stage(tuple(stage["rates"]), tuple(stage["scales"]), _levels(stage["levels"]), str(stage["plan"]))
            for stage in data.get("earlier", ())
        )
        made = cls(**values)
        if not made._possible():
            raise UsageError("plan.json holds a number that no plan can have: it was damaged or edited.")
        return made

    def _possible(self) -> bool:
        """Whether the accountant can be asked about this plan: columns of one length, numbers inside their ranges."""
        owners = len(self.facts.owners)
        columns = (
            self.budgets,
            self.epsilons,
            *(part for stage in self._stages for part in (stage.rates, stage.scales)),
        )
        return (
            all(len(column) == owners for column in columns)
            and self.facts.records >= 1
            and 0 < self.delta < 1
            and self.steps == sum(stage.steps for stage in self._stages)
            and all(0 <= rate <= 1 for stage in self._stages for rate in stage.rates)
            and all(0 < scale < _LARGE for stage in self._stages for scale in stage.scales)
            and all(0 <= level.count < _LARGE for level in self._levels)
            and all(0 <= noise < _LARGE for level in self._levels for noise in (level.noise, *level.queries))
            and all(value is None or value >= 0 for value in (*self.budgets, *self.epsilons))
        )

    def __str__(self) -> str:
        from evenhand.describing import describe

        return describe(self)


def default_delta(records: int) -> float:
    """Return the largest power of ten that is at most 1/(10 N).

    Examples:
      >>> default_delta(1000), default_delta(1001), default_delta(9900)
      (0.0001, 1e-05, 1e-05)
    """
    return float(f"1e-{len(str(10 * records - 1))}")


def delta_warnings(delta: float, records: int) -> list[str]:
    """Say what a delta above 1/(10 N) allows, and which one to take; nothing up to there.

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


def _fields(part: Any) -> dict[str, Any]:
    """A dataclass as plain data; unlike ``asdict`` it copies nothing, which counts with tens of thousands of owners."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _levels(rows: Iterable[Mapping[str, Any]]) -> tuple[PlannedLevel, ...]:
    return tuple(PlannedLevel(**{**level, "queries": tuple(level["queries"])}) for level in rows)
