"""A small project of one's own, and the command line in this process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from evenhand.cli import main
from evenhand.runs import Folder

CANARY = "alice-secret-4711"
"""A private value: whatever goes wrong, it must never be printed."""
HEADER = ["age", "city", "name", "ill"]
TOML = """
data = "people.csv"
label = "ill"
labels = ["no", "yes"]
groups = "city"
model = "linear"
epochs = 1
batch_size = 20

[columns.age]
kind = "number"
low = 0
high = 100

[columns.city]
kind = "category"
values = ["north", "south"]
"""


def evenhand(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["evenhand", *map(str, arguments)])
        patch.chdir(cwd)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def done(*arguments: object, cwd: Path) -> dict:
    found = evenhand(*arguments, "--json", cwd=cwd)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def people(count: int = 80) -> list[list[str]]:
    """Records whose label follows from the age; every one carries the canary in a column that is left out."""
    return [
        [str(20 + row * 7 % 60), ("north", "south")[row % 2], CANARY, "yes" if row * 7 % 60 > 30 else "no"]
        for row in range(count)
    ]


def write(folder: Path, rows: list[list[str]] | None = None, header: list[str] = HEADER, toml: str = TOML) -> None:
    lines = [header, *(people() if rows is None else rows)]
    (folder / "people.csv").write_text("".join(",".join(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "people.toml").write_text(toml, encoding="utf-8")


def train(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    return evenhand("train", "people.toml", "--epsilon", 3, "--out", "run", *flags, cwd=folder)


def spent(folder: Path) -> int:
    """Steps that the run's ledger has reserved."""
    run = Folder(folder / "run")
    return run.ledger().reserved if run.ledger_file.exists() else 0
