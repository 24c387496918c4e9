"""Measure one training at many strengths of the offset: overall against balanced against worst, at no further cost.

Moving the offset after training uses released weights and released (or public) counts only. What is measured here
describes held-out records, which the statement does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenhand.methods.priors import Prior
from evenhand.reporting.group_metrics import wilson
from evenhand.reporting.held_out import small_cells
from evenhand.reporting.held_out.effective_records import effective
from evenhand.reporting.metrics import CLASSES, LABELS, ORDINAL
from evenhand.training.goals.decision import Decision
from evenhand.training.goals.goal import PATH, Goal

FEW = 30
"""Held-out records below which a class or group says little."""
LISTED = 100
"""Classes, and groups, up to which each is recorded at every strength; of more only the worst one is."""


class Cell(NamedTuple):
    """The accuracy of a class or group, its held-out records, and how many of them are independent."""

    share: float
    records: int
    independent: int


@dataclass(frozen=True)
class Held:
    """Held-out records and a trained model's plain outputs for them.

    Attributes:
      scores: one column per class or label.
      truth: class numbers, or 0 and 1 per label.
      kind: of the targets.
      labels: names of the labels; empty where they have none.
      groups: the group of each record.
      whose: a number for the person of each record; None if it is not known or nobody has several.
    """

    scores: Tensor
    truth: Tensor
    kind: str
    labels: Sequence[str] = ()
    groups: Sequence[str] = ()
    whose: Tensor | None = None

    def __len__(self) -> int:
        return len(self.truth)

    def cell(self, share: float, inside: NDArray[Any]) -> Cell:
        """Return the share with the number of records ``inside``, and of those that are independent."""
        return Cell(share, int(inside.sum()), self.independent(inside))

    def behind(self, truth: NDArray[Any], number: int) -> Cell:
        """Return the records of a class; of several labels those with or without one, whichever count for fewer."""
        if self.kind != LABELS:
            return self.cell(math.nan, truth == number)
        sides = [self.cell(math.nan, inside) for inside in (truth[:, number] > 0, truth[:, number] <= 0)]
        return min(sides, key=lambda cell: (cell.independent, cell.records))

    def independent(self, inside: NDArray[Any]) -> int:
        """Return how many independent records these are."""
        return int(inside.sum()) if self.whose is None else effective(self.whose.numpy()[inside])

    def take(self, rows: Tensor) -> Held:
        """Return these records only."""
        names = [self.groups[row] for row in rows.tolist()] if self.groups else ()
        whose = None if self.whose is None else self.whose[rows]
        return Held(self.scores[rows], self.truth[rows], self.kind, self.labels, names, whose)


def frontier(
    held: Held,
    prior: Prior,
    *,
    trained_tau: float,
    groups: Sequence[str] = (),
    chosen: float | None = None,
    least: int = 1,
) -> list[dict[str, Any]]:
    """Return a row per strength of the offset, from the outputs of one trained model; none for other targets.

    A row has the accuracy of each class (of several labels: balanced) and of each group, ``classes`` and ``groups``,
    with its records. Small ones are left out as everywhere, and while a class is, none is called the worst. Classes are
    left out beside groups of which one has few records of a class: from the figures of classes and of groups together
    those records' figure could follow.

    Args:
      held: held-out records with plain outputs.
      prior: counts of the training labels.
      trained_tau: the strength that the loss had.
      groups: names of the rows of a prior by group.
      chosen: a further strength to show, the one in use.
      least: held-out records that a class or group needs to be named as worst.

    Examples:
      >>> import torch
      >>> held = Held(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), "classes")
      >>> [row["worst"] for row in frontier(held, Prior.declared([9, 1]), trained_tau=0.0)][:2]
      [0.0, 0.0]
    """
    if held.kind not in (CLASSES, ORDINAL, LABELS) or not len(held):
        return []
    path = sorted({*PATH, *(() if chosen is None else (chosen,))})
    both = _may_stand_together(held, least)
    return [
        {"tau": tau, **_figures(held, decision, prior, least, both)}
        for tau in path
        for decision in [Decision.of(Goal(), prior, tau=tau, trained_tau=trained_tau, groups=groups)]
    ]


def _figures(held: Held, decision: Decision, prior: Prior, least: int, both: bool) -> dict[str, Any]:
    """Return what one decision gives: overall, weighted to the training prior, balanced, classes, groups, the worst.

    Args:
      held: held-out records with plain outputs.
      decision: how outputs become answers.
      prior: counts of the training labels.
      least: held-out records that a class or group needs.
      both: see ``_may_stand_together``.
    """
    adjusted = decision.adjust(held.scores, held.kind, held.groups if decision.by_group else None)
    truth = held.truth.numpy()
    if held.kind == LABELS:
        guess = (adjusted > 0).numpy()
        right = (guess == (truth > 0)).all(1)
        recalls, counts = _by_label(guess, truth > 0)
        weighted = None
    else:
        right = adjusted.argmax(-1).numpy() == truth
        width = adjusted.shape[-1]
        counts = np.bincount(truth, minlength=width)
        hits = np.bincount(truth, weights=right, minlength=width)
        recalls = np.divide(hits, counts, out=np.full(width, math.nan), where=counts > 0)
        shares = np.array(prior.pooled().shares()[0])
        present = counts > 0
        weighted = float((recalls[present] * shares[present]).sum() / shares[present].sum())
    present = ~np.isnan(recalls)
    sizes = {str(place): held.behind(truth, place).independent for place in range(len(counts))}
    hidden = set(small_cells.left_out(sizes, least, overlap=held.whose is not None))
    few = np.array([str(place) in hidden for place in range(len(counts))])
    shown = np.where(few, math.nan, recalls)
    place = None if hidden or not present.any() else int(np.nanargmin(shown))  # the worst may be among the hidden
    row: dict[str, Any] = {
        "accuracy": float(right.mean()),
        "accuracy_training_prior": None if hidden else weighted,
        "balanced": float(recalls[present].mean()) if present.any() and not hidden else None,
        "classes_not_shown": int((present & few).sum()),
        "worst": None if place is None else float(recalls[place]),
    }
    names = [held.labels[number] if number < len(held.labels) else str(number) for number in range(len(counts))]
    classes = {
        name: held.behind(truth, number)._replace(share=float(recall))
        for number, (name, recall) in enumerate(zip(names, shown, strict=True))
        if not math.isnan(recall)
    }
    groups = _groups(held, right, least)
    if place is not None:
        row |= _worst("worst_class", names[place], classes[names[place]])
    if groups:
        lowest = min(groups, key=lambda name: groups[name].share)
        row |= _worst("worst_group", lowest, groups[lowest])
    return row | _listed("groups", groups) | _listed("classes", classes if both else {})


def _listed(key: str, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return accuracy and records of each class or group; nothing of none or of very many."""
    return {key: {name: _plain(cell) for name, cell in cells.items()}} if 0 < len(cells) <= LISTED else {}


