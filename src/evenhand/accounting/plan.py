"""The frozen Plan: every number that decides privacy, printable and hashed. Nothing here needs torch or data.

A plan has stages: steps that share rates and relative bounds. A change of budgets begins a new stage.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from evenhand import _notebook, untrusted
from evenhand._numbers import promised, rounded_up
from evenhand.accounting import accountant
from evenhand.accounting.accountant import FINE, Composition, merged_noise
from evenhand.accounting.budgets import delta_warnings
from evenhand.accounting.owner_classes import epsilon_by_class
from evenhand.errors import UsageError
from evenhand.types import PRIOR_KINDS, Event, Facts, Guarantee, PriorKind, Unit

SCHEMA = 1
_OWNERS_LISTED = 10  # owners that a warning lists one by one
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
"""Keys of plan.json and the kinds of their values; see ``untrusted.fits``."""
_PRIOR: untrusted.Shape = {"kind": str, "noise": _NUMBER}
_OPTIONAL = {"earlier", "prior", "packages"}
"""Keys that are left out of plan.json where there is nothing to say."""
_UNSAID = {"features": "", "unit": "record", "told_apart": "", "records_per_person": 1, "person_cap": 0, "persons": 0}
"""Public facts that are left out of plan.json where there is nothing to say."""
_LATER: dict[str, Any] = {"derived": [], **_UNSAID}
"""Public facts that plans of earlier versions do not have."""
_LATER_SHAPE: untrusted.Shape = {
    **{"derived": [str], "features": str, "unit": str, "told_apart": str},
    **{"records_per_person": int, "person_cap": int, "persons": int},
}


UNITS: Mapping[Unit, str] = {"record": "one record", "person": "person"}
"""Whom a promise is about, as plan and statement name it."""


@dataclass(frozen=True)
class PlannedLevel:
    """A stretch of steps with the calibrated noise multipliers of the gradient and of each side query."""

    count: int
    noise: float
    bound: float
    queries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Steps under equal budgets: rate and relative bound per owner class, then the levels in order.

    ``plan`` is the digest of the plan that fixed them, for stages that are over. A rate of 0 means that the class was
    left out.
    """

    rates: tuple[float, ...]
    scales: tuple[float, ...]
    levels: tuple[PlannedLevel, ...]
    plan: str = ""

    @property
    def steps(self) -> int:
        """Return the number of its steps."""
        return sum(level.count for level in self.levels)

    def first(self, steps: int) -> Stage:
        """Return its first ``steps`` steps."""
        return replace(self, levels=cut_levels(self.levels, 0, steps))

    def events(self, rate: float, scale: float) -> list[Event]:
        """Return the events that a record with this rate and relative bound is exposed to."""
        if rate == 0:
            return []
        return [(rate, merged_noise(level.noise / scale, level.queries), level.count) for level in self.levels]


@dataclass(frozen=True)
class PlannedPrior:
    """Counts of labels over all records, released once beside the steps: what is counted, and the noise multiplier."""

    kind: PriorKind
    noise: float

    def stage(self, owners: int) -> Stage:
        """Return the release as a stage: every record of each of the classes is in it, with sensitivity 1."""
        return Stage((1.0,) * owners, (1.0,) * owners, (PlannedLevel(1, self.noise, 1.0),))


