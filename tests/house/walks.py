"""How many files of evenhand one use walks through: ``python tests/house/walks.py`` prints a line per use.

A walk is the set of Python files whose functions run, seen by ``sys.setprofile``. Left out are files that are only
imported, what an import calls (registries, lazy names of packages), and templates.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import evenhand as eh

PACKAGE = str(Path(eh.__file__).parent) + os.sep
WALKS: dict[str, Callable[[], set[str]]] = {}
WARM = 9
"""Steps until the engine has compared itself with autograd and blocks have their length."""


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the files of evenhand whose functions run inside."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename.removeprefix(PACKAGE)
        ours = name != frame.f_code.co_filename and name.endswith(".py")
        if event == "call" and ours and name not in files and not importing(frame):
            files.add(name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def importing(frame: FrameType | None) -> bool:
    """Whether this call is part of an import: below the top level of a module, or a package that finds a lazy name."""
    while frame is not None:
        inside = frame.f_code.co_filename.startswith(PACKAGE)
        if inside and frame.f_code.co_name in ("<module>", "__getattr__"):
            return True
        frame = frame.f_back
    return False


def a_step(model: torch.nn.Module, inputs: torch.Tensor, *, last: bool = False) -> set[str]:
    """Files of one step within a block of charged steps, or of the ``last`` of a block, which also writes the ledger.

    The engine has compared itself with autograd before, and no secret coin asks for a look at the records.
    """
    data = eh.data.wrap(inputs, [i % 2 for i in range(len(inputs))])
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=data.facts, epochs=100, batch_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp(), compose=False) as private:
        batches = private.batches(data)
        while True:
            batch = next(batches)
            ends = private.position + 1 == private._ledger.reserved
            looks = any(private._coupling.due(step) for step in (private.position, private.position + 1))
            if private.position >= WARM and ends is last and not looks:
                break
            private.step(batch)
        with watched() as files:
            private.step(batch)
    return files


class Last(torch.nn.Module):
    """An LSTM whose last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(4, 8, batch_first=True), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def step_linear() -> set[str]:
    return a_step(torch.nn.Linear(6, 2), torch.randn(256, 6))


def last_step_linear() -> set[str]:
    return a_step(torch.nn.Linear(6, 2), torch.randn(256, 6), last=True)


def step_cnn() -> set[str]:
    layers = (torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    return a_step(torch.nn.Sequential(*layers), torch.randn(256, 1, 8, 8))


def step_lstm() -> set[str]:
    return a_step(Last(), torch.randn(256, 5, 4))


def command(*arguments: str) -> set[str]:
    """Files of one command, run in this process."""
    from evenhand.cli import app

    with watched() as files, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app([*arguments], standalone_mode=False)
    return files


def train_csv() -> set[str]:
    folder = Path(tempfile.mkdtemp())
    rows = [f"{20 + i % 50},{'fm'[i % 2]},{'no' if i % 3 else 'yes'}" for i in range(400)]
    (folder / "people.csv").write_text("age,sex,ill\n" + "\n".join(rows) + "\n", encoding="utf-8")
    settings = (
        "--label",
        "ill",
        "--labels",
        "no,yes",
        "--groups",
        "sex",
        "--number",
        "age=0:120",
        "--category",
        "sex=f,m",
    )
    command("init", str(folder / "people.csv"), *settings, "--out", str(folder / "people.toml"))
    return command(
        "train", str(folder / "people.toml"), "--epsilon", "3", "--epochs", "2", "--out", str(folder / "run")
    )


def verify() -> set[str]:
    return command("verify", str(next((Path(__file__).parents[1] / "golden").glob("*/owners"))))


def epsilon() -> set[str]:
    return command("epsilon", "--rate", "0.01", "--noise", "1", "--steps", "1000", "--delta", "1e-5")


WALKS.update(
    {
        "private.step of nn.Linear": step_linear,
        "private.step of a CNN": step_cnn,
        "private.step of an LSTM": step_lstm,
        "the last step of a block of nn.Linear": last_step_linear,
        "evenhand train on a CSV": train_csv,
        "evenhand verify": verify,
        "evenhand epsilon": epsilon,
    }
)

if __name__ == "__main__":
    os.environ.setdefault("EVENHAND_STATE", tempfile.mkdtemp())
    torch.set_num_threads(1)
    for name, walk in WALKS.items():
        files = walk()
        print(f"{name}: {len(files)} files", *(sorted(files) if "-v" in sys.argv else ()), sep="\n  ")
