"""Run one cell of a comparison: skip it when finished, continue it when cut short, else start it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import durable, untrusted
from evenhand.comparison import training_record_figures as research
from evenhand.comparison.sweep import Cell
from evenhand.errors import VerificationError
from evenhand.runs.folder import Folder, write_durably, write_json
from evenhand.training.config import PYTHON, Config, to_toml

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan
    from evenhand.data import Data


_TRAINING = (
    *("model", "device", "method", "epsilon", "delta", "noise", "epochs", "batch_size", "loss", "optimizer", "lr"),
    *("lr_schedule", "momentum", "weight_decay", "average", "augment", "views", "micro_batch", "lean"),
    *("precision", "seed", "insecure_seed", "compose", "allow_not_finite", "least_records", "settings"),
    *("budgets", "goal", "tau", "prior", "prior_counts"),
)
"""Keys of a config that do not change which data are loaded."""


@dataclass(frozen=True)
class Validation:
    """The part of the TRAINING records that a trial is scored on; the test data stay out of it."""

    share: float
    seed: int


@dataclass(frozen=True)
class Task:
    """One cell for a worker: its config, its folder, and the plan that it must follow.

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
        """Return the run folder."""
        return Folder(self.path)


def plan_task(
    cell: Cell, out: Path, *, research: bool = False, validation: Validation | None = None, tuned: bool = False
) -> Task:
    """Plan a cell and name its folder after plan and config, so that a changed cell never reuses an old run.

    What is not private goes below ``private/``; so do trials, whose metrics are about training records. A cell that
    asks for counts of labels where there are none to release, such as one that is not private, says so as its run will.
    """
    config = cell.config
    plan = _planned(_Same(dataclasses.replace(config, seed=0, insecure_seed=None, lr=1.0)), cell.epsilon, validation)
    config = dataclasses.replace(config, prior=plan.prior is not None)
    cell = dataclasses.replace(cell, config=config)
    digest = hashlib.sha256(f"{plan.digest}\n{to_toml(config)}".encode()).hexdigest()[:8]
    place = out / "private" / "tuning" if validation else out if cell.private else out / "private"
    return Task(cell, place / f"{_plain(cell.name)}-{digest}", plan, research, validation, tuned)


@lru_cache(maxsize=4096)
def _planned(same: _Same, epsilon: float | None, validation: Validation | None) -> Plan:
    """Return the plan of a config, cached: seeds and learning rates share it."""
    from evenhand.accounting.budgets import Privacy
    from evenhand.training.fit import countable
    from evenhand.training.from_config import planned, read_budgets

    config = same.config
    training = _loaded(_data(config), validation)[0]
    promise = None if epsilon is None else read_budgets(config, training) or Privacy(epsilon, config.delta)
    counts = countable(training, config.prior and not config.prior_counts)
    return planned(config, training.facts, promise, counts)


def finished(task: Task) -> bool:
    """Return whether the folder holds the finished run of this cell: same plan, same config, model and statement.

    The ledger's hashes are checked. The model's bytes are not: ``summary.result`` verifies the folder.
    """
    folder = task.folder
    config = task.path / "config.toml"
    if not (folder.statement_file.exists() and folder.model_file.exists() and config.exists()):
        return False
    if (task.research and not research.file(folder).exists()) or not _says_tuned(task):
        return False
    reading = folder.ledger()
    same = reading.plan == task.plan.digest and untrusted.read_bytes(config) == to_toml(task.cell.config).encode()
    return same and bool(reading.released) and reading.reserved >= task.plan.steps


def perform(task: Task) -> None:
    """Run the cell in this process, from wherever it stands; its files are durable on return.

    The plan that the run followed is checked against the task's.
    """
    import torch

    from evenhand.training.fit import resume
    from evenhand.training.from_config import train
    from evenhand.training.run import Run, load

    torch.set_num_threads(processor_threads())
    began = time.process_time()
    folder, config = task.folder, task.cell.config
    durable.refuse_link(task.path)
    reading = folder.ledger() if folder.begun else None
    training, held_out = loaded(task.cell, task.validation)
    training = dataclasses.replace(training, tuned=task.tuned)
    if not _says_tuned(task):
        _mark_tuned(task)
    done = reading is not None and bool(reading.released) and reading.reserved >= task.plan.steps
    if done and folder.model_file.exists():
        folder.write_statement()
    elif reading is not None and (reading.reserved or reading.torn):
        resume(task.path, train=training, test=held_out, progress=False)
    else:
        train(config, training, held_out, task.path, progress=False)
    if folder.plan().digest != task.plan.digest:
        raise VerificationError("The run followed another plan than the comparison made: its data changed meanwhile.")
    if task.validation is None and held_out is not None and not (task.path / "report.html").exists():
        Run(folder).report().save(task.path / "report.html")
    if not (task.path / "model-card.md").exists():
        write_durably(task.path / "model-card.md", Run(folder).card().encode())
    if task.research:
        model = load(task.path, model=config.build_model(training.facts)).model
        research.write(folder, model, training, task.plan)
    spent = seconds(task) + time.process_time() - began
    write_durably(folder.private / "processor_seconds.txt", f"{spent:.3f}\n".encode())


