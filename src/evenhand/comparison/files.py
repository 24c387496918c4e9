"""The files of a comparison: tables as CSV, Markdown and JSON, and the report; what is not private goes elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenhand.comparison import tuning
from evenhand.comparison.cells import loaded
from evenhand.comparison.grid import Sweep
from evenhand.comparison.summary import Result, together
from evenhand.comparison.tables import as_csv, as_json, as_markdown
from evenhand.reporting.comparison_page import ComparisonData, render_comparison
from evenhand.reporting.comparison_rows import Entry, Verdict
from evenhand.runs.folder import write_durably

_README = """# A comparison of evenhand

May be shared: report.html, table.csv, table.md, table.json; of each run's folder what its README.md names. Results of
several runs together reveal more than those of one: report.html says how much all of them do.

Must not be shared: private/ (runs without privacy, trials of tuning, values of training records, locks), unless the
data are public.

Go on after an interruption: the same command with the same --out.
"""


def write(out: Path, sweep: Sweep, found: Sequence[Entry], results: Sequence[Result]) -> dict[str, Path]:
    """Write every file; returns where by name.

    The files in ``out`` may be shared: they hold private runs only, unless the data are public. With a non-private
    method on other data the full form goes into ``out/private``.
    """
    write_durably(out / "README.md", _README.encode())
    research = any(not entry.private for entry in found)
    shared = list(found) if sweep.public else [_shareable(entry) for entry in found if entry.private]
    written = _write(out, "report.html", "table", _page(sweep, shared, results, research and sweep.public))
    if research and not sweep.public:
        full = _page(sweep, found, results, True)
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


def _page(sweep: Sweep, found: Sequence[Entry], results: Sequence[Result], research: bool) -> ComparisonData:
    plan = results[0].task.plan
    done = [result for result in results if result.failure is None and result.task.cell.private]
    base = sweep.base
    named = base.data if sweep.public else "own data"
    return ComparisonData(
        title=f"{', '.join(dict.fromkeys(entry.method for entry in found))} on {named}, {plan.facts.records} records",
        entries=found,
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
        verdicts=_verdicts(sweep, found),
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


def _verdicts(sweep: Sweep, found: Sequence[Entry]) -> list[Verdict]:
    """Every declared claim at every promise at which its methods were run."""
    reference = next((entry.rows for entry in found if not entry.private), {})
    made = []
    for claim in sweep.claims:
        for left in (entry for entry in found if entry.method == claim.left and entry.private):
            rows = {entry.method: entry.rows for entry in found if entry.epsilon in (left.epsilon, None)}
            made.append(Verdict(claim.text, left.promise, *claim.judged(rows, reference)))
    return made


def _setting(sweep: Sweep, results: Sequence[Result]) -> dict[str, Any]:
    """What the results are about, for who has data like these; facts of the records only where they are public."""
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
