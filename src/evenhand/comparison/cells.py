"""One cell of a comparison: recognised when finished, continued when cut short, else run from the start."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand.comparison import research
from evenhand.comparison.grid import Cell
from evenhand.config import Config, to_toml
from evenhand.errors import VerificationError
from evenhand.runs import Folder

if TYPE_CHECKING:
    from evenhand.plans import Plan


@dataclass(frozen=True)
class Task:
    """What a worker needs: the cell, where it goes, and the plan that it must follow."""

    cell: Cell
    path: Path
    plan: Plan
    research: bool = False

    @property
    def folder(self) -> Folder:
        """The run folder."""
        return Folder(self.path)


def task(cell: Cell, out: Path, *, research: bool = False) -> Task:
    """Plan a cell and name its folder after plan and config, so that another question never meets an old answer.

    What is not private goes below ``private/``.
    """
    from evenhand.configured import promised
    from evenhand.methods import method
    from evenhand.planning import plan
    from evenhand.privacy.budgets import Privacy

    config, training = cell.config, loaded(cell)[0]
    promise = None if cell.epsilon is None else promised(config, training) or Privacy(cell.epsilon, config.delta)
    made = plan(
        method(config.method, config.settings),
        promise,
        data=training.facts,
        epochs=config.epochs,
        batch_size=config.batch_size,
    )
    digest = hashlib.sha256(f"{made.digest}\n{to_toml(config)}".encode()).hexdigest()[:8]
    return Task(cell, (out if cell.private else out / "private") / f"{cell.name}-{digest}", made, research)


def finished(found: Task) -> bool:
    """Whether the folder holds this cell's run to its end: same plan, same config, model and statement written."""
    folder = found.folder
    config = found.path / "config.toml"
    if not (folder.statement_file.exists() and folder.model_file.exists() and config.exists()):
        return False
    if found.research and not research.file(folder).exists():
        return False
    reading = folder.ledger()
    same = reading.plan == found.plan.digest and config.read_text() == to_toml(found.cell.config)
    return same and bool(reading.released) and reading.reserved >= found.plan.steps


def perform(found: Task) -> None:
    """Run the cell in this process, from wherever it stands."""
    import torch

    from evenhand.configured import train
    from evenhand.loading import load
    from evenhand.results import Run
    from evenhand.training import resume

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder, config = found.folder, found.cell.config
    reading = folder.ledger() if folder.ledger_file.exists() else None
    training, held_out = loaded(found.cell)
    if reading is not None and reading.released and reading.reserved >= found.plan.steps:
        folder.write_statement()
    elif reading is not None and (reading.reserved or reading.torn):
        resume(found.path, train=training, test=held_out, progress=False)
    else:
        train(config, training, held_out, found.path, progress=False)
    if folder.plan().digest != found.plan.digest:
        raise VerificationError("The run followed another plan than the comparison made: its data changed meanwhile.")
    if held_out is not None and not (found.path / "report.html").exists():
        Run(folder).report().save(found.path / "report.html")
    if found.research:
        bound = max(level.bound for level in found.plan.levels) if found.plan.certified else None
        model = load(found.path, model=config.build_model(training.facts)).model
        research.write(folder, model, training, bound)


def loaded(cell: Cell) -> tuple[Any, Any]:
    """Training and held-out data, kept for the next cell: it asks for the same."""
    asked = dataclasses.replace(cell.config, method="dpsgd", epsilon=None, settings={}, insecure_seed=None, seed=0)
    return _loaded(_Same(asked))


@dataclass(frozen=True, eq=False)
class _Same:
    """A config that can be compared: equal when its file would be."""

    config: Config

    def __hash__(self) -> int:
        return hash(to_toml(self.config))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and to_toml(self.config) == to_toml(other.config)


@lru_cache(maxsize=1)
def _loaded(same: _Same) -> tuple[Any, Any]:
    return same.config.load_data()
