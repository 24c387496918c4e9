"""A small project of one's own, and the command line in this process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from commands import evenhand, result
from evenhand.runs.folder import Folder

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


done = result


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
