"""The studies of matched.py: data, promises, arms, rates that all arms share, and claims declared before the "
"replicas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One way to train. ``lowered`` takes the budgets of laxer owners that share of the way to the strictest.

    ``dropped`` is the share of the records of every owner but the strictest that is not trained on. ``epochs`` and
    ``batch`` are the study's where they are 0.
    """

    name: str
    method: str
    settings: tuple[tuple[str, float | str], ...] = ()
    lowered: float = 0.0
    dropped: float = 0.0
    optimizer: str = "sgd"
    schedule: str = ""
    private: bool = True
    epochs: float = 0
    batch: int = 0


@dataclass(frozen=True)
class Promise:
    """One epsilon for all, or with ``ratio`` budgets that rise from ``epsilon`` by equal factors to ratio * epsilon."""

    name: str
    epsilon: float
    ratio: float = 1.0

    def budgets(self, owners: tuple[str, ...], lowered: float) -> dict[str, float]:
        """Return the epsilon of every owner."""
        steps = max(1, len(owners) - 1)
        full = [self.epsilon * self.ratio ** (place / steps) for place in range(len(owners))]
        return {name: own - lowered * (own - self.epsilon) for name, own in zip(owners, full, strict=True)}


@dataclass(frozen=True)
class Claim:
    """Says that ``left`` less ``right`` is above ``least`` points; both at ``rate``, or each at its own without one."""

    text: str
    left: str
    right: str
    measure: str
    promise: str
    rate: float | None = None
    least: float = 0.0


@dataclass(frozen=True)
class Study:
    """A grid of arms, promises and rates, every cell trained ``replicas`` times on splits of their own.

    ``score`` is what trials choose a rate by. ``owned``: groups are owners with budgets; ``dealt``: every seed deals
    the classes to them anew. ``first`` is the group of most interest by number,
    ``order`` the owners from the strictest (default: by name). ``watch`` are shares of the steps at
    which groups are looked at. ``norms`` are groups whose loss and gradients
    are measured after training. ``guides`` are arms that ``evenhand recommend`` may name, for data of this ``kind``.
    ``average`` is the decay of the average of weights, 0 for none. Without ``matched`` replicas train each arm at its
    own rate alone, which the trials chose.
    """

    name: str
    title: str
    question: str
    paper: str
    source: str
    arms: tuple[Arm, ...]
    promises: tuple[Promise, ...]
    rates: tuple[float, ...]
    batch: int
    epochs: float
    claims: tuple[Claim, ...]
    choices: tuple[str, ...]
    measures: tuple[str, ...] = ("overall", "balanced", "worst", "first")
    score: str = "balanced"
    delta: float = 1e-5
    replicas: int = 20
    trials: int = 5
    momentum: float = 0.9
    schedule: str = "linear"
    average: float = 0.9
    matched: bool = True
    owned: bool = False
    dealt: bool = False
    even: bool = False
    first: int = 0
    order: tuple[str, ...] = ()
    rare: tuple[int, int] | None = None
    watch: tuple[float, ...] = ()
    curves: tuple[str, ...] = ()
    auc: bool = False
    norms: tuple[int, ...] = ()
    published: float | None = None
    widest: int = 2
    answer: str = ""
    kind: str = "table"
    guides: tuple[str, ...] = ()

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)
