"""Read the run folders of a comparison and average their results over seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evenhand.accounting import accountant
from evenhand.comparison import declared_claims, measures, training_record_figures, tuning
from evenhand.comparison.executors import Failure
from evenhand.comparison.run_cell import Task, seconds
from evenhand.comparison.sweep import EACH_RUN, Chosen, Trial
from evenhand.reporting import comparison_findings, metrics, replicas
from evenhand.reporting.comparison_sections import Effort, Entry
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import small_cells
from evenhand.reporting.replicas import Rows
from evenhand.reporting.uncertainty import LEVEL, Split, of_values
from evenhand.runs.folder import write_durably
from evenhand.runs.verify import verify
from evenhand.training.config import Config, to_toml

_PLAIN = ("accuracy", "balanced_accuracy", "mcc", "roc_auc", "log_loss")
SETTINGS = (
    *("method", "model", "features", "epochs", "batch_size", "loss", "optimizer", "lr", "lr_schedule", "momentum"),
    *("weight_decay", "average", "augment", "views"),
)
_MEASURES = {"balanced_accuracy": "balanced", "roc_auc": "auc", "mcc": "mcc"}


@dataclass(frozen=True)
class Result:
    """One run: its promised epsilon, the steps its ledger charges, its last evaluation; or why there is none."""

    task: Task
    epsilon: float | None = None
    steps_charged: int = 0
    last: Mapping[str, Any] | None = None
    failure: str | None = None
    owners: Mapping[str, float | None] = field(default_factory=dict)


def result(task: Task, failure: Failure | None) -> Result:
    """Read and verify a run folder; one that does not verify is a failure, whatever it says."""
    if failure is not None:
        return Result(task, failure=failure.reason)
    checked = verify(task.path)
    if not checked["ok"]:
        return Result(task, failure=f"its folder does not verify: {checked['problems'][0]}")
    rows = task.folder.metrics(full=True)
    return Result(task, checked["epsilon"], checked["steps"], rows[-1] if rows else None, owners=checked["owners"])


def entries(
    results: Sequence[Result],
    *,
    baseline: str | None = None,
    efforts: Mapping[tuple[str, float | None], Effort] | None = None,
    asked: Sequence[str] = (),
) -> list[Entry]:
    """Return one entry per method and promise, in the order given, with costs where a reference finished.

    Differences are taken to the line called ``baseline`` at the same promise; ``efforts`` says what tuning took;
    ``asked`` are metrics beside accuracy that the comparison is about.
    """
    cells: dict[tuple[str, float | None], list[Result]] = {}
    for result in results:
        cells.setdefault((result.task.cell.method, result.task.cell.epsilon), []).append(result)
    reference = next((_by_seed(runs) for (_, epsilon), runs in cells.items() if epsilon is None), {})
    drafts = [_entry(method, epsilon, runs, reference, asked) for (method, epsilon), runs in cells.items()]
    bases = {entry.epsilon: entry.rows for entry in drafts if entry.method == baseline}

    def against(entry: Entry, level: float = LEVEL) -> dict[str, Estimate]:
        base = {} if entry.method == baseline else bases.get(entry.epsilon, {})
        return declared_claims.against(entry.rows, base, entry.split, level=level)

    drafts = [
        dataclasses.replace(entry, effort=(efforts or {}).get((entry.method, entry.epsilon)), against=against(entry))
        for entry in drafts
    ]
    return [
        comparison_findings.changed(entry, partial(against, entry)) for entry in comparison_findings.corrected(drafts)
    ]


def split_of(configs: Sequence[Config], held_out: float, records: int) -> Split:
    """Return how trainings were split: resampled if their split seeds differ, then with held-out over training records.

    Examples:
      >>> both = [Config(split_seed=0), Config(split_seed=1)]
      >>> split_of(both, 100, 400).ratio, split_of(both[:1], 100, 400).ratio
      (0.25, None)
    """
    seeds = {(config.split_seed, config.source.get("split_seed")) for config in configs}
    return Split(held_out / records if len(seeds) > 1 and held_out and records else None)


def metrics_of(row: Mapping[str, Any], groups: Sequence[str] | None = None) -> dict[str, float]:
    """Return every metric of one evaluation by fairlearn's names, without those that are undefined.

    How groups differ is of all groups, or of those in ``groups``.

    Examples:
      >>> metrics = metrics_of({"accuracy": 0.75, "mcc": None, "groups": {"a": 1.0, "b": 0.5}})
      >>> metrics["accuracy_group_min"], metrics["accuracy_difference"], "mcc" in metrics
      (0.5, 0.5, False)
    """
    values = {name: float(row[name]) for name in _PLAIN if row.get(name) is not None}
    values |= {name: float(value) for name, value in row.get("metrics", {}).items() if value is not None}
    shares = row.get("groups", {})
    large = [value for name, value in shares.items() if groups is None or name in groups]
    differ = metrics.differences("accuracy", [value for value in large if value is not None])
    return values | {name: value for name, value in differ.items() if math.isfinite(value)}


def cell_digest(config: Config, epsilon: float | None) -> str:
    """Return a digest of everything that decides a training but its seeds: equal cells of two studies can be pooled.

    Examples:
      >>> cell_digest(Config(seed=1), 3.0) == cell_digest(Config(seed=2), 3.0) != cell_digest(Config(lr=9.0), 3.0)
      True
    """
    plain = Config()
    free = ("seed", "split_seed", "insecure_seed", "data_dir", "device", "micro_batch", "lean", "compose")
    source = {key: value for key, value in config.source.items() if key != "split_seed"}
    if source.get("owner_seed") == config.seed:
        source["owner_seed"] = EACH_RUN
    same = dataclasses.replace(config, **{name: getattr(plain, name) for name in free}, source=source, epsilon=epsilon)
    return hashlib.sha256(to_toml(same).encode()).hexdigest()[:16]


def together(results: Iterable[Result]) -> float | None:
    """Return the epsilon of all private runs together, for whoever sees them all; None if there is no such run."""
    runs = [result.task.plan for result in results if result.task.plan.certified and result.failure is None]
    if not runs:
        return None
    owners = range(len(runs[0].facts.owners))
    exposed = {tuple((event, plan.cap) for plan in runs for event in plan.events_of_each(owner)) for owner in owners}
    delta = runs[0].delta
    return max(
        accountant.epsilon([event for event, _ in pairs], delta, cap=[cap for _, cap in pairs] or 1)
        for pairs in exposed
    )


def _by_seed(runs: Sequence[Result]) -> dict[int, Mapping[str, Any]]:
    return {run.task.cell.seed: run.last for run in runs if run.last is not None}


def _entry(
    method: str, epsilon: float | None, runs: Sequence[Result], reference: Rows, asked: Sequence[str] = ()
) -> Entry:
    rows = _by_seed(runs)
    split = split_of([run.task.cell.config for run in runs], replicas.size(rows), runs[0].task.plan.facts.records)
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    inside = [
        training_record_figures.read(run.task.folder) for run in runs if run.last is not None and run.task.research
    ]
    entry = Entry(
        method=method,
        epsilon=epsilon,
        spent=max(spent, default=None),
        seeds=len(rows),
        failures=tuple(f"{run.task.cell.name}: {run.failure}" for run in runs if run.failure is not None),
        metrics=estimates(rows, split, asked),
        asked={name: by_group(name, rows, split) for name in asked},
        asked_costs={name: by_group(name, rows, split, reference) for name in asked} if epsilon is not None else {},
        groups={name: replicas.share(rows, split, name) for name in replicas.names(rows)},
        owners={name: replicas.share(rows, split, name, "owners") for name in replicas.names(rows, "owners")},
        budgets=_budgets(runs),
        training=_training(inside),
        seconds=sum(seconds(run.task) for run in runs),
        rows=rows,
        settings=_settings(runs[0].task.cell.config),
        split=split,
        cell=cell_digest(runs[-1].task.cell.config, epsilon),
    )
    return _with_costs(entry, rows, reference) if epsilon is not None and reference else entry


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings of an entry's trainings that are not defaults; a file of the user's own is not named."""
    plain = Config()
    always = ("method", "model", "epochs", "lr")
    named = {name: getattr(config, name) for name in SETTINGS}
    named = {name: value for name, value in named.items() if name in always or value != getattr(plain, name)}
    shown = {name: "own" if isinstance(value, str) and ":" in value else value for name, value in named.items()}
    return {**shown, "settings": dict(config.settings)}


