"""Freed memory is kept while a run is open, given back afterwards, and left alone where it is not ours to handle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from evenhand.gradients import memory

FAULTS = """
import resource, tempfile
import torch
import evenhand as eh

torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(1536, 64), torch.randint(2, (1536,))
data = eh.data.wrap(x, y, labels=[0, 1])
plan = eh.plan("dpsgd", eh.FixedNoise(1.0, 1e-5), data=data.facts, epochs=15, batch_size=1536)
wide, narrow, last = torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64), torch.nn.Linear(64, 2)
model = torch.nn.Sequential(wide, torch.nn.Tanh(), narrow, torch.nn.Tanh(), last)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = torch.nn.CrossEntropyLoss(reduction="none")
faults = []
with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp(), compose=False) as private:
    for batch in private.batches(data):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        private.step(batch)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[len(faults) // 2])
"""


class Training:
    pass


class Library:
    """Notes what is asked of the C library."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | str, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        self.calls.append((name, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append(("give back", pad))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(memory, "_library", lambda: found)
    monkeypatch.setattr(memory, "_keepers", 0)
    return found


def test_the_last_one_gives_the_memory_back(library: Library) -> None:
    first, second = Training(), Training()
    one, two = memory.KeepFreedMemory(first), memory.KeepFreedMemory(second)
    assert library.calls == list(memory._KEEP.items())
    one.give_back()
    one.give_back()
    assert len(library.calls) == 2
    two.give_back()
    assert library.calls[2:] == [*memory._USUAL.items(), ("give back", 0)]


@pytest.mark.skipif(memory._library() is None, reason="not glibc, or the environment says how to handle memory")
def test_the_c_library_takes_every_value() -> None:
    """mallopt answers 0 to what it does not know or what is out of its range."""
    try:
        for name, value in [*memory._KEEP.items(), *memory._USUAL.items()]:
            assert memory._library().mallopt(name, value) == 1, name
    finally:
        memory._set(memory._library(), memory._USUAL)


def test_a_run_that_nobody_closed_gives_the_memory_back(library: Library) -> None:
    owner = Training()
    memory.KeepFreedMemory(owner)
    del owner
    assert library.calls[-1] == ("give back", 0)


@pytest.mark.parametrize("name", memory._CHOSEN)
def test_what_the_environment_says_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert memory._library.__wrapped__() is None


@pytest.mark.skipif(memory._library() is None, reason="not glibc, or the environment says how to handle memory")
def test_a_step_does_not_fetch_its_memory_from_the_system_again() -> None:
    """Layers of 48 MB that are freed at the end of every step: some 12,000 pages each."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_of_its_parent(library: Library) -> None:
    """A thread that counts while the process forks is not in the child, and never lets go of the lock there."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    child = os.fork()
    if not child:
        signal.alarm(20)
        memory.KeepFreedMemory(Training()).give_back()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
