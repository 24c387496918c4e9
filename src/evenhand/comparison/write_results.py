"""Write what a comparison leaves: report and tables that may be shared, and the full form among the private files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand.comparison import tuning
from evenhand.comparison.run_cell import loaded
from evenhand.comparison.summary import Result, together
from evenhand.comparison.sweep import Sweep
from evenhand.comparison.tables import as_csv, as_json, as_markdown
from evenhand.reporting import metrics, replicas, run_findings
from evenhand.reporting.comparison_page import ComparisonData, render_comparison
from evenhand.reporting.comparison_sections import Entry, Verdict
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import small_cells
from evenhand.runs.folder import write_durably

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
    chosen = list(entries) if sweep.public else [_shareable(entry) for entry in entries if entry.private]
    shared = [without_small_groups(entry, sweep.base.least_records) for entry in chosen]
    page = _page(sweep, shared, results, research and sweep.public, sweep.base.least_records)
    column = next((result.task.folder.group_column() for result in results if result.failure is None), None)
    written = _write(out, "report.html", "table", page, column)
    if research and not sweep.public:
        full = _page(sweep, entries, results, True, 0)
        written |= {
            f"full_{name}": path
            for name, path in _write(out / "private", "report-full.html", "table-full", full, column).items()
        }
    return written


def _write(folder: Path, page: str, table: str, data: ComparisonData, column: str | None) -> dict[str, Path]:
    """Write one form of the results: groups carry the name of their column where people read, not where programs do."""
    named = dataclasses.replace(data, entries=[with_column(entry, column) for entry in data.entries])
    texts = {
        folder / page: render_comparison(named),
        folder / f"{table}.csv": as_csv(data),
        folder / f"{table}.md": as_markdown(named),
        folder / f"{table}.json": as_json(data),
    }
    for path, text in texts.items():
        write_durably(path, text.encode("utf-8", "replace"))
    return dict(zip(("report", "csv", "markdown", "json"), texts, strict=True))


def _page(
    sweep: Sweep, entries: Sequence[Entry], results: Sequence[Result], research: bool, least: int
) -> ComparisonData:
    plan = results[0].task.plan
    done = [result for result in results if result.failure is None and result.task.cell.private]
    base = sweep.base
    named, size = base.data if sweep.public else "own data", f"{plan.facts.records} {plan.facts.units}"
    steps = f"{plan.steps} of about {plan.expected_batch:g} {plan.facts.units}"
    return ComparisonData(
        title=f"{', '.join(dict.fromkeys(entry.method for entry in entries))} on {named}, {size}",
        unit=plan.facts.promised,
        entries=entries,
        delta=next((result.task.plan.delta for result in results if result.task.cell.private), plan.delta),
        together=together(done) if sweep.tune is None else None,
        runs=len(done),
        records=next((int(result.last["records"]) for result in results if result.last is not None), 0),
        facts={
            "Data": f"{named}, {plan.facts.records} training {plan.facts.units}, {len(plan.facts.groups)} groups",
            "Model": base.model if ":" not in base.model else "own model",
            "Steps": f"{steps} ({base.epochs:g} epochs), lr {base.lr:g}"
            if sweep.tune is None
            else "as tuned for each method: see the table of trials",
            "Seeds": f"{base.seed} to {base.seed + sweep.seeds - 1}: initialisation"
            + (", and the held-out records of each" if sweep.resampled else "; one held-out split for all"),
            "Noise": "operating-system entropy" if base.insecure_seed is None else "PUBLIC SEED: research only",
            "Runs": f"{len(done)} private, each with its own ledger and statement in this folder",
            **_replicas(sweep),
        },
        reproduce=_command(sweep),
        research=research,
        public=sweep.public,
        baseline=sweep.baseline or "",
        tuning=_tuning(sweep),
        grid={} if sweep.tune is None else {**sweep.tune.config, **sweep.tune.settings},
        verdicts=_verdicts(sweep, entries),
        setting=_setting(sweep, results),
        split=_split(sweep),
        least=least,
    )


def _replicas(sweep: Sweep) -> dict[str, str]:
    """Return how many replicas were trained together, and what publishing them or the best of them costs."""
    if sweep.replicas == "off":
        return {}
    cost = (
        "research on public data; on private data each would be a release, also where only the best is shown"
        if sweep.public
        else "each is a release of its own: whoever sees figures of all, or of the best, is bounded by what all "
        "runs spend together"
    )
    return {"Replicas": f"{sweep.seeds} of each method and promise, trained together where the model allows it; {cost}"}


def _split(sweep: Sweep) -> str:
    """Return how held-out records were chosen, and why so."""
    if sweep.resampled and sweep.public:
        return "Every seed holds out other records, the same for all methods."
    if sweep.resampled:
        return (
            "Every seed holds out other records, the same for all methods: whoever trains in one run is held out, and "
            "so not covered, in another."
        )
    if sweep.public:
        return "All runs hold out the same records."
    return "All runs hold out the same records, so that nobody who trains in one run is held out, and bare, in another."


def without_small_groups(entry: Entry, least: int) -> Entry:
    """Return the entry without figures of groups and owners that have too few held-out records to be shared.

    Examples:
      >>> rows = {seed: {"groups": {"a": 0.9, "b": 0.5}, "group_records": {"a": 90, "b": 4}} for seed in range(2)}
      >>> bare = without_small_groups(Entry("dpsgd", 3.0, rows=rows), 10)
      >>> bare.rows[0]["groups"], bare.small
      ({}, {'b': 0})
    """
    hidden = small_cells.too_small(list(entry.rows.values()), least)
    owners = {f"owner:{name}" for name in hidden.owners}
    groups = [name for name in entry.groups if name not in hidden.groups]

    def shown(metric: str) -> bool:
        stem, across = metrics.base(metric)
        across_groups = across and not across.startswith("[")
        return all(hidden.shows(stem, name) for name in groups) if across_groups else hidden.shows(metric)

    def by_metric(tables: Mapping[str, Mapping[str, Estimate]]) -> dict[str, dict[str, Estimate]]:
        return {
            metric: small_cells.suppress(table, [name for name in table if not hidden.shows(metric, name)], least)
            for metric, table in tables.items()
        }

    def rest(rows: replicas.Rows) -> replicas.Rows:
        return {seed: small_cells.without(row, hidden) for seed, row in rows.items()}

    return dataclasses.replace(
        entry,
        metrics={name: value for name, value in entry.metrics.items() if shown(name)},
        asked=by_metric(entry.asked),
        asked_costs=by_metric(entry.asked_costs),
        groups=small_cells.suppress(entry.groups, hidden.groups, least),
        costs=small_cells.suppress(entry.costs, hidden.groups, least),
        owners=small_cells.suppress(entry.owners, hidden.owners, least),
        against={name: value for name, value in entry.against.items() if name not in owners},
        rows=rest(entry.rows),
        reference=rest(entry.reference),
        small={name: 0 if name in hidden.groups else count for name, count in replicas.small(entry.rows).items()},
    )


def with_column(entry: Entry, column: str | None) -> Entry:
    """Return the entry with the name of the column before every group, where that is known.

    Examples:
      >>> with_column(Entry("dpsgd", 3.0, small={"Asian": 9}), "race").small
      {'race = Asian': 9}
    """
    if column is None:
        return entry

    def rows(by_seed: replicas.Rows) -> replicas.Rows:
        return {seed: run_findings.row_with_column(row, column) for seed, row in by_seed.items()}

    def by_metric(tables: Mapping[str, Mapping[str, Estimate]]) -> dict[str, dict[str, Estimate]]:
        return {metric: run_findings.with_column(table, column) for metric, table in tables.items()}

    return dataclasses.replace(
        entry,
        groups=run_findings.with_column(entry.groups, column),
        costs=run_findings.with_column(entry.costs, column),
        training=run_findings.with_column(entry.training, column),
        small=run_findings.with_column(entry.small, column),
        asked=by_metric(entry.asked),
        asked_costs=by_metric(entry.asked_costs),
        rows=rows(entry.rows),
        reference=rows(entry.reference),
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
    asked = [(claim, left) for claim in sweep.claims for left in entries if left.method == claim.left and left.private]
    verdicts = []
    for claim, left in asked:
        rows = {entry.method: entry.rows for entry in entries if entry.epsilon in (left.epsilon, None)}
        judged = claim.judged(rows, reference, left.split, claims=len(asked))
        verdicts.append(
            Verdict(claim.text, left.promise, judged.verdict, judged.difference, judged.power, claim.smallest)
        )
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
    words += [f"--metric {','.join(sweep.metrics)}"] if sweep.metrics else []
    words += [f"--seeds {sweep.seeds}", f"--epochs {base.epochs:g}", *(["--reference"] if sweep.reference else [])]
    words += [f"--batch-size {base.batch_size:g}"] if base.batch_size is not None else []
    words += [f"--set {key}={json.dumps(value)}" for key, value in base.settings.items()]
    return " ".join([*words, "--out again"])


def _shareable(entry: Entry) -> Entry:
    plain = Entry(entry.method, entry.epsilon)
    blank = dataclasses.replace(entry, costs={}, cost=plain.cost, cost_gap=plain.cost_gap, asked_costs={})
    return dataclasses.replace(blank, training={}, reference={})
