"""Flags that describe a schedule, and the plot of what it spends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options

if TYPE_CHECKING:
    from evenhand.methods.schedules import Schedule

Name = Annotated[str | None, typer.Option("--schedule", help="constant, linear, time, step or phases.")]
Decay = Annotated[float | None, typer.Option("--decay", help="R of linear, time and step decay.")]
Every = Annotated[int | None, typer.Option("--every", help="K of step decay: epochs between two levels.")]
Phases = Annotated[int | None, typer.Option("--phases", help="Number of phases.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the spent epsilon over the steps.")]


def built(name: str | None, decay: float | None, every: int | None, phases: int | None, **more: Any) -> Schedule:
    """The schedule that the flags describe; a flag that it does not have is an error."""
    from evenhand.methods import registry

    chosen = registry.build("schedule", name or "constant", options.given(decay=decay, every=every, n=phases, **more))
    return chosen  # type: ignore[no-any-return]


def draw(
    path: Path, spending: Mapping[str, Sequence[tuple[int, float]]], budgets: Mapping[str, float], delta: float
) -> None:
    """Write an SVG of the spent epsilon per owner, with the promises as dashed lines."""
    from evenhand._numbers import rounded_up
    from evenhand.reporting.charts import lines
    from evenhand.runs.folder import write_durably

    picture = lines(
        spending,
        title="Spent epsilon",
        x_label="step",
        y_label=f"spent epsilon (per record, add/remove, delta {delta:g})",
        limits={f"promised to {name}": value for name, value in budgets.items()},
        printed=rounded_up,
    )
    write_durably(path, picture.encode())