def processor_threads() -> int:
    """Return how many threads a worker may use."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def _says_tuned(task: Task) -> bool:
    """Return whether the run's files say that trials chose its settings; True for a run that is not counted."""
    counted = task.folder.composition()
    if not task.tuned or counted is None or counted["runs"] is None:
        return True
    file = task.folder.statement_file
    said = not file.exists() or _statement_says_tuned(file)
    return said and bool(counted.get("tuned"))


def _statement_says_tuned(statement: Path) -> bool:
    """Return whether a written statement says that trials chose the settings."""
    written = untrusted.read_json(statement, {"accounting": {"tuning_counted": bool}})
    return not written["accounting"]["tuning_counted"]


def _mark_tuned(task: Task) -> None:
    """Mark a run from before the trials that chose the same settings; remove its page and card, to be made again."""
    write_json(task.folder.composition_file, {**(task.folder.composition() or {}), "tuned": True})
    for name in ("report.html", "model-card.md"):
        (task.path / name).unlink(missing_ok=True)


def seconds(task: Task) -> float:
    """Return the processor seconds that the run took, over all starts that ended by themselves."""
    file = task.folder.private / "processor_seconds.txt"
    return untrusted.parse_json(untrusted.read_bytes(file, largest=64), file.name, float) if file.exists() else 0.0


def loaded(cell: Cell, validation: Validation | None = None) -> tuple[Any, Any]:
    """Return training and held-out data, cached for the next cell, which needs the same.

    With ``validation`` both are parts of the training data.
    """
    return _loaded(_data(cell.config), validation)


@dataclass(frozen=True, eq=False)
class _Same:
    """A config that can be compared: equal when its file would be."""

    config: Config

    @cached_property
    def _file(self) -> str:
        return to_toml(self.config)

    def __hash__(self) -> int:
        return hash(self._file)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._file == other._file


def _data(config: Config) -> _Same:
    """Return the config with every key that does not change which data are loaded at its default."""
    plain = Config()
    return _Same(dataclasses.replace(config, **{name: getattr(plain, name) for name in _TRAINING}))


_GIVEN: list[tuple[Data, Data | None]] = []


@contextlib.contextmanager
def given(train: Data, held_out: Data | None) -> Iterator[None]:
    """Let cells of the source "python" find these data, in this process, until the context ends."""
    forget()
    _GIVEN.append((train, held_out))
    try:
        yield
    finally:
        _GIVEN.pop()
        forget()


def forget() -> None:
    """Drop all data and plans that were cached for the next cell."""
    _planned.cache_clear()
    _read.cache_clear()
    _SMALL.clear()


_SMALL: dict[tuple[_Same, Validation | None], tuple[Any, Any]] = {}
"""Small data that were loaded: with resampled splits every seed has its own, and every method asks for them again."""
_NUMBERS = 2**18
"""Numbers in the inputs of data that are small."""


def _loaded(same: _Same, validation: Validation | None) -> tuple[Any, Any]:
    """Return the data of a config, loaded once if they are small, else if they are among the last two."""
    key = (same, validation)
    if key not in _SMALL:
        from evenhand.models.build import declared_shape

        data = _read(same, validation)
        shape = declared_shape(data[0].facts)
        if shape is None or data[0].facts.records * math.prod(shape) > _NUMBERS:
            return data
        _SMALL[key] = data
    return _SMALL[key]


@lru_cache(maxsize=2)
def _read(same: _Same, validation: Validation | None) -> tuple[Any, Any]:
    """Load the data of a config, and split its training part for a trial."""
    if validation is None:
        return _GIVEN[-1] if same.config.data == PYTHON and _GIVEN else same.config.load_data()
    from evenhand.data.tables import split

    return split(_loaded(same, None)[0], validation.share, validation.seed)


def _plain(name: str) -> str:
    """Return a line's name as a folder's name: letters, digits, dots, dashes."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
