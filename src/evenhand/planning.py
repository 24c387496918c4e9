"""The plan: every number that decides privacy, fixed before the first gradient, printable, hashed.

``plan(...)`` is where sampling, rule, queries and schedule meet the promise. It sees public facts only.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenhand import _validate, registry
from evenhand.errors import UsageError
from evenhand.methods import Method
from evenhand.methods import method as find_method
from evenhand.privacy import accountants, calibration
from evenhand.privacy.budgets import Budgets, FixedNoise, Privacy, Promise
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
        return accountants.merged(level.noise / self.scales[owner], level.queries)

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

    def spending(self, owner: int = 0, points: int = 64) -> list[tuple[int, float]]:
        """(steps, epsilon) over the whole plan, for progress and charts; empty if no epsilon is established."""
        return accountants.curve(self.events(owner), self.delta, points=points) if self.certified else []

    def warnings(self) -> list[str]:
        """What a privacy engineer should look at before signing."""
        found = []
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
        )
        values["levels"] = tuple(
            PlannedLevel(**{**level, "queries": tuple(level["queries"])}) for level in data["levels"]
        )
        return cls(**values)

    def __str__(self) -> str:
        from evenhand.describing import describe

        return describe(self)


def plan(
    method: str | Method,
    privacy: Promise | None,
    *,
    data: Facts,
    epochs: float = 10,
    batch_size: float | None = None,
    allow_unproven: bool = False,
) -> Plan:
    """Fix every number that decides privacy, calibrated so that the promise is met and hardly undershot.

    Args:
      method: a name from ``evenhand methods`` or a Method.
      privacy: Privacy, Budgets or FixedNoise; None only for a method that is not private.
      data: public facts (``evenhand.data.wrap(...).facts``).
      epochs: expected passes over the data; steps are ceil(epochs * N / batch_size).
      batch_size: EXPECTED number of records per step (Poisson sampling: the real number varies).
      allow_unproven: let a rule without an established guarantee run; no epsilon is printed then.

    Examples:
      >>> from evenhand.types import Facts
      >>> made = plan("dpsgd", Privacy(3, 1e-4), data=Facts(1257, (("all", 1257),)), epochs=30, batch_size=128)
      >>> made.steps, round(made.epsilons[0], 2)
      (295, 3.0)
    """
    chosen = find_method(method)
    records = _validate.whole(data.records, "the number of records")
    epochs = _validate.number(epochs, "epochs", low=0)
    batch = _validate.number(default_batch(records) if batch_size is None else batch_size, "batch_size", low=0)
    if batch > records:
        raise UsageError(f"batch_size={batch:g} is more than the {records} records: pass at most {records}.")
    guarantee = chosen.rule.guarantee
    if guarantee == "not established" and not allow_unproven:
        raise UsageError(
            f"No guarantee is established for {chosen.name!r}: pass allow_unproven=True to run it without an epsilon."
        )
    steps = math.ceil(epochs * records / batch)
    shape = [(count, level.noise, level.bound) for count, level in chosen.schedule.segments(steps, records / batch)]
    delta = _delta(privacy, records)
    budgets = _budgets(privacy, data)
    owners = len(data.owners)
    noises = _noises(chosen, privacy, budgets, [(batch / records, noise, count) for count, noise, _ in shape], delta)
    made = Plan(
        method=chosen.name,
        guarantee=guarantee,
        rule=registry.spec(chosen.rule),
        queries=tuple(registry.spec(query) for query in chosen.queries),
        schedule=registry.spec(chosen.schedule),
        facts=data,
        delta=delta,
        budgets=budgets,
        steps=steps,
        expected_batch=batch,
        rates=(batch / records,) * owners,
        scales=(1.0,) * owners,
        levels=tuple(
            PlannedLevel(count, noise, bound, queries)
            for (count, _, bound), (noise, queries) in zip(shape, noises, strict=True)
        ),
        epsilons=(None,) * owners,
    )
    return dataclasses.replace(made, epsilons=tuple(made.spent(steps, owner) for owner in range(owners)))


def default_batch(records: int) -> int:
    """Expected batch size when none is given: large batches bear noise best, about a tenth of the data up to 1024."""
    return max(1, min(1024, round(records / 10)))


def default_delta(records: int) -> float:
    """Largest power of ten strictly below 1/N.

    >>> default_delta(1257)
    0.0001
    """
    return float(f"1e-{math.floor(math.log10(records)) + 1}")


def _delta(privacy: Promise | None, records: int) -> float:
    given = privacy.delta if privacy is not None else None
    return default_delta(records) if given is None else given


def _budgets(privacy: Promise | None, facts: Facts) -> tuple[float | None, ...]:
    if isinstance(privacy, Budgets):
        missing = set(facts.owner_names) - set(privacy.epsilons)
        unknown = set(privacy.epsilons) - set(facts.owner_names)
        if missing or unknown:
            raise UsageError(
                f"Budgets and owners differ: {len(missing)} owner(s) have no budget and {len(unknown)} budget(s)"
                f" have no records. Give one epsilon for each of: {', '.join(map(repr, facts.owner_names[:20]))}."
            )
        return tuple(float(privacy.epsilons[name]) for name in facts.owner_names)
    return (float(privacy.epsilon) if isinstance(privacy, Privacy) else None,) * len(facts.owners)


def _noises(
    chosen: Method, privacy: Promise | None, budgets: Sequence[float | None], shape: Sequence[Event], delta: float
) -> list[tuple[float, tuple[float, ...]]]:
    """Gradient and query multipliers of each level. Every class gets the strictest promise: one bound, one rate."""
    if chosen.rule.guarantee == "not private":
        return [(0.0, (0.0,) * len(chosen.queries)) for _ in shape]
    fixed = tuple(query.noise for query in chosen.queries if query.noise is not None)
    if isinstance(privacy, FixedNoise):
        scale = privacy.noise
    elif privacy is None:
        raise UsageError(f"{chosen.name!r} is a private method: say what was promised, for example epsilon=3.")
    else:
        strictest = min(epsilon for epsilon in budgets if epsilon is not None)
        scale = calibration.calibrate(shape, strictest, delta, query_noise=accountants.merged(math.inf, fixed))
    return [_split(chosen, scale * relative) for _, relative, _ in shape]


def _split(chosen: Method, noise: float) -> tuple[float, tuple[float, ...]]:
    """Share one step's multiplier between the gradient and the side queries, so that they merge back to it."""
    left = 1.0 - sum(query.share or 0.0 for query in chosen.queries)
    queries = tuple(
        query.noise if query.noise is not None else noise / math.sqrt(query.share or 1.0) for query in chosen.queries
    )
    return noise / math.sqrt(left), queries
