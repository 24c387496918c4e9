"""Commands of evenhand in forked children, under limits: Python and torch are loaded once for all of them."""

from __future__ import annotations

import os
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
TRAIN = ("train", "--data", "digits", "--epsilon", "3", "--epochs", "2", "--seed", "0", "--model", "linear")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (128 + number for a signal) and all that it printed."""

    code: int
    text: str

    @property
    def clean(self) -> bool:
        """Whether it ended without a traceback and without a signal."""
        return self.code in (0, 1, 2, 3) and "Traceback" not in self.text and "Exception ignored" not in self.text


def command(*arguments: object, before: Callable[[], object] = lambda: None) -> Ended:
    """Run ``evenhand ARGUMENTS`` in a child; ``before`` runs there first, to set limits or to break something."""
    return child(lambda: _main([str(argument) for argument in arguments], before))


def child(work: Callable[[], object]) -> Ended:
    """Run ``work`` in a child process, whose stdout and stderr are read together."""
    import evenhand.training.from_config

    evenhand.data.sources.digits()

    reader, writer = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        code = 70
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    code = 71
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode("utf-8", "backslashreplace")
    status = os.waitpid(number, 0)[1]
    return Ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status), text)


def _main(arguments: Sequence[str], before: Callable[[], object]) -> None:
    import torch

    from evenhand.cli import main

    torch.set_num_threads(1)
    sys.argv = ["evenhand", *arguments]
    before()
    main()


def largest_file(size: int) -> Callable[[], None]:
    """Return what makes every file end at ``size`` bytes, as a full disk would."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def open_files(count: int) -> Callable[[], None]:
    """Return what leaves room for ``count`` more open files."""

    def limit() -> None:
        highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(os.dup(2), 10 + count), highest))
        taken = []
        try:
            while True:
                taken.append(os.dup(2))
        except OSError:
            for handle in taken[:count]:
                os.close(handle)

    return limit


def left_over(folder: Path) -> list[str]:
    """Return the files of a folder that were never given their name."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.name.endswith(".part"))
