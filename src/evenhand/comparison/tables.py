"""Write the table of a comparison for spreadsheets, people and programs: equal figures as CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from evenhand._numbers import bare_percent, mean, rounded_up
from evenhand.accounting.plan import UNITS
from evenhand.reporting.comparison_findings import finding, findings, lead
from evenhand.reporting.comparison_page import ComparisonData
from evenhand.reporting.comparison_sections import (
    Entry,
    difference,
    difference_names,
    tuning_line,
    verdict_line,
)
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import small_cells
from evenhand.reporting.text import cell, unmarked
from evenhand.reporting.uncertainty import FEWEST

ADJACENCY = "add/remove"


def rows(data: ComparisonData) -> list[dict[str, Any]]:
    """Return the table: one row per method and promise, plain values."""
    return [_row(data, entry) for entry in data.entries]


def as_csv(data: ComparisonData) -> str:
    """Return the table for spreadsheets; a name that a spreadsheet would run as a formula gets an apostrophe."""
    table_rows = rows(data)
    columns = list(dict.fromkeys(key for row in table_rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_harmless(column) for column in columns])
    for row in table_rows:
        writer.writerow([_harmless(row.get(column)) for column in columns])
    return text.getvalue()


def as_markdown(data: ComparisonData) -> str:
    """Return the table for people, with what every epsilon means and the findings in words."""
    rated = any(math.isfinite(entry.majority) for entry in data.entries)
    head = [
        "method",
        "promise",
        "spent epsilon",
        "seeds",
        "all records, %",
        *(["most common label, %"] if rated else []),
    ]
    head += ["worst group, %", "served worst"]
    head += ["cost, points", "gap, points"] if data.costed else []
    lines = [
        f"# {unmarked(data.title)}",
        "",
        unmarked(lead(data.entries)),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for entry in data.entries:
        cells = [
            entry.method + ("" if entry.private else " (not private, research only)"),
            entry.promise,
            "" if entry.spent is None else rounded_up(entry.spent),
            f"{entry.seeds}" + (f" ({len(entry.failures)} failed)" if entry.failures else ""),
            _words(entry.accuracy, 100),
            *([bare_percent(entry.majority)] if rated else []),
            _words(entry.worst, 100),
            entry.worst_group or ("too close to tell" if entry.seeds else ""),
        ]
        cells += [_words(entry.cost), _words(entry.cost_gap)] if data.costed else []
        lines.append(f"| {' | '.join(map(unmarked, cells))} |")
    lines += [
        "",
        f"Epsilon: {data.terms}. Means with 95 % intervals that hold the chance of training and of held-out records, "
        f"which are not covered. {data.split} Worst group: of those with at least {FEWEST} held-out records.",
        "",
    ]
    lines += [f"- {unmarked(sentence)}" for sentence in findings(data.entries, data.least, data.baseline)]
    lines += _compared(data)
    lines += [f"- failed: {unmarked(reason)}" for entry in data.entries for reason in entry.failures]
    if data.together is not None and data.runs > 1:
        lines += ["", f"All {data.runs} private runs together: epsilon {rounded_up(data.together)} ({data.terms})."]
    return "\n".join(lines) + "\n"


def _compared(data: ComparisonData) -> list[str]:
    """Return lines on claims, differences to the baseline and the effort of tuning, where there are any."""
    lines = [f"- claim: {unmarked(verdict_line(verdict))}" for verdict in data.verdicts]
    names = difference_names(data.entries)
    if names:
        head = ["method", "promise", *names.values()]
        title = f"Differences to {unmarked(data.baseline)} in points, paired by seed, with 95 % intervals:"
        lines += ["", title, "", f"| {' | '.join(map(unmarked, head))} |", f"|{'---|' * len(head)}"]
        for entry in data.entries:
            if entry.against:
                cells = [entry.method, entry.promise, *(difference(entry.against.get(name)) for name in names)]
                lines.append(f"| {' | '.join(map(unmarked, cells))} |")
    tuned = [entry for entry in data.entries if entry.effort is not None]
    if tuned:
        lines += ["", f"{data.tuning}", ""]
        lines += [f"- {unmarked(tuning_line(entry))}" for entry in tuned]
    return lines


def as_json(data: ComparisonData) -> str:
    """Return the table for programs: every estimate with its interval; what is not measured is null."""
    body = {
        "schema": 1,
        "unit": UNITS["person" if data.unit == "person" else "record"],
        "adjacency": ADJACENCY,
        "delta": data.delta,
        "epsilon_of_all_runs_together": data.together,
        "research": data.research,
        "split": data.split,
        "held_out_over_training": next((entry.split.ratio for entry in data.entries), None),
        "least_records": data.least,
        "findings": findings(data.entries, data.least, data.baseline),
        "setting": dict(data.setting),
        "baseline": data.baseline,
        "tuning": data.tuning,
        "grid": dict(data.grid),
        "claims": [
            {
                "text": verdict.text,
                "promise": verdict.promise,
                "verdict": verdict.verdict,
                "difference": _plain({"": verdict.difference})[""],
                "seeds": verdict.difference.count,
                "matters": verdict.matters,
                "power": verdict.power,
            }
            for verdict in data.verdicts
        ],
        "entries": [
            {
                "method": entry.method,
                "epsilon": entry.epsilon,
                "spent_epsilon": entry.spent,
                "private": entry.private,
                "seeds": entry.seeds,
                "failures": list(entry.failures),
                "cell": entry.cell,
                "worst_group": entry.worst_group,
                "majority": _null(entry.majority),
                "records": {"all": entry.accuracy.count, **_sizes(entry)},
                "metrics": _plain(entry.metrics),
                "groups": _plain(entry.groups),
                "asked": {name: _plain(part) for name, part in entry.asked.items()},
                "asked_costs": {name: _plain(part) for name, part in entry.asked_costs.items()},
                **_owners(entry),
                "against_baseline": _plain(entry.against),
                "settings": dict(entry.settings),
                "processor_seconds": round(entry.seconds, 1),
                **_effort(entry),
                "by_seed": {str(seed): _evaluation(row) for seed, row in entry.rows.items()},
                "finding": finding(entry),
                **(_costs(entry) if entry.costs else {}),
            }
            for entry in data.entries
        ],
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def rows_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per method, promise and metric of what ``as_json`` wrote; ``n`` is the number of trainings.

    Examples:
      >>> entry = {"method": "dpsgd", "epsilon": 3.0, "seeds": 5, "groups": {}, "asked": {}}
      >>> rows_of({"entries": [{**entry, "metrics": {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9}}}]})
      [{'method': 'dpsgd', 'epsilon': 3.0, 'metric': 'accuracy', 'mean': 0.8, 'low': 0.7, 'high': 0.9, 'n': 5}]
    """
    return [
        {
            "method": entry["method"],
            "epsilon": entry["epsilon"],
            "metric": name,
            "mean": figure["value"],
            "low": figure["low"],
            "high": figure["high"],
            "n": entry["seeds"],
        }
        for entry in body["entries"]
        for name, figure in {
            **entry["metrics"],
            **{f"accuracy[{group}]": figure for group, figure in entry["groups"].items()},
            **{f"{name}[{group}]": one for name, part in entry["asked"].items() for group, one in part.items()},
        }.items()
    ]


