"""Compute the privacy claims of the five papers by their own formulas, beside the true epsilon.

Every figure is computed here from a paper's setting; nothing is typed in but the settings. ``true`` is None where no
finite epsilon is established. All epsilons: one record, add/remove, Poisson sampling, at the claim's delta. Each claim
says which of three it speaks of: the paper's text, its public code at a commit, or an assumption of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenhand import _validate
from evenhand.accounting import accountant, calibration, renyi
from evenhand.accounting.accountant import merged_noise
from evenhand.errors import UsageError
from evenhand.methods.schedules import Constant, Linear, Phases, Schedule, Step, Time
from evenhand.types import Event

LEAST_NOISE = 1e-4
TEXT, ASSUMED = "the paper's text", "an assumption of ours"
_SAD_COMMIT = "its public code (FangXieLab/SAD-DPSGD at 63a15ca)"


@dataclass(frozen=True)
class Claim:
    """A paper's claimed epsilon and the true one.

    ``speaks_of`` is one of three: the paper's text, its public code at a commit, or an assumption of ours. ``events``
    are the steps that run, where they draw Poisson batches and noise of known size, so that an audit can play them.
    """

    paper: str
    setting: str
    claimed: float | None
    true: float | None
    delta: float
    why: str
    speaks_of: str
    events: tuple[Event, ...] | None = None

    @property
    def factor(self) -> float | None:
        """Return how many times the true epsilon exceeds the claimed one."""
        return self.true / self.claimed if self.true is not None and self.claimed else None


@dataclass(frozen=True)
class Setting:
    """A training as a paper describes it."""

    records: int
    batch: float
    epochs: float
    delta: float

    def __post_init__(self) -> None:
        _validate.whole(self.records, "records")
        _validate.number(self.batch, "batch_size", low=0)
        _validate.number(self.epochs, "epochs", low=0)
        _validate.delta(self.delta)

    @property
    def rate(self) -> float:
        """Return the sampling rate."""
        return self.batch / self.records

    def events(self, schedule: Schedule, noise: float) -> list[Event]:
        """Return the steps that run: noise is added in every iteration, not once an epoch."""
        per_epoch = self.records / self.batch
        steps = math.ceil(self.epochs * per_epoch)
        return [(self.rate, noise * level.noise, count) for count, level in schedule.segments(steps, per_epoch)]


MNIST = Setting(records=60_000, batch=64, epochs=100, delta=1e-5)
THINWALL = Setting(records=1173, batch=32, epochs=30, delta=1e-3)
HAM10000 = Setting(records=8012, batch=256, epochs=20, delta=1e-3)
SAD_CODE = Setting(records=8012, batch=128, epochs=50, delta=1e-3)
SAD_PHASES = Phases(length=0.7)
"""The defaults of that code; they are the only way in which it trains SAD."""
DECAYS: dict[str, Schedule] = {
    "no decay": Constant(),
    "linear decay": Linear(decay=0.99),
    "time decay": Time(decay=0.01),
    "step decay": Step(decay=0.5, every=10),
}


def adapt_v2(
    setting: Setting, schedule: Schedule, *, epsilon: float | None = None, noise: float | None = None
) -> Claim:
    """Return the claim of paper 004: truncated concentrated privacy, composed once per EPOCH (its table 2).

    Give the claimed ``epsilon`` (the initial noise then follows from table 2), or the initial ``noise``, or both when
    the paper prints both.

    Examples:
      >>> claim = adapt_v2(MNIST, Constant(), epsilon=1.0)
      >>> 1000 < claim.true < 1200
      True
    """
    if epsilon is None and noise is None:
        raise UsageError("Paper 004 needs the claimed --epsilon or the initial --noise.")
    per_epoch = schedule.segments(round(setting.epochs), 1)
    total = sum(count / level.noise**2 for count, level in per_epoch)
    weight = 13 * setting.rate**2 * total / 2
    start = noise if noise is not None else math.sqrt(weight / renyi.zcdp_rho(epsilon or 0.0, setting.delta))
    claimed = epsilon if epsilon is not None else renyi.zcdp_epsilon(weight / start**2, setting.delta)
    events = setting.events(schedule, start)
    least = min(level for _, level, _ in events)
    _, broken = renyi.tcdp_subsampled(setting.rate, least)
    reasons = [f"table 2 composes once per epoch, Algorithm 1 adds noise in each of {sum(e[2] for e in events)} steps"]
    reasons += [f"lemma 4 does not apply: {text}" for text in broken[:1]]
    return Claim(
        "004 Global-Adapt-V2",
        f"{schedule.name}, sigma from {start:.4g} to {least:.4g}",
        claimed,
        accountant.epsilon(events, setting.delta),
        setting.delta,
        "; ".join(reasons),
        TEXT,
        tuple(events),
    )


def sad(setting: Setting, epsilon: float, phases: Phases | None = None) -> tuple[Claim, Claim]:
    """Return the claim of paper 000's public code, and what the code would spend if it drew Poisson batches.

    The code calibrates ONE sigma as if it were constant, takes it for the FIRST phase, and divides it by 0.8 at each
    later one: noise only grows, so that it would over-protect. Its loader shuffles, so nothing is established for it.
    The sigma is calibrated here by our own accountant; the code's Renyi accountant takes a larger one.

    Examples:
      >>> code, poisson = sad(SAD_CODE, 3.0)
      >>> code.true, poisson.true < 3.0
      (None, True)
    """
    shape = phases or SAD_PHASES
    one = calibration.calibrate(setting.events(Constant(), 1.0), epsilon, setting.delta)
    last = one / shape.noise ** (shape.n - 1)
    events = tuple(setting.events(shape, last))
    would = accountant.epsilon(events, setting.delta)
    words = f"{shape.n} phases, sigma from {one:.4g} to {last:.4g}"
    return (
        Claim("000 SAD-DPSGD", words, epsilon, None, setting.delta, _SHUFFLED, _SAD_COMMIT),
        Claim("000 SAD-DPSGD", f"{words}, Poisson batches", epsilon, would, setting.delta, _OVER, ASSUMED, events),
    )


def sad_text(setting: Setting, epsilon: float) -> Claim:
    """Return the claim of paper 000's text: every step enters the sum with its own sigma and the sampling rate.

    Examples:
      >>> claim = sad_text(HAM10000, 3.0)
      >>> 2.99 < claim.true <= 3.0
      True
    """
    shape = Phases()
    noise = calibration.calibrate(setting.events(shape, 1.0), epsilon, setting.delta)
    return Claim(
        "000 SAD-DPSGD",
        f"{shape.n} phases, sigma from {noise * shape.noise ** (shape.n - 1):.4g} to {noise:.4g}",
        epsilon,
        accountant.epsilon(setting.events(shape, noise), setting.delta),
        setting.delta,
        "its Renyi sum is right when every step enters with its own sigma and the sampling rate, on Poisson batches",
        TEXT,
        tuple(setting.events(shape, noise)),
    )


def dpsgd_f(setting: Setting, noise: float, query_noise: float = 10.0) -> tuple[Claim, Claim]:
    """Return the claim of paper 003 as published, and one with clamped clip bounds and the side query merged in.

    As published nothing holds, since noisy clip bounds may be negative.

    Examples:
      >>> published, clamped = dpsgd_f(Setting(54_649, 256, 60, 1e-6), 0.8)
      >>> round(published.claimed, 2), published.true
      (6.55, None)
    """
    events = setting.events(Constant(), noise)
    together = setting.events(Constant(), merged_noise(noise, [query_noise]))
    claimed = renyi.epsilon(events, setting.delta, conversion="old")
    why = "one Gaussian of gradient and side query, which share a sample; C_k in [C0, 5 C0], max over all groups"
    return (
        Claim("003 DPSGD-F", f"as published, sigma {noise:g}", claimed, None, setting.delta, _UNCLAMPED, TEXT),
        Claim(
            "003 DPSGD-F",
            f"clamped, sigma {noise:g} and {query_noise:g}",
            claimed,
            accountant.epsilon(together, setting.delta),
            setting.delta,
            why,
            ASSUMED,
            tuple(events),
        ),
    )


_SHUFFLED = (
    "noise only grows from the calibrated sigma on, so Poisson batches would be over-protected; its loader shuffles, "
    "for which no finite epsilon of this account follows"
)
_OVER = "one sigma, calibrated as if constant, is the first phase's and the smallest: less is spent than claimed"
_UNCLAMPED = "Algorithm 2 takes C_k from noisy ratios without a clamp: bounds turn negative, so no sensitivity is known"
_SMOOTHING = (
    "theorem 1 scales noise by a local, data-dependent sensitivity and adds it to unclipped features; the classifier "
    "stores the training points: no finite epsilon follows"
)
_AUTO = "the clip threshold is estimated from raw gradient norms of the private batch: it is not private"
_OWNERS = "holds for the right-anchored tail of public length: adding a record of owner k moves the sum by at most C_k"


def owner_budgets(setting: Setting, budgets: Sequence[float]) -> list[Claim]:
    """Return the claims of paper 001 (and IDP-SGD): equal owners, each with its own clip bound and budget.

    Examples:
      >>> all(claim.true <= claim.claimed for claim in owner_budgets(Setting(6000, 60, 1, 1e-5), (1.0, 3.0)))
      True
    """
    levels = [(1.0, math.ceil(setting.epochs * setting.records / setting.batch))]
    scale, bounds = calibration.owner_bounds([1] * len(budgets), budgets, setting.rate, levels, setting.delta)
    return [
        Claim(
            "001 INO-SGD",
            f"owner with budget {budget:g}, bound x{bound:.3f}",
            budget,
            accountant.epsilon([(setting.rate, scale / bound, levels[0][1])], setting.delta),
            setting.delta,
            _OWNERS,
            TEXT,
            ((setting.rate, scale / bound, levels[0][1]),),
        )
        for budget, bound in zip(budgets, bounds, strict=True)
    ]


def smoothing(delta: float = 1e-5, epsilon: float = 3.0) -> Claim:
    """Return the claim of paper 002: no finite epsilon follows from its theorem 1."""
    return Claim("002 instance-level smoothing", "any", epsilon, None, delta, _SMOOTHING, TEXT)


def claims(told: Callable[[int, int], None] | None = None) -> list[Claim]:
    """Compute and return every privacy claim of the five papers and of the baseline Auto-DPSGD.

    Args:
      told: called with the number of computations done and their total, before the first and after each.
    """
    computations = _computations()
    rows: list[Claim] = []
    for done, compute in enumerate(computations):
        if told is not None:
            told(done, len(computations))
        rows += compute()
    if told is not None:
        told(len(computations), len(computations))
    return rows


def _computations() -> list[Callable[[], Sequence[Claim]]]:
    """Return what computes the claims, in the order of the table."""
    mnist, adult = Setting(54_649, 256, 60, 1e-6), Setting(36_177, 256, 20, 1e-6)
    adapted = [(MNIST, decay, epsilon) for decay in DECAYS.values() for epsilon in (1.0, 3.0, 8.0)]
    thin_wall = [(THINWALL, DECAYS["step decay"], epsilon) for epsilon in (1.0, 3.0, 8.0)]

    def adapt(setting: Setting, decay: Schedule, epsilon: float) -> Callable[[], Sequence[Claim]]:
        return lambda: [adapt_v2(setting, decay, epsilon=epsilon)]

    def steps_decay(epsilon: float) -> Callable[[], Sequence[Claim]]:
        return lambda: sad(SAD_CODE, epsilon)

    return [
        lambda: [sad_text(HAM10000, 3.0)],
        *(steps_decay(epsilon) for epsilon in (3.0, 8.0, 16.0)),
        lambda: [Claim("000 Auto-DPSGD (baseline)", "any", 3.0, None, 1e-3, _AUTO, TEXT)],
        lambda: owner_budgets(Setting(60_000, 512, 30, 1e-5), (1.0, 2.0, 3.0)),
        lambda: [smoothing()],
        lambda: dpsgd_f(mnist, 0.8),
        lambda: dpsgd_f(adult, 1.0),
        *(adapt(*case) for case in adapted),
        lambda: [adapt_v2(MNIST, DECAYS["step decay"], epsilon=1.0, noise=0.1916)],
        *(adapt(*case) for case in thin_wall),
    ]


def as_published(
    paper: str, setting: Setting, schedule: Schedule, epsilon: float | None, noise: float | None
) -> list[Claim]:
    """Return the claims of one paper for a setting of the user's own."""
    papers: dict[str, Callable[[], Sequence[Claim]]] = {
        "000": lambda: sad(setting, _needed(epsilon, "--epsilon"), schedule if isinstance(schedule, Phases) else None),
        "002": lambda: [smoothing(setting.delta, _needed(epsilon, "--epsilon"))],
        "003": lambda: dpsgd_f(setting, _needed(noise, "--noise")),
        "004": lambda: [adapt_v2(setting, schedule, epsilon=epsilon, noise=noise)],
    }
    _validate.known(paper, papers, "paper")
    if noise is not None and not min(level for _, level, _ in setting.events(schedule, noise)) > LEAST_NOISE:
        raise UsageError(
            f"--noise {noise:g} falls to {LEAST_NOISE:g} or less: such steps have no finite epsilon, whatever a paper "
            "claims. Give more."
        )
    return list(papers[paper]())


def _needed(value: float | None, flag: str) -> float:
    if value is None:
        raise UsageError(f"This paper's formula needs {flag}.")
    return value
