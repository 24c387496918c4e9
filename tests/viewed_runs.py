"""Small runs to look at: two private ones, one with a budget for each owner, one without privacy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import evenhand as eh

OWNERS = {"strict": 1.0, "usual": 3.0, "open": 8.0}
HOSTILE = "<img src=x onerror=document.title='owned'>\u202e</script><script>document.title='owned'<"


def folders(within: Path, *names: str) -> dict[str, Path]:
    """Train the runs with these names, or all; a second or two altogether."""
    train, test = eh.data.digits()
    budgets = eh.Budgets(OWNERS, delta=1e-5)
    owners = [("strict", "usual", "open")[place % 3] for place in range(len(train))]
    records = train.fetch(torch.arange(len(train)))

    settings: dict[str, dict[str, Any]] = {
        "first": {"train": train, "epsilon": 3.0, "epochs": 4},
        "second": {"train": train, "epsilon": 1.0, "epochs": 2, "method": "auto_s"},
        "owners": {"train": records, "owners": owners, "privacy": budgets, "method": "idp_sample", "epochs": 2},
        "plain": {"train": train, "method": "sgd", "epochs": 2},
    }
    for name in names or settings:
        eh.fit(torch.nn.Linear(64, 10), test=test, out=within / name, compose=False, **settings[name])
    return {name: within / name for name in names or settings}


def hostile_copy(run: Path, within: Path) -> Path:
    """Copy a run so that its group, its method's data and its folder have names that are markup."""
    copy = within / "<b onload=x>&'\""
    shutil.copytree(run, copy)
    file = copy / "metrics.jsonl"
    name = HOSTILE.encode("unicode_escape").decode()
    file.write_text(file.read_text().replace('"class 3"', f'"{name}"'))
    return copy
