"""The papers' comparisons on linear models, at matched learning rates and at tuned ones, with many replicas.

    python experiments/matched.py ino_map_digits --data-dir FOLDER [--replicas N] [--minutes M] [--work FOLDER]

Every arm is trained at every rate of one grid. Trials, on a fifth of the records that the same seed would train on,
say which rate each arm would have chosen; a grid whose end was chosen grows, for all arms. Replicas split the records
anew and share their draws among all arms that sample alike. Finished seeds are kept in the work folder and not
repeated; with ``--minutes`` the command stops after a seed when the time is over, and its page says how many replicas
there are. The figures go to docs/results/NAME.json; ``matched_page.py`` makes the page from them alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matched_page
import numpy as np
import torch
from matched_data import Pool, Split, pool
from matched_studies import STUDIES
from matched_study import Arm, Promise, Study
from numpy.typing import NDArray
from serving_train import Learner, Recipe, slopes_of, train_together
from torch import Tensor, nn

import evenhand as eh
from evenhand.types import Facts

TRIAL = 1000
"""The first seed of the trials, apart from those of the replicas."""
Row = dict[str, Any]
Cell = tuple[str, str, float]


def cells(study: Study, rates: Sequence[float]) -> list[tuple[Arm, Promise, float]]:
    """Return every training of one seed. What is not private is trained once, for the first promise."""
    return [
        (arm, promise, rate)
        for arm in study.arms
        for promise in (study.promises if arm.private else study.promises[:1])
        for rate in rates
    ]


@cache
def planned(study: Study, arm: Arm, promise: Promise, facts: Facts) -> tuple[Any, Any]:
    """Return plan and method of a cell, whatever its rate."""
    method = eh.method(arm.method, dict(arm.settings))
    if not arm.private:
        promised: Any = None
    elif study.owned:
        order = study.order or tuple(sorted(name for name, _ in facts.owners))
        promised = eh.Budgets(promise.budgets(order, arm.lowered), study.delta)
    else:
        promised = eh.Privacy(promise.epsilon, study.delta)
    epochs, batch = arm.epochs or study.epochs, arm.batch or study.batch
    return eh.plan(method, promised, data=facts, epochs=epochs, batch_size=batch), method


def recipe(study: Study, arm: Arm, promise: Promise, rate: float, data: eh.data.Data) -> Recipe:
    """Return how one cell is trained on these data."""
    plan, method = planned(study, arm, promise, data.facts)
    return Recipe(
        plan,
        method,
        arm.optimizer,
        rate,
        average=study.average,
        momentum=study.momentum if arm.optimizer == "sgd" else None,
        schedule=arm.schedule or study.schedule,
    )


class Watcher:
    """Looks at groups, and at the pulls of the strictest owner and of all others, at given shares of the steps."""

    def __init__(self, study: Study, split: Split, steps: int, names: Sequence[Cell]) -> None:
        self._study, self._split, self._names = study, split, names
        self._at = {round(share * steps): share for share in study.watch}
        rows = torch.arange(len(split.train))
        self._train = split.train.fetch(rows)
        self.seen: dict[Cell, list[Any]] = {name: [] for name in names}

    def __call__(self, position: int, learners: Sequence[Learner]) -> None:
        """Note what is to be seen at this step."""
        if position not in self._at:
            return
        for name, learner in zip(self._names, learners, strict=True):
            if self._study.owned and not name[0].startswith(("INO", "strictest")):
                self.seen[name].append([self._at[position], *pulls(learner, self._split.train, *self._train)])
            if name[0] in self._study.curves:
                right, _ = counted(learner.model, self._split)
                self.seen[name].append([self._at[position], *right])


def pulls(learner: Learner, data: eh.data.Data, inputs: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return conditions 1 and 2 of 001 for the strictest owner against all others together, on the training records.

    First the cosine between its expected sum of clipped gradients in a step and that of the others, then how many times
    longer the others' sum is. The sum of the cosine and of the inverse of that ratio must be above 0, or a small step
    along the expected update raises the loss of the strictest owner. Last N q C of the others over its own.
    """
    plan = learner.recipe.plan
    with torch.no_grad():
        _, slopes = slopes_of(learner.model(inputs).unsqueeze(1), targets)
        slopes = slopes[:, 0]
        norms = slopes.norm(dim=1) * (inputs.square().sum(1) + 1).sqrt()
        owner = data.owner.long()
        bounds = torch.tensor(plan.scales)[owner] * plan.levels[0].bound
        weights = torch.clamp(bounds / norms, max=1.0) * torch.tensor(plan.rates)[owner]
        strictest = int(np.argmin([epsilon or 0.0 for epsilon in plan.epsilons]))
        mine = owner == strictest
        sums = []
        for rows in (mine, ~mine):
            scaled = slopes[rows] * weights[rows].float().unsqueeze(1)
            sums.append(torch.cat([(scaled.T @ inputs[rows]).flatten(), scaled.sum(0)]).double())
    own, others = (float(total.norm()) for total in sums)
    shares = [
        count * rate * scale for (_, count), rate, scale in zip(plan.facts.owners, plan.rates, plan.scales, strict=True)
    ]
    cosine = float(sums[0] @ sums[1]) / max(own * others, 1e-12)
    return round(cosine, 4), round(others / max(own, 1e-12), 3), round(sum(shares) / shares[strictest] - 1, 3)


