"""The pages of docs/results about serving small classes, from finished trainings of serving.py and nothing else.

    python experiments/serving_page.py mnist8 [--work FOLDER] [--out FOLDER]

Intervals hold the randomness of training and of the held-out records (see evenhand.reporting.uncertainty); those of the
bars are simultaneous over all bars of a study.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from page_text import lined_up, listed
from serving import PATH, Store, Task, best_rate, best_tau, trial_score, tried_rates
from serving_studies import STUDIES, Bar, Line, Study

from evenhand.reporting.charts import lines as drawn_lines
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import standalone
from evenhand.reporting.uncertainty import LEVEL, Split, difference, of_values

WORDS = {"overall": "overall", "weighted": "weighted to the training shares", "balanced": "mean over classes"}
PARTS = {5: "a fifth", 8: "an eighth"}


@dataclass(frozen=True)
class Cell:
    """Answers of one line at one strength: right answers by replica and class, and how many records a class has."""

    recalls: NDArray[np.float64]
    sizes: NDArray[np.float64]
    shares: NDArray[np.float64]
    split: Split

    def estimate(self, measure: str, level: float = LEVEL) -> Estimate:
        """Return a measure in percent with its interval."""
        weights = self._weights(measure)
        values = self.recalls @ weights
        mean = self.recalls.mean(0)
        chance = float((weights**2 * mean * (1 - mean) / self.sizes).sum())
        found = of_values(values.tolist(), chance, int(self.sizes.sum()), self.split, level=level, bounds=(0.0, 1.0))
        return _percent(found)

    @property
    def worst(self) -> int:
        """Return the class with the smallest mean over replicas."""
        return int(self.recalls.mean(0).argmin())

    def _weights(self, measure: str) -> NDArray[np.float64]:
        count = len(self.sizes)
        if measure == "worst":
            return np.eye(count, dtype=np.float64)[self.worst].copy()
        return {
            "overall": self.sizes / self.sizes.sum(),
            "weighted": self.shares,
            "balanced": np.full(count, 1 / count),
        }[measure]

    def above(self, other: Cell, level: float = LEVEL) -> Estimate:
        """Return by how much the worst class is better than the worst of another line, paired by replica."""
        mine, theirs = self.worst, other.worst
        found = difference(
            self.recalls[:, mine].tolist(),
            other.recalls[:, theirs].tolist(),
            int(self.sizes[mine]),
            self.split,
            level=level,
            right_records=int(other.sizes[theirs]),
        )
        return _percent(found)


def _percent(estimate: Estimate) -> Estimate:
    return Estimate(100 * estimate.value, 100 * estimate.low, 100 * estimate.high, estimate.count)


class Figures:
    """All finished trainings of a study, and what was chosen in its trials."""

    def __init__(self, study: Study, store: Store) -> None:
        self.study, self.store = study, store

    def rate(self, line: Line, epsilon: float) -> float:
        """Return the chosen rate of a line."""
        return best_rate(self.study, self.store, self.study.line(line.tuned_as or line.name), epsilon)

    def rows(self, line: Line, epsilon: float) -> list[dict[str, Any]]:
        """Return the replicas of a line, by seed."""
        rate = self.rate(line, epsilon)
        rows = [
            row for task, row in self.store.rows.items() if _is_replica(task, self.study.training(line), epsilon, rate)
        ]
        return sorted(rows, key=lambda row: int(row["seed"]))

    def cell(self, line: Line, epsilon: float, tau: float) -> Cell:
        """Return the answers of a line at one strength."""
        rows = self.rows(line, epsilon)
        paths = [next(entry for entry in row["path"] if entry["tau"] == tau) for row in rows]
        sizes = np.mean([row["sizes"] for row in rows], axis=0)
        resampled = any(row["sizes"] != rows[0]["sizes"] for row in rows)
        split = Split(float(sizes.sum() / rows[0]["records"]) if resampled else None)
        recalls = np.array([path["classes"] for path in paths])
        return Cell(recalls, sizes, np.mean([row["shares"] for row in rows], axis=0), split)

    def tau(self, line: Line, epsilon: float, goal: str) -> float:
        """Return the strength that a goal has in the trials."""
        if goal == "as trained":
            return line.tau
        if goal != "kept":
            return best_tau(self.study, self.store, line, epsilon, goal)
        rate, least = self.rate(line, epsilon), (self.study.overall_at_least or 0.0) / 100
        good = [
            tau for tau in PATH if trial_score(self.study, self.store, line, epsilon, rate, tau, "overall") >= least
        ]
        return max(good, default=0.0)

    def goals(self, line: Line) -> list[str]:
        """Return the goals that a line's answers are shown for."""
        if not line.moved:
            return ["as trained"]
        return ["balanced", "worst", *(["kept"] if self.study.overall_at_least is not None else [])]


def _is_replica(task: Task, line: str, epsilon: float, rate: float) -> bool:
    return (task.line, task.epsilon, task.rate, task.trial) == (line, epsilon, rate, False)


