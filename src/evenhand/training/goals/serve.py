"""Carry a goal through a run: its loss, its decision, and what is chosen on held-out records at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand import untrusted
from evenhand.data.dataset import Data
from evenhand.errors import UsageError
from evenhand.methods.priors import Prior
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.reporting.metrics import CLASSES, LABELS, NUMBERS, ORDINAL, TOKENS
from evenhand.runs.folder import Folder
from evenhand.training import evaluate
from evenhand.training.goals import parity
from evenhand.training.goals.decision import FILE, NOT_COVERED, Decision
from evenhand.training.goals.frontier import Held, best, frontier
from evenhand.training.goals.goal import HELD_OUT, OVERALL, PATH, Goal, Tau, check_tau, refuse_without_prior
from evenhand.training.losses import Binary, CrossEntropy, LogitAdjusted, Loss
from evenhand.training.private import Private

_SPLIT = 0
"""Seed of the halves of held-out records: public, so that a page can be written again."""


@dataclass(frozen=True)
class Crossed:
    """Decisions that were chosen on one half of the held-out records and answer for the other."""

    parts: tuple[tuple[Tensor, Decision], ...]

    def adjust(
        self, scores: Tensor, kind: str, groups: Sequence[str] | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return adjusted outputs, each record's by the decision that did not see it; see ``Decision.adjust``."""
        result = scores.clone()
        for rows, decision in self.parts:
            names = None if groups is None else [groups[row] for row in rows.tolist()]
            result[rows] = decision.adjust(scores[rows], kind, names, generator).to(scores.dtype)
        return result


Answering: TypeAlias = Decision | Crossed


@dataclass(frozen=True)
class Serving:
    """A goal with the counts that it rests on.

    Attributes:
      goal: whom the run is to serve.
      tau: strength that was asked for: a number, "held-out", or None for the goal's own.
      prior: counts of labels; None where there are none.
      trained_tau: strength of the offset in the loss.
      groups: names of the groups of the training data.
      least: held-out records that a class or group needs to be named as the worst on the frontier.

    Examples:
      >>> serving = Serving(Goal("worst"), prior=Prior.declared([9, 1]))
      >>> serving.loss(CrossEntropy()), serving.trained_by(serving.loss(CrossEntropy())).decision.plain
      (LogitAdjusted(prior=Prior(counts=((9.0, 1.0),), noise=0.0, kind='labels', records=0), tau=2.5), True)
    """

    goal: Goal = OVERALL
    tau: Tau = None
    prior: Prior | None = None
    trained_tau: float = 0.0
    groups: tuple[str, ...] = ()
    least: int = 1

    @property
    def strength(self) -> float:
        """Return the strength that loss and decision have before held-out records are looked at."""
        return self.goal.tau if self.tau is None or isinstance(self.tau, str) else self.tau

    def loss(self, usual: Loss) -> Loss:
        """Return the loss to train with: the usual one with offsets; one of the user's own is returned as it is."""
        several = self.prior is not None and self.prior.kind == "each label"
        plain = isinstance(usual, CrossEntropy) and not usual.smoothing
        fits = plain or (isinstance(usual, Binary) and (several or self._two))
        if self.prior is None or not self.strength or not fits:
            return usual
        return LogitAdjusted(self.prior.pooled(), self.strength)

    @property
    def _two(self) -> bool:
        return self.prior is not None and self.prior.labels == 2

    def trained_by(self, loss: Loss) -> Serving:
        """Return this with the strength that ``loss`` has; a user's own ``LogitAdjusted`` counts as asked for."""
        if not isinstance(loss, LogitAdjusted):
            return self
        asked = loss.tau if self.tau is None and not self.goal.needs_prior else self.tau
        prior = self.prior if self.prior is not None or not isinstance(loss.prior, Prior) else loss.prior
        return replace(self, tau=asked, prior=prior, trained_tau=loss.tau)

    @property
    def decision(self) -> Decision | None:
        """Return the decision before held-out records are looked at; None if outputs are taken as they are."""
        if self.prior is None:
            return None
        return self._with(self.strength)

    def settle(self, held: Held | None) -> tuple[Decision | None, Answering | None]:
        """Return the decision to release, and the one to measure it by, which no record chose for itself.

        They differ where held-out records choose: each half is answered for by what the other half chose, and what is
        released is chosen on both.
        """
        if held is None or (self.goal.name != "parity" and self.tau != HELD_OUT):
            return self.decision, self.decision
        halves = split(held)
        parts = tuple((halves[1 - half], self._chosen(held.take(halves[half]))) for half in (0, 1))
        return self._chosen(held), Crossed(parts)

    def frontier(self, held: Held, decision: Decision | None) -> list[dict[str, Any]]:
        """Return what each strength of the offset gives, see ``frontier``; none without counts."""
        if self.prior is None:
            return []
        chosen = None if decision is None or self.goal.name == "parity" else decision.tau
        options: dict[str, Any] = {
            "trained_tau": self.trained_tau,
            "groups": self.groups,
            "chosen": chosen,
            "least": self.least,
        }
        return frontier(held, self.prior, **options)

    def _chosen(self, held: Held) -> Decision:
        """Return the decision that these held-out records choose."""
        if self.goal.name == "parity":
            return parity.thresholds(self.goal, held, self.groups)
        assert self.prior is not None
        rows = frontier(held, self.prior, trained_tau=self.trained_tau, groups=self.groups)
        return self._with(best(rows, self.goal), f"{NOT_COVERED} tau is one of {', '.join(f'{t:g}' for t in PATH)}.")

    def _with(self, tau: float, chosen: str | None = None) -> Decision:
        assert self.prior is not None
        words = {} if chosen is None else {"chosen": chosen}
        return Decision.of(self.goal, self.prior, tau=tau, trained_tau=self.trained_tau, groups=self.groups, **words)


