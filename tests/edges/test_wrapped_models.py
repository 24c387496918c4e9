"""Models spread over devices or processes are refused by name before anything is spent, with what to pass instead."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor

import evenhand as eh
from edges import two_processes
from edges.runs_made import begun, planned, records
from evenhand.errors import UnsupportedModelError
from evenhand.gradients.doctor.doctor import examine

LOSS = nn.CrossEntropyLoss(reduction="none")


class FullyShardedStandIn(nn.Module):
    """Not torch's own, as in a library that brings a class of that name along."""


FullyShardedStandIn.__name__ = "FullyShardedDataParallel"


def attached(model: nn.Module, out: Path) -> None:
    data = records()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, planned(data), out=out) as private:
        for batch in private.batches(data):
            private.step(batch)


def fitted(model: nn.Module, out: Path) -> None:
    eh.fit(model, records(), epsilon=3.0, epochs=2, out=out, progress=False)


def resumed(model: nn.Module, out: Path) -> None:
    eh.resume(out, model=model, train=records(), progress=False)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_data_parallel_model_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    for way in (attached, fitted):
        out = tmp_path / way.__name__
        with pytest.raises(UnsupportedModelError, match=r"\(DataParallel\).*Pass model\.module"):
            way(nn.DataParallel(nn.Linear(3, 2)), out)
        assert not out.exists()


def test_a_part_that_is_data_parallel_is_refused_by_its_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(3, 4)), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match=r"'0' \(DataParallel\)"):
        fitted(model, tmp_path)


def test_a_resumed_run_refuses_a_wrapped_model(tmp_path: Path) -> None:
    begun(tmp_path, 2).close()
    charged = eh.verify(tmp_path)["steps"]
    with pytest.raises(UnsupportedModelError, match=r"Pass model\.module"):
        resumed(nn.DataParallel(nn.Linear(3, 2)), tmp_path)
    assert eh.verify(tmp_path)["steps"] == charged


def test_the_doctor_names_a_wrapped_model() -> None:
    found = examine(nn.DataParallel(nn.Linear(3, 2)), LOSS, torch.randn(8, 3), torch.arange(8) % 2)
    assert not found.trainable
    assert "(DataParallel)" in found.refused[0]


@pytest.mark.usefixtures("group")
def test_sharded_models_are_refused_by_name_instead_of_a_raw_error(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    second = nn.Sequential(nn.Linear(3, 2))
    fully_shard(second, mesh=mesh)
    spread = nn.Linear(3, 2)
    spread.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    for model in (first, second, spread, FullyShardedStandIn()):
        with pytest.raises(UnsupportedModelError, match=r"FSDP or DTensor.*before it was sharded"):
            fitted(model, tmp_path / "run")
    with pytest.raises(UnsupportedModelError, match=r"\(DistributedDataParallel\).*Pass model\.module"):
        fitted(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("group")
def test_a_process_group_of_one_process_is_no_obstacle(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as private:
        assert private.position == 1


def test_two_processes_are_refused_a_model_that_averages_gradients_by_itself(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    given = (str(tmp_path), address)
    torch.multiprocessing.start_processes(two_processes.refused, given, nprocs=2, start_method="forkserver")
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text().splitlines()
        assert ["(DistributedDataParallel)" in line for line in said] == [True, True]
        assert ["Pass model.module" in line for line in said] == [True, True]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", [attached, fitted])
def test_a_compiled_model_is_refused_with_what_to_pass(way: object, tmp_path: Path) -> None:
    assert callable(way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.compile(nn.Linear(3, 2))
    with pytest.raises(UnsupportedModelError, match=r"is compiled.*before torch\.compile"):
        way(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