@dataclass(frozen=True)
class Plan:
    """Everything that will be done, and its cost. Columns follow ``facts.owners``: one entry per budget class.

    ``scales`` multiplies the clip bound per class; ``budgets`` is what was promised (None: nothing was), ``epsilons``
    what the whole plan spends (None: no finite epsilon is established). ``rates``, ``scales`` and ``levels`` hold for
    the steps after those of ``earlier``: what was charged before budgets changed. ``prior`` is charged from the first
    row of the ledger on, whether or not it is released. ``packages`` made the method or a part of it, with versions.
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
    prior: PlannedPrior | None = None
    packages: tuple[str, ...] = ()

    @property
    def certified(self) -> bool:
        """Return whether a finite epsilon may be printed for this plan."""
        return self.guarantee in ("by construction", "proved and tested")

    @cached_property
    def digest(self) -> str:
        """Return the hash of the whole plan; speed settings are no part of it and cannot change it (law 3)."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def from_here(self) -> Plan:
        """Return the steps after the last change of budgets alone, as a plan of their own."""
        if not self.earlier:
            return self
        alone = dataclasses.replace(self, earlier=(), prior=None, steps=sum(level.count for level in self.levels))
        return dataclasses.replace(alone, epsilons=alone.spent_by_owner())

    def level_at(self, position: int) -> PlannedLevel:
        """Return the level of step ``position`` (from 0)."""
        if not 0 <= position < self.steps:
            raise IndexError(f"the plan has {self.steps} steps")
        return self._levels[bisect.bisect_right(self._ends, position)]

    def scales_at(self, position: int) -> tuple[float, ...]:
        """Return the relative bounds per class that hold at step ``position``."""
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
        """Return the noise multiplier of a whole step for a record of this class, side queries merged in (law 6)."""
        return merged_noise(level.noise / self.scales[owner], level.queries)

    def exposures(self, steps: int | None = None) -> tuple[Stage, ...]:
        """Return the release of the prior, if there is one, and the first ``steps`` steps (all of them by default)."""
        parts = self._stages if steps is None else _first_steps(self._stages, steps)
        return parts if self.prior is None else (self.prior.stage(len(self.rates)), *parts)

    @property
    def cap(self) -> int:
        """Return how many records of a person there are at most, each of which is drawn by itself; else 1."""
        return max(1, self.facts.person_cap)

    def events(self, owner: int = 0, steps: int | None = None) -> list[Event]:
        """Return what a record of this class is exposed to in the first ``steps`` steps (all of them by default).

        Raises:
            UsageError: the promise is about all records of a person, each drawn by itself: see ``events_of_each``.
        """
        if self.cap > 1:
            raise UsageError(
                f"Up to {self.cap} records of a person are each drawn by themselves here, and this looks at single "
                "ones, which would make epsilon too small: it knows data by person without person_cap."
            )
        return self.events_of_each(owner, steps)

    def events_of_each(self, owner: int = 0, steps: int | None = None) -> list[Event]:
        """Return what each record of this class is exposed to. What a person risks follows with ``cap=plan.cap``."""
        return [event for part in self.exposures(steps) for event in part.events(part.rates[owner], part.scales[owner])]

    def composed(self, owner: int = 0, steps: int | None = None, *, rel: float = FINE) -> Composition:
        """Return the privacy of the first ``steps`` steps (all by default) for whom this plan promises it."""
        return Composition(self.events_of_each(owner, steps), rel=rel, cap=self.cap)

    def spent(self, steps: int, owner: int = 0) -> float | None:
        """Return epsilon after ``steps`` steps for a record of this class; None if none is established."""
        return self.composed(owner, steps).epsilon(self.delta) if self.certified else None

    def spent_by_owner(self, steps: int | None = None) -> tuple[float | None, ...]:
        """Return ``spent`` of every class: exact for a few distinct ones, certified upper bounds for many thousands."""
        if not self.certified:
            return (None,) * len(self.rates)
        parts = self.exposures(self.steps if steps is None else steps)
        return epsilon_by_class(parts, self.delta, self.budgets, self.cap) if parts else (0.0,) * len(self.rates)

    def spending(self, owner: int = 0, points: int = 64) -> list[tuple[int, float]]:
        """Return (steps, epsilon) over the whole plan, for progress and charts; empty if no epsilon is established."""
        if not self.certified:
            return []
        curve = accountant.curve(self.events_of_each(owner), self.delta, points=points, cap=self.cap)
        before = 0 if self.prior is None else 1
        return [(releases - before, epsilon) for releases, epsilon in curve if releases > before]

    def warnings(self) -> list[str]:
        """Return what a privacy engineer should look at before signing."""
        warnings = []
        if self.facts.derived:
            warnings.append(
                f"{' and '.join(self.facts.derived)} were read off the data and are printed as public facts: declare "
                "them (labels=, group_names=) if they are not public knowledge."
            )
        if self.packages and self.guarantee == "proved and tested":
            warnings.append(f"the guarantee is the word of {' and '.join(self.packages)}: ask there for the proof.")
        warnings += delta_warnings(self.delta, self.facts.records) if self.certified else []
        if self.certified and min(level.noise for level in self.levels) < 0.3:
            warnings.append("a noise multiplier below 0.3 protects single steps hardly at all.")
        if any(epsilon is not None and epsilon > 20 for epsilon in self.epsilons):
            warnings.append("an epsilon above 20 promises next to nothing.")
        return warnings

    def replacement_warnings(self, steps: int) -> list[str]:
        """Return the epsilon for REPLACING a record, of a method that releases every record in a row of its own.

        Empty for other methods, before the first step, and where no epsilon is established. The rule of such a method
        gives ``replacing_factor``: how much further replacing a record moves the rows than adding or removing it.

        Args:
            steps: how many steps were made.
        """
        settings = self.rule.get("settings", {})
        if "replacing_factor" not in settings or not steps or not self.certified:
            return []

        def spent(owner: int) -> str:
            events = [
                (rate, noise / settings["replacing_factor"], count) for rate, noise, count in self.events(owner, steps)
            ]
            epsilon = math.ceil(1000 * accountant.epsilon(events, self.delta) - 1e-9) / 1000
            return f"epsilon {epsilon:.3f} for owner {self.facts.owner_names[owner]!r}"

        largest = max(range(len(self.scales)), key=self.scales.__getitem__)
        many = len(self.scales) > _OWNERS_LISTED
        figures = f"at most {spent(largest)}" if many else ", ".join(map(spent, range(len(self.scales))))
        meant = "" if set(self.budgets) == {None} else f" Budgets were promised for: {settings['adjacency']}."
        return [
            "every record is released in a row of its own: these add/remove epsilons hold only where the "
            "number of rows of each owner is public and a missing record leaves a row of zeros. If one record is "
            f"REPLACED by any other of its owner: {figures}, delta {self.delta:g}.{meant}"
        ]

    @cached_property
    def _text(self) -> str:
        return json.dumps(self, default=_fields)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for plan.json. Meanings never change; a new meaning gets a new key and schema number."""
        plain = json.loads(self._text)
        return {"schema": SCHEMA, **{key: value for key, value in plain.items() if key not in _OPTIONAL or value}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Raises:
            UsageError: on unknown or missing keys, or on a value that no plan can have.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        if data.get("schema") != SCHEMA or set(data) | _OPTIONAL != fields | {"schema"}:
            raise UsageError("plan.json was not written by this version of evenhand, or was edited.")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key in fields
        }
        whole = untrusted.fits(dict(data), _SHAPE) and untrusted.fits(data.get("packages", []), [str])
        if not whole or not untrusted.fits({**_LATER, **data["facts"]}, _LATER_SHAPE):
            raise UsageError("plan.json holds something of another kind than a plan does: it was damaged or edited.")
        facts = {**_LATER, **data["facts"]}
        values["facts"] = Facts(
            records=facts["records"],
            owners=tuple((str(name), int(count)) for name, count in facts["owners"]),
            groups=tuple(facts["groups"]),
            labels=tuple(facts["labels"]),
            inputs=facts["inputs"],
            derived=tuple(facts["derived"]),
            ordered=facts.get("ordered") is True,
            features=facts["features"],
            unit=facts["unit"],
            told_apart=facts["told_apart"],
            records_per_person=facts["records_per_person"],
            person_cap=facts["person_cap"],
            persons=facts["persons"],
        )
        values["levels"] = _levels(data["levels"])
        values["earlier"] = tuple(
            Stage(tuple(stage["rates"]), tuple(stage["scales"]), _levels(stage["levels"]), str(stage["plan"]))
            for stage in data.get("earlier", ())
        )
        if prior := data.get("prior"):
            if not untrusted.fits(prior, _PRIOR) or prior["kind"] not in PRIOR_KINDS:
                raise UsageError("plan.json holds something of another kind than a prior: it was damaged or edited.")
            values["prior"] = PlannedPrior(prior["kind"], prior["noise"])
        plan = cls(**values)
        if not plan._possible():
            raise UsageError("plan.json holds a number that no plan can have: it was damaged or edited.")
        return plan

    def _possible(self) -> bool:
        """Return whether the accountant can be asked about this plan: equally long columns, numbers in their ranges."""
        owners = len(self.facts.owners)
        columns = (
            self.budgets,
            self.epsilons,
            *(part for stage in self._stages for part in (stage.rates, stage.scales)),
        )
        return (
            all(len(column) == owners for column in columns)
            and self.facts.records >= 1
            and self.facts.unit in UNITS
            and (self.unit == UNITS["person"]) == (self.facts.promised == "person")
            and 0 <= self.facts.person_cap <= (accountant.MOST_RECORDS if self.facts.unit == "record" else 0)
            and (self.facts.persons <= self.facts.records <= self.facts.persons * self.facts.person_cap)
            == (self.facts.person_cap > 0)
            and 1 <= self.facts.records_per_person <= (_LARGE if self.facts.unit == "person" else 1)
            and 0 < self.delta < 1
            and self.steps == sum(stage.steps for stage in self._stages)
            and all(0 <= rate <= 1 for stage in self._stages for rate in stage.rates)
            and all(0 < scale < _LARGE for stage in self._stages for scale in stage.scales)
            and all(0 <= level.count < _LARGE for level in self._levels)
            and all(0 <= noise < _LARGE for level in self._levels for noise in (level.noise, *level.queries))
            and all(value is None or value >= 0 for value in (*self.budgets, *self.epsilons))
            and (self.prior is None or 0 <= self.prior.noise < _LARGE)
        )

    def __str__(self) -> str:
        from evenhand.mechanism.describe_plan import describe

        return describe(self)

    def _repr_html_(self) -> str:
        values = {
            "Method": f"{self.method} ({self.guarantee})",
            self.facts.units.capitalize(): self.facts.records,
            "Steps": f"{self.steps} of about {self.expected_batch:g} {self.facts.units}",
            "Delta": self.delta,
        }
        owners = zip(self.facts.owner_names, self.budgets, self.epsilons, strict=True)
        few = itertools.islice(owners, 20)
        rows = [[name, promised(budget), "none" if spent is None else rounded_up(spent)] for name, budget, spent in few]
        return _notebook.facts("Plan", values) + _notebook.table("Owners", ("owner", "promised", "would spend"), rows)


def cut_levels(levels: Sequence[PlannedLevel], begin: int, end: int) -> tuple[PlannedLevel, ...]:
    """Return the levels of steps ``begin .. end - 1``.

    Examples:
      >>> cut_levels([PlannedLevel(3, 1.0, 1.0), PlannedLevel(3, 2.0, 1.0)], 2, 5)
      (PlannedLevel(count=1, noise=1.0, bound=1.0, queries=()), PlannedLevel(count=2, noise=2.0, bound=1.0, queries=()))
    """
    parts, position = [], 0
    for level in levels:
        count = min(position + level.count, end) - max(position, begin)
        if count > 0:
            parts.append(replace(level, count=count))
        position += level.count
    return tuple(parts)


def _first_steps(stages: Sequence[Stage], steps: int) -> tuple[Stage, ...]:
    """Return the first ``steps`` steps of stages that follow each other."""
    parts = []
    for stage in stages:
        part = stage.first(steps)
        steps -= part.steps
        if part.levels:
            parts.append(part)
    return tuple(parts)


def _fields(part: Any) -> dict[str, Any]:
    """Return a dataclass as plain data, without the copies of ``asdict``: these cost time with many thousand owners."""
    plain = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for name, default in {"ordered": False, **_UNSAID}.items():
        if plain.get(name) == default:  # not in plans of earlier versions nor their digests
            del plain[name]
    return plain


def _levels(rows: Iterable[Mapping[str, Any]]) -> tuple[PlannedLevel, ...]:
    return tuple(PlannedLevel(**{**level, "queries": tuple(level["queries"])}) for level in rows)