def _budgets(runs: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """Return each owner's budget and the most that a run spent of it; nothing where all have the same promise."""
    done = [run for run in runs if run.failure is None and run.task.cell.config.budgets]
    if not done:
        return {}
    plan = done[0].task.plan
    return {
        name: (budget, max(run.owners.get(name) or 0.0 for run in done))
        for name, budget in zip(plan.facts.owner_names, plan.budgets, strict=True)
        if budget is not None
    }


def _training(inside: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Estimate]]:
    """Return values of training records per group, with intervals over trainings; records are what they are."""
    groups = dict.fromkeys(name for run in inside for name in run)
    values = {
        group: {
            name: [run[group][name] for run in inside if group in run]
            for name in next(run[group] for run in inside if group in run)
        }
        for group in groups
    }
    return {
        group: {name: of_values(known, 0.0, len(known), Split()) for name, known in figures.items()}
        for group, figures in values.items()
    }


def _with_costs(entry: Entry, rows: Rows, reference: Rows) -> Entry:
    """Add the points lost against the reference, paired by seed: the same start, the same split."""
    before, after = replicas.paired(reference, rows)

    def cost(measure: str, records: int) -> Estimate:
        points = measures.estimate(measure, after, entry.split, before)
        return dataclasses.replace(points, count=records if points.measured else 0)

    common = [name for name in entry.groups if name in replicas.names(before)]
    costs = {name: cost(f"cost:{name}", entry.groups[name].count) for name in common}
    whole, gap = cost("cost", entry.accuracy.count), cost("cost_gap", entry.accuracy.count)
    return dataclasses.replace(entry, costs=costs, cost=whole, cost_gap=gap, reference=before)