def _effort(entry: Entry) -> dict[str, Any]:
    effort = entry.effort
    if effort is None:
        return {}
    return {
        "tuning": {
            "trials": effort.trials,
            "failed": effort.failed,
            "processor_seconds": round(effort.seconds, 1),
            "chosen": dict(effort.chosen),
        }
    }


def _sizes(entry: Entry) -> dict[str, Any]:
    """Return held-out records of one training by group; None where even their number is not shared."""
    return {
        "groups": {name: None if small_cells.hidden(group) else group.count for name, group in entry.groups.items()}
    }


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None or key not in ("majority", "metrics")}


def _owners(entry: Entry) -> dict[str, Any]:
    """Return per owner: promised and spent epsilon where budgets differ, accuracy where held-out owners are known."""
    names = dict.fromkeys([*entry.budgets, *entry.owners])
    owners = {
        name: {
            **(dict(zip(("budget", "epsilon"), entry.budgets[name], strict=True)) if name in entry.budgets else {}),
            "accuracy": _plain({name: entry.owners[name]})[name] if name in entry.owners else None,
        }
        for name in names
    }
    return {"owners": owners} if owners else {}


def _row(data: ComparisonData, entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": entry.method,
        "private": entry.private,
        "epsilon": entry.epsilon,
        "spent_epsilon": entry.spent,
        "delta": data.delta if entry.private else None,
        "unit": UNITS["person" if data.unit == "person" else "record"] if entry.private else None,
        "adjacency": ADJACENCY if entry.private else None,
        "seeds": entry.seeds,
        "failed": len(entry.failures),
        "worst_group": entry.worst_group,
        "majority": entry.majority,
        "held_out_records": entry.accuracy.count,
    }
    named = dict(entry.metrics)
    if data.costed:
        named |= {"privacy_cost": entry.cost, "privacy_cost_gap": entry.cost_gap}
    for name, estimate in named.items():
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    for name, estimate in entry.against.items():
        row |= {f"difference[{name}]": estimate.value}
        row |= {f"difference[{name}]_low": estimate.low, f"difference[{name}]_high": estimate.high}
    if entry.effort is not None:
        row |= {"trials": entry.effort.trials, "tuning_seconds": entry.effort.seconds, "chosen": entry.effort.words}
    row |= {f"accuracy[{name}]": _figure(estimate) for name, estimate in entry.groups.items()}
    row |= {f"owner_accuracy[{name}]": _figure(estimate) for name, estimate in entry.owners.items()}
    row |= {f"owner_spent_epsilon[{name}]": spent for name, (_, spent) in entry.budgets.items()}
    return row | {f"privacy_cost[{name}]": _figure(estimate) for name, estimate in entry.costs.items()}


def _figure(estimate: Estimate) -> float | str:
    return small_cells.words(estimate.count) if small_cells.hidden(estimate) else estimate.value


def _costs(entry: Entry) -> dict[str, Any]:
    whole = _plain({"privacy_cost": entry.cost, "privacy_cost_gap": entry.cost_gap})
    return {**whole, "privacy_cost_groups": _plain(entry.costs)}


def _plain(estimates: Any) -> dict[str, Any]:
    return {
        name: {"value": _null(e.value), "low": _null(e.low), "high": _null(e.high)} for name, e in estimates.items()
    }


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _harmless(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return cell(value) if isinstance(value, str) else value


def _words(estimate: Estimate, scale: float = 1.0) -> str:
    return mean(estimate.value, estimate.low, estimate.high, scale, missing="")
