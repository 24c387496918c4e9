"""Write the table of a comparison for spreadsheets, people and programs: equal figures as CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand._numbers import mean, rounded_up
from evenhand.comparison import tuning
from evenhand.comparison.run_cell import loaded
from evenhand.comparison.summary import Result, together
from evenhand.comparison.sweep import Sweep
from evenhand.reporting.comparison_page import ComparisonData, lead, render_comparison
from evenhand.reporting.comparison_sections import (
    Entry,
    Verdict,
    difference,
    difference_names,
    finding,
    tuning_line,
    verdict_line,
)
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.text import cell, unmarked
from evenhand.runs.folder import write_durably

UNIT, ADJACENCY = "one record", "add/remove"


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
    head = ["method", "promise", "spent epsilon", "seeds", "all records, %", "worst group, %", "lowest group"]
    head += ["cost, points", "gap, points"] if data.costed else []
    lines = [f"# {unmarked(data.title)}", "", lead(data), "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for entry in data.entries:
        cells = [
            entry.method + ("" if entry.private else " (not private, research only)"),
            entry.promise,
            "" if entry.spent is None else rounded_up(entry.spent),
            f"{entry.seeds}" + (f" ({len(entry.failures)} failed)" if entry.failures else ""),
            _words(entry.accuracy, 100),
            _words(entry.worst, 100),
            entry.worst_group,
        ]
        cells += [_words(entry.cost), _words(entry.cost_gap)] if data.costed else []
        lines.append(f"| {' | '.join(map(unmarked, cells))} |")
    lines += [
        "",
        f"Epsilon: {data.terms}. Means with 95 % t-intervals over seeds; held-out records are not covered.",
        "",
    ]
    lines += [f"- {unmarked(finding(entry))}" for entry in data.entries if entry.seeds]
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
        title = f"Differences to {unmarked(data.baseline)} in points, paired by seed, with 95 % t-intervals:"
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
        "unit": UNIT,
        "adjacency": ADJACENCY,
        "delta": data.delta,
        "epsilon_of_all_runs_together": data.together,
        "research": data.research,
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
                "worst_group": entry.worst_group,
                "metrics": _plain(entry.metrics),
                "groups": _plain(entry.groups),
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


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("group_records", "owner_records", "records")}


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
        "unit": UNIT if entry.private else None,
        "adjacency": ADJACENCY if entry.private else None,
        "seeds": entry.seeds,
        "failed": len(entry.failures),
        "worst_group": entry.worst_group,
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
    row |= {f"accuracy[{name}]": estimate.value for name, estimate in entry.groups.items()}
    row |= {f"owner_accuracy[{name}]": estimate.value for name, estimate in entry.owners.items()}
    row |= {f"owner_spent_epsilon[{name}]": spent for name, (_, spent) in entry.budgets.items()}
    return row | {f"privacy_cost[{name}]": estimate.value for name, estimate in entry.costs.items()}


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


_README = """# A comparison of evenhand

May be shared: report.html, table.csv, table.md, table.json; of each run's folder what its README.md names. Results of
several runs together reveal more than those of one: report.html says how much all of them do.

Must not be shared: private/ (runs without privacy, trials of tuning, values of training records, locks), unless the
data are public.

