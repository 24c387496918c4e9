"""The end of ``train`` and ``resume``: a dozen lines for a person, one JSON object for a program."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand._numbers import NO_BREAK, interval, percent, promised, spent_range
from evenhand._numbers import count as counted
from evenhand._numbers import delta as shown_delta
from evenhand.cli import hints, options
from evenhand.terminal import is_quiet, say

if TYPE_CHECKING:
    from evenhand.training.run import Run

MOST_LINES = 12


def show(finished: Run, as_json: bool, *, tips: bool = False, first: Sequence[str] = ()) -> None:
    """Print how a run ended: at most twelve lines, or one JSON object; a person at the terminal sees both.

    The metrics named in ``first`` come first.
    """
    figures = summary(finished, first)
    advice = _advice(finished) if tips and not is_quiet() else []
    full = finished.path / "private" / "report-full.html"
    page = f"not private, do not share: {full}" if full.exists() else f"report: {finished.path / 'report.html'}"
    text = "\n".join(lines(figures, finished.privacy.data, advice, finished.path / "statement.md", page))
    if as_json and sys.stderr.isatty() and not is_quiet():
        say(text)
    options.emit(figures, text, as_json)


def lines(
    figures: Mapping[str, Any], statement: Mapping[str, Any], advice: list[str], words: Path, page: str
) -> list[str]:
    """Return the last lines of a run: result, worst group, spent of promised, advice, and where the rest is.

    Args:
      figures: see ``summary``.
      statement: the privacy statement as data.
      advice: sentences to print; those that do not fit into twelve lines are left out.
      words: the file with the statement in words.
      page: where the report is.
    """
    from evenhand.reporting.run_findings import against_majority

    warning = against_majority(figures["accuracy"], figures["majority"], figures["effective_records"])
    asked = [
        f"{name} {value:.4g}" for name in figures.get("first", ()) if (value := figures["metrics"][name]) is not None
    ]
    head = [
        *([] if warning is None else [warning]),
        *([", ".join(asked)] if asked else []),
        _accuracy(figures),
        *_worst(figures),
        _spent(statement),
    ]
    head += [f"WARNING: {text}" for text in statement["warnings"][:2]]
    tail = [f"statement: {words}", page]
    room = MOST_LINES - len(head) - len(tail)
    return [line.replace(NO_BREAK, " ") for line in (*head, *advice[:room], *tail)]


def summary(finished: Run, first: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures that ``--json`` prints; scripts rely on these keys.

    ``majority`` is the share of the largest class among held-out records; ``beats_majority`` is null if nothing was
    held out. JSON is piped into files and other people's tools, so groups that are too small to be shared have null for
    every figure here too; ``least_records`` is null if none is.
    """
    from evenhand.reporting import metrics
    from evenhand.reporting.held_out import effective_records, small_cells
    from evenhand.reporting.run_findings import recorded, worst_group
    from evenhand.runs import statement_files

    last = finished.folder.last_evaluation() or {}
    statement = finished.privacy.data
    accuracy, majority = last.get("accuracy"), last.get("majority")
    shares, records, frame = last.get("groups", {}), last.get("group_records", {}), recorded(last)
    by_metric, left_out = last.get("group_metrics", {}), last.get(small_cells.LEFT_OUT, {})
    return {
        "epsilon": statement["guarantee"]["epsilon"],
        "delta": statement["guarantee"]["delta"],
        "accuracy": accuracy,
        "balanced_accuracy": last.get("balanced_accuracy"),
        "majority": majority,
        "beats_majority": None if accuracy is None or majority is None else accuracy > majority,
        "interval": None if accuracy is None else [frame.overall.low, frame.overall.high],
        "records": last.get("records", 0),
        "effective_records": effective_records.size(last),
        "metrics": {name: metrics.value(last, name) for name in first}
        | (last.get("metrics") or {name: last[name] for name in _METRICS if name in last}),
        "first": list(first),
        "group_metrics": {name: metrics.by_group(last, name) for name in first},
        "groups": {
            name: {
                **{metric: values.get(name) for metric, values in by_metric.items()},
                "n": records.get(name, 0),
                "effective": effective_records.sizes(last).get(name, 0),
                "accuracy": share,
                "interval": None if share is None else [frame.by_group[name].low, frame.by_group[name].high],
            }
            for name, share in shares.items()
        }
        | {
            name: {"n": None, "effective": None, "accuracy": None, "interval": None}
            for name in left_out.get("groups", ())
        },
        "least_records": left_out.get("least"),
        "group_accuracy": shares,
        "worst_group": worst_group(shares, effective_records.sizes(last)),
        "initial_drops": [
            {"group": drop.group, "length": drop.length, "depth": drop.depth, "recovered": drop.recovered}
            for drop in metrics.initial_drops(finished.evaluations)
        ],
        "group_column": finished.group_column,
        **statement_files.as_json(statement["owners"], last, str(finished.path / statement_files.FILE)),
        "goal": last.get("goal", "overall"),
        "tau": last.get("tau", 0.0),
        "frontier": last.get("frontier", []),
        "steps": statement["mechanism"]["steps_charged"],
        "method": statement["mechanism"]["method"],
        "guarantee": statement["guarantee"]["level"],
        "run": str(finished.path),
    }


