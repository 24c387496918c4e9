"""What DPSGD-F's trainings cost, by epochs and by noise: the paper's accountant, and the true epsilon.

    python experiments/epsilon_study.py       # seconds; writes docs/results/epsilon.md and its pictures

Pure arithmetic on the settings of Xu et al. 2021 (003): no data, no training. The paper counts the gradient's noise
alone, by Renyi moments and their older conversion. The truth counts gradient and noisy counts as the one release that
they are, and assumes what the paper does not do: clip bounds clamped to [C_0, 5 C_0]. Unclamped, no epsilon follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenhand._numbers import rounded_up
from evenhand.accounting import accountant
from evenhand.comparison.paper_claims import Setting, dpsgd_f
from evenhand.methods.schedules import Constant
from evenhand.reporting.charts import lines
from evenhand.reporting.svg import standalone

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COUNTS = 10.0
"""Noise of the group counts. The paper prints no number for it that we could find: this one is ours."""
NOISES = (0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class Case:
    """A training of the paper, its noise multiplier, and the epochs to look at."""

    name: str
    setting: Setting
    noise: float
    epochs: tuple[int, ...]


CASES = (
    Case("Adult", Setting(36_177, 256, 20, 1e-6), 1.0, (1, 2, 5, 10, 20, 40, 60)),
    Case("Dutch", Setting(48_336, 256, 20, 1e-6), 1.0, (1, 2, 5, 10, 20, 40, 60)),
    Case("MNIST", Setting(54_649, 256, 60, 1e-6), 0.8, (1, 2, 5, 10, 20, 40, 60, 100)),
)


@dataclass(frozen=True)
class Cost:
    """Epsilon of one training: as the paper counts, truly with its noisy counts, and truly for DP-SGD at its noise."""

    paper: float
    true: float
    dpsgd: float


COLUMNS: dict[str, Callable[[Cost], float]] = {
    "the paper's accountant": lambda cost: cost.paper,
    "true, DPSGD-F": lambda cost: cost.true,
    "true, DP-SGD": lambda cost: cost.dpsgd,
}


def cost(setting: Setting, noise: float) -> Cost:
    """All three at one noise multiplier."""
    clamped = dpsgd_f(setting, noise, COUNTS)[1]
    if clamped.claimed is None or clamped.true is None:
        raise ValueError("the clamped form has a claimed and a true epsilon")
    alone = accountant.epsilon(setting.events(Constant(), noise), setting.delta)
    return Cost(clamped.claimed, clamped.true, alone)


def by_epochs(case: Case) -> dict[float, Cost]:
    """The same noise for fewer and for more epochs."""
    return {epochs: cost(replace(case.setting, epochs=epochs), case.noise) for epochs in case.epochs}


def by_noise(case: Case) -> dict[float, Cost]:
    """The paper's epochs at other noise multipliers."""
    return {noise: cost(case.setting, noise) for noise in NOISES}


def section(case: Case) -> tuple[list[str], dict[str, str]]:
    """The part of the page on one training, and its pictures by file name."""
    told = f"noise multiplier {case.noise:g}", f"{case.setting.epochs:g} epochs"
    setting = case.setting
    parts = [
        f"## {case.name}",
        f"{setting.records:,} records, batches of {setting.batch:g}, delta {setting.delta:g}; in the paper "
        f"{told[0]} and {told[1]}.",
    ]
    pictures = {}
    studies: tuple[tuple[str, str, Callable[[Case], dict[float, Cost]]], ...] = (
        ("epochs", told[0], by_epochs),
        ("noise", told[1], by_noise),
    )
    for kind, fixed, study in studies:
        found = study(case)
        axis = "epochs" if kind == "epochs" else "noise multiplier"
        series = {name: [(x, pick(each)) for x, each in found.items()] for name, pick in COLUMNS.items()}
        words = f"Epsilon over {axis} on {case.name}, {fixed}"
        file = f"epsilon_{case.name.lower()}_{kind}.svg"
        pictures[file] = standalone(lines(series, title=words, x_label=axis, y_label="epsilon"))
        parts += [f"By {axis}, {fixed}:", f"![{words}]({file})", table(axis, found)]
    return parts, pictures


def table(axis: str, found: dict[float, Cost]) -> str:
    """Figures of one study; every epsilon is rounded up."""
    head = [axis, *COLUMNS]
    rows = [[f"{x:g}", *(rounded_up(pick(each)) for pick in COLUMNS.values())] for x, each in found.items()]
    return "\n".join([_row(head), _row(["---"] * len(head)), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> tuple[str, dict[str, str]]:
    """The whole page, and its pictures by file name."""
    parts = [
        "# What DPSGD-F costs, by epochs and by noise",
        "How much of the paper's epsilon is the accountant, and what do its noisy counts cost?",
        "Every epsilon: per record, add/remove, Poisson sampling. *The paper's accountant* sees the noise of the "
        "gradients only, by Renyi moments with the older conversion. *True, DPSGD-F* counts the noisy counts too "
        f"(noise multiplier {COUNTS:g}, ours), as one release with the gradient, and needs clip bounds clamped to "
        "[C_0, 5 C_0]: as published they are not, and no epsilon follows. *True, DP-SGD* is the gradient alone. "
        "The older accountant is the looser one: in every row it says more than even the clamped form with its noisy "
        "counts spends.",
        "Made by `python experiments/epsilon_study.py`, without data.",
    ]
    pictures: dict[str, str] = {}
    for case in CASES:
        text, drawn = section(case)
        parts += text
        pictures |= drawn
    return "\n\n".join(parts) + "\n", pictures


def main() -> None:
    """Compute everything, then write it down."""
    text, pictures = page()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "epsilon.md").write_text(text)
    for file, drawing in pictures.items():
        (RESULTS / file).write_text(drawing)


if __name__ == "__main__":
    main()
