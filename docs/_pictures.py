"""The pictures of README and front page that are drawn from figures: who is served, what speed costs, which method.

    python docs/_pictures.py train     trains the README's first command with 20 seeds, for both goals (a few minutes)
    python docs/_pictures.py           draws docs/images/*.svg from the figures that are there

Screenshots of reports are made by docs/_screenshots.py.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.reporting.comparison_charts import dots
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import COLOURS, SIZE, STRONG, drawing, hover, line, standalone, text
from evenhand.reporting.text import width
from evenhand.reporting.uncertainty import Split, of_values

HERE = Path(__file__).parent
IMAGES = HERE / "images"
GOALS = IMAGES / "goals.json"
SPEED_PAGE = HERE / "explanation" / "speed.md"
SEEDS = 20
WHOLE = "all records"


def train(out: Path = GOALS) -> None:
    """Train as the README's first command does, once for each seed, and move the answers of every run.

    Both goals are one training: its epsilon is the same, and moving the answers spends nothing.
    """
    from typer.testing import CliRunner

    import evenhand as eh
    from evenhand.cli import app
    from evenhand.runs.folder import Folder

    def evenhand(*words: str) -> None:
        done = CliRunner().invoke(app, ["--quiet", *words])
        if done.exit_code:
            raise RuntimeError(done.output)

    figures: dict[str, Any] = {"goals": {"overall": [], "worst": []}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENHAND_STATE"] = str(Path(folder) / "state")
        for seed in range(SEEDS):
            run = Path(folder) / f"run{seed}"
            evenhand("train", "--data", "digits", "--epsilon", "3", "--seed", str(seed), "--out", str(run))
            for goal, answers in figures["goals"].items():
                if goal != "overall":
                    evenhand("adjust", str(run), "--goal", goal)
                row = Folder.existing(run).last_evaluation()
                answers.append({WHOLE: row["accuracy"], **row["groups"]})
                figures["records"] = {WHOLE: row["records"], **row["group_records"]}
            figures["epsilon"] = max(figures.get("epsilon", 0.0), eh.verify(run)["epsilon"])
    out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def goals(figures: Mapping[str, Any], size: int = 560) -> str:
    """Return the accuracy of every class under both goals, means over seeds with intervals, so many pixels wide."""
    names = {"goal overall (the default)": "overall", "goal worst, the same trainings": "worst"}
    rows = [
        (name, {words: _estimate(figures, goal, name) for words, goal in names.items()}) for name in figures["records"]
    ]
    title = (
        f"Digits, class 8 made a minority, the same epsilon: right answers per class under two goals, "
        f"{len(figures['goals']['overall'])} trainings"
    )
    return standalone(dots(rows, title=title, unit="%", worst=("class 8",), size=size))


def _estimate(figures: Mapping[str, Any], goal: str, name: str) -> Estimate:
    values = [answers[name] for answers in figures["goals"][goal]]
    count, mean = figures["records"][name], sum(values) / len(values)
    return of_values(values, mean * (1 - mean) / count, count, Split(), bounds=(0.0, 1.0))


@dataclass(frozen=True)
class Speed:
    """One model's step as multiples of plain SGD's, by competitor."""

    model: str
    multiples: Mapping[str, float]


def speeds(page: str, threads: str = "1") -> list[Speed]:
    """Return the figures of the table of times in the page on speed."""
    table = page.partition("<!-- benchmark: begin -->")[2].partition("\n\n")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.strip().splitlines())
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    shown = ("ours", "Opacus hooks", "Opacus ghost", "vmap(grad)")
    return [
        Speed(row["model"], {name: float(row[name].split()[0]) for name in shown})
        for row in cells
        if row["threads"] == threads
    ]


def speed(rows: Sequence[Speed]) -> str:
    """Return the time of a private step beside plain SGD's, one row per model, on a logarithmic axis."""
    size, top, tall = 560.0, 62.0, 30.0
    left = max(width(row.model, SIZE) for row in rows) + 14
    right, bottom = size - 16, top + tall * len(rows)
    highest = max(value for row in rows for value in row.multiples.values())

    def at(value: float) -> float:
        return left + 8 + math.log(value / 0.8) / math.log(1.15 * highest / 0.8) * (right - left - 8)

    names, shapes = list(rows[0].multiples), ("m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", "m-4-4h8v8h-8z", "m0-5l5 9h-10z")
    parts, x = [], 0.0
    looks = dict(zip(names, zip((STRONG, *COLOURS[1:]), (*shapes, "m0-6l6 6-6 6-6-6z"), strict=False), strict=True))

    def mark(x: float, y: float, name: str) -> str:
        colour, shape = looks[name]
        return f'<path d="M{x:.1f} {y:.1f}{shape}" fill="{colour}" stroke="var(--eh-page,#fff)" stroke-width="1"/>'

    for name in names:
        words = "evenhand" if name == "ours" else name
        parts += [mark(x + 6, 10, name), text(x + 17, 14.5, words, bold=name == "ours")]
        x += width(words, SIZE) + 42
    for tick in (1, 2, 5, 10, 20):
        if tick < 1.15 * highest:
            parts.append(
                line([(at(tick), top - 12), (at(tick), bottom)], "currentColor", faint=0.5 if tick == 1 else 0.13)
            )
            parts.append(text(at(tick), top - 18, f"{tick}x", "middle", muted=True))
    for place, row in enumerate(rows):
        y = top + tall * (place + 0.5) - 6
        inner = [text(0, y + SIZE * 0.36, row.model)]
        inner += [mark(at(value), y, name) for name, value in reversed(row.multiples.items())]
        told = ", ".join(f"{'evenhand' if name == 'ours' else name} {value:g}" for name, value in row.multiples.items())
        parts.append(hover(f"{row.model}: {told}", inner, row.model))
    parts.append(text((left + right) / 2, bottom + 16, "time of a step, plain SGD = 1x", "middle", muted=True))
    title = "Time of a private step as a multiple of plain SGD's, one thread, from docs/explanation/speed.md"
    told = "; ".join(f"{row.model} {row.multiples['ours']:g}" for row in rows)
    return standalone(drawing(size, bottom + 24, title, f"evenhand: {told}.", parts))


