"""Workers that die, fail or hang on: the others go on, and nobody is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenhand.comparison.executors import outcome, run_in_processes
from evenhand.errors import UsageError


def work(task: tuple[str, str]) -> None:
    """What a task asks for: note that it ran, then die, fail or finish."""
    kind, place = task
    with Path(place).open("a") as file:
        file.write("x")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "die once" and len(Path(place).read_text()) == 1:
        os._exit(3)
    if kind == "refuse":
        raise UsageError("Not like this.")
    if kind == "fail":
        raise RuntimeError("a private value")
    if kind == "threads":
        Path(place).write_text(os.environ["OMP_NUM_THREADS"])
    if kind == "sleep":
        time.sleep(600)


def test_a_death_is_retried_once_and_the_others_go_on(tmp_path: Path) -> None:
    kinds = ["die", "good", "die once", "refuse", "fail", "good", "threads"]
    tasks = {f"{i} {kind}": (kind, str(tmp_path / str(i))) for i, kind in enumerate(kinds)}
    seen: list[int] = []
    failed = run_in_processes(tasks, work, jobs=2, threads=3, watch=lambda busy, done: seen.append(done))
    assert set(failed) == {"0 die", "3 refuse", "4 fail"}
    assert "ended by signal 9, 2 times" in failed["0 die"].reason
    assert failed["3 refuse"].reason == "Not like this."
    assert "private value" not in failed["4 fail"].reason
    assert "private value" in failed["4 fail"].details
    runs = [len((tmp_path / str(i)).read_text()) for i in range(6)]
    assert runs == [2, 1, 2, 1, 1, 1]
    assert (tmp_path / "6").read_text() == "3"
    assert seen[-1] == len(tasks)
    assert seen == sorted(seen)


def test_what_the_operating_system_refuses_is_said_in_a_sentence() -> None:
    def write(task: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    failure = outcome(write, None)
    assert failure is not None
    assert failure.reason.startswith("a file cannot be read or written (No space left on device). Make room")


ORPHANS = """
import signal, sys; sys.path.insert(0, {here!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
from test_executors import work
from evenhand.comparison.executors import run_in_processes
if __name__ == "__main__":
    run_in_processes({{"a": ("sleep", {place!r})}}, work, jobs=1, threads=1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    script, place = tmp_path / "start.py", tmp_path / "ran"
    script.write_text(ORPHANS.format(here=str(Path(__file__).parent), place=str(place)))
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    wait_for(place.exists)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert children
    parent.send_signal(how)
    parent.wait(timeout=60)
    wait_for(lambda: not any(alive(int(child)) for child in children))


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
