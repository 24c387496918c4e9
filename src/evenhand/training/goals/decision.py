"""Turn a model's outputs into answers: constant offsets per label, per group where the group decides.

A decision is a shareable file of a run, ``decision.json``. The released weights stay plain.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenhand import untrusted
from evenhand.errors import UsageError, VerificationError
from evenhand.methods.priors import Prior
from evenhand.reporting.metrics import CLASSES, LABELS, ORDINAL, TOKENS
from evenhand.runs.folder import Folder, write_json
from evenhand.runs.statement_files import DECISION
from evenhand.training.goals.goal import OVERALL, Goal

FILE = DECISION
_FORMAT = 1
_SURE = 30.0
"""A logit that stands for certainty."""
NOT_COVERED = (
    "Chosen on held-out records: the privacy statement does not cover those records, and nothing protects them in this "
    "decision."
)
FREE = "Made of counts that the ledger has charged, or that are public: choosing it spends nothing further."


@dataclass(frozen=True)
class Mixture:
    """A randomised threshold of one group: the chance of a positive answer rises in steps with the score.

    With chance ``ignore`` the answer is positive with chance ``constant``; else each threshold decides with its chance.
    """

    ignore: float
    constant: float
    thresholds: tuple[tuple[float, float], ...]
    """Chance and probability above which the answer is positive."""

    def chance(self, likely: Tensor) -> Tensor:
        """Return the chance of a positive answer for probabilities of the second class."""
        steps = torch.zeros_like(likely)
        for share, above in self.thresholds:
            steps = steps + share * (likely > above).to(likely.dtype)
        return self.ignore * self.constant + (1 - self.ignore) * steps


@dataclass(frozen=True)
class Decision:
    """Offsets that are added to a model's outputs before the largest one (or every positive one) is the answer.

    Attributes:
      goal: what it serves.
      tau: strength of the offset that answers have in all.
      trained_tau: the part of it that the loss had, and the outputs have already.
      offsets: one row for all records, or one per name in ``groups``.
      groups: names of groups, where the answer depends on the group.
      mixtures: one randomised threshold per group, in place of offsets.
      prior: the counts that offsets were made of.
      chosen: in words, what the choice looked at.

    Examples:
      >>> decision = Decision.of(Goal("balanced"), Prior.declared([9, 1]), tau=1.0)
      >>> decision.adjust(torch.zeros(1, 2), "classes").argmax(1)  # a rare label answers a tie
      tensor([1])
    """

    goal: Goal = OVERALL
    tau: float = 0.0
    trained_tau: float = 0.0
    offsets: tuple[tuple[float, ...], ...] = ()
    groups: tuple[str, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    prior: Prior | None = None
    chosen: str = FREE

    @classmethod
    def of(
        cls,
        goal: Goal,
        prior: Prior,
        *,
        tau: float,
        trained_tau: float = 0.0,
        groups: Sequence[str] = (),
        chosen: str = FREE,
    ) -> Decision:
        """Return the decision with strength ``tau`` for a model whose loss had the offset ``trained_tau``.

        With counts by group each group has its own offsets, made of the label's share within it.
        """
        basis = prior.pooled().offsets()[0]
        rows = prior.offsets()
        named = tuple(groups) if prior.kind == "labels by group" and len(rows) == len(groups) else ()
        if not named:
            rows = prior.pooled().offsets()
        moved = tuple(
            tuple(trained_tau * whole - tau * own for whole, own in zip(basis, row, strict=True)) for row in rows
        )
        return cls(goal, tau, trained_tau, moved, named, prior=prior, chosen=chosen)

    @property
    def by_group(self) -> bool:
        """Return whether an answer depends on the record's group."""
        return bool(self.groups)

    @property
    def plain(self) -> bool:
        """Return whether answers are those of the plain outputs."""
        return not self.mixtures and all(value == 0 for row in self.offsets for value in row)

    def adjust(
        self, scores: Tensor, kind: str, groups: Sequence[str] | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return outputs whose largest (with several labels: positive) values are the answers; a new tensor.

        Args:
          scores: one column per class or label, as from ``evaluate.scores_of``; of tokens the last dimension.
          kind: of the targets; real numbers are returned as they are.
          groups: the group of each record, where the decision depends on it.
          generator: draws of a randomised decision; default from the operating system.
        """
        if self.plain or kind not in (CLASSES, ORDINAL, LABELS, TOKENS):
            return scores
        rows = self._places(len(scores), groups)
        if self.mixtures:
            return self._drawn(scores, rows, generator)
        table = torch.tensor(self.offsets, dtype=scores.dtype)
        if scores.shape[-1] != table.shape[1]:
            raise UsageError(
                f"The decision of this run is for {table.shape[1]} labels, and the model gives other outputs: pass the "
                "model that was trained."
            )
        chosen = table[rows] if len(table) > 1 else table.expand(len(scores), -1)
        return scores + chosen.reshape(len(scores), *[1] * (scores.dim() - 2), -1).to(scores.device)

    def _places(self, records: int, groups: Sequence[str] | None) -> Tensor:
        """Return the row of each record; a group that the decision does not know is an error."""
        if not self.by_group:
            return torch.zeros(records, dtype=torch.long)
        if groups is None or len(groups) != records:
            raise UsageError(
                "The decision of this run depends on a record's group: pass groups= with one name per record, or the "
                "column of groups on the command line."
            )
        places = {name: place for place, name in enumerate(self.groups)}
        if not places.keys() >= set(groups):
            raise UsageError(
                "A record belongs to a group that the decision of this run has no offsets for: use the groups of the "
                "training data."
            )
        return torch.tensor([places[name] for name in groups], dtype=torch.long)

    def _drawn(self, scores: Tensor, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return outputs of which the second is larger with the chance that the mixture gives."""
        draws = generator or torch.Generator().manual_seed(secrets.randbits(63))
        likely = scores.double().softmax(-1)[:, 1].cpu()
        chance = torch.stack([mixture.chance(likely) for mixture in self.mixtures], dim=1)
        mine = chance.gather(1, rows.unsqueeze(1)).squeeze(1)
        margin = (mine.logit() - torch.rand(len(mine), dtype=torch.float64, generator=draws).logit()).nan_to_num(0.0)
        margin = margin.clamp(-_SURE, _SURE)
        return torch.stack([torch.zeros_like(margin), margin], dim=1).to(scores.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``from_json`` reads it."""
        prior = self.prior
        return {
            "format": _FORMAT,
            "goal": str(self.goal),
            "tau": self.tau,
            "trained_tau": self.trained_tau,
            "add_to_outputs": [list(row) for row in self.offsets],
            "groups": list(self.groups),
            "randomised": bool(self.mixtures),
            "mixtures": [[part.ignore, part.constant, *map(list, part.thresholds)] for part in self.mixtures],
            "prior": None
            if prior is None
            else {
                "counts": [list(row) for row in prior.counts],
                "noise": prior.noise,
                "kind": prior.kind,
                "records": prior.records,
            },
            "chosen": self.chosen,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Return the decision that ``to_json`` wrote; raise VerificationError for anything else."""
        try:
            if data["format"] != _FORMAT:
                raise ValueError
            known = data["prior"]
            prior = None if known is None else Prior(_rows(known["counts"]), *(known[key] for key in _OF_PRIOR))
            mixtures = tuple(
                Mixture(float(ignore), float(constant), _pairs(thresholds))
                for ignore, constant, *thresholds in data["mixtures"]
            )
            decision = cls(
                Goal.parse(data["goal"]),
                float(data["tau"]),
                float(data["trained_tau"]),
                _rows(data["add_to_outputs"]),
                tuple(str(name) for name in data["groups"]),
                mixtures,
                prior,
                str(data["chosen"]),
            )
        except (UsageError, ValueError, KeyError, TypeError, IndexError, OverflowError):
            raise VerificationError(_DAMAGED) from None
        numbers = [decision.tau, decision.trained_tau, *(value for row in decision.offsets for value in row)]
        wide = len({len(row) for row in decision.offsets}) > 1
        rows = len(decision.mixtures or decision.offsets)
        if wide or not all(map(math.isfinite, numbers)) or (decision.groups and rows != len(decision.groups)):
            raise VerificationError(_DAMAGED)
        return decision

    def write(self, folder: Folder) -> None:
        """Write ``decision.json`` into a run folder; the ledger records it, durable on return."""
        write_json(folder.path / FILE, self.to_json())


_OF_PRIOR = ("noise", "kind", "records")
_DAMAGED = f"{FILE} cannot be read: it was damaged or edited."


def read(path: Path) -> Decision | None:
    """Return the decision of a run folder, checked; None where its outputs are taken as they are."""
    file = path / FILE
    return Decision.from_json(untrusted.read_json(file)) if file.exists() else None


def _rows(values: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in values)


def _pairs(values: Any) -> tuple[tuple[float, float], ...]:
    return tuple((float(share), float(above)) for share, above in values)
