"""One cell of a comparison: recognised when finished, continued when cut short, else run from the start."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import durable, untrusted
from evenhand.comparison import training_record_figures as research
from evenhand.comparison.sweep import Cell
from evenhand.errors import VerificationError
from evenhand.runs.folder import Folder, write_durably, write_json
from evenhand.training.config import Config, to_toml

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan


_TRAINING = (
    *("model", "device", "method", "epsilon", "delta", "noise", "epochs", "batch_size", "loss", "optimizer", "lr"),
    *("lr_schedule", "momentum", "weight_decay", "average", "augment", "views", "micro_batch", "lean"),
    *("precision", "seed", "insecure_seed", "compose", "allow_not_finite", "settings", "budgets"),
)
"""Keys of a config that do not change which data are loaded."""


@dataclass(frozen=True)
class Validation:
    """The part of the TRAINING records that a trial is scored on; the test data stay out of it."""

    share: float
    seed: int


@dataclass(frozen=True)
class Task:
    """What a worker needs: the cell, where it goes, and the plan that it must follow.

    ``tuned`` says that its settings won trials on the same training records; its statement will say so.
    """

    cell: Cell
    path: Path
    plan: Plan
    research: bool = False
    validation: Validation | None = None
    tuned: bool = False

    @property
    def folder(self) -> Folder:
        """The run folder."""
        return Folder(self.path)


def task(
    cell: Cell, out: Path, *, research: bool = False, validation: Validation | None = None, tuned: bool = False
) -> Task:
    """Plan a cell and name its folder after plan and config, so that another question never meets an old answer.

    What is not private goes below ``private/``; so do trials, whose metrics are about training records.
    """
    config = cell.config
    made = _planned(_Same(dataclasses.replace(config, seed=0, insecure_seed=None, lr=1.0)), cell.epsilon, validation)
    digest = hashlib.sha256(f"{made.digest}\n{to_toml(config)}".encode()).hexdigest()[:8]
    place = out / "private" / "tuning" if validation else out if cell.private else out / "private"
    return Task(cell, place / f"{_plain(cell.name)}-{digest}", made, research, validation, tuned)


@lru_cache(maxsize=4096)
def _planned(same: _Same, epsilon: float | None, validation: Validation | None) -> Plan:
    """The plan of a config: seeds and learning rates share it."""
    from evenhand.accounting.budgets import Privacy
    from evenhand.training.from_config import planned, read_budgets

    config = same.config
    training = _loaded(_data(config), validation)[0]
    promise = None if epsilon is None else read_budgets(config, training) or Privacy(epsilon, config.delta)
    return planned(config, training.facts, promise)


def finished(found: Task) -> bool:
    """Whether the folder holds this cell's run to its end: same plan, same config, model and statement written."""
    folder = found.folder
    config = found.path / "config.toml"
    if not (folder.statement_file.exists() and folder.model_file.exists() and config.exists()):
        return False
    if (found.research and not research.file(folder).exists()) or not _told(found):
        return False
    reading = folder.ledger()
    same = reading.plan == found.plan.digest and untrusted.read_bytes(config) == to_toml(found.cell.config).encode()
    return same and bool(reading.released) and reading.reserved >= found.plan.steps


def perform(found: Task) -> None:
    """Run the cell in this process, from wherever it stands."""
    import torch

    from evenhand.training.fit import resume
    from evenhand.training.from_config import train
    from evenhand.training.run import Run, load

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    began = time.process_time()
    folder, config = found.folder, found.cell.config
    durable.refuse_link(found.path)
    reading = folder.ledger() if folder.begun else None
    training, held_out = loaded(found.cell, found.validation)
    training = dataclasses.replace(training, tuned=found.tuned)
    if not _told(found):
        _tell(found)
    done = reading is not None and bool(reading.released) and reading.reserved >= found.plan.steps
    if done and folder.model_file.exists():
        folder.write_statement()
    elif reading is not None and (reading.reserved or reading.torn):
        resume(found.path, train=training, test=held_out, progress=False)
    else:
        train(config, training, held_out, found.path, progress=False)
    if folder.plan().digest != found.plan.digest:
        raise VerificationError("The run followed another plan than the comparison made: its data changed meanwhile.")
    if found.validation is None and held_out is not None and not (found.path / "report.html").exists():
        Run(folder).report().save(found.path / "report.html")
    if not (found.path / "model-card.md").exists():
        write_durably(found.path / "model-card.md", Run(folder).card().encode())
    if found.research:
        bound = max(level.bound for level in found.plan.levels) if found.plan.certified else None
        model = load(found.path, model=config.build_model(training.facts)).model
        research.write(folder, model, training, bound)
    spent = seconds(found) + time.process_time() - began
    write_durably(folder.private / "processor_seconds.txt", f"{spent:.3f}\n".encode())


def _told(found: Task) -> bool:
    """Whether the run's count of runs says that trials chose its settings; a run that is not counted says nothing."""
    counted = found.folder.composition()
    if not found.tuned or counted is None or counted["runs"] is None:
        return True
    file = found.folder.statement_file
    said = not file.exists() or _said_tuned(file)
    return said and bool(counted.get("tuned"))


def _said_tuned(statement: Path) -> bool:
    written = untrusted.read_json(statement, {"accounting": {"tuning_counted": bool}})
    return not written["accounting"]["tuning_counted"]


def _tell(found: Task) -> None:
    """A run from before the trials that now chose the same settings: page and card are made again."""
    write_json(found.folder.composition_file, {**(found.folder.composition() or {}), "tuned": True})
    for name in ("report.html", "model-card.md"):
        (found.path / name).unlink(missing_ok=True)


def seconds(found: Task) -> float:
    """Processor seconds that the run took, over all starts that ended by themselves."""
    file = found.folder.private / "processor_seconds.txt"
    return untrusted.parse_json(untrusted.read_bytes(file, largest=64), file.name, float) if file.exists() else 0.0


def loaded(cell: Cell, validation: Validation | None = None) -> tuple[Any, Any]:
    """Training and held-out data, kept for the next cell: it asks for the same.

    With ``validation`` both are parts of the training data.
    """
    return _loaded(_data(cell.config), validation)


@dataclass(frozen=True, eq=False)
class _Same:
    """A config that can be compared: equal when its file would be."""

    config: Config

    def __hash__(self) -> int:
        return hash(to_toml(self.config))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and to_toml(self.config) == to_toml(other.config)


def _data(config: Config) -> _Same:
    """The same config with everything that decides about training only at its default."""
    plain = Config()
    return _Same(dataclasses.replace(config, **{name: getattr(plain, name) for name in _TRAINING}))


@lru_cache(maxsize=2)
def _loaded(same: _Same, validation: Validation | None) -> tuple[Any, Any]:
    if validation is None:
        return same.config.load_data()
    from evenhand.data.tables import split

    return split(_loaded(same, None)[0], validation.share, validation.seed)


def _plain(name: str) -> str:
    """A line's name as a folder's: letters, digits, dots, dashes."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
