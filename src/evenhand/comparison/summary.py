"""Read the run folders of a comparison and average their results over seeds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenhand.accounting import accountant
from evenhand.comparison import declared_claims, training_record_figures, tuning
from evenhand.comparison.executors import Failure
from evenhand.comparison.run_cell import Task, seconds
from evenhand.comparison.sweep import Chosen, Trial
from evenhand.reporting.comparison_sections import NOTHING, Effort, Entry
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.intervals import over_seeds, privacy_cost
from evenhand.reporting.metrics import bounds, differences
from evenhand.runs.folder import write_durably
from evenhand.runs.verify import verify
from evenhand.training.config import Config

_PLAIN = ("accuracy", "balanced_accuracy", "mcc", "roc_auc", "log_loss")
SETTINGS = (
    *("method", "model", "features", "epochs", "batch_size", "loss", "optimizer", "lr", "lr_schedule", "momentum"),
    *("weight_decay", "average", "augment", "views"),
)


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
    rows = task.folder.metrics()
    return Result(task, checked["epsilon"], checked["steps"], rows[-1] if rows else None, owners=checked["owners"])


def entries(
    results: Sequence[Result],
    *,
    baseline: str | None = None,
    efforts: Mapping[tuple[str, float | None], Effort] | None = None,
) -> list[Entry]:
    """Return one entry per method and promise, in the order given, with costs where a reference finished.

    Differences are taken to the line called ``baseline`` at the same promise; ``efforts`` says what tuning took.
    """
    cells: dict[tuple[str, float | None], list[Result]] = {}
    for result in results:
        cells.setdefault((result.task.cell.method, result.task.cell.epsilon), []).append(result)
    reference = next((_by_seed(runs) for (_, epsilon), runs in cells.items() if epsilon is None), {})
    drafts = [_entry(method, epsilon, runs, reference) for (method, epsilon), runs in cells.items()]
    bases = {entry.epsilon: entry.rows for entry in drafts if entry.method == baseline}
    return [
        dataclasses.replace(
            entry,
            effort=(efforts or {}).get((entry.method, entry.epsilon)),
            against={}
            if entry.method == baseline
            else declared_claims.against(entry.rows, bases.get(entry.epsilon, {})),
        )
        for entry in drafts
    ]


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return every metric of one evaluation by fairlearn's names, without those that are undefined.

    Examples:
      >>> metrics = metrics_of({"accuracy": 0.75, "mcc": None, "groups": {"a": 1.0, "b": 0.5}})
      >>> metrics["accuracy_group_min"], metrics["accuracy_difference"], "mcc" in metrics
      (0.5, 0.5, False)
    """
    metrics = {name: float(row[name]) for name in _PLAIN if row.get(name) is not None}
    metrics |= {name: float(value) for name, value in row.get("metrics", {}).items() if value is not None}
    differ = differences("accuracy", row.get("groups", {}).values())
    return metrics | {name: value for name, value in differ.items() if math.isfinite(value)}


def together(results: Iterable[Result]) -> float | None:
    """Return the epsilon of all private runs together, for whoever sees them all; None if there is no such run."""
    runs = [result.task.plan for result in results if result.task.plan.certified and result.failure is None]
    if not runs:
        return None
    owners = range(len(runs[0].facts.owners))
    exposed = {tuple(event for plan in runs for event in plan.events(owner)) for owner in owners}
    return max(accountant.epsilon(events, runs[0].delta) for events in exposed)


def _by_seed(runs: Sequence[Result]) -> dict[int, Mapping[str, Any]]:
    return {run.task.cell.seed: run.last for run in runs if run.last is not None}


def _entry(
    method: str, epsilon: float | None, runs: Sequence[Result], reference: Mapping[int, Mapping[str, Any]]
) -> Entry:
    rows = _by_seed(runs)
    evaluations = [metrics_of(row) for row in rows.values()]
    names = list(dict.fromkeys(name for metrics in evaluations for name in metrics))
    groups = list(dict.fromkeys(name for row in rows.values() for name in row["groups"]))
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    owners = list(dict.fromkeys(name for row in rows.values() for name in row.get("owners", {})))
    inside = [
        training_record_figures.read(run.task.folder) for run in runs if run.last is not None and run.task.research
    ]
    entry = Entry(
        method=method,
        epsilon=epsilon,
        spent=max(spent, default=None),
        seeds=len(rows),
        failures=tuple(f"{run.task.cell.name}: {run.failure}" for run in runs if run.failure is not None),
        metrics={name: _range(name, [metrics[name] for metrics in evaluations if name in metrics]) for name in names},
        groups={name: _range("accuracy", [row["groups"][name] for row in rows.values()]) for name in groups},
        owners={
            name: _range("accuracy", [row["owners"][name] for row in rows.values() if name in row.get("owners", {})])
            for name in owners
        },
        budgets=_budgets(runs),
        training=_training(inside),
        seconds=sum(seconds(run.task) for run in runs),
        rows=rows,
        settings=_settings(runs[0].task.cell.config),
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
    groups = dict.fromkeys(name for run in inside for name in run)
    return {
        group: {
            name: over_seeds([run[group][name] for run in inside if group in run])
            for name in next(run[group] for run in inside if group in run)
        }
        for group in groups
    }


def _with_costs(entry: Entry, rows: Mapping[int, Any], reference: Mapping[int, Any]) -> Entry:
    """Add the points lost against the reference, paired by seed: the same start, the same split."""

    def cost(name: str | None) -> Estimate:
        before, after = ({seed: _value(row, name) for seed, row in table.items()} for table in (reference, rows))
        return privacy_cost(before, after)

    costs = {name: cost(name) for name in entry.groups if all(name in row["groups"] for row in reference.values())}
    ranked = sorted((name for name in costs if costs[name].measured), key=lambda name: costs[name].value)
    gap = NOTHING
    if len(ranked) > 1:
        low, high = ranked[0], ranked[-1]
        before, after = (
            {seed: _value(row, high) - _value(row, low) for seed, row in table.items()} for table in (reference, rows)
        )
        gap = privacy_cost(before, after)
    return dataclasses.replace(entry, costs=costs, cost=cost(None), cost_gap=gap)


def _value(row: Mapping[str, Any], group: str | None) -> float:
    share = row["accuracy"] if group is None else row["groups"][group]
    return math.nan if share is None else float(share)


def _range(name: str, values: Sequence[float]) -> Estimate:
    low, high = bounds(name)
    return over_seeds(values, low=low, high=high)


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
        rows = [] if failure is not None else task.folder.metrics()
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
