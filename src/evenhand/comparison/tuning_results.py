"""What tuning did: every trial's score, what won for each method and promise, and what that took."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.comparison import summary, tuning
from evenhand.comparison.executors import Failure
from evenhand.comparison.run_cell import Task, seconds
from evenhand.comparison.sweep import Chosen, Trial
from evenhand.reporting.comparison_rows import Effort
from evenhand.runs.folder import write_durably

Key = tuple[str, float | None]


@dataclass(frozen=True)
class Tried:
    """One finished or failed trial."""

    trial: Trial
    score: float
    seconds: float
    failure: str | None = None


def tried(trials: Sequence[Trial], tasks: Sequence[Task], failed: Mapping[str, Failure], score: str) -> list[Tried]:
    """Read the trials' folders: their scores on the validation part, and their processor seconds."""
    found = []
    for trial, task in zip(trials, tasks, strict=True):
        failure = failed.get(task.path.name)
        rows = [] if failure is not None else task.folder.metrics()
        value = summary.metrics_of(rows[-1]).get(tuning.SCORES[score], math.nan) if rows else math.nan
        found.append(Tried(trial, value, seconds(task), None if failure is None else failure.reason))
    return found


def chosen(found: Sequence[Tried]) -> dict[Key, tuning.Choice]:
    """What won for each line and promise; one whose trials all failed has nothing."""
    winners = {}
    for key in dict.fromkeys(one.trial.key for one in found):
        own = [one for one in found if one.trial.key == key]
        scores: dict[int, list[float]] = {}
        for one in own:
            scores.setdefault(one.trial.point, []).append(one.score)
        point = tuning.best(scores)
        if point is not None:
            winners[key] = next(one.trial.choice for one in own if one.trial.point == point)
    return winners


def efforts(found: Sequence[Tried], winners: Chosen) -> dict[Key, Effort]:
    """How much was tried for each line and promise, and what was chosen."""
    made = {}
    for key in dict.fromkeys(one.trial.key for one in found):
        own = [one for one in found if one.trial.key == key]
        won = winners.get(key)
        made[key] = Effort(
            trials=len(own),
            failed=sum(one.failure is not None for one in own),
            seconds=sum(one.seconds for one in own),
            chosen={} if won is None else {**won.config, **won.settings},
        )
    return made


def write(folder: Path, tune: tuning.Tune, found: Sequence[Tried], public: bool) -> Path:
    """Keep every score; on data that are not public among the private files, since they are about training records."""
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
            for one in found
        ],
    }
    path = (folder if public else folder / "private") / "tuning.json"
    write_durably(path, (json.dumps(body, indent=1) + "\n").encode())
    return path
