"""One thread for small models while a run goes on, unless somebody chose a number; and as many as before afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand import threads

FLAT, PICTURE = "(64,) float32", "(3, 32, 32) float32"
PROGRAM = """
import sys, torch, evenhand as eh
before, seen = torch.get_num_threads(), set()
class Watched(torch.nn.Linear):
    def forward(self, x):
        seen.add(torch.get_num_threads())
        return super().forward(x)
data = [eh.data.wrap(torch.randn(60, 3), [i % 2 for i in range(60)]) for _ in range(2)]
eh.fit(Watched(3, 2), data[0], test=data[1], epsilon=3.0, epochs=1, batch_size=20, out=sys.argv[1], progress=False)
assert seen == {1}, seen
assert torch.get_num_threads() == before
"""


def test_a_small_model_is_trained_in_one_thread(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which torch would take seven threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


def during(model: nn.Module, records: int = 5) -> int:
    """Threads inside; they must be as before afterwards, also after an error."""
    before = torch.get_num_threads()
    seen = 0
    with contextlib.suppress(eh.errors.UsageError), threads.suited(model, FLAT, records):
        seen = torch.get_num_threads()
        raise eh.errors.UsageError("an error inside")
    assert torch.get_num_threads() == before
    return seen


def test_a_large_model_keeps_all_threads(seven: None) -> None:
    assert during(nn.Linear(64, 10)) == 1
    assert during(nn.Linear(64, 10), records=10**6) == 7


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_who_chose_by_the_environment_keeps_it(name: str, seven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    assert during(nn.Linear(64, 10)) == 7


def test_who_chose_in_torch_keeps_it(seven: None) -> None:
    torch.set_num_threads(5)
    assert during(nn.Linear(64, 10)) == 5


@pytest.mark.parametrize(
    ("model", "inputs", "records", "small"),
    [
        (nn.Linear(64, 10), FLAT, 256, True),
        (nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10)), FLAT, 126, True),
        (nn.Sequential(nn.Linear(64, 2000), nn.Linear(2000, 2000)), FLAT, 256, False),
        (nn.Conv2d(3, 64, 3), PICTURE, 256, False),
        (nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 64, 3)), "(784,) float32", 1024, False),
        (nn.LSTM(8, 64), "(500, 8) float32", 64, False),
        (nn.Embedding(1000, 64), "(200,) int64", 64, False),
        (nn.Linear(64, 10), "2 arrays", 1, False),
    ],
)
def test_what_is_small(model: nn.Module, inputs: str, records: int, small: bool) -> None:
    assert threads.small(model, inputs, records) is small
