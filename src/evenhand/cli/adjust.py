"""``evenhand adjust``: let a finished run answer for another goal, without training and at no further cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from evenhand.cli import options

NAME = "adjust"
EXAMPLE = "evenhand adjust runs/first --goal worst"


def run(
    folder: options.RunFolder,
    goal: Annotated[
        str,
        typer.Option("--goal", help="overall, balanced, worst, or parity:fpr (tpr, selection_rate, equalized_odds)."),
    ] = "worst",
    tau: options.Tau = None,
    prior: options.PriorCounts = None,
    model: Annotated[str | None, typer.Option("--model", help="file.py:factory, where the run was started so.")] = None,
    json: options.Json = False,
) -> None:
    """Move the decisions of a finished run: weights and promise stay, decision, statement and report are written again.

    What it gives is measured on the run's held-out records, which the statement does not cover.
    """
    from evenhand.training.goals.adjust import adjust
    from evenhand.training.goals.decision_sections import changes, not_shown

    counts = options.counts(prior) or None
    finished = adjust(Path(folder), goal=goal, tau=options.strength(tau), prior=counts, model=model)
    last = finished.folder.last_evaluation()
    chosen: dict[str, Any] = next((row for row in last["frontier"] if row["tau"] == last["tau"]), {})
    body = {key: last[key] for key in ("goal", "tau", "accuracy", "frontier")} | {"run": str(finished.path)}
    worst = chosen.get("worst_class")
    text = f"goal {last['goal']}, tau {last['tau']:g}: {100 * last['accuracy']:.1f} % of held-out records correct"
    if worst is not None:
        text += f"; worst class {worst['name']}: {100 * worst['accuracy']:.1f} % of {worst['n']}"
    text = "\n".join(filter(None, [f"{text}.", *changes(last)[-1:], not_shown(chosen)]))
    text += "\nNothing was trained or spent: the counts of labels were charged with the run, or are public."
    options.emit(body, f"{text}\nreport: {finished.path / 'report.html'}", json)
