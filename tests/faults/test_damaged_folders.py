"""``verify`` on damaged run folders: one line per problem, exit code 1, little time and memory; other commands too."""

from __future__ import annotations

import collections
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenhand as eh
from edges import forging
from evenhand import untrusted
from evenhand.data.fingerprint import Survey
from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.runs import checkpoints
from evenhand.runs.folder import Folder
from evenhand.training.config import of_run
from evenhand.training.goals.predict import preprocessing
from evenhand.training.run import Run
from faults import damaged_folders

pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="damage with devices, pipes and links")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with owners, a density, a signed run and one whose budgets changed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, make in forging.KINDS.items():
        make(folder / name)
    return [folder / name for name in forging.KINDS]


def judged(runs: list[Path], to: Path, count: int, seed: int) -> collections.Counter[str]:
    """Damage so many copies; returns how many ended how, and the largest time and memory."""
    seen, wrong = collections.Counter[str](), []
    for case, outcome, same in damaged_folders.verdicts(runs, to, range(count), seed):
        seen[f"exit {outcome.code}"] += 1
        seen["largest ms"] = max(seen["largest ms"], round(1000 * outcome.seconds))
        seen["largest MB"] = max(seen["largest MB"], round(outcome.megabytes))
        found = damaged_folders.faults(outcome) + ([] if same else ["a change to a covered file was accepted"])
        wrong += [f"{case}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
    return seen


def test_damaged_folders_are_refused_in_a_line(runs: list[Path], tmp_path: Path) -> None:
    kinds = len(damaged_folders.damages())
    seen = judged(runs[:1], tmp_path, kinds, seed=3)
    assert seen["exit 1"] > kinds / 2


@pytest.mark.slow
def test_a_thousand_damaged_folders(runs: list[Path], tmp_path: Path) -> None:
    seen = judged(runs, tmp_path, 1000, seed=1)
    print(dict(seen))
    assert seen["exit 0"] + seen["exit 1"] == 1000


READERS: dict[str, Callable[[Path], object]] = {
    "statement": lambda path: Folder.existing(path).statement(),
    "report": lambda path: Run(Folder.existing(path)).report(),
    "card": lambda path: Run(Folder.existing(path)).card(),
    "load": lambda path: eh.load(path, model=nn.Linear(3, 2)),
    "checkpoint": lambda path: checkpoints.load(Folder.existing(path), Folder.existing(path).plan()),
    "marks": lambda path: checkpoints.marks(Folder.existing(path)),
    "rows": lambda path: Survey.read(Folder(path).rows_file),
    "preprocessing": preprocessing,
    "config": of_run,
    "resume": lambda path: eh.resume(path, model=nn.Linear(3, 2), train=forging.data(), progress=False),
    "rebudget": lambda path: eh.rebudget(path, eh.Privacy(5), epochs=1, train=forging.data()),
}
"""What commands do with a folder; some write to it."""


def commanded(runs: list[Path], to: Path, numbers: range, seed: int) -> collections.Counter[str]:
    """Read damaged copies in every way; whatever is raised is an error on purpose, or the operating system's."""
    seen = collections.Counter[str]()
    for number in numbers:
        copy, name, kind, _ = damaged_folders.damaged(runs, to, number, seed)
        for command, read in READERS.items():
            try:
                read(copy)
                seen["read"] += 1
            except EvenhandError:
                seen["refused"] += 1
            except OSError:
                seen[f"operating system, {command}"] += 1
            except Exception as error:
                raise AssertionError(f"{command} after {kind} of {name} ({number}): {error!r}") from error
        shutil.rmtree(copy)
    return seen


def test_other_commands_refuse_damage_with_a_sentence(runs: list[Path], tmp_path: Path) -> None:
    kinds = len(damaged_folders.damages())
    assert commanded(runs[:1], tmp_path, range(0, kinds, 2), seed=5)["refused"] > 10


@pytest.mark.slow
def test_other_commands_on_damaged_folders(runs: list[Path], tmp_path: Path) -> None:
    print(dict(commanded(runs, tmp_path, range(300), seed=6)))


def checkpoint(kind: str, mark: Path) -> Any:
    return {
        "list": [1, 2],
        "tensor": torch.zeros(3),
        "other keys": {"weights": torch.zeros(3)},
        "list for states": {"plan": "x", "position": 1, "ledger_head": "y", "model": [], "optimizer": {}, "memory": {}},
        "text for a number": {"plan": "x", "position": "1", "ledger_head": "y", "model": {}, "optimizer": {}},
        "code": damaged_folders.Shell(mark),
    }[kind]


@pytest.mark.parametrize("kind", ["list", "tensor", "other keys", "list for states", "text for a number", "code"])
@pytest.mark.parametrize("archive", [True, False])
def test_only_checkpoints_are_taken_for_checkpoints(kind: str, archive: bool, tmp_path: Path) -> None:
    file, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    torch.save(checkpoint(kind, mark), file, _use_new_zipfile_serialization=archive)
    with pytest.raises(UsageError, match="damaged or is not one of ours"):
        checkpoints.read(file)
    file.write_bytes(pickle.dumps(checkpoint(kind, mark)))
    with pytest.raises(UsageError, match="damaged or is not one of ours"):
        checkpoints.read(file)
    assert not mark.exists()


def test_archives_that_unpack_to_more_than_they_are_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    file.write_bytes(damaged_folders.bomb(2**26))
    assert file.stat().st_size < 2**20
    with pytest.raises(UsageError):
        checkpoints.read(file)
    with pytest.raises(VerificationError, match=r"rows\.npz cannot be read"):
        Survey.read(file)


def test_a_digest_reads_no_hole_behind_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(3)}, file)
    assert untrusted.digest(file) is not None
    with file.open("ab") as out:
        out.truncate(2**42)
    assert untrusted.digest(file) is None
