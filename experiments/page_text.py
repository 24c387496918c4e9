"""The pages of docs/results, made from the figures in their JSON files and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import correlating
import judging
import plotting

from evenhand.comparison import measures
from evenhand.reporting.text import unmarked
from evenhand.reporting.uncertainty import Split

COMMAND = "python experiments/results.py"


def page(table: Mapping[str, Any]) -> str:
    """One experiment: question, answer, setting, tables, claims, tuning, duration, command."""
    study = table["study"]
    parts = [
        f"# {study['title']}",
        study["question"],
        "## Answer",
        listed([*judging.conclusions(table), *_failures(table)]),
        *([f"What the paper claims, judged by {_claim_intervals(table)}:"] if table["claims"] else []),
        listed(judging.judged(table)),
        study.get("conclusion", ""),
        "## Setting",
        listed(_setting(table)),
        "Choices of ours, where the paper leaves them open or where we differ:",
        listed(study.get("open", [])),
        "## Results",
        f"Means over seeds with 95 % {_intervals(table)}; epsilon {_terms(table)}.",
        _picture(table, "accuracy"),
        _results(table),
        _picture(table, "groups"),
        _groups(table, "by_group"),
        _groups(table, "by_owner"),
        _against(table),
        *_budgets(table),
        _tuning(table),
        "## Again",
        _duration(table),
        f"```text\n{COMMAND} {table['experiment']} --data-dir FOLDER\n```",
        f"The figures: [{table['experiment']}.json]({table['experiment']}.json).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(table: Mapping[str, Any]) -> list[str]:
    setting, study = table["setting"], table["study"]
    groups = ", ".join(f"{name} {count:,}" for name, count in setting.get("group_records", {}).items())
    lines = [
        f"Paper: {study['paper']}.",
        f"Data: {setting['data']}, {setting['records']:,} training records; groups: {groups}.",
        f"Model: {setting['model']}, {setting['parameters']:,} parameters.",
    ]
    if "budgets" in setting:
        each = [f"{name} {setting['budgets'][name]:g}" for name in setting["budgets"]]
        lines.append(f"Owners and their epsilon: {', '.join(each)}.")
    seeds = max(entry["seeds"] for entry in table["entries"])
    split = f". {table['split']}" if table.get("split") else "; one split of the data for all."
    lines.append(f"Seeds: {seeds} per method and promise{split}")
    for entry in table["entries"]:
        if "pooled_from" in entry:
            studies = " and ".join(f"[{name}]({name}.md)" for name in entry["pooled_from"])
            count = len(entry["by_seed"])
            lines.append(f"{unmarked(entry['method'])}: pooled with the same trainings of {studies}, {count} in all.")
    return lines


def _intervals(table: Mapping[str, Any]) -> str:
    """What the intervals of a table hold: tables from before splits were told have the chance of training alone."""
    return "intervals that hold the chance of training and of held-out records" if table.get("split") else "t-intervals"


def _claim_intervals(table: Mapping[str, Any]) -> str:
    if not table.get("split"):
        return "the 95 % interval of the paired difference"
    several = " for all of these together" if len(table["claims"]) > 1 else ""
    return f"the 95 % interval of the paired difference, which holds{several} and holds the chance of held-out records"


def _results(table: Mapping[str, Any]) -> str:
    costed = any("privacy_cost" in entry for entry in table["entries"])
    owners = "budgets" in table["setting"]
    head = ["method", "promise", "spent", "all records, %", "worst group, %", "lowest", "gap, points"]
    head += ["worst owner, %"] if owners else []
    head += ["cost, points", "cost gap, points"] if costed else []
    rows = []
    for entry in table["entries"]:
        metrics = entry["metrics"]
        row = [
            entry["method"] + ("" if entry["private"] else " (not private)"),
            judging.promise(entry),
            "" if entry["spent_epsilon"] is None else f"{math.ceil(1000 * entry['spent_epsilon']) / 1000:.3f}",
            _share(metrics.get("accuracy")),
            _share(metrics.get("accuracy_group_min")),
            entry["worst_group"],
            _share(metrics.get("accuracy_difference")),
        ]
        row += [_points(_worst_owner(entry, table))] if owners else []
        row += [_points(entry.get("privacy_cost")), _points(entry.get("privacy_cost_gap"))] if costed else []
        rows.append(list(map(unmarked, row)))
    return lined_up(head, rows)


def _groups(table: Mapping[str, Any], kind: str) -> str:
    """Accuracy per group or per owner, where there are few enough to be read."""
    values = {
        f"{entry['method']}, {judging.promise(entry)}": entry["groups"]
        if kind == "by_group"
        else {name: owner["accuracy"] for name, owner in entry.get("owners", {}).items()}
        for entry in table["entries"]
    }
    names = list(dict.fromkeys(name for found in values.values() for name in found))
    if not 1 < len(names) <= 20:
        return ""
    rows = [[unmarked(method), *(_share(found.get(name)) for name in names)] for method, found in values.items()]
    words = "group" if kind == "by_group" else "owner"
    return f"Accuracy in % per {words}:\n\n{lined_up(['method', *map(unmarked, names)], rows)}"


def _picture(table: Mapping[str, Any], name: str) -> str:
    found = plotting.pictures(table).get(name)
    return "" if found is None else f"![{unmarked(found.words)}]({table['experiment']}_{name}.svg)"


def _budgets(table: Mapping[str, Any]) -> list[str]:
    """Whether owners with small budgets gain most; nothing where owners have none."""
    if not correlating.changes(table):
        return []
    found = correlating.trends(table)
    title = (
        f"Who gains over {unmarked(table['baseline'])}: an owner's change in accuracy (its recall, where an owner is a "
        "class) against its budget. A falling line gives most to the owners with the strictest promise."
    )
    if not found:
        few = f"With fewer than {correlating.LEAST} owners of different budgets there is nothing to correlate."
        return [title, _picture(table, "budgets"), few]
    head = ["method", "owners", "points per unit of epsilon", "Pearson r", "p"]
    rows = [
        [unmarked(each.method), str(each.owners), f"{each.slope:+.2f}", f"{each.r:+.2f}", f"{each.p:.2g}"]
        for each in found
    ]
    remark = "p is two-sided, over owners: with few of them only an almost straight line is below 0.05."
    return [title, _picture(table, "budgets"), lined_up(head, rows), remark]


def _against(table: Mapping[str, Any]) -> str:
    entries = [entry for entry in table["entries"] if entry["against_baseline"]]
    names = list(dict.fromkeys(name for entry in entries for name in entry["against_baseline"]))
    if not names:
        return ""
    words = {"accuracy": "all records", "worst": "worst group", "gap": "gap", "worst_owner": "worst owner"}
    head = ["method", "promise", *(words.get(name, name.replace("owner:", "owner ")) for name in names)]
    rows = [
        [
            unmarked(entry["method"]),
            judging.promise(entry),
            *(_points(entry["against_baseline"].get(name), sign=True) for name in names),
        ]
        for entry in entries
    ]
    title = f"Difference to {unmarked(table['baseline'])} in points, paired by seed, with 95 % {_intervals(table)}:"
    return f"{title}\n\n{lined_up(list(map(unmarked, head)), rows)}"


def _tuning(table: Mapping[str, Any]) -> str:
    if not table["tuning"]:
        return "Nothing was tuned: every method has the settings above."
    rows = [
        [
            unmarked(entry["method"]),
            judging.promise(entry),
            str(entry["tuning"]["trials"]),
            f"{entry['tuning']['processor_seconds']:.0f}",
            ", ".join(f"{key} {value}" for key, value in entry["tuning"]["chosen"].items()) or "nothing to choose",
        ]
        for entry in table["entries"]
        if "tuning" in entry
    ]
    head = ["method", "promise", "trials", "processor seconds", "chosen"]
    grid = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in table["grid"].items())
    return f"## Tuning\n\n{table['tuning']}\n\nThe grid: {grid}.\n\n{lined_up(head, rows)}{_edges(table)}"


def _edges(table: Mapping[str, Any]) -> str:
    """Who chose a value at the end of its list: beyond it there might be a better one."""
    ends = {
        key: {min(values), max(values)}
        for key, values in table["grid"].items()
        if len(values) > 1 and not any(isinstance(value, str) for value in values)
    }
    found = [
        f"{unmarked(entry['method'])} ({key} {value})"
        for entry in table["entries"]
        for key, value in entry.get("tuning", {}).get("chosen", {}).items()
        if value in ends.get(key, set())
    ]
    return f"\n\nAt the end of the grid, so that more might be had beyond: {', '.join(found)}." if found else ""


def _duration(table: Mapping[str, Any]) -> str:
    final, tuning = seconds(table)
    two = f"about {final / 120:.1f} minutes on two cores"
    words = f"The {_runs(table)} final runs took {final / 60:.1f} processor minutes ({two})"
    return words + (f"; tuning before them {tuning / 60:.1f} processor minutes." if tuning else "; nothing was tuned.")


def _runs(table: Mapping[str, Any]) -> int:
    return sum(entry["seeds"] for entry in table["entries"])


def seconds(table: Mapping[str, Any]) -> tuple[float, float]:
    """Processor seconds of the final runs, and of tuning."""
    entries = table["entries"]
    tuning = sum(entry["tuning"]["processor_seconds"] for entry in entries if "tuning" in entry)
    return sum(entry["processor_seconds"] for entry in entries), tuning


def _failures(table: Mapping[str, Any]) -> list[str]:
    return [f"Failed: {unmarked(reason)}" for entry in table["entries"] for reason in entry["failures"]]


def _worst_owner(entry: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, float | None] | None:
    split = Split(table.get("held_out_over_training"))
    found = measures.estimate("worst_owner", judging.rows(entry), split)
    if not found.measured:
        return None
    return {"value": found.value, "low": max(0.0, found.low), "high": min(100.0, found.high)}


def _terms(table: Mapping[str, Any]) -> str:
    return f"per record, add/remove, delta {table['delta']:g}, recomputed from each run's ledger"


def _share(found: Mapping[str, Any] | None) -> str:
    return _points(None if found is None else {key: None if v is None else 100 * v for key, v in found.items()})


def _points(found: Mapping[str, Any] | None, sign: bool = False) -> str:
    if found is None or found["value"] is None:
        return ""
    form = "+.1f" if sign else ".1f"
    low, high = found["low"], found["high"]
    known = low is not None and high is not None and low == low
    return f"{found['value']:{form}}" + (f" ({low:{form}} to {high:{form}})" if known else "")


def lined_up(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def listed(lines: Sequence[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)
