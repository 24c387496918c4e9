"""How well small classes can be served at honest epsilon: trainings, and the frontier that each of them gives.

    python experiments/serving.py mnist8 --data-dir FOLDER [--seeds 20] [--jobs 2] [--work FOLDER]
    python experiments/serving.py ham --data-dir FOLDER
    python experiments/serving.py cifar --data-dir FOLDER
    python experiments/serving.py cifar_rare --data-dir FOLDER

Every training is a linear model on fixed features that releases noisy counts of labels, so that its answers can be
moved to any strength of the offset afterwards, at no further cost. Rates, and the strength that an answer is moved to,
are chosen on a part of the training records that the training does not see, by the mean of several splits, from the
same rates for all lines; a rate at an end of the grid widens it. Then ``--seeds`` trainings on all training records are
measured on the held-out ones. Plan, counts, sampler and private step are those of ``eh.fit``, see serving_train.py;
there is no run folder, since nothing is released. All lines of a seed share its draws. Finished trainings are kept in
the work folder and not repeated.

The page is written when all is there; ``python experiments/serving_page.py`` writes it of what there is so far.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving_data import Records, records
from serving_studies import STUDIES, Line, Study
from serving_train import Recipe, train_together
from torch import Tensor, nn

import evenhand as eh
from evenhand.methods.priors import Prior

PATH = (0.0, 0.5, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 4.0, 5.0, 6.0)
"""Strengths of the offset that every training is measured at."""
TRIAL = 1000
"""The first seed of the trials, apart from those of the replicas."""


@dataclass(frozen=True)
class Task:
    """One training: ``trial`` tells whether it is measured on validation records or on the held-out ones."""

    line: str
    epsilon: float
    rate: float
    seed: int
    trial: bool


@cache
def planned(study: Study, line: Line, epsilon: float, data: eh.data.Data) -> Any:
    """Return the plan of a line on these data; its epsilon contains the counts of labels."""
    return eh.plan(
        eh.method(line.method, dict(line.settings)),
        eh.Privacy(epsilon, study.delta),
        data=data.facts,
        epochs=study.epochs,
        batch_size=study.batch,
        prior="labels",
    )


def recipe(study: Study, line: Line, task: Task, data: eh.data.Data) -> Recipe:
    """Return how one task is trained."""
    plan, method = planned(study, line, task.epsilon, data), eh.method(line.method, dict(line.settings))
    return Recipe(plan, method, line.optimizer, task.rate, line.tau, study.average)


def measured(model: nn.Module, prior: Prior, tau: float, data: eh.data.Data, shares: Tensor) -> list[dict[str, Any]]:
    """Return, for each strength, the share of right answers overall, weighted to the training shares, and by class."""
    with torch.no_grad():
        parts = [data.fetch(rows) for rows in torch.split(torch.arange(len(data)), 4096)]
        logits = torch.cat([model(inputs) for inputs, _ in parts]).double()
        truth = torch.cat([labels for _, labels in parts])
    offsets, rows = torch.tensor(prior.offsets()[0], dtype=torch.float64), []
    for strength in PATH:
        right = (logits - (strength - tau) * offsets).argmax(1) == truth
        recalls = [float(right[truth == label].double().mean()) for label in range(logits.shape[1])]
        weighted = float(torch.tensor(recalls, dtype=torch.float64) @ shares)
        rows.append(
            {"tau": strength, "overall": float(right.double().mean()), "weighted": weighted, "classes": recalls}
        )
    return rows


def performed(study: Study, tasks: Sequence[Task], source: Records) -> list[dict[str, Any]]:
    """Return the figures of trainings with one seed, which share its split and its draws."""
    started, (seed, trial) = time.process_time(), (tasks[0].seed, tasks[0].trial)
    train, test = source.split(study, seed, trial)
    counts = torch.bincount(train.fetch(torch.arange(len(train)))[1], minlength=len(train.facts.labels)).double()
    sizes = torch.bincount(test.fetch(torch.arange(len(test)))[1], minlength=len(counts)).tolist()
    shares = counts / counts.sum()
    recipes = [recipe(study, study.line(task.line), task, train) for task in tasks]
    rows = []
    for task, done in zip(tasks, train_together(recipes, seed, train), strict=True):
        path = measured(done.model, done.prior, study.line(task.line).tau, test, shares)
        row = {"spent": done.spent, "records": len(train), "sizes": sizes, "shares": shares.tolist(), "path": path}
        rows.append({**asdict(task), **row})
    seconds = (time.process_time() - started) / len(rows)
    return [{**row, "seconds": seconds} for row in rows]


class Store:
    """Finished trainings of a study, one line of JSON each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows = {_task(row): row for row in map(json.loads, lines)}

    def add(self, row: dict[str, Any]) -> None:
        """Keep one finished training."""
        with self._file.open("a") as target:
            target.write(json.dumps(row) + "\n")
        self.rows[_task(row)] = row


def _task(row: dict[str, Any]) -> Task:
    return Task(row["line"], row["epsilon"], row["rate"], row["seed"], row["trial"])


def entry_at(row: dict[str, Any], tau: float) -> dict[str, Any]:
    """Return what a training gives at one strength."""
    entry: dict[str, Any] = next(entry for entry in row["path"] if entry["tau"] == tau)
    return entry


def score(row: dict[str, Any], tau: float, goal: str) -> float:
    """Return what trials are chosen by: overall, the mean over classes, or the lowest class."""
    entry = entry_at(row, tau)
    if goal == "overall":
        return float(entry["overall"])
    return float(min(entry["classes"]) if goal == "worst" else statistics.mean(entry["classes"]))