def ask(
    goal: str | Goal,
    tau: Any,
    prior: Prior | Sequence[float] | Mapping[Any, float] | None,
    *,
    data: Data,
    held_out: Data | None,
    released: bool,
    research: bool = False,
    least: int = LEAST,
) -> Serving:
    """Return the goal that was asked for, with declared counts; raise, before anything is spent, if it cannot be had.

    Args:
      goal: a goal or its name.
      tau: see ``Serving``.
      prior: counts that are publicly known.
      data: training data.
      held_out: held-out data.
      released: whether the plan releases noisy counts.
      research: held-out data hold training records.
      least: held-out records of each class and group that a threshold may follow from.
    """
    wanted = Goal.parse(goal)
    strength = check_tau(tau, wanted)
    kind = evaluate.kind_of(data.facts, data.fetch(torch.arange(1))[1])
    chosen = wanted.name != "overall" or strength is not None or prior is not None
    if chosen and kind in (NUMBERS, TOKENS):
        what = "real numbers" if kind == NUMBERS else "tokens"
        raise UsageError(f"The targets are {what}: goals, tau and prior are for labels. Nothing was spent.")
    known = None if prior is None else _declared(prior, kind, data)
    refuse_without_prior(wanted, strength, known if known is not None else (released or None))
    if wanted.name == "parity" or strength == HELD_OUT:
        if held_out is None or research:
            raise UsageError(
                f"{'The goal ' + str(wanted) if wanted.name == 'parity' else 'tau held-out'} is settled on held-out "
                "records, which are no training records: pass test=, or on the command line --test-share."
            )
        whose = held_out.by_record.together
        if len(held_out) < 2 or (whose is not None and len(torch.unique(whose)) < 2):
            raise UsageError(
                f"{'The goal ' + str(wanted) if wanted.name == 'parity' else 'tau held-out'} is settled on one half of "
                "the held-out records and measured on the other, and they are of one person or one record: hold out "
                "more, --test-share. Nothing was spent."
            )
        if wanted.name == "parity":
            targets = held_out.fetch(torch.arange(len(held_out)))[1]
            parity.refuse_unsuited(
                wanted,
                kind,
                max(len(data.facts.labels), 2),
                held_out.group_names(),
                targets.tolist() if targets.dim() == 1 else [0] * len(targets),
                least,
                None if whose is None else whose.tolist(),
            )
    return Serving(wanted, strength, known, groups=tuple(data.facts.groups))


