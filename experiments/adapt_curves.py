"""Thresholds and gradient norms of Global-Adapt and Global-Adapt-V2 over a training (004, figures 1 and 2), on MNIST.

    python experiments/adapt_curves.py --data-dir FOLDER --seeds 20     # about ten seconds of one core a training
    python experiments/adapt_curves.py --pages                          # page and pictures again from the JSON file

A linear model, AdamW with one-cycle rates and the paper's rate and weight decay, at true epsilon 1. The threshold of
Global-Adapt follows from noisy counts that the training paid for, that of V2 is a public formula: both may be shown of
any data. Norms are those of the first 2,000 held-out records after each half epoch; MNIST is public, of private data
they could not be shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from following import DIGITS, Curve, command, curve, drawn, followed, table, words
from seed_intervals import over_seeds
from torch import nn

import evenhand as eh
from evenhand import models
from evenhand.data import Data, load
from evenhand.gradients import per_sample
from evenhand.reporting.group_metrics import Estimate
from evenhand.training.optimizers import Descent
from evenhand.training.private import Private

EPSILON, DELTA, EPOCHS, BATCH, PARTS, LOOKED_AT = 1.0, 1e-5, 30, 256, 2, 2000
DESCENT = Descent("adamw", 1e-3, weight_decay=1e-3, scheduler="one-cycle")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Global-Adapt": ("global_adapt", {}),
    "V2, constant noise": ("global_adapt_v2", {}),
    "V2, linear decay": ("global_adapt_v2", {"decay": "linear"}),
    "V2, time decay": ("global_adapt_v2", {"decay": "time"}),
    "V2-S, step decay": ("global_adapt_v2_s", {}),
}
ALL = "all"
"""The one group of these curves."""


def trained(name: str, train: Data, test: Data, seed: int) -> list[dict[str, Any]]:
    """Train once; return a row for each half epoch: threshold, mean norm of the gradients and accuracy."""
    torch.manual_seed(seed)
    model = models.build("linear", train.facts)
    method, settings = METHODS[name]
    promise = eh.Privacy(EPSILON, DELTA)
    plan = eh.plan(eh.method(method, settings), promise, data=train.facts, epochs=EPOCHS, batch_size=BATCH)
    optimizer, schedule = DESCENT.build(model, plan.steps)
    loss, rows = nn.CrossEntropyLoss(reduction="none"), test.fetch(torch.arange(LOOKED_AT))
    threshold: dict[str, float] = {}

    def remember(private: Private) -> None:
        threshold[ALL] = next(iter(private.followed().values()))[""]

    def look() -> dict[str, Any]:
        with torch.no_grad():
            right = (model(rows[0]).argmax(1) == rows[1]).double().mean().item()
        found = {
            "norm": per_sample(model, loss, *rows).norm.mean().item(),
            "accuracy": right,
            "threshold": threshold[ALL],
        }
        return {measure: {ALL: round(value, DIGITS)} for measure, value in found.items()}

    return followed(model, optimizer, loss, plan, train, look, parts=PARTS, schedule=schedule, after=remember)


def measured(seeds: int, data_dir: Path | None) -> dict[str, Any]:
    """Train every method with every seed; return all rows, and the processor seconds of a training."""
    train, test = load("mnist", data_dir=data_dir)
    if test is None:
        raise ValueError("MNIST has held-out records")
    started, runs = time.process_time(), []
    for name in METHODS:
        for seed in range(seeds):
            runs.append({"method": name, "seed": seed, "rows": trained(name, train, test, seed)})
            print(f"{name}, seed {seed}: {time.process_time() - started:.0f} processor seconds so far", flush=True)
    return {"seeds": seeds, "seconds": (time.process_time() - started) / len(runs), "runs": runs}


def grown(found: Mapping[str, Any], method: str, measure: str) -> Estimate:
    """Return the mean over the last fifth of the training, divided by that over the middle fifth, over seeds."""
    runs = [[row[measure][ALL] for row in run["rows"]] for run in found["runs"] if run["method"] == method]
    return over_seeds([_mean(values, 0.8, 1.0) / _mean(values, 0.4, 0.6) for values in runs])


def _mean(values: Sequence[float], start: float, stop: float) -> float:
    return statistics.mean(values[round(start * len(values)) : round(stop * len(values))])


def fallen(found: Mapping[str, Any], method: str, measure: str) -> Estimate:
    """Return the last value divided by that after the first epoch, over seeds."""
    runs = [[row[measure][ALL] for row in run["rows"]] for run in found["runs"] if run["method"] == method]
    return over_seeds([values[-1] / values[PARTS - 1] for values in runs])


def answer(found: Mapping[str, Any]) -> str:
    """Return in a paragraph what the curves say of both figures of the paper, with intervals over seeds."""
    threshold, steady = grown(found, "Global-Adapt", "threshold"), fallen(found, "V2, constant noise", "norm")
    decaying = ", ".join(f"{words(fallen(found, name, 'norm'), '.2f')} ({name})" for name in METHODS if "decay" in name)
    grows = "grows" if threshold.low > 1 else "falls" if threshold.high < 1 else "is not seen to grow"
    falls = "falls" if steady.high < 1 else "is not seen to fall"
    return (
        f"The threshold of Global-Adapt is in the last fifth of the training {words(threshold, '.2f')} times what it "
        f"is in the middle fifth: it {grows} at the end. With constant noise the mean norm ends at "
        f"{words(steady, '.2f')} of that after the first epoch, so it {falls} there; where noise decays at {decaying}."
    )


def page(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the page, and its pictures by file name."""
    curves: dict[str, dict[str, Curve]] = {
        measure: {name: curve(found, name, measure, ALL) for name in METHODS} for measure in ("threshold", "norm")
    }
    titles = {
        "threshold": ("Clip threshold over the epochs", "threshold"),
        "norm": ("Mean norm of the gradients over the epochs", "mean norm"),
    }
    pictures = {f"adapt_curves_{m}.svg": drawn(curves[m], *titles[m]) for m in titles}
    last = {
        (name, measure): curve(found, name, measure, ALL)[-1][1]
        for name in METHODS
        for measure in ("threshold", "norm", "accuracy")
    }
    rows = [
        [
            name,
            words(last[name, "threshold"]),
            words(grown(found, name, "threshold"), ".2f"),
            words(last[name, "norm"], ".2f"),
            words(fallen(found, name, "norm"), ".2f"),
            words(last[name, "accuracy"]),
        ]
        for name in METHODS
    ]
    head = ["method", "last threshold", "last over middle fifth", "last mean norm", "over that of epoch 1", "accuracy"]
    parts = [
        "# Thresholds and gradient norms of Global-Adapt and Global-Adapt-V2",
        "Does the threshold of Global-Adapt grow at the end of training, and do gradients shrink where noise decays "
        "(Chilukoti et al. 2025, figures 1 and 2)?",
        answer(found),
        f"MNIST, linear model on pixels, epsilon {EPSILON:g} counted per step, add/remove, delta {DELTA:g}; {EPOCHS} "
        f"epochs of batches of {BATCH} expected, AdamW at the paper's rate {DESCENT.lr:g} and weight decay, "
        f"one-cycle rates, thresholds and decays of the catalogue (the paper's). Means over {found['seeds']} seeds "
        f"with 95 % t-intervals; norms and accuracy are of {LOOKED_AT:,} held-out records, which no epsilon covers. "
        "The paper has a convolutional network and batches of 64.",
        table(head, rows),
        *(f"![{titles[measure][0]}](adapt_curves_{measure}.svg)" for measure in titles),
        "The paper sees the threshold of Global-Adapt grow exponentially at the end, mean norms that stay where noise "
        "is constant, and mean norms that fall where it decays. A ratio above 1 in the third column is growth; one "
        "below 1 in the fifth is a fall.",
        f"Made by `python experiments/adapt_curves.py --data-dir FOLDER --seeds {found['seeds']}`; "
        f"{found['seconds']:.0f} processor seconds a training. The figures: [adapt_curves.json](adapt_curves.json).",
    ]
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    command("adapt_curves", __doc__, measured, page)
