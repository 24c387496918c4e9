"""The outcome of an audit: a claim, and how much of it an attack could show to be spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bound:
    """Hold what is claimed for one owner or group beside what an attack showed.

    Attributes:
      claim: the promised epsilon; None where nothing is promised.
      lower: the largest epsilon that the attack certifies at the audit's confidence; 0 if it certifies nothing.
      ceiling: the most that so many trials can certify, however bad the mechanism is.
      trials: how often the attack played.
    """

    claim: float | None
    lower: float
    ceiling: float
    trials: int

    @property
    def ok(self) -> bool:
        """Return whether the attack stayed at or below the claim.

        Examples:
          >>> Bound(1.0, 0.8, 5.0, 1000).ok, Bound(1.0, 1.2, 5.0, 1000).ok
          (True, False)
        """
        return self.claim is None or self.lower <= self.claim

    def to_json(self) -> dict[str, Any]:
        """Return the bound as data."""
        return {
            "claim": self.claim,
            "lower_bound": self.lower,
            "ceiling": self.ceiling,
            "trials": self.trials,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class Audit:
    """One attack on one promise: what it tried, what it may find at most, and what it found.

    Attributes:
      kind: "mechanism", "canary" or "lira".
      delta: of claim and lower bounds.
      confidence: with which all lower bounds hold together.
      per_owner: a bound for every owner class, by name.
      per_group: a bound for every group, by name; empty where groups were not attacked.
      threat_model: what the attacker knows and sees, in a sentence.
      method: the attack and the statistics of its bound, in a sentence.
      data: on which data it ran, in a sentence.
      private: whether the figures are an exact function of private records, so that they must not be shared.
      details: further figures of this kind of audit, as JSON can carry them.
    """

    kind: str
    delta: float
    confidence: float
    per_owner: Mapping[str, Bound]
    threat_model: str
    method: str
    data: str
    private: bool
    per_group: Mapping[str, Bound] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def claim(self) -> float | None:
        """Return the largest epsilon that is claimed; None if for some owner nothing is."""
        claims = [bound.claim for bound in self.per_owner.values()]
        return None if None in claims or not claims else max(claim for claim in claims if claim is not None)

    @property
    def lower_bound(self) -> float:
        """Return the largest lower bound over the owners."""
        return max((bound.lower for bound in self.per_owner.values()), default=0.0)

    @property
    def ok(self) -> bool:
        """Return whether no lower bound exceeds its claim."""
        return all(bound.ok for bound in [*self.per_owner.values(), *self.per_group.values()])

    def to_json(self) -> dict[str, Any]:
        """Return the audit as data: what ``evenhand audit --json`` prints; scripts rely on these keys."""
        return {
            "kind": self.kind,
            "claim": self.claim,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "delta": self.delta,
            "per_owner": {name: bound.to_json() for name, bound in self.per_owner.items()},
            "per_group": {name: bound.to_json() for name, bound in self.per_group.items()},
            "ok": self.ok,
            "threat_model": self.threat_model,
            "method": self.method,
            "data": self.data,
            "private": self.private,
            "details": dict(self.details),
        }
