"""How well small classes can be served at honest epsilon: trainings, and the frontier that each of them gives.

    python experiments/serving.py mnist8 --data-dir FOLDER [--seeds 20] [--jobs 2] [--work FOLDER]
    python experiments/serving.py ham --data-dir FOLDER
    python experiments/serving.py cifar --data-dir FOLDER
    python experiments/serving.py cifar_rare --data-dir FOLDER

Every training is a linear model on fixed features that releases noisy counts of labels, so that its answers can be
moved to any strength of the offset afterwards, at no further cost. Rates, and the strength that an answer is moved to,
are chosen on an eighth of the training records that the training does not see, by the mean of two splits, from the same
rates for all lines; a rate at an end of the grid widens it. Then ``--seeds`` trainings on all training records are
measured on the held-out ones. Plan, counts, sampler and private step are those of ``eh.fit``; there is no run folder,
since nothing is released. Finished trainings are kept in the work folder and not repeated.

The page is written by ``python experiments/serving_page.py``.
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
from torch import Tensor, nn

import evenhand as eh
from evenhand.gradients.microbatches import MicroBatches
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.release_counts import release_counts
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods.priors import Prior
from evenhand.training.losses import LogitAdjusted
from evenhand.training.optimizers import AdamBC, Descent
from evenhand.training.weight_average import Average, named

PATH = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
"""Strengths of the offset that every training is measured at."""
TRIALS = (1000, 1001)
"""Seeds of the trials, apart from those of the replicas."""


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


def trained(study: Study, line: Line, task: Task, data: eh.data.Data) -> tuple[nn.Module, Prior, float]:
    """Return the averaged model of one training, its released counts, and the epsilon that both spend together."""
    plan, chosen = planned(study, line, task.epsilon, data), eh.method(line.method, dict(line.settings))
    mechanism = Mechanism(plan, chosen.rule, chosen.queries, Stream.insecure(task.seed, 0))
    row = release_counts(plan, mechanism.stream, data)
    prior = Prior(row.counts, row.std, row.kind, len(data))
    model = nn.Linear(data.fetch(torch.arange(1))[0].shape[1], len(data.facts.labels))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    loss = LogitAdjusted(prior, line.tau) if line.tau else nn.CrossEntropyLoss(reduction="none")
    optimizer, schedule = Descent(line.optimizer, task.rate, None, None, "linear").build(model, plan.steps)
    sampler, engine = PoissonSampler(data.owner, plan.rates, mechanism.stream), MicroBatches(model, loss)
    memory, average = chosen.rule.initial(plan.facts), Average(model, named(study.average))
    for step in range(plan.steps):
        if schedule is not None:
            schedule.go_to(step)
        batch = draw(data, sampler, step, 0)
        released = private_gradient(mechanism, engine.run(batch.inputs, batch.targets), batch, memory)
        memory = released.memory
        for name, parameter in model.named_parameters():
            parameter.grad = released.gradient[name].to(parameter.dtype)
        if isinstance(optimizer, AdamBC):
            optimizer.see_noise(released.commit.std / plan.expected_batch)
        optimizer.step()
        average.update()
    average.apply()
    return model, prior, plan.epsilons[0]


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
        rows.append({"tau": strength, "overall": float(right.double().mean()), "weighted": weighted, "classes": recalls})
    return rows


def performed(study: Study, task: Task, source: Records) -> dict[str, Any]:
    """Return the figures of one training."""
    started, line = time.process_time(), study.line(task.line)
    train, test = source.split(study, task.seed, task.trial)
    shares = torch.bincount(train.fetch(torch.arange(len(train)))[1], minlength=len(train.facts.labels)).double()
    model, prior, spent = trained(study, line, task, train)
    rows = measured(model, prior, line.tau, test, shares / shares.sum())
    seconds = time.process_time() - started
    sizes = torch.bincount(test.fetch(torch.arange(len(test)))[1], minlength=len(shares)).tolist()
    return {**asdict(task), "spent": spent, "seconds": seconds, "records": len(train), "sizes": sizes, "path": rows}


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


def score(row: dict[str, Any], tau: float, goal: str) -> float:
    """Return what trials are chosen by: the mean over classes, or the lowest class."""
    classes = next(entry["classes"] for entry in row["path"] if entry["tau"] == tau)
    return min(classes) if goal == "worst" else statistics.mean(classes)


def trial_score(store: Store, line: Line, epsilon: float, rate: float, tau: float, goal: str) -> float:
    """Return the mean score of the trials of one rate; minus infinity if one is missing."""
    tasks = [Task(line.name, epsilon, rate, seed, trial=True) for seed in TRIALS]
    if any(task not in store.rows for task in tasks):
        return -np.inf
    return statistics.mean(score(store.rows[task], tau, goal) for task in tasks)


def best_rate(store: Store, line: Line, epsilon: float) -> float:
    """Return the rate with the best mean over classes, answers as trained."""
    rates = sorted({task.rate for task in store.rows if task.line == line.name and task.epsilon == epsilon and task.trial})
    return max(rates, key=lambda rate: trial_score(store, line, epsilon, rate, line.tau, "balanced"))


def best_tau(store: Store, line: Line, epsilon: float, goal: str) -> float:
    """Return the strength that serves a goal best in the trials of the line's rate."""
    rate = best_rate(store, line, epsilon)
    return max(PATH, key=lambda tau: trial_score(store, line, epsilon, rate, tau, goal))