def counted(model: nn.Module, split: Split) -> tuple[list[int], Tensor]:
    """Return how many held-out records of each group are right, and all logits."""
    with torch.no_grad():
        inputs, labels = split.test.fetch(torch.arange(len(split.test)))
        logits = model(inputs)
    right = (logits.argmax(1) == labels).numpy()
    return np.bincount(split.part, right, int(split.part.max()) + 1).astype(int).tolist(), logits


def steepness(model: nn.Module, split: Split, groups: Sequence[int]) -> list[list[float]]:
    """Return the mean loss, and the mean norm of the gradients, of the held-out records of these groups."""
    with torch.no_grad():
        inputs, labels = split.test.fetch(torch.arange(len(split.test)))
        loss, slopes = slopes_of(model(inputs).unsqueeze(1), labels)
        norms = slopes[:, 0].norm(dim=1) * (inputs.square().sum(1) + 1).sqrt()
    rows = [np.flatnonzero(split.part == group) for group in groups]
    return [[round(float(values.numpy()[some].mean()), 5) for some in rows] for values in (loss[:, 0], norms)]


def area(logits: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of the area under the curve of each class against all others."""
    from sklearn.metrics import roc_auc_score

    scores, truth = logits.softmax(1).numpy(), labels.numpy()
    return float(np.mean([roc_auc_score(truth == label, scores[:, label]) for label in range(scores.shape[1])]))


def lessened(split: Split, share: float, seed: int) -> Split:
    """Return a split without a share of the training records of every owner but the first by name, the strictest."""
    if not share:
        return split
    random, owner = np.random.default_rng([seed, 7]), split.train.owner.numpy()
    first = min(range(len(split.train.facts.owners)), key=lambda place: split.train.facts.owners[place][0])
    kept: list[NDArray[np.int64]] = []
    for place in range(len(split.train.facts.owners)):
        rows = random.permutation(np.flatnonzero(owner == place))
        kept.append(rows if place == first else rows[round(share * len(rows)) :])
    return Split(split.train.take(torch.from_numpy(np.sort(np.concatenate(kept)))), split.test, split.part)


def performed(
    study: Study, source: Pool, seed: int, trial: bool, rates: Sequence[float], known: set[Cell]
) -> list[Row]:
    """Return the rows of one seed, without the cells in ``known``."""
    split, rows = source.split(study, seed, trial), []
    sizes = np.bincount(split.part).tolist()
    labels = split.test.fetch(torch.arange(len(split.test)))[1]
    todo = [cell for cell in cells(study, rates) if (cell[0].name, cell[1].name, cell[2]) not in known]
    parts: dict[Any, list[tuple[Cell, Recipe]]] = {}
    splits = {share: lessened(split, share, seed) for share in {arm.dropped for arm, _, _ in todo}}
    for arm, promise, rate in todo:
        made = recipe(study, arm, promise, rate, splits[arm.dropped].train)
        key = (arm.dropped, made.plan.rates, made.plan.steps)
        parts.setdefault(key, []).append(((arm.name, promise.name, rate), made))
    for (share, _, steps), members in parts.items():
        started = time.process_time()
        names = [name for name, _ in members]
        look = Watcher(study, splits[share], steps, names) if study.watch and not trial else None
        done = train_together([made for _, made in members], seed, splits[share].train, look)
        seconds = (time.process_time() - started) / len(members)
        for name, one in zip(names, done, strict=True):
            right, logits = counted(one.model, split)
            row: Row = {"cell": list(name), "seed": seed, "trial": trial, "right": right, "sizes": sizes}
            row |= {"records": len(splits[share].train), "spent": one.spent, "seconds": round(seconds, 4)}
            if study.auc:
                row["auc"] = round(area(logits, labels), 5)
            if study.norms:
                row["steep"] = steepness(one.model, split, study.norms)
            if look is not None and look.seen[name]:
                row["seen"] = look.seen[name]
            rows.append(row)
    return rows


def best(study: Study, rows: Sequence[Row], arm: str, promise: str) -> float | None:
    """Return the rate that the trials of an arm choose."""
    scores: dict[float, list[float]] = {}
    for row in rows:
        if row["trial"] and row["cell"][:2] == [arm, promise]:
            right, sizes = np.array(row["right"], float), np.array(row["sizes"], float)
            value = right.sum() / sizes.sum() if study.score == "overall" else (right / sizes).mean()
            scores.setdefault(row["cell"][2], []).append(float(value))
    return max(scores, key=lambda rate: statistics.mean(scores[rate])) if scores else None


def widened(study: Study, rows: Sequence[Row], rates: Sequence[float]) -> list[float]:
    """Return the grid, with a further rate at each end that an arm chose; it grows ``widest`` times at most an end."""
    chosen = {best(study, rows, arm.name, promise.name) for arm, promise, _ in cells(study, rates[:1])}
    factor, grown = study.rates[1] / study.rates[0], list(rates)
    if rates[0] in chosen and rates[0] > study.rates[0] / factor ** (study.widest - 0.5):
        grown.insert(0, round(rates[0] / factor, 6))
    if rates[-1] in chosen and rates[-1] < study.rates[-1] * factor ** (study.widest - 0.5):
        grown.append(round(rates[-1] * factor, 6))
    return grown


def seeds(study: Study, source: Pool, file: Path, replicas: int) -> Iterator[list[Row]]:
    """Yield the rows so far after every seed: trials until the grid holds its choices, then replicas."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rates = sorted({*study.rates, *(row["cell"][2] for row in rows)})

    def train(seed: int, trial: bool) -> None:
        known = {tuple(row["cell"]) for row in rows if (row["seed"], row["trial"]) == (seed, trial)}
        if not trial and not study.matched:
            known |= {
                (arm.name, promise.name, rate)
                for arm, promise, rate in cells(study, rates)
                if rate != best(study, rows, arm.name, promise.name)
            }
        fresh = performed(study, source, seed, trial, rates, known)
        with file.open("a") as target:
            target.writelines(json.dumps(row) + "\n" for row in fresh)
        rows.extend(fresh)

    while True:
        for place in range(study.trials):
            train(TRIAL + place, True)
            yield rows
        wider = widened(study, rows, rates)
        if wider == rates:
            break
        rates = wider
    for seed in range(replicas):
        train(seed, False)
        yield rows


def gathered(study: Study, source: Pool, rows: Sequence[Row]) -> dict[str, Any]:
    """Return all that the page needs: for each cell the right answers of every replica, and what the trials chose."""
    replicas = [row for row in rows if not row["trial"]]
    grid = sorted({row["cell"][2] for row in rows})
    found: dict[Cell, list[Row]] = {}
    for row in sorted(replicas, key=lambda row: int(row["seed"])):
        found.setdefault(tuple(row["cell"]), []).append(row)
    least = min(map(len, found.values()))
    names = [f"owner {place}" for place in range(len(source.group_names))] if study.dealt else source.group_names
    tuned = {
        (arm.name, promise.name): best(study, rows, arm.name, promise.name)
        for arm, promise, _ in cells(study, grid[:1])
    }
    some = next(iter(found.values()))[:least]
    return {
        "study": study.name,
        "records": replicas[0]["records"],
        "groups": list(names),
        "labels": len(source.names),
        "majority": round(float(np.bincount(source.labels).max() / len(source.labels)), 5),
        "parameters": len(source.names) * (source.inputs.shape[1] + 1),
        "sizes": [row["sizes"] for row in some]
        if any(r["sizes"] != some[0]["sizes"] for r in some)
        else some[0]["sizes"],
        **({"dealt": [source.strictest(seed) for seed in range(least)]} if study.dealt else {}),
        "rates": grid,
        "replicas": least,
        "trials": study.trials,
        "minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
        "cells": [
            {
                "arm": arm,
                "promise": promise,
                "rate": rate,
                "tuned": tuned[arm, promise] == rate,
                "spent": some[0]["spent"],
                "right": [row["right"] for row in some[:least]],
                **({"auc": [row["auc"] for row in some[:least]]} if study.auc else {}),
                **({"steep": [row["steep"] for row in some[:least]]} if study.norms else {}),
                **_seen(study, some[:least]),
            }
            for (arm, promise, rate), some in found.items()
        ],
    }


def _seen(study: Study, rows: Sequence[Row]) -> Mapping[str, Any]:
    if not all(row.get("seen") for row in rows):
        return {}
    return {"seen": np.round(np.mean([row["seen"] for row in rows], axis=0), 4).tolist()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study that was asked for, and write its figures and its page."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("study", choices=sorted(STUDIES))
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--replicas", type=int)
    asked.add_argument("--minutes", type=float, default=float("inf"))
    asked.add_argument("--work", type=Path, default=Path("runs/serving"))
    asked.add_argument("--out", type=Path, default=Path("docs/results"))
    given = asked.parse_args(arguments)
    torch.set_num_threads(1)
    study, started, rows = STUDIES[given.study], time.monotonic(), []
    given.work.mkdir(parents=True, exist_ok=True)
    source = pool(study.source, given.data_dir, given.work)
    for rows in seeds(study, source, given.work / f"{study.name}.jsonl", given.replicas or study.replicas):
        last = rows[-1]
        print(
            f"{study.name}: {'trial' if last['trial'] else 'replica'} {last['seed']}, {len(rows)} trainings", flush=True
        )
        if time.monotonic() - started > 60 * given.minutes:
            break
    if any(not row["trial"] for row in rows):
        matched_page.write(gathered(study, source, rows), given.out)


if __name__ == "__main__":
    main()
