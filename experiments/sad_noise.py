"""How the noise of SAD-DPSGD depends on beta, gamma and the number of phases: its figures 3 to 5 at true epsilon.

    python experiments/sad_noise.py           # seconds; writes docs/results/sad_noise.md and its pictures

Pure arithmetic: every schedule is calibrated so that the whole training spends the promise exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from page_text import lined_up, listed

import evenhand as eh
from evenhand.reporting.charts import lines
from evenhand.reporting.svg import standalone
from evenhand.types import Facts

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
RECORDS, BATCH, EPOCHS, EPSILON, DELTA = 8012, 128, 50, 3.0, 1e-3
"""The public code's batch and epochs, the paper's epsilon and delta; four fifths of the 10,015 pictures."""


@dataclass(frozen=True)
class Noise:
    """What the figures show of a schedule's multipliers over the steps, and the share of steps in the first phase."""

    mean: float
    variance: float
    first: float
    length: float


COLUMNS: dict[str, Callable[[Noise], float]] = {
    "mean": lambda noise: noise.mean,
    "variance": lambda noise: noise.variance,
    "first": lambda noise: noise.first,
    "first phase, share of steps": lambda noise: noise.length,
}


def noise(beta: float = 0.8, gamma: float = 0.9, phases: int = 3) -> Noise:
    """Return the calibrated noise of one schedule."""
    method = eh.method("sad", {"noise": beta, "length": gamma, "n": phases})
    facts = Facts(RECORDS, (("all", RECORDS),))
    plan = eh.plan(method, eh.Privacy(EPSILON, DELTA), data=facts, epochs=EPOCHS, batch_size=BATCH)
    levels = np.repeat([level.noise for level in plan.levels], [level.count for level in plan.levels])
    return Noise(float(levels.mean()), float(levels.var()), plan.levels[0].noise, plan.levels[0].count / plan.steps)


STUDIES: tuple[tuple[str, str, Sequence[float], Callable[[float], Noise]], ...] = (
    ("beta", "gamma 0.9, n 3", (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), lambda value: noise(beta=value)),
    ("gamma", "beta 0.8, n 3", (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), lambda value: noise(gamma=value)),
    ("n", "beta 0.9, gamma 0.9", (1, 2, 3, 4, 5, 6, 8), lambda value: noise(beta=0.9, phases=int(value))),
)
CLAIMS = (
    ("beta", "mean", "falls", "As beta rises, the mean falls"),
    ("beta", "variance", "falls", "As beta rises, the variance falls"),
    ("beta", "first", "rises", "As beta rises, the first multiplier rises"),
    ("gamma", "mean", "rises", "As gamma falls, the mean falls"),
    ("gamma", "variance", "rises", "As gamma falls, the variance falls"),
    ("gamma", "first", "rises", "As gamma falls, the first multiplier falls"),
    ("n", "mean", "rises", "As n rises, the mean rises"),
    ("n", "variance", "rises", "As n rises, the variance rises"),
    ("n", "first", "falls", "As n rises, the first multiplier falls"),
)
"""What the paper says of its figures 3 to 5, and the direction along the parameter that this is."""


def monotone(values: Sequence[float], direction: str) -> bool:
    """Return whether values go one way from each to the next.

    >>> monotone([1, 2, 3], "rises"), monotone([1, 3, 2], "rises"), monotone([3, 2], "falls")
    (True, False, True)
    """
    return all(after > before if direction == "rises" else after < before for before, after in pairwise(values))


def page() -> tuple[str, dict[str, str]]:
    """Return the page, and its pictures by file name."""
    found = {name: {value: of(value) for value in values} for name, _, values, of in STUDIES}
    verdicts = []
    for name, column, direction, text in CLAIMS:
        values = [COLUMNS[column](each) for each in found[name].values()]
        turn = int(np.argmax(values)) if direction == "rises" else int(np.argmin(values))
        holds = "**holds**" if monotone(values, direction) else "**does not hold** over the whole range"
        at = "" if monotone(values, direction) else f" (it turns at {name} = {list(found[name])[turn]:g})"
        ends = f"{values[0]:.3f} at {min(found[name]):g}, {values[-1]:.3f} at {max(found[name]):g}"
        verdicts.append(f"{text}: {holds}; {ends}{at}.")
    parts = [
        "# SAD-DPSGD: what beta, gamma and n do to the noise",
        "Figures 3, 4 and 5 of Huang and Xie 2025 (000), with every schedule calibrated to the same true promise.",
        listed(verdicts),
        f"{RECORDS:,} records, batches of {BATCH} expected, {EPOCHS} epochs, epsilon {EPSILON:g}, delta "
        f"{DELTA:g}, add/remove, "
        "Poisson sampling. Multipliers of the gradients' noise; mean and variance over the steps. A constant "
        "schedule is "
        "beta = 1. The paper prints no values for these figures, so directions are compared and not heights; its own "
        "accountant adds Renyi moments, which moves heights only.",
    ]
    pictures = {}
    for name, fixed, _, _ in STUDIES:
        series = {
            words: [(float(value), pick(each)) for value, each in found[name].items()]
            for words, pick in list(COLUMNS.items())[:3]
        }
        title = f"Noise multipliers over {name}, {fixed}"
        drawn = lines(series, title=title, x_label=name, y_label="noise multiplier")
        pictures[f"sad_noise_{name}.svg"] = standalone(drawn)
        rows = [
            [f"{value:g}", *(f"{pick(each):.4f}" for pick in COLUMNS.values())] for value, each in found[name].items()
        ]
        parts += [f"## {name}", f"{fixed}.", f"![{title}](sad_noise_{name}.svg)", lined_up([name, *COLUMNS], rows)]
    parts.append("Made by `python experiments/sad_noise.py`, without data.")
    return "\n\n".join(parts) + "\n", pictures


def main() -> None:
    """Compute everything, then write it down."""
    text, pictures = page()
    (RESULTS / "sad_noise.md").write_text(text)
    for file, drawing in pictures.items():
        (RESULTS / file).write_text(drawing)


if __name__ == "__main__":
    main()
