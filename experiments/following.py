"""Trainings that are looked at on the way: the loop, the curves over seeds, and the command that writes their page."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from seed_intervals import over_seeds
from torch import nn

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.data import Data
from evenhand.reporting.charts import lines
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import standalone
from evenhand.reporting.text import unmarked
from evenhand.training.optimizers import Schedule
from evenhand.training.private import Private

RESULTS = Path(__file__).parent.parent / "docs" / "results"
DIGITS = 5
Curve = list[tuple[float, Estimate]]


def followed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: nn.Module,
    plan: Plan,
    train: Data,
    look: Callable[[], Mapping[str, Any]],
    *,
    parts: int = 1,
    schedule: Schedule | None = None,
    after: Callable[[Private], None] = lambda private: None,
) -> list[dict[str, Any]]:
    """One training; a row of what ``look`` sees after each of the ``parts`` of an epoch.

    ``after`` is called after every step. The run's folder is not kept.
    """
    per_epoch, rows = train.facts.records / plan.expected_batch, []
    per_row = per_epoch / parts
    with (
        tempfile.TemporaryDirectory() as folder,
        eh.attach(model, optimizer, loss, plan, out=Path(folder) / "run", compose=False) as private,
    ):
        for batch in private.batches(train):
            if schedule is not None:
                schedule.go_to(private.position)
            private.step(batch)
            after(private)
            if int(private.position / per_row) > int((private.position - 1) / per_row) or not private.remaining:
                rows.append({"epoch": round(private.position / per_epoch, 2), **look()})
    return rows


def curve(found: Mapping[str, Any], method: str, measure: str, group: str) -> Curve:
    """Means over the seeds of one method at every row: epoch, and the measure of one group."""
    runs = [run["rows"] for run in found["runs"] if run["method"] == method]
    return [
        (float(rows[0]["epoch"]), over_seeds([row[measure][group] for row in rows])) for rows in zip(*runs, strict=True)
    ]


def drawn(series: Mapping[str, Curve], title: str, y_label: str, scale: float = 1, *, x_label: str = "epoch") -> str:
    """The means of several curves as a picture of its own."""
    values = {name: [(epoch, scale * each.value) for epoch, each in points] for name, points in series.items()}
    return standalone(lines(values, title=title, x_label=x_label, y_label=y_label))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    lined = [f"| {' | '.join(map(unmarked, row))} |" for row in [head, *rows]]
    return "\n".join([lined[0], f"|{'---|' * len(head)}", *lined[1:]])


def words(found: Estimate | None, form: str = ".3f") -> str:
    """A mean with its interval; one seed has none.

    >>> words(Estimate(0.5, 0.25, 0.75, 3), "+.2f")
    '+0.50 (+0.25 to +0.75)'
    """
    if found is None:
        return ""
    if found.count > 1 and found.low != found.low:
        return f"{found.value:{form}}"
    ends = "one seed" if found.count == 1 else f"{found.low:{form}} to {found.high:{form}}"
    return f"{found.value:{form}} ({ends})"


def command(
    name: str,
    about: str | None,
    measured: Callable[[int, Path | None], Mapping[str, Any]],
    page: Callable[[Mapping[str, Any]], tuple[str, dict[str, str]]],
) -> None:
    """Train, or read what was trained, then draw and write it down; ``name`` is that of all files."""
    asked = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", type=Path, help="where the files of the data sets are")
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--pages", action="store_true", help="train nothing, read the JSON file")
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args()
    torch.set_num_threads(1)
    file = given.out / f"{name}.json"
    if not given.pages:
        given.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measured(given.seeds, given.data_dir), indent=1) + "\n")
    text, pictures = page(json.loads(file.read_text()))
    for end, written in {f"{name}.md": text, **pictures}.items():
        (given.out / end).write_text(written)
