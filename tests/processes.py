"""Processes of their own that begin at once, forked from a server that has imported torch and computed nothing.

They have their own pid, signals, streams and exit code, and the environment and folder of whoever starts them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evenhand.comparison import executors
from evenhand.training.guards import coupling_guard

_serve = executors._serve
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "sklearn.datasets", "fairlearn.metrics", "evenhand.comparison.compare", "evenhand.cli"]
)


class Started:
    """A function in a process of its own, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, work: Callable[..., object], *arguments: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="evenhand-process-")
        self._streams = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process
        given = (dict(os.environ), Path.cwd(), self._streams, work, arguments)
        self._process = process(target=_run, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end, once; return what was printed."""
        self._process.join(timeout)
        assert self.poll() is not None, "waited in vain"
        out, err = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        self._folder.cleanup()
        return out, err


def started(*arguments: object) -> Started:
    """Start ``evenhand ARGUMENTS``."""
    return Started(_command, *map(str, arguments))


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def _command(*arguments: str) -> None:
    """Run a command; its workers are forks of it, which is safe since neither torch nor the command has threads."""
    import torch

    from evenhand.cli import main

    torch.set_num_threads(1)
    executors.START = "fork"
    sys.argv = ["evenhand", *arguments]
    main()


def _run(
    environment: dict[str, str],
    folder: Path,
    streams: list[Path],
    work: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    _here(environment)
    os.chdir(folder)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work(*arguments)


def _here(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    coupling_guard.DRAWS, coupling_guard.LOOKS = 4, 2


class Serve:
    """Run a worker of a comparison with the environment of the process that starts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_served, dict(os.environ))


def _served(environment: dict[str, str], *arguments: Any) -> None:
    _here(environment)
    _serve(*arguments)
