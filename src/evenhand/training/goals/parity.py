"""Set one threshold per group, so that groups share a rate (fairlearn's ThresholdOptimizer), from held-out records.

Rates of one kind (false positives, true positives, selection) are met by one fixed threshold per group: fairlearn gives
the rate to share, and each group's threshold, of three digits, is the one that comes closest to it. Equalised odds asks
for two rates at once, which no single threshold gives: there the answer is drawn at random between thresholds, as
fairlearn does it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenhand.errors import UsageError
from evenhand.reporting.held_out.effective_records import effective
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.reporting.metrics import CLASSES, ORDINAL
from evenhand.training.goals.decision import NOT_COVERED, Decision, Mixture
from evenhand.training.goals.frontier import Held
from evenhand.training.goals.goal import PARITY, Goal

_NEAR = 1e-6
"""How close to 0 or 1 a threshold may be."""


def refuse_unsuited(
    goal: Goal,
    kind: str,
    labels: int,
    groups: Sequence[str],
    truth: Sequence[int],
    least: int = LEAST,
    whose: Sequence[int] | None = None,
) -> None:
    """Raise unless parity can be reached: two classes, two groups or more, enough records of each class in each group.

    ``whose`` tells the persons behind the records, of whom several records count for less.

    Enough are ``least`` in each half: thresholds that are set on one half of the records are measured on the other, and
    a threshold is stored and shared, so it must not follow from a few people.
    """
    if kind not in (CLASSES, ORDINAL) or labels > 2:
        raise UsageError(
            f"The goal {goal} is for targets with two classes, and these are others: use --goal balanced or worst."
        )
    if len(set(groups)) < 2:
        raise UsageError(f"The goal {goal} compares groups, and there are fewer than two: name them, --groups COLUMN.")
    cells: dict[tuple[str, int], list[int]] = {}
    for person, name, label in zip(range(len(groups)) if whose is None else whose, groups, truth, strict=True):
        cells.setdefault((name, label), []).append(person)
    needed = 2 * max(1, least)
    if any(effective(np.array(cells.get((name, label), []))) < needed for name in set(groups) for label in (0, 1)):
        raise UsageError(
            f"The goal {goal} needs at least {needed} held-out records of either class in every group "
            f"(--least-records {max(1, least)} in each half of them), and a group has fewer: its threshold would "
            "follow from a few people. Nothing was spent. Merge small groups, hold out more (--test-share), use "
            "--goal balanced or worst, or choose groups that are not the label itself."
        )


def thresholds(goal: Goal, held: Held, groups: Sequence[str]) -> Decision:
    """Return the decision whose thresholds meet the goal on these records.

    Args:
      goal: parity of a metric.
      held: held-out records with plain outputs for two classes.
      groups: names of the groups, in the order of the decision's rows.

    Guarantee:
      None in the sense of differential privacy: thresholds follow from the held-out records. Say so where they go.
    """
    likely = held.scores.double().softmax(-1)[:, 1].numpy()
    truth, names = held.truth.numpy(), np.array([str(name) for name in held.groups], dtype=object)
    present = tuple(name for name in groups if (names == name).any())
    mixtures = _fairlearn(goal, likely, truth, names, present)
    chosen = f"{NOT_COVERED} Thresholds per group by fairlearn's ThresholdOptimizer ({PARITY[goal.metric or '']})."
    if goal.metric == "equalized_odds":
        words = f"{chosen} Answers are drawn at random between thresholds."
        return Decision(goal, groups=present, mixtures=mixtures, chosen=words)
    rows = []
    for name, mixture in zip(present, mixtures, strict=True):
        mine = names == name
        chance = mixture.chance(torch.from_numpy(likely[mine])).numpy()
        rows.append((0.0, -_logit(rounded(_threshold(goal, likely[mine], truth[mine], chance)))))
    return Decision(goal, offsets=tuple(rows), groups=present, chosen=f"{chosen} Answers are not random.")


def _fairlearn(
    goal: Goal, likely: NDArray[Any], truth: NDArray[Any], names: NDArray[Any], present: Sequence[str]
) -> tuple[Mixture, ...]:
    from fairlearn.postprocessing import ThresholdOptimizer

    optimizer = ThresholdOptimizer(
        estimator=_passing_on(), constraints=PARITY[goal.metric or ""], prefit=True, predict_method="predict"
    )
    codes = np.array([present.index(name) for name in names])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.fit(likely.reshape(-1, 1), truth.astype(int), sensitive_features=codes)
    table = optimizer.interpolated_thresholder_.interpolation_dict
    return tuple(_mixture(table[place]) for place in range(len(present)))


def _passing_on() -> Any:
    """Return an estimator whose answer is its input: fairlearn asks it for the scores."""
    from sklearn.preprocessing import FunctionTransformer

    passing = FunctionTransformer()
    passing.predict = lambda inputs: np.asarray(inputs)[:, 0]
    return passing


def _mixture(row: Any) -> Mixture:
    """Return fairlearn's interpolation for one group; a threshold beyond all scores is moved to 0 or 1."""
    first = rounded(float(row["p0"]))
    ends = [_within(row[f"operation{place}"].threshold) for place in (0, 1)]
    ignore, constant = (rounded(float(row.get(key, 0.0))) for key in ("p_ignore", "prediction_constant"))
    return Mixture(ignore, constant, ((first, ends[0]), (1 - first, ends[1])))


def _within(threshold: float) -> float:
    return rounded(float(threshold)) if 0 <= threshold <= 1 else -1.0 if threshold < 0 else 2.0


def rounded(share: float) -> float:
    """Return a share with three digits of its distance to 0 or 1: what is stored does not single out a record.

    Examples:
      >>> rounded(0.45678), rounded(0.000123456), round(1 - rounded(0.99987654), 9)
      (0.457, 0.000123, 0.000123)
    """
    near = float(f"{min(share, 1 - share):.3g}")
    return near if share <= 0.5 else 1 - near


def _threshold(goal: Goal, likely: NDArray[Any], truth: NDArray[Any], chance: NDArray[Any]) -> float:
    """Return the one threshold whose rate among these records is nearest to that of the random one."""
    among = {"fpr": truth == 0, "tpr": truth == 1}.get(goal.metric or "", np.ones(len(truth), dtype=bool))
    wanted = float(chance[among].mean())
    values = np.unique(likely)
    middles = (values[1:] + values[:-1]) / 2
    candidates = np.concatenate([[max(values[0] / 2, _NEAR)], middles, [min((1 + values[-1]) / 2, 1 - _NEAR)]])
    ordered = np.sort(likely[among])
    rates = 1 - np.searchsorted(ordered, candidates, side="right") / len(ordered)
    near = np.abs(rates - wanted)
    ties = candidates[near <= near.min() + 1e-12]
    return float(ties[np.argmin(np.abs(ties - 0.5))])


def _logit(share: float) -> float:
    share = min(max(share, _NEAR), 1 - _NEAR)
    return math.log(share / (1 - share))