Go on after an interruption: the same command with the same --out.
"""


def write(out: Path, sweep: Sweep, entries: Sequence[Entry], results: Sequence[Result]) -> dict[str, Path]:
    """Write every file, durable on return; return their paths by name.

    The files in ``out`` may be shared: they hold private runs only, unless the data are public. With a non-private
    method on other data the full form goes into ``out/private``.
    """
    write_durably(out / "README.md", _README.encode())
    research = any(not entry.private for entry in entries)
    shared = list(entries) if sweep.public else [_shareable(entry) for entry in entries if entry.private]
    written = _write(out, "report.html", "table", _page(sweep, shared, results, research and sweep.public))
    if research and not sweep.public:
        full = _page(sweep, entries, results, True)
        written |= {
            f"full_{name}": path
            for name, path in _write(out / "private", "report-full.html", "table-full", full).items()
        }
    return written


def _write(folder: Path, page: str, table: str, data: ComparisonData) -> dict[str, Path]:
    texts = {
        folder / page: render_comparison(data),
        folder / f"{table}.csv": as_csv(data),
        folder / f"{table}.md": as_markdown(data),
        folder / f"{table}.json": as_json(data),
    }
    for path, text in texts.items():
        write_durably(path, text.encode("utf-8", "replace"))
    return dict(zip(("report", "csv", "markdown", "json"), texts, strict=True))


def _page(sweep: Sweep, entries: Sequence[Entry], results: Sequence[Result], research: bool) -> ComparisonData:
    plan = results[0].task.plan
    done = [result for result in results if result.failure is None and result.task.cell.private]
    base = sweep.base
    named = base.data if sweep.public else "own data"
    return ComparisonData(
        title=f"{', '.join(dict.fromkeys(entry.method for entry in entries))} on {named}, {plan.facts.records} records",
        entries=entries,
        delta=next((result.task.plan.delta for result in results if result.task.cell.private), plan.delta),
        together=together(done) if sweep.tune is None else None,
        runs=len(done),
        records=next((int(result.last["records"]) for result in results if result.last is not None), 0),
        facts={
            "Data": f"{named}, {plan.facts.records} training records, {len(plan.facts.groups)} groups",
            "Model": base.model if ":" not in base.model else "own model",
            "Steps": f"{plan.steps} of about {plan.expected_batch:g} records ({base.epochs:g} epochs), lr {base.lr:g}"
            if sweep.tune is None
            else "as tuned for each method: see the table of trials",
            "Seeds": f"{base.seed} to {base.seed + sweep.seeds - 1}: initialisation; one held-out split for all",
            "Noise": "operating-system entropy" if base.insecure_seed is None else "PUBLIC SEED: research only",
            "Runs": f"{len(done)} private, each with its own ledger and statement in this folder",
        },
        reproduce=_command(sweep),
        research=research,
        public=sweep.public,
        baseline=sweep.baseline or "",
        tuning=_tuning(sweep),
        grid={} if sweep.tune is None else {**sweep.tune.config, **sweep.tune.settings},
        verdicts=_verdicts(sweep, entries),
        setting=_setting(sweep, results),
    )


def _tuning(sweep: Sweep) -> str:
    if sweep.tune is None:
        return ""
    return (
        f"The same grid was tried for every method, as far as it has the settings; trials were scored by "
        f"{sweep.tune.score} on {100 * sweep.tune.share:g} % of the training records, never on the test data. "
        + (tuning.PUBLIC if sweep.public else tuning.UNCHARGED)
    )


def _verdicts(sweep: Sweep, entries: Sequence[Entry]) -> list[Verdict]:
    """Return the verdict on every declared claim at every promise at which its methods were run."""
    reference = next((entry.rows for entry in entries if not entry.private), {})
    verdicts = []
    for claim in sweep.claims:
        for left in (entry for entry in entries if entry.method == claim.left and entry.private):
            rows = {entry.method: entry.rows for entry in entries if entry.epsilon in (left.epsilon, None)}
            verdicts.append(Verdict(claim.text, left.promise, *claim.judged(rows, reference)))
    return verdicts


def _setting(sweep: Sweep, results: Sequence[Result]) -> dict[str, Any]:
    """Return facts that tell whether the results fit other data; facts of the records only where they are public."""
    cell, plan = results[0].task.cell, results[0].task.plan
    facts = plan.facts
    body: dict[str, Any] = {"model": cell.config.model if ":" not in cell.config.model else "own model"}
    body |= {"records": facts.records, "groups": len(facts.groups), "labels": len(facts.labels)}
    if sweep.base.budgets:
        body["owners"] = dict(facts.owners)
        body["budgets"] = dict(sweep.base.budgets)
    if sweep.public:
        training = loaded(cell)[0]
        counts = [int((training.group == index).sum()) for index in range(len(facts.groups))]
        body |= {"data": sweep.base.data, "group_records": dict(zip(facts.groups, counts, strict=True))}
        body["parameters"] = sum(weight.numel() for weight in cell.config.build_model(facts).parameters())
    return body


def _command(sweep: Sweep) -> str:
    base = sweep.base
    if sweep.file and (sweep.variants or sweep.tune or ":" in base.model):
        return f"evenhand compare {sweep.file if sweep.public else 'CONFIG.toml'} --out again"
    words = ["evenhand compare", f"--data {base.data}" if sweep.public else "CONFIG.toml"]
    words += [f"--methods {','.join(sweep.methods)}"]
    budgets = ",".join(f"{name}={float(value):g}" for name, value in base.budgets.items())
    promises = f"--owners {base.owners} --budgets {budgets}" if sweep.public else "--budgets FILE.toml"
    words += [promises] if base.budgets else [f"--epsilons {','.join(f'{e:g}' for e in sweep.epsilons)}"]
    words += [f"--seeds {sweep.seeds}", f"--epochs {base.epochs:g}", *(["--reference"] if sweep.reference else [])]
    words += [f"--batch-size {base.batch_size:g}"] if base.batch_size is not None else []
    words += [f"--set {key}={json.dumps(value)}" for key, value in base.settings.items()]
    return " ".join([*words, "--out again"])


def _shareable(entry: Entry) -> Entry:
    plain = Entry(entry.method, entry.epsilon)
    return dataclasses.replace(entry, costs={}, cost=plain.cost, cost_gap=plain.cost_gap, training={})