def begin(private: Private, data: Data, wanted: Serving, usual: Loss) -> Serving:
    """Release the counts that the plan names, give the run the loss of its goal, and return what is served.

    A crash can cut the counts short; then a goal that needs them is refused before the first step.
    """
    released = private.release_prior(data)
    serving = replace(wanted, prior=wanted.prior if wanted.prior is not None else released)
    refuse_without_prior(serving.goal, serving.tau, serving.prior)
    loss = serving.loss(usual)
    if loss is not usual:
        private.use_loss(loss)
    return serving.trained_by(loss)


@dataclass(frozen=True)
class Settled:
    """How answers are made while they are measured, and what a line of metrics says about it."""

    answering: Answering | None = None
    line: dict[str, Any] = field(default_factory=dict)


def settle(folder: Folder, model: nn.Module, data: Data, serving: Serving) -> Settled:
    """Choose the decision, write it into the run folder, and return it with the frontier for the metrics.

    A run without counts whose answers are its plain outputs gets no ``decision.json``.
    """
    records = held(model, data)
    decision, answering = serving.settle(records)
    if decision is None:
        return Settled()
    decision.write(folder)
    line = {
        "goal": str(decision.goal),
        "tau": decision.tau,
        "decision": untrusted.digest(folder.path / FILE),
        "frontier": serving.frontier(records, decision),
    }
    return Settled(answering, line)


def recorded(wanted: Serving) -> dict[str, Any]:
    """Return the settings of a run's config that say this again."""
    counts = () if wanted.prior is None else wanted.prior.counts[0]
    return {"goal": str(wanted.goal), "tau": wanted.tau, "prior_counts": counts}


def _declared(prior: Prior | Sequence[float] | Mapping[Any, float], kind: str, data: Data) -> Prior:
    """Return declared counts as a prior for these targets, one per label."""
    from evenhand.training.goals.goal import declared

    if kind != LABELS or isinstance(prior, Prior):
        return declared(prior, len(data.facts.labels))
    row = declared(prior, len(data.facts.labels)).counts[0]
    scale = data.facts.records / 1e6 if max(row) > data.facts.records else 1.0  # shares are kept as millionths
    return Prior((tuple(count * scale for count in row),), 0.0, "each label", data.facts.records)


def held(model: nn.Module, data: Data) -> Held:
    """Return held-out records with the model's plain outputs, for the kinds of targets that goals are for."""
    kind = evaluate.kind_of(data.facts, data.fetch(torch.arange(1))[1])
    if kind not in (CLASSES, ORDINAL, LABELS):
        return Held(torch.empty(0, 1), torch.empty(0), kind)
    scores, truth = evaluate.compute_scores(model, data)
    scores = scores.double() if kind != LABELS else scores.double().reshape(truth.shape)
    whose = data.by_record.together
    if whose is not None:
        whose = None if len(torch.unique(whose)) == len(whose) else whose.cpu()
    return Held(scores, truth, kind, data.facts.labels, data.group_names(), whose)


def split(held: Held) -> tuple[Tensor, Tensor]:
    """Return the rows of two random halves, with as equal shares of each class in each group as can be.

    All records of a person are in one half, and go by the class and group of one of them.
    """
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(_SPLIT)).tolist()
    truth, whose = held.truth.tolist(), range(len(held)) if held.whose is None else held.whose.tolist()
    cells: dict[Any, int] = {}
    half_of: dict[int, int] = {}
    halves: tuple[list[int], list[int]] = ([], [])
    for row in order:
        if whose[row] not in half_of:
            cell = (held.groups[row] if held.groups else "", str(truth[row]))
            cells[cell] = cells.get(cell, len(cells) - 1) + 1
            half_of[whose[row]] = cells[cell] % 2
        halves[half_of[whose[row]]].append(row)
    return torch.tensor(sorted(halves[0])), torch.tensor(sorted(halves[1]))