def wanted_trials(study: Study, store: Store, line: Line, epsilon: float) -> list[Task]:
    """Return the trials that are still missing: the grid, then a rate beyond the end at which the best lies."""
    rates = sorted(
        {*line.rates, *(t.rate for t in store.rows if (t.line, t.epsilon, t.trial) == (line.name, epsilon, True))}
    )
    tasks = [Task(line.name, epsilon, rate, seed, trial=True) for rate in rates for seed in TRIALS]
    missing = [task for task in tasks if task not in store.rows]
    if missing:
        return missing
    best, factor = best_rate(store, line, epsilon), line.rates[1] / line.rates[0]
    beyond = {rates[0]: rates[0] / factor, rates[-1]: rates[-1] * factor}.get(best)
    return [] if beyond is None else [Task(line.name, epsilon, beyond, seed, trial=True) for seed in TRIALS]


def rounds(study: Study, store: Store, seeds: int) -> Iterator[list[Task]]:
    """Yield tasks that can run side by side, until all trials and replicas are there."""
    while trials := [
        task for epsilon in study.epsilons for line in study.lines for task in wanted_trials(study, store, line, epsilon)
    ]:
        yield trials
    tasks = [
        Task(line.name, epsilon, best_rate(store, study.line(line.tuned_as or line.name), epsilon), seed, trial=False)
        for seed in range(seeds)
        for epsilon in study.epsilons
        for line in study.lines
    ]
    yield [task for task in tasks if task not in store.rows]


_given: tuple[Study, Records] | None = None


def _work(task: Task) -> dict[str, Any]:
    assert _given is not None
    torch.set_num_threads(1)
    return performed(_given[0], task, _given[1])


def run(study: Study, source: Records, folder: Path, seeds: int, jobs: int) -> None:
    """Do all that is missing of a study; workers share the features with this process."""
    global _given
    folder.mkdir(parents=True, exist_ok=True)
    store, _given = Store(folder / f"{study.name}.jsonl"), (study, source)
    for tasks in rounds(study, store, seeds):
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=40) as pool:
            for row in pool.imap_unordered(_work, tasks):
                store.add(row)
                last = row["path"][0]
                print(
                    f"{study.name} eps {row['epsilon']:g} {row['line']} rate {row['rate']:g} seed {row['seed']}: "
                    f"{100 * last['overall']:.1f} / {100 * min(last['classes']):.1f}, {row['seconds']:.0f} s",
                    flush=True,
                )


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
    given.work.mkdir(parents=True, exist_ok=True)
    run(study, records(study.source, study.features, given.data_dir, given.work), given.work, given.seeds, given.jobs)


if __name__ == "__main__":
    main()
