"""The page of docs/results about densities on MNIST, made from the lines of their runs and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lined
import numpy as np
from lined import Row

LINEAR = "DP-SGD linear"
DATA = ("MNIST", "MNIST with class 8 cut to 500 records")
ALLOWED = 1.0
"""Points that the best density may lie below the linear model."""
Value = Callable[[Row], float]


def page(rows: Sequence[Row], delta: float) -> str:
    """Answer, tables, how it was made."""
    seeds = len({row["seed"] for row in rows})
    parts = [
        "# Densities on MNIST scattering features",
        "Can one release of class densities stand beside a linear model that DP-SGD trains on the same features at the "
        "same true epsilon, and does it serve the worst class better?",
        "\n".join(f"- {line}" for line in answers(rows)),
        f"Test accuracy / worst class in per cent, mean over at most {seeds} seeds with a 95 % t-interval; delta "
        f"{delta:g}, add or remove one record. Without privacy: densities with a noise multiplier of 0.02, plain SGD.",
    ]
    for name in DATA:
        here = [row for row in rows if row["data"] == name]
        if here:
            parts += [f"## {name}", table(here, _cell), "Seconds of a fit and of 10,000 predictions:"]
            parts.append(table(here, _seconds))
    parts += [
        "The linear model's learning rate is the best of three on a tenth of the training records, for every "
        "epsilon; the densities run with their defaults, which were found on MNIST. Neither is counted in epsilon.",
        "Made by `python experiments/density_mnist.py FOLDER --cache FEATURES`.",
    ]
    return "\n\n".join(parts) + "\n"


def answers(rows: Sequence[Row]) -> list[str]:
    """What the runs say about the two questions, at each epsilon."""
    said = []
    for name, (words, value) in zip(DATA, (("accuracy", accuracy), ("worst class", worst)), strict=True):
        for epsilon in sorted({row["epsilon"] for row in rows if row["epsilon"]}):
            here = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
            forms = sorted({row["form"] for row in here} - {LINEAR})
            if not forms or not any(row["form"] == LINEAR for row in here):
                continue
            best = max(forms, key=lambda form: np.mean([value(row) for row in here if row["form"] == form]))
            gains = _paired(here, best, value)
            if gains:
                said.append(
                    f"{name}, epsilon {epsilon:g}: {words} of `{best}` less the linear model's: "
                    f"{lined.said(gains)} points; {_judged(gains, -ALLOWED if value is accuracy else 0.0)}."
                )
    return said


def _judged(gains: Sequence[float], least: float) -> str:
    goal = f"at most {-least:g} point below" if least else "above the linear model"
    return f"{goal}: {'yes' if np.mean(gains) >= least else 'no'}"


def _paired(rows: Sequence[Row], form: str, value: Value) -> list[float]:
    by = {(row["form"], row["seed"]): value(row) for row in rows}
    return [by[form, seed] - by[LINEAR, seed] for name, seed in by if name == form and (LINEAR, seed) in by]


def accuracy(row: Row) -> float:
    """Per cent of all test records."""
    return float(row["accuracy"])


def worst(row: Row) -> float:
    """Per cent of the class that is served worst."""
    return float(min(row["classes"]))


def table(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    """Forms by epsilon."""
    levels = sorted({row["epsilon"] for row in rows}, key=lambda epsilon: epsilon or np.inf)
    names = [f"epsilon {epsilon:g}" if epsilon else "no privacy" for epsilon in levels]
    lines = [f"| form | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for form in sorted({row["form"] for row in rows}):
        own = [[row for row in rows if (row["form"], row["epsilon"]) == (form, epsilon)] for epsilon in levels]
        lines.append(f"| {form} | {' | '.join(cell(some) if some else '' for some in own)} |")
    return "\n".join(lines)


def _cell(rows: Sequence[Row]) -> str:
    return f"{lined.said([accuracy(row) for row in rows])} / {np.mean([worst(row) for row in rows]):.1f}"


def _seconds(rows: Sequence[Row]) -> str:
    return " / ".join(f"{np.mean([row['seconds'][part] for row in rows]):.1f}" for part in ("fit", "predict"))