def trial_score(study: Study, store: Store, line: Line, epsilon: float, rate: float, tau: float, goal: str) -> float:
    """Return the mean score of the trials of one rate; minus infinity if one is missing.

    With ``pooled`` trials, the worst class is the one with the smallest mean over them, as in the tables.
    """
    rows = [row for task in trials(study, line, epsilon, rate) if (row := store.rows.get(task)) is not None]
    if len(rows) < study.trials:
        return -np.inf
    if study.pooled and goal == "worst":
        return float(np.mean([entry_at(row, tau)["classes"] for row in rows], axis=0).min())
    return statistics.mean(score(row, tau, goal) for row in rows)


def trials(study: Study, line: Line, epsilon: float, rate: float) -> list[Task]:
    """Return the trials of one rate."""
    name = study.training(line)
    return [Task(name, epsilon, rate, TRIAL + place, trial=True) for place in range(study.trials)]


def tried_rates(study: Study, store: Store, line: Line, epsilon: float) -> list[float]:
    """Return the rates of the grid, and those by which it was widened."""
    tried = (study.training(line), epsilon, True)
    further = {task.rate for task in store.rows if (task.line, task.epsilon, task.trial) == tried}
    return sorted({*line.rates, *further})


def best_rate(study: Study, store: Store, line: Line, epsilon: float) -> float:
    """Return the rate with the best mean over classes: as trained, or at its best strength if answers are moved."""
    strengths = PATH if line.moved else (line.tau,)
    return max(
        tried_rates(study, store, line, epsilon),
        key=lambda rate: max(trial_score(study, store, line, epsilon, rate, tau, "balanced") for tau in strengths),
    )


def best_tau(study: Study, store: Store, line: Line, epsilon: float, goal: str) -> float:
    """Return the strength that serves a goal best in the trials of the line's rate."""
    rate = best_rate(study, store, line, epsilon)
    return max(PATH, key=lambda tau: trial_score(study, store, line, epsilon, rate, tau, goal))


def wanted_trials(study: Study, store: Store, line: Line, epsilon: float) -> list[Task]:
    """Return the trials that are still missing: the grid, then a rate beyond the end at which the best lies."""
    rates = tried_rates(study, store, line, epsilon)
    missing = [task for rate in rates for task in trials(study, line, epsilon, rate) if task not in store.rows]
    if missing or not study.widened:
        return missing
    best, factor = best_rate(study, store, line, epsilon), line.rates[1] / line.rates[0]
    beyond = {rates[0]: rates[0] / factor, rates[-1]: rates[-1] * factor}.get(best)
    return [] if beyond is None else trials(study, line, epsilon, beyond)


def rounds(study: Study, store: Store, seeds: int) -> Iterator[list[Task]]:
    """Yield tasks that can run side by side, until all trials and replicas are there."""
    cells = [(line, epsilon) for line in study.lines for epsilon in line.epsilons or study.epsilons]
    tuned = [(study.line(line.tuned_as or line.name), epsilon) for line, epsilon in cells]
    while missing := {task: None for line, epsilon in tuned for task in wanted_trials(study, store, line, epsilon)}:
        yield list(missing)
    rates = [best_rate(study, store, line, epsilon) for line, epsilon in tuned]
    tasks = {
        Task(study.training(line), epsilon, rate, seed, trial=False): None
        for (line, epsilon), rate in zip(cells, rates, strict=True)
        for seed in range(seeds)
    }
    yield [task for task in tasks if task not in store.rows]


def bundles(tasks: Sequence[Task]) -> list[list[Task]]:
    """Return the tasks in bundles that share a seed, in the order of seeds, at most 24 in one."""
    by_seed: dict[tuple[int, bool], list[Task]] = {}
    for task in tasks:
        by_seed.setdefault((task.seed, task.trial), []).append(task)
    return [part[at : at + 24] for _, part in sorted(by_seed.items()) for at in range(0, len(part), 24)]


_given: tuple[Study, Records] | None = None


def _work(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    assert _given is not None
    torch.set_num_threads(1)
    return performed(_given[0], tasks, _given[1])


def run(study: Study, source: Records, folder: Path, seeds: int, jobs: int) -> None:
    """Do all that is missing of a study; workers share the features with this process."""
    global _given
    folder.mkdir(parents=True, exist_ok=True)
    store, _given = Store(folder / f"{study.name}.jsonl"), (study, source)
    for tasks in rounds(study, store, seeds):
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            for rows in pool.imap_unordered(_work, bundles(tasks)):
                for row in rows:
                    store.add(row)
                    first = row["path"][0]
                    print(
                        f"{study.name} eps {row['epsilon']:g} {row['line']} rate {row['rate']:g} seed {row['seed']}: "
                        f"{100 * first['overall']:.1f} / {100 * min(first['classes']):.1f}, {row['seconds']:.1f} s",
                        flush=True,
                    )


def warm_up() -> None:
    """Import once, before workers are forked, what torch imports late."""
    torch.set_num_threads(1)
    nn.Linear(1, 1)(torch.zeros(1, 1)).sum().backward()
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study that was asked for."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("study", choices=sorted(STUDIES))
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--seeds", type=int, default=20)
    asked.add_argument("--jobs", type=int, default=1)
    asked.add_argument("--work", type=Path, default=Path("runs/serving"))
    given = asked.parse_args(arguments)
    study = STUDIES[given.study]
    warm_up()
    given.work.mkdir(parents=True, exist_ok=True)
    run(study, records(study.source, study.features, given.data_dir, given.work), given.work, given.seeds, given.jobs)
    import serving_page  # which reads what is finished by this module

    serving_page.main([study.name, "--work", str(given.work)])


if __name__ == "__main__":
    main()