def _plain(cell: Cell) -> dict[str, Any]:
    """Return accuracy, records, and how many of them are independent where that is fewer."""
    fewer = {"effective": cell.independent} if cell.independent < cell.records else {}
    return {"accuracy": cell.share, "n": cell.records, **fewer}


def _worst(key: str, name: str, cell: Cell) -> dict[str, Any]:
    """Return name, share, records, interval, and whether the records are enough to tell."""
    low, high = wilson(cell.share, cell.independent)
    told = {"interval": [low, high], "too_few_to_tell": cell.independent < FEW}
    return {key: {"name": name, **_plain(cell), **told}}


def _may_stand_together(held: Held, least: int) -> bool:
    """Return whether figures of classes may be listed where those of groups are known.

    They may where groups are the classes, and where every group has ``least`` records, or none, of every class: every
    sum and difference of both is then about so many records.
    """
    if held.kind == LABELS or len(set(held.groups)) < 2:
        return True
    groups = np.unique([str(name) for name in held.groups], return_inverse=True)[1]
    cells, code = np.unique(np.stack([groups, held.truth.numpy()]), axis=1, return_inverse=True)
    alike = all(len(np.unique(part)) == cells.shape[1] for part in cells)
    return alike or min(held.independent(code.ravel() == place) for place in range(cells.shape[1])) >= least


def _by_label(guess: NDArray[Any], truth: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return balanced accuracy of each label, and how many records have it; NaN where all or none do."""
    present, absent = truth.sum(0), (~truth).sum(0)
    hits, passes = (guess & truth).sum(0), (~guess & ~truth).sum(0)
    both = (present > 0) & (absent > 0)
    value = (hits / np.maximum(present, 1) + passes / np.maximum(absent, 1)) / 2
    return np.where(both, value, math.nan), np.minimum(present, absent)


def _groups(held: Held, right: NDArray[Any], least: int) -> dict[str, Cell]:
    """Return accuracy and records of each group that is shown; none of one group, or if groups are the classes."""
    names = np.array([str(name) for name in held.groups], dtype=object)
    distinct = sorted(set(names.tolist()))
    if len(distinct) < 2 or held.kind == LABELS or _are_classes(names, held.truth.numpy()):
        return {}
    cells = {name: held.cell(float(right[names == name].mean()), names == name) for name in distinct}
    sizes = {name: cell.independent for name, cell in cells.items()}
    hidden = small_cells.left_out(sizes, least, overlap=held.whose is not None)
    return {name: cell for name, cell in cells.items() if name not in hidden}


def _are_classes(names: NDArray[Any], truth: NDArray[Any]) -> bool:
    """Return whether every group has records of one class only."""
    return all(len(np.unique(truth[names == name])) == 1 for name in set(names.tolist()))


def best(rows: Sequence[dict[str, Any]], goal: Goal) -> float:
    """Return the strength that serves a goal best among rows of a frontier; the smallest of several equal ones."""
    key = "worst" if goal.name == "worst" else "balanced"
    return float(max(rows, key=lambda row: (-math.inf if row[key] is None else row[key], -row["tau"]))["tau"])
