"""``evenhand recommend``: a method and its parameters from public facts, with reasons from measured results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli import options
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from evenhand.comparison.recommend import Advice

NAME = "recommend"
EXAMPLE = "evenhand recommend --records 40000 --smallest 0.3 --epsilon 3"


def run(
    records: Annotated[int, typer.Option("--records", help="Training records, as publicly declared.")],
    smallest: Annotated[
        float | None, typer.Option("--smallest", help="Share of the smallest group, e.g. 0.02.")
    ] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="Promise to every record.")] = 3.0,
    budgets: Annotated[
        str | None, typer.Option("--budgets", help="Owners with budgets of their own: strict=1,open=8.")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="table, images, text or other; kinds are never mixed.")] = "table",
    parameters: Annotated[int | None, typer.Option("--parameters", help="Trainable parameters of the model.")] = None,
    goal: Annotated[str, typer.Option("--goal", help="What to be best in: worst, accuracy or gap.")] = "worst",
    metric: Annotated[
        str | None, typer.Option("--metric", help="The goal as a metric, e.g. accuracy_group_min.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Recommend a method for data like yours. Only public facts are asked for, so this costs no privacy."""
    import dataclasses

    from evenhand.comparison.recommend import Facts, recommend

    if metric is not None:
        goal = _goal(options.metrics(metric))
    owners = options.pairs(budgets, "--budgets") if budgets is not None else {}
    promised = max(owners.values()) if owners else epsilon
    advice = recommend(Facts(records, promised, smallest, bool(owners), kind, parameters), goal)
    options.emit(dataclasses.asdict(advice), _text(advice), json)


def _goal(metrics: tuple[str, ...]) -> str:
    """Return the goal that a metric stands for; refuse one that no study has recorded."""
    goals = {"accuracy": "accuracy", "accuracy_group_min": "worst", "accuracy_difference": "gap"}
    if metrics[0] not in goals or len(metrics) > 1:
        raise UsageError(
            f"The studies behind this advice recorded one of {', '.join(goals)} at a time: take one, or compare on "
            f"data like yours with `evenhand compare --metric {metrics[0]}`."
        )
    return goals[metrics[0]]


def _text(advice: Advice) -> str:
    lines = [
        f"method: {advice.method}"
        + (
            f" (how sure: {advice.sure})"
            if advice.measured
            else " (the plain default: nothing like your data was measured)"
        )
    ]
    used = {key: value for key, value in advice.settings.items() if key not in ("method", "settings")}
    if used:
        lines.append("with: " + ", ".join(f"{key} {value}" for key, value in used.items()))
    settings = advice.settings.get("settings", {})
    if settings:
        lines.append("settings: " + " ".join(f"--set {key}={value}" for key, value in settings.items()))
    lines += [f"- {reason}" for reason in advice.reasons]
    if advice.others:
        lines.append(f"- As good by the intervals: {', '.join(advice.others)}.")
    if advice.measured:
        lines.append(f"From the study {advice.study}. {advice.provenance}")
    return "\n".join(lines)