_METRICS = ("accuracy", "balanced_accuracy", "mcc", "roc_auc", "log_loss")


def _accuracy(figures: Mapping[str, Any]) -> str:
    """Return the overall result in one line, with the majority rate beside it."""
    accuracy, records, independent = figures["accuracy"], figures["records"], figures["effective_records"]
    if accuracy is None:
        metrics = {name: value for name, value in figures["metrics"].items() if value is not None}
        listed = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:6])
        return (
            f"{listed} on {counted(records)} held-out records" if listed else "no held-out data: nothing was measured"
        )
    low, high = figures["interval"]
    parts = [
        f"accuracy {percent(accuracy, 1000)} (95 % interval {interval(low, high, records=records)}) of "
        f"{counted(records)} held-out records"
        + (f", counted as {counted(independent)} since several are of one person" if independent < records else "")
    ]
    if figures["balanced_accuracy"] is not None:
        parts.append(f"balanced accuracy {percent(figures['balanced_accuracy'], 1000)}")
    if figures["majority"] is not None:
        parts.append(f"always the largest class {percent(figures['majority'], 1000)}")
    return "; ".join(parts)


def _worst(figures: Mapping[str, Any]) -> list[str]:
    """Return the group served worst with its records and interval, if it may be named."""
    from evenhand.reporting.run_findings import NO_WORST, named, span_of_large

    groups, name = figures["groups"], figures["worst_group"]
    measured = [(group["accuracy"], group["effective"]) for group in groups.values() if group["accuracy"] is not None]
    if len(measured) < 2:
        return []
    if name is None:
        return [f"{NO_WORST}{span_of_large(measured)}; each of the {len(measured)} is in the report with its interval"]
    group = groups[name]
    low, high = group["interval"]
    return [
        f"worst group: {named(name, figures['group_column'])}, accuracy "
        f"{percent(group['accuracy'], 1000)} (95 % interval {interval(low, high, records=group['n'])}) of "
        f"{counted(group['n'])} held-out records"
    ]


def _spent(statement: Mapping[str, Any]) -> str:
    """Return what was spent of what was promised, with the terms an epsilon needs."""
    owners, mechanism = statement["owners"], statement["mechanism"]
    steps = f"{mechanism['steps_charged']} of {mechanism['steps_planned']} steps"
    if statement["guarantee"]["epsilon"] is None:
        return f"no privacy is promised: {statement['guarantee']['level']} ({steps})"
    spent = [row["epsilon"] for row in owners]
    budgets = [row["budget"] for row in owners if row["budget"] is not None]
    asked = promised(max(budgets, default=None), missing="nothing")
    if budgets and min(budgets) != max(budgets):
        asked = f"{promised(min(budgets))} to {asked}"
    whom = "one person" if statement["guarantee"]["unit"] == "person" else "one record"
    whose = "" if len(owners) == 1 else f" over {counted(len(owners))} owners"
    return (
        f"spent: epsilon {spent_range(min(spent), max(spent))} of {asked} promised{whose}, delta "
        f"{shown_delta(statement['guarantee']['delta'])}, for {whom} added or removed ({steps})"
    )


def _advice(finished: Run) -> list[str]:
    """Return what to mind when reading the figures, and what to try after a run that could be better."""
    size = sum(parameter.numel() for parameter in finished.model.parameters() if parameter.requires_grad)
    charged = finished.folder.ledger().reserved
    cautions = hints.cautions(finished.plan, charged, finished.evaluations)
    tries = hints.after(finished.plan, size, finished.evaluations)
    free = hints.for_nothing(finished.folder.last_evaluation() or {}, str(finished.path))
    return [
        *(f"at no further cost: {text}" for text in free),
        *(f"to mind: {text}" for text in cautions),
        *(f"to try (every run spends anew): {text}" for text in tries),
    ]
