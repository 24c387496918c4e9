"""Hints on what to try after a poor run, and what to mind when reading its figures.

Both from facts: the plan, the size of the model, the released evaluations.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand.training.goals.goal import TAU

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan

LOUD = 3.0
"""Noise is loud when its length is this many times the largest possible mean gradient."""
FALL, RISE, GAP, TINY, LIFT = 0.02, 0.01, 0.15, 30, 0.05


def after(plan: Plan, parameters: int, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return at most four hints, the most telling first; none after a good run. Each run that is tried spends anew.

    Examples:
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand import Privacy
      >>> from evenhand.types import Facts
      >>> dp_plan = plan("dpsgd", Privacy(0.1), data=Facts(500, (("all", 500),), labels=("no", "yes")), epochs=5)
      >>> after(dp_plan, 10_000, [{"accuracy": 0.5, "groups": {}, "group_records": {}}])[0].split(":")[0][-45:]
      'as long as the longest possible mean gradient'
    """
    metrics = [line for line in metrics if line["accuracy"] is not None and line.get("targets") in (None, "ordinal")]
    if not metrics or not plan.facts.labels:
        return []
    curve = [float(line["accuracy"]) for line in metrics if line.get("accuracy") is not None]
    if not curve:
        return []
    chance = 1 / len(plan.facts.labels)
    loud = _loudness(plan, parameters)
    poor = curve[-1] < chance + 0.5 * (1 - chance)
    hints = []
    if poor and loud > LOUD:
        hints.append(
            f"the noise is {loud:.0f} times as long as the longest possible mean gradient: raise --batch-size (now "
            f"{plan.expected_batch:g}, the cost per epoch grows little), or give the model fewer parameters (now "
            f"{parameters}; --model linear, fewer columns or categories)"
        )
    if _fallen(metrics):
        hints.append(
            f"accuracy fell by {100 * (max(curve) - curve[-1]):.0f} points from its best evaluation: lower --lr, or "
            "take fewer --epochs"
        )
    elif len(curve) >= 4 and curve[-1] - curve[-1 - len(curve) // 4] > RISE:
        hints.append(
            "accuracy was still rising at the end: raise --lr or --epochs (more epochs need more noise for the same "
            "epsilon; `evenhand plan` shows how much)"
        )
    if poor and not hints:
        hints.append(
            f"accuracy {curve[-1]:.0%} is not far above guessing ({chance:.0%}): try --lr 5 times larger and smaller, "
            "check that bounds are not much wider than the values, and that the columns tell about the label"
        )
    return [*hints, *_gap(metrics[-1])][:4]


def for_nothing(last: Mapping[str, Any], run: str) -> list[str]:
    """Return at most one hint on answers that would serve the worst class better; it costs no privacy and no training.

    Args:
      last: the last evaluation, with the frontier of a run that released counts of labels.
      run: the run folder, for the command.

    Examples:
      >>> rows = [{"tau": 0.0, "accuracy": 0.9, "worst": 0.4}, {"tau": 2.5, "accuracy": 0.92, "worst": 0.8}]
      >>> for_nothing({"frontier": rows}, "runs/first")[0][:38]
      '`evenhand adjust runs/first --goal wor'
      >>> for_nothing({"frontier": rows, "goal": "worst", "tau": 2.5}, "runs/first")
      []
    """
    rows = {row["tau"]: row for row in last.get("frontier", ())}
    plain, moved = rows.get(0.0), rows.get(TAU["worst"])
    if last.get("goal", "overall") != "overall" or last.get("tau") or not plain or not moved:
        return []
    if plain["worst"] is None or moved["worst"] is None or moved["worst"] - plain["worst"] < LIFT:
        return []
    return [
        f"`evenhand adjust {run} --goal worst` moves the answers, nothing is trained anew: the class served worst goes "
        f"from {plain['worst']:.0%} to {moved['worst']:.0%}, all records from {plain['accuracy']:.0%} to "
        f"{moved['accuracy']:.0%} (on these held-out records)"
    ]


def cautions(plan: Plan, charged: int, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what could mislead a reader of this run: a chosen stop, tiny groups. Empty if nothing does.

    Args:
      plan: the plan of the run.
      charged: steps that its ledger charges.
      metrics: its evaluations on held-out data.

    Examples:
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand import Privacy
      >>> from evenhand.types import Facts
      >>> dp_plan = plan("dpsgd", Privacy(3), data=Facts(1000, (("all", 1000),), labels=("a", "b")), epochs=2)
      >>> cautions(dp_plan, dp_plan.steps, [{"accuracy": 0.9, "group_records": {"a": 12}}])[0][:45]
      '1 group(s) have fewer than 30 held-out record'
    """
    warnings = []
    if len(metrics) > 1 and charged < plan.steps:
        warnings.append(f"the run stopped after {charged} of {plan.steps} planned steps: {_CHOSEN}")
    elif metrics and _fallen(metrics):
        warnings.append(f"an earlier evaluation was better than the last one: {_CHOSEN}")
    return warnings + (_tiny(metrics[-1]) + _hidden(metrics[-1]) if metrics else [])


def _hidden(last: Mapping[str, Any]) -> list[str]:
    """Return why groups are not shown, and what shows them; names are in the report."""
    from evenhand.reporting.held_out import small_cells

    left_out = last.get(small_cells.LEFT_OUT, {})
    many = len(left_out.get("groups", ()))
    if not many:
        return []
    return [
        f"{many} group(s) are not shown: one has fewer than {left_out.get('least')} held-out records, or would tell of "
        "one that has. More held-out records show them (--test-share), and `evenhand report RUN --full` to you alone"
    ]


_CHOSEN = (
    "stopping early, or taking an earlier checkpoint, because of these held-out figures makes the model depend on the "
    "held-out records, which no epsilon covers, and the figures too good; measure again on records set aside for that"
)


def _fallen(metrics: Sequence[Mapping[str, Any]]) -> bool:
    curve = [float(line["accuracy"]) for line in metrics if line.get("accuracy") is not None]
    return bool(curve) and max(curve) - curve[-1] > FALL


def _loudness(plan: Plan, parameters: int) -> float:
    """Return the length of the noise in the mean gradient, in units of the bound: z sqrt(parameters) / batch."""
    noise = max(level.noise for level in plan.levels)
    return float(noise * parameters**0.5 / plan.expected_batch)


def _gap(last: Mapping[str, Any]) -> list[str]:
    """Return a hint if one group is served worse than all others by more than chance explains."""
    from evenhand.reporting.held_out import effective_records
    from evenhand.reporting.run_findings import worst_group

    groups = {name: share for name, share in last.get("groups", {}).items() if share is not None}
    worst = worst_group(groups, effective_records.sizes(last))
    if worst is None or max(groups.values()) - groups[worst] <= GAP or for_nothing(last, ""):
        return []
    return [
        f"group {worst!r} is served {100 * (max(groups.values()) - groups[worst]):.0f} points worse than the best: "
        "compare methods that look after groups (`evenhand methods`)"
    ]


def _tiny(last: Mapping[str, Any]) -> list[str]:
    from evenhand.reporting.held_out import effective_records

    tiny = [name for name, count in effective_records.sizes(last).items() if count < TINY]
    if not tiny:
        return []
    names = ", ".join(map(repr, tiny[:3])) + (f" and {len(tiny) - 3} more" if len(tiny) > 3 else "")
    return [f"{len(tiny)} group(s) have fewer than {TINY} held-out records, so their figures are rough: {names}"]


VARIABLE = "EVENHAND_TRACEBACK"
"""Set to anything, it shows the whole traceback, with whatever data values are in it."""


def said(error: BaseException) -> str:
    """Return one sentence with the kind of an error and the place that raised it, and nothing of its message.

    Examples:
      >>> try: float("37 years")
      ... except ValueError as error: print("37" in said(error), said(error)[:30])
      False An error that was not foreseen
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if "evenhand" in Path(frame.filename).parts]
    last = (own_frames or frames)[-1] if frames else None
    place = "" if last is None else f" in {Path(last.filename).name}, line {last.lineno}"
    return (
        f"An error that was not foreseen: {type(error).__name__}{place}. Its message is not shown, since it may quote "
        f"your data; {VARIABLE}=1 shows it. What a run has spent is in its ledger: `evenhand verify RUN` says it, and "
        "`evenhand resume RUN` goes on. Please report this."
    )
