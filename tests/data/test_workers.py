"""Worker processes read what one process reads, with the same secret draws, and end with the run."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.data import in_workers, wrap
from evenhand.data.record_seeds import seeds
from evenhand.errors import DataError, ProcessError
from processes import Started, wait_for


class Drawn(torch.utils.data.Dataset[Any]):
    """Records that are changed at random as they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        draws = [float(torch.rand(1)), float(np.random.rand()), random.random()]  # noqa: NPY002
        return torch.tensor([float(number), *draws]), number % 2


class Plain(Drawn):
    """Records that are the same whenever they are read."""

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([float(number), 1.0]), number % 2


class Dies(Plain):
    """Records of which reading one ends the process that reads it, but for the process that made them."""

    def __init__(self, deadly: int) -> None:
        self.deadly, self.process = deadly, os.getpid()

    def __getitem__(self, number: int) -> Any:
        if number >= self.deadly and os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Looks(Plain):
    """Records that cannot be read where the ledger of the run is open; other tests may have left theirs open."""

    def __getitem__(self, number: int) -> Any:
        run = os.environ["EVENHAND_TEST_RUN"]
        if os.environ.get("EVENHAND_TEST_PARENT") != str(os.getpid()) and any(
            link.startswith(run) and "ledger" in link for link in open_files()
        ):
            raise DataError("A worker has the ledger open.")
        return super().__getitem__(number)


def open_files() -> list[str]:
    """Return what this process has open, without what another of its threads closes meanwhile."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links


def secret(numbers: Any) -> list[int]:
    return [1000 + number for number in numbers]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dataset", [Drawn(), Plain()])
def test_workers_read_what_one_process_reads(dataset: Any, count: int) -> None:
    data, rows = wrap(dataset), torch.tensor([7, 0, 39, 7, 12, 3, 25])
    with in_workers(count, data) as (read, _):
        for chosen in (rows, rows[:1], rows[:0]):
            with seeds(secret):
                (x, y), (u, v) = data.fetch(chosen), read.fetch(chosen)
            assert torch.equal(x, u)
            assert torch.equal(y, v)
            (x, _), (u, _) = data.fetch(chosen), read.fetch(chosen)
            assert torch.equal(x, u), "outside of training the seed is one constant"


def test_persons_and_held_out_data_are_read_by_the_same_workers() -> None:
    data = wrap(Drawn(), persons=[f"p{number // 4}" for number in range(40)])
    with in_workers(2, data, wrap(Plain())) as (read, test):
        assert test is not None
        assert torch.equal(test.fetch(torch.arange(40))[0], wrap(Plain()).fetch(torch.arange(40))[0])
        with seeds(secret):
            assert torch.equal(read.by_record.fetch(torch.arange(9))[0], data.by_record.fetch(torch.arange(9))[0])


def test_arrays_need_no_workers() -> None:
    data = wrap(torch.zeros(4, 2), [0, 1, 0, 1])
    with in_workers(2, data) as (read, none):
        assert read is data
        assert none is None


def fitted(workers: int, out: Path, dataset: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(len(dataset[0][0]), 2)
    options: dict[str, Any] = {"noise": 1.0, "epochs": 6, "batch_size": 8, "insecure_seed": 3, "prior": False}
    eh.fit(model, wrap(dataset, labels=(0, 1)), out=out, workers=workers, compose=False, **options)
    return model


def test_a_run_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    alone, read = (fitted(workers, tmp_path / str(workers), Drawn()) for workers in (0, 2))
    assert torch.equal(alone.weight, read.weight)
    assert eh.verify(tmp_path / "2")["steps"] == 30


def test_workers_have_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_TEST_PARENT", str(os.getpid()))
    monkeypatch.setenv("EVENHAND_TEST_RUN", os.path.realpath(tmp_path))
    fitted(2, tmp_path / "run", Looks())
    assert eh.verify(tmp_path / "run")["ok"]


def test_a_worker_that_dies_is_one_line_and_what_is_charged_stays(tmp_path: Path) -> None:
    data = wrap(Dies(0), labels=(0, 1))
    model = nn.Linear(2, 2)
    with pytest.raises(ProcessError, match=r"A worker process that reads records died.*resume the run"):
        eh.fit(model, data, noise=1.0, epochs=2, batch_size=8, workers=2, out=tmp_path / "run", prior=False)


def test_an_error_of_the_dataset_is_that_of_one_process() -> None:
    class Fails(Plain):
        def __getitem__(self, number: int) -> Any:
            if number > 20:
                raise DataError("The file of a record is damaged.")
            return super().__getitem__(number)

    with in_workers(2, wrap(Fails())) as (read, _), pytest.raises(DataError, match="damaged"):
        read.fetch(torch.tensor([3, 30]))


def leave_workers(folder: str) -> None:
    """Start workers, write down who they are, and wait to be killed."""
    with in_workers(2, wrap(Plain())) as (read, _):
        read.fetch(torch.arange(4))
        pool: Any = read.fetch
        Path(folder, "pids").write_text(" ".join(map(str, pool.pool._processes)))
        signal.pause()


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    started, pids = Started(leave_workers, str(tmp_path)), tmp_path / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    workers = [int(pid) for pid in pids.read_text().split()]
    started.kill()
    started.communicate()
    wait_for(lambda: not any(alive(pid) for pid in workers), 20)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
