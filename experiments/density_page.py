"""The page of docs/results about densities, made from the lines of their runs and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lined
import numpy as np
from lined import Row

from evenhand.reporting.charts import lines
from evenhand.reporting.svg import standalone

LINEAR, PUBLISHED = "DP-SGD linear", "as published (not private)"
DATA = ("MNIST", "MNIST with class 8 cut to 500 records", "CIFAR-10, 10,000 records", "HAM10000")
DRAWN = {
    LINEAR: LINEAR,
    "moment_density": "moments",
    "random_feature_density": "random features",
    "random_feature_density, smoothing 1": "smoothed",
}
"""Forms in the pictures, by names that fit beside a line; the others lie far below."""
ALLOWED = 1.0
"""Points that the best density may lie below the linear model on MNIST."""
SHOWN = 3.0
"""The epsilon at which every class is shown."""
Value = Callable[[Row], float]


def accuracy(row: Row) -> float:
    """Per cent of all test records."""
    return float(row["accuracy"])


def worst(row: Row) -> float:
    """Per cent of the class that is served worst."""
    return float(min(row["classes"]))


def disparity(row: Row) -> float:
    """Points between the classes that are served best and worst."""
    return float(max(row["classes"]) - min(row["classes"]))


def least_auc(row: Row) -> float:
    """ROC-AUC of the class that is told from the others worst, in per cent."""
    return 100 * float(min(row["auc"]))


def page(rows: Sequence[Row], delta: float, minutes: float) -> tuple[str, dict[str, str]]:
    """The text, and its pictures by file name; ``minutes`` is what all of it took, features and tuning included."""
    seeds = len({row["seed"] for row in rows})
    parts = [
        "# Densities on scattering features",
        "Can one release of class densities stand beside a linear model that DP-SGD trains on the same features at the "
        "same true epsilon, and does it serve the worst class better?",
        "\n".join(f"- {line}" for line in answers(rows)),
        f"Everything is in per cent of test records, mean over at most {seeds} seeds, with a 95 % t-interval; delta "
        f"{delta:g}, add or remove one record. Without privacy: densities with a noise multiplier of 0.02, plain SGD, "
        "and the form of the paper, for which no epsilon holds (one seed, three passes of its projection).",
    ]
    parts.append(
        "Above, the density that is named is the best by the same figures. `noisy_embedding_density` releases every "
        "record by itself, so that budgets can differ from record to record; its noise is that of a single record, "
        "which leaves little at these epsilons. The others release sums, whose noise many records share."
    )
    pictures: dict[str, str] = {}
    for number, name in enumerate(DATA):
        here = [row for row in rows if row["data"] == name]
        if here:
            text, drawn = section(name, here, f"densities_{number + 1}")
            parts, pictures = parts + text, pictures | drawn
    parts += [
        "## How it was made",
        costs(rows),
        "The linear model's learning rate is the best of three on a tenth of the training records, for every "
        "epsilon; the densities run with their defaults, which were found on MNIST. Neither is counted in epsilon.",
        f"Made by `python experiments/densities.py DATA --cache FEATURES`; {minutes:.0f} minutes of runs on shared "
        "cores, features and tuning included.",
    ]
    return "\n\n".join(parts) + "\n", pictures


def section(name: str, rows: Sequence[Row], stem: str) -> tuple[list[str], dict[str, str]]:
    """The part of the page on one data set, and its pictures."""
    parts, pictures = [f"## {name}"], {}
    for value, kind, words in ((accuracy, "accuracy", "Accuracy"), (worst, "worst", "Accuracy on the worst class")):
        title, file = f"{words} over epsilon, {name}", f"{stem}_{kind}.svg"
        drawing = lines(curves(rows, value), title=title, x_label="epsilon", y_label="per cent")
        pictures[file] = standalone(drawing)
        parts.append(f"![{title}]({file})")
    parts += [
        "Accuracy / worst class:",
        table(rows, lambda some: f"{_said(some, accuracy)} / {_mean(some, worst):.1f}"),
        "Points between the best and the worst class / lowest ROC-AUC of a class:",
        table(rows, lambda some: f"{_mean(some, disparity):.1f} / {_mean(some, least_auc):.1f}"),
    ]
    shown = [row for row in rows if row["epsilon"] == SHOWN]
    if shown:
        parts += [f"Accuracy of every class at epsilon {SHOWN:g}:", classes(shown)]
    return parts, pictures


def curves(rows: Sequence[Row], value: Value) -> dict[str, list[tuple[float, float]]]:
    """Mean over seeds by epsilon, for the forms that are drawn."""
    found = {}
    for form, short in DRAWN.items():
        own = [row for row in rows if row["form"] == form and row["epsilon"]]
        levels = sorted({row["epsilon"] for row in own})
        if levels:
            found[short] = [(at, _mean([row for row in own if row["epsilon"] == at], value)) for at in levels]
    return found


def answers(rows: Sequence[Row]) -> list[str]:
    """What the runs say about both questions, on each data set at each epsilon."""
    said = []
    for name in DATA:
        for epsilon in sorted({row["epsilon"] for row in rows if row["epsilon"]}):
            here = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
            if not any(row["form"] == LINEAR for row in here):
                continue
            for words, value in (("accuracy", accuracy), ("worst class", worst)):
                best = max(_forms(here, LINEAR), key=lambda form: _mean(_of(here, form), value), default=None)
                gains = [] if best is None else _paired(here, best, value)
                if gains:
                    told = f"{words} of `{best}` less the linear model's: {lined.said(gains)} points"
                    said.append(f"{name}, epsilon {epsilon:g}: {told}{judged(name, words, gains)}.")
    return said


def judged(name: str, words: str, gains: Sequence[float]) -> str:
    """Whether the goal is reached that was set: accuracy on MNIST, the worst class where a digit is rare."""
    goals = {(DATA[0], "accuracy"): -ALLOWED, (DATA[1], "worst class"): 0.0}
    least = goals.get((name, words))
    if least is None:
        return ""
    goal = f"at most {-least:g} point below" if least else "above the linear model"
    return f"; {goal}: {'yes' if np.mean(gains) >= least else 'no'}"


def costs(rows: Sequence[Row]) -> str:
    """What a fit and predictions take."""
    lines = [
        "| form, all records of MNIST | seconds of a fit | seconds of 10,000 predictions | MB |",
        "|---|---|---|---|",
    ]
    for form in _forms(rows):
        own = [row for row in _of(rows, form) if row["data"] == DATA[0]]
        if own:
            parts = [np.median([row["seconds"][part] for row in own]) for part in ("fit", "predict")]
            memory = max(row["memory"] for row in own)
            lines.append(f"| {form} | {parts[0]:.1f} | {parts[1]:.1f} | {memory:,.0f} |")
    told = (
        "Medians on one core that other work may have shared; MB is the most that fit and predictions needed beside "
        "the features, which stay in a file."
    )
    return "\n".join([*lines, "", told])


def table(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    """Forms by epsilon."""
    levels = sorted({row["epsilon"] for row in rows}, key=lambda epsilon: epsilon or np.inf)
    names = [f"epsilon {epsilon:g}" if epsilon else "no privacy" for epsilon in levels]
    lines = [f"| form | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for form in _forms(rows):
        own = [[row for row in _of(rows, form) if row["epsilon"] == epsilon] for epsilon in levels]
        lines.append(f"| {form} | {' | '.join(cell(some) if some else '' for some in own)} |")
    return "\n".join(lines)


def classes(rows: Sequence[Row]) -> str:
    """Forms by class."""
    count = len(rows[0]["classes"])
    lines = [f"| form | {' | '.join(map(str, range(count)))} |", "|---" * (count + 1) + "|"]
    for form in _forms(rows):
        means = np.mean([row["classes"] for row in _of(rows, form)], axis=0)
        lines.append(f"| {form} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return "\n".join(lines)


def _forms(rows: Sequence[Row], *without: str) -> list[str]:
    return sorted({row["form"] for row in rows} - set(without))


def _of(rows: Sequence[Row], form: str) -> list[Row]:
    return [row for row in rows if row["form"] == form]


def _paired(rows: Sequence[Row], form: str, value: Value) -> list[float]:
    other = {row["seed"]: value(row) for row in _of(rows, LINEAR)}
    return [value(row) - other[row["seed"]] for row in _of(rows, form) if row["seed"] in other]


def _mean(rows: Sequence[Row], value: Value) -> float:
    return float(np.mean([value(row) for row in rows]))


def _said(rows: Sequence[Row], value: Value) -> str:
    return lined.said([value(row) for row in rows])