@dataclass(frozen=True)
class Question:
    """A question of the decision picture, and what to take where the answer is yes."""

    words: str
    answer: str
    why: str


QUESTIONS = (
    Question("Did people get different promises?", "ino_scale or idp_scale", "a budget for each owner"),
    Question("Are some labels rare?", "dpsgd with goal balanced or worst", "noisy counts move the answers"),
    Question("Do groups differ that are no labels?", "dpsgd, dpsgd_f and naive", "compare them: evenhand compare"),
    Question("Frozen features, and no wish to tune?", "moment_density", "one release, no gradient steps"),
    Question("Is it hard to choose a clip bound?", "auto_s or adaptive_clip", "the bound matters less, or is followed"),
)


def decision(questions: Sequence[Question] = QUESTIONS) -> str:
    """Return the questions in order, narrow enough for a phone; the first yes decides."""
    size, tall, top = 372.0, 96.0, 0.0
    parts = []
    for place, question in enumerate(questions, 1):
        y = top + tall * (place - 1)
        frame = 'fill="none" stroke="currentColor" stroke-opacity="0.35" stroke-width="1"'
        parts.append(f'<rect x="0" y="{y:.1f}" width="{size:g}" height="34" rx="6" {frame}/>')
        parts.append(text(12, y + 22, f"{place}  {question.words}", bold=True))
        parts.append(line([(26, y + 34), (26, y + 58), (50, y + 58)], STRONG, thick=1.5))
        parts.append(f'<path d="M50 {y + 54:.1f}l7 4-7 4z" fill="{STRONG}" stroke="none"/>')
        parts.append(text(32, y + 50, "yes", colour=STRONG))
        parts.append(text(64, y + 60, question.answer, bold=True, colour="var(--eh-blue,#0072b2)"))
        parts.append(text(64, y + 77, question.why, muted=True))
        parts.append(line([(10, y + 34), (10, y + tall)], "currentColor", faint=0.35, dash="3 3"))
    y = top + tall * len(questions)
    edge = 'fill="none" stroke="var(--eh-blue,#0072b2)" stroke-width="1.5"'
    parts.append(f'<rect x="0" y="{y:.1f}" width="{size:g}" height="34" rx="6" {edge}/>')
    parts.append(text(12, y + 22, "no to all: dpsgd, the default", bold=True))
    told = " ".join(f"{question.words} Yes: {question.answer}." for question in questions)
    return standalone(drawing(size, y + 36, "Which method? The first yes decides", f"{told} No to all: dpsgd.", parts))


PICTURES: dict[str, Callable[[], str]] = {
    "goals": lambda: goals(json.loads(GOALS.read_text(encoding="utf-8"))),
    "goals-narrow": lambda: goals(json.loads(GOALS.read_text(encoding="utf-8")), 340),
    "speed": lambda: speed(speeds(SPEED_PAGE.read_text(encoding="utf-8"))),
    "which-method": decision,
}


def main(arguments: Sequence[str]) -> None:
    """Train if asked for, then draw everything."""
    if list(arguments) == ["train"]:
        train()
    elif arguments:
        raise SystemExit(__doc__)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