def by_group(metric: str, rows: Rows, split: Split, reference: Rows | None = None) -> dict[str, Estimate]:
    """Return a metric per group over trainings, or how much it rises against ``reference``, paired by seed.

    Examples:
      >>> row = {"groups": {"a": 0.5}, "group_records": {"a": 40}, "group_metrics": {"fpr": {"a": 0.25}}}
      >>> by_group("fpr", {0: row, 1: row}, Split())["a"].value, by_group("fpr", {0: row}, Split(), {0: row})["a"].value
      (0.25, 0.0)
    """
    tables = {seed: metrics.by_group(row, metric) for seed, row in rows.items()}
    if reference is not None:
        before = {seed: metrics.by_group(row, metric) for seed, row in reference.items()}
        tables = {
            seed: {name: table[name] - before[seed][name] for name in table if name in before[seed]}
            for seed, table in tables.items()
            if seed in before
        }
    limits = metrics.bounds(metric) if reference is None else (-math.inf, math.inf)
    means = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        values = [table[name] for table in tables.values() if name in table]
        mean = of_values(values, 0.0, replicas.size(rows, name), split, bounds=limits)
        means[name] = dataclasses.replace(mean, count=replicas.size(rows, name))
    return means


def estimates(rows: Rows, split: Split, asked: Sequence[str] = ()) -> dict[str, Estimate]:
    """Return every metric over trainings by fairlearn's names; how groups differ is of those with enough records.

    So are the metrics in ``asked``, such as ``fpr_difference``.

    Examples:
      >>> row = {"accuracy": 0.75, "records": 400, "groups": {"a": 1.0, "b": 0.5, "c": 0.0}}
      >>> row["group_records"] = {"a": 198, "b": 198, "c": 4}
      >>> metrics = estimates({0: row, 1: row}, Split())
      >>> metrics["accuracy_group_min"].value, metrics["accuracy"].low < 0.75 < metrics["accuracy"].high
      (0.5, True)
    """
    large = replicas.large(rows)
    tables = [metrics_of(row, large) | _asked(row, large, asked) for row in rows.values()]
    names = dict.fromkeys(name for table in tables for name in table)
    means: dict[str, Estimate] = {}
    for name in names:
        if name == "accuracy":
            means[name] = replicas.share(rows, split)
            continue
        values = [table[name] for table in tables if name in table]
        variance = _variance(name, rows, split, large)
        means[name] = of_values(values, variance, replicas.size(rows), split, bounds=metrics.bounds(name))
    return means