def _printed(estimate: Estimate, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{estimate.value:{sign}.1f} ({estimate.low:{sign}.1f} to {estimate.high:{sign}.1f})"


def _goal_words(goal: str, study: Study) -> str:
    kept = f"overall kept at {study.overall_at_least:g} %" if study.overall_at_least is not None else ""
    return {"as trained": "as trained", "balanced": "mean over classes", "worst": "worst class", "kept": kept}[goal]


def results(figures: Figures, names: Sequence[str], epsilon: float) -> str:
    """Return the table of one epsilon."""
    study, base = figures.study, figures.study.lines[0]
    head = ["line", "goal", "rate", "tau", *WORDS.values(), "worst class", "worst against DP-SGD's", "replicas"]
    body = []
    usual = figures.cell(base, epsilon, base.tau)
    for line in study.lines:
        if epsilon not in (line.epsilons or study.epsilons) or not figures.rows(line, epsilon):
            continue
        for goal in figures.goals(line):
            tau = figures.tau(line, epsilon, goal)
            cell = figures.cell(line, epsilon, tau)
            worst = f"{names[cell.worst]}: {_printed(cell.estimate('worst'))}"
            against = "" if line is base else _printed(cell.above(usual), signed=True)
            body.append(
                [
                    *(line.name, _goal_words(goal, study), f"{figures.rate(line, epsilon):g}", f"{tau:g}"),
                    *(_printed(cell.estimate(measure)) for measure in WORDS),
                    *(worst, against, str(len(cell.recalls))),
                ]
            )
    return lined_up(head, body)


def verdicts(figures: Figures, names: Sequence[str]) -> list[str]:
    """Return a sentence for every bar of the study, with intervals that hold for all of them together."""
    study, level = figures.study, 1 - (1 - LEVEL) / max(1, sum(len(bar.least) for bar in figures.study.bars))
    return [_verdict(figures, bar, measure, least, level, names) for bar in study.bars for measure, least in bar.least]


def _verdict(figures: Figures, bar: Bar, measure: str, least: float, level: float, names: Sequence[str]) -> str:
    study = figures.study
    line = study.line(bar.line)
    cell = figures.cell(line, bar.epsilon, figures.tau(line, bar.epsilon, bar.goal))
    if measure in (*WORDS, "worst"):
        value = cell.estimate(measure, level)
    else:
        value = cell.above(figures.cell(study.lines[0], bar.epsilon, study.lines[0].tau), level)
    reached = "reached" if value.value >= least else "NOT reached"
    sure = "" if value.low > least or value.high < least else ", not decided by the interval"
    words = f"{WORDS.get(measure, measure)}{f' ({names[cell.worst]})' if measure == 'worst' else ''}"
    goal = _goal_words(bar.goal, study)
    return (
        f"Epsilon {bar.epsilon:g}, {bar.line} (goal: {goal}), {words} at least {least:g}: **{reached}**{sure}; "
        f"{_printed(value)}."
    )


def paired(figures: Figures, names: Sequence[str]) -> list[str]:
    """Return a sentence for every pair of lines: their difference, paired by replica, in the class served worst."""
    study, sentences = figures.study, []
    for left, right in study.pairs:
        for epsilon in study.line(right).epsilons or study.epsilons:
            mine, other = (figures.cell(study.line(name), epsilon, study.line(name).tau) for name in (left, right))
            place = figures.cell(study.lines[0], epsilon, study.lines[0].tau).worst
            values = (mine.recalls[:, place] - other.recalls[:, place]).tolist()
            records = int(mine.sizes[place])
            training = _percent(of_values(values, 0.0, records, Split()))
            both = _percent(
                difference(mine.recalls[:, place].tolist(), other.recalls[:, place].tolist(), records, mine.split)
            )
            sentences.append(
                f"{left} against {right} in class {names[place]}, epsilon {epsilon:g}, {len(values)} replicas: "
                f"{_printed(training, signed=True)} points on these held-out records; "
                f"{both.low:+.1f} to {both.high:+.1f} with the chance of {records} held-out records, an upper bound."
            )
    return sentences


def frontier(figures: Figures, epsilon: float) -> str:
    """Return what one training gives at every strength."""
    line = next((line for line in figures.study.lines if line.moved), figures.study.lines[0])
    body = []
    for tau in PATH:
        cell = figures.cell(line, epsilon, tau)
        body.append([f"{tau:g}", *(_printed(cell.estimate(measure)) for measure in (*WORDS, "worst"))])
    return lined_up(["tau", *WORDS.values(), "worst class"], body)


def picture(figures: Figures) -> str:
    """Return the frontier as a drawing: overall accuracy against that of the worst class."""
    line = next((line for line in figures.study.lines if line.moved), figures.study.lines[0])
    series = {}
    for epsilon in figures.study.epsilons:
        cells = [figures.cell(line, epsilon, tau) for tau in PATH]
        for measure, words in (("overall", "overall"), ("balanced", "mean of classes"), ("worst", "worst class")):
            values = [(tau, cell.estimate(measure).value) for tau, cell in zip(PATH, cells, strict=True)]
            series[f"{words}, epsilon {epsilon:g}"] = values
    title = "What one training gives at every strength of the offset: mean over replicas"
    worst = f"worst class, epsilon {figures.study.epsilons[0]:g}"
    return standalone(drawn_lines(series, title=title, x_label="tau", y_label="right answers, %", highlight=worst))


def _grid(study: Study) -> str:
    if len({line.rates for line in study.lines if line.optimizer == "sgd" and not line.tuned_as}) == 1:
        return "from one grid for all lines, widened where the best lay at its end"
    return (
        "from three rates a factor of 2 apart about the one that earlier trials on training records chose from "
        "a grid a "
        "factor of 4 apart, the same for all lines, so that both ends lie inside that grid"
    )


def _pooled(study: Study) -> str:
    return ", the worst class being that with the smallest mean over them" if study.pooled else ""


def tuning(figures: Figures) -> str:
    """Return the scores of all trials."""
    body = []
    for line in figures.study.lines:
        for epsilon in line.epsilons or figures.study.epsilons:
            if line.tuned_as:
                continue
            for rate in tried_rates(figures.study, figures.store, line, epsilon):
                strengths = PATH if line.moved else (line.tau,)
                score = max(
                    trial_score(figures.study, figures.store, line, epsilon, rate, tau, "balanced") for tau in strengths
                )
                mark = " (chosen)" if rate == figures.rate(line, epsilon) else ""
                body.append([line.name, f"{epsilon:g}", f"{rate:g}{mark}", f"{100 * score:.1f}"])
    return lined_up(["line", "epsilon", "rate", "mean over classes, %"], body)


def page(figures: Figures, names: Sequence[str]) -> str:
    """Return the page of a study."""
    study = figures.study
    name = f"serving_{study.name}"
    replicas = [row for row in figures.store.rows.values() if not row["trial"]]
    spent = max(row["spent"] / row["epsilon"] for row in replicas)
    minutes = sum(row["seconds"] for row in figures.store.rows.values()) / 60
    rare = ""
    if study.rare is not None:
        rare = f"class {names[study.rare[0]]} cut to {study.rare[1]} training records, drawn anew in every replica; "
    inputs = "pixels" if study.features == "none" else f"{study.features} features"
    drawn = ""
    if replicas[0]["sizes"] != replicas[-1]["sizes"]:
        drawn = ", drawn anew in every replica, all pictures of a lesion on one side"
    setting = [
        f"Data: {study.source}, {replicas[0]['records']:,} training records; {rare}"
        f"{sum(replicas[0]['sizes']):,} held-out records"
        f"{drawn}.",
        f"Model: linear on {inputs}; batches of {study.batch:,} records expected, {study.epochs:g} "
        f"epochs, momentum 0.9, linear decay, weights averaged with decay {study.average:g}, clip bound 0.1.",
        f"True epsilon, add/remove one record, delta {study.delta:g}, noisy counts of labels included; at most "
        f"{100 * spent:.2f} % of each promise is spent.",
        f"Rates are chosen by the mean over classes in {study.trials} trials on {PARTS[study.part]} of the training "
        f"records, {_grid(study)}; a line whose answers are moved has its "
        f"strength tau chosen by the same trials{_pooled(study)}. Trials are research on public data: their "
        "epsilon is in no figure.",
        "Overall is the share of right answers among held-out records as they are. Weighted to the training shares is "
        "what records like the training ones would see.",
    ]
    parts = [f"# {study.title}", "## Answer", study.answer]
    if study.bars:
        parts += ["What was to be reached, with intervals that hold for all of these together:"]
        parts += [listed(verdicts(figures, names))]
    parts += ["## Setting", listed(setting), "## Results"]
    parts += ["Percent, with 95 % intervals that hold the randomness of training and of the held-out records."]
    for epsilon in study.epsilons:
        parts += [f"Epsilon {epsilon:g}:", results(figures, names, epsilon)]
    parts += [listed(paired(figures, names))]
    parts += [
        "## One training, every strength",
        f"![What one training gives at every strength of the offset]({name}.svg)",
        *(part for epsilon in study.epsilons for part in (f"Epsilon {epsilon:g}:", frontier(figures, epsilon))),
        "## Tuning",
        tuning(figures),
        "## Again",
        f"About {minutes:.0f} processor minutes, features not counted.",
        f"```text\npython experiments/serving.py {study.name} --data-dir FOLDER\n"
        f"python experiments/serving_page.py {study.name}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page that was asked for."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("study", choices=sorted(STUDIES))
    asked.add_argument("--work", type=Path, default=Path("runs/serving"))
    asked.add_argument("--out", type=Path, default=Path("docs/results"))
    given = asked.parse_args(arguments)
    study = STUDIES[given.study]
    with np.load(given.work / f"{study.source}-{study.features}.npz") as stored:
        names = [str(name) for name in stored["names"]]
    figures = Figures(study, Store(given.work / f"{study.name}.jsonl"))
    (given.out / f"serving_{study.name}.md").write_text(page(figures, names))
    (given.out / f"serving_{study.name}.svg").write_text(picture(figures))


if __name__ == "__main__":
    main()