def _asked(row: Mapping[str, Any], large: Sequence[str], asked: Sequence[str]) -> dict[str, float]:
    """Return the metrics asked for that one evaluation has; how groups differ is of those in ``large``."""
    small = tuple(name for name in row.get("groups", {}) if name not in large)
    rest = small_cells.without(row, small_cells.Hidden(groups=small))
    values = {name: metrics.value(rest, name) for name in asked}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _variance(name: str, rows: Rows, split: Split, large: Sequence[str]) -> float:
    """Return the variance that held-out records give a metric; 0 of log loss, whose interval holds trainings only."""
    if name in _MEASURES:
        return measures.score_variance(_MEASURES[name], rows, split)
    if name == "accuracy_group_min":
        return replicas.lowest_variance(rows, split, large)
    if name == "accuracy_group_max":
        return max((replicas.variance(rows, split, group) for group in large), default=0.0)
    return measures.gap_variance(rows, split) if name.startswith("accuracy_") else 0.0


Key = tuple[str, float | None]


@dataclass(frozen=True)
class Tried:
    """One finished or failed trial."""

    trial: Trial
    score: float
    seconds: float
    failure: str | None = None


def read_trials(
    trials: Sequence[Trial], tasks: Sequence[Task], failed: Mapping[str, Failure], score: str
) -> list[Tried]:
    """Read the trials' folders: their scores on the validation part, and their processor seconds."""
    outcomes = []
    for trial, task in zip(trials, tasks, strict=True):
        failure = failed.get(task.path.name)
        rows = [] if failure is not None else task.folder.metrics(full=True)
        value = tuning.value_of(rows[-1], score) if rows else math.nan
        outcomes.append(Tried(trial, value, seconds(task), None if failure is None else failure.reason))
    return outcomes


def choose_winners(outcomes: Sequence[Tried]) -> dict[Key, tuning.Choice]:
    """Return the winning choice of each line and promise; none for one whose trials all failed."""
    winners = {}
    for key in dict.fromkeys(one.trial.key for one in outcomes):
        group = [one for one in outcomes if one.trial.key == key]
        scores: dict[int, list[float]] = {}
        for one in group:
            scores.setdefault(one.trial.point, []).append(one.score)
        point = tuning.best(scores)
        if point is not None:
            winners[key] = next(one.trial.choice for one in group if one.trial.point == point)
    return winners


def efforts(outcomes: Sequence[Tried], winners: Chosen) -> dict[Key, Effort]:
    """Return how much was tried for each line and promise, and what was chosen."""
    by_key = {}
    for key in dict.fromkeys(one.trial.key for one in outcomes):
        group = [one for one in outcomes if one.trial.key == key]
        won = winners.get(key)
        by_key[key] = Effort(
            trials=len(group),
            failed=sum(one.failure is not None for one in group),
            seconds=sum(one.seconds for one in group),
            chosen={} if won is None else {**won.config, **won.settings},
        )
    return by_key


def write(folder: Path, tune: tuning.Tune, outcomes: Sequence[Tried], public: bool) -> Path:
    """Write every score to ``tuning.json``, durable on return, and return its path.

    It goes among the private files unless the data are public, since scores are about training records.
    """
    body: dict[str, Any] = {
        "score": tune.score,
        "share": tune.share,
        "split_seed": tune.split_seed,
        "note": tuning.PUBLIC if public else tuning.UNCHARGED,
        "trials": [
            {
                "method": one.trial.line,
                "epsilon": one.trial.epsilon,
                "seed": one.trial.cell.seed,
                "chosen": {**one.trial.choice.config, **one.trial.choice.settings},
                "score": one.score if math.isfinite(one.score) else None,
                "processor_seconds": one.seconds,
                **({"failure": one.failure} if one.failure else {}),
            }
            for one in outcomes
        ],
    }
    path = (folder if public else folder / "private") / "tuning.json"
    write_durably(path, (json.dumps(body, indent=1) + "\n").encode())
    return path
