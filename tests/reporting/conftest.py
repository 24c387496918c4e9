"""Reports to look at: the digits example, and the ones that could go wrong; and a browser to look at them with."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from evenhand.reporting.group_metrics import Estimate, estimate
from evenhand.reporting.run_page import ReportData, headline

STATEMENT = (
    "If one record of the training data is added or removed, the chance of any outcome changes by at most a factor "
    "e^2.98, except with probability 1e-4 (epsilon 2.98, delta 1e-4, per record, add/remove).",
    "At 1 % false alarms, guessing whether a given record was used succeeds at most 21 % of the time.",
    "Not covered: the held-out records, preprocessing, the choice of method and settings, timing, and what people say.",
)
FACTS = {
    "method": "dpsgd (guarantee: by construction)",
    "data": "digits, 1,224 records for training, 450 held out",
    "steps": "287, Poisson sampling, expected batch 128",
    "noise": "1.72 times the clip bound 1.0",
    "accountant": "privacy loss distributions",
}
REPRODUCE = (
    "pip install evenhand\n"
    "evenhand train --data digits --method dpsgd --epsilon 3 --delta 1e-4 --epochs 30 --batch-size 128 --seed 0"
)


def report(groups: Mapping[str, Estimate], **changes: object) -> ReportData:
    """A report of a private run with these groups, curves that rise towards them, and one owner."""
    count = sum(group.count for group in groups.values())
    right = sum(group.value * group.count for group in groups.values() if group.count)
    overall = estimate(right / count if count else math.nan, count)
    curves = [
        {
            "step": round(epoch * 9.57),
            "epoch": float(epoch),
            "accuracy": (0.0 if math.isnan(overall.value) else overall.value) * _rise(epoch, 3),
            "groups": {
                name: group.value * _rise(epoch, 3 + 3 * (i % 4) * (1 - group.value) + 9 * (group.value < 0.8))
                for i, (name, group) in enumerate(groups.items())
                if group.count
            },
        }
        for epoch in range(1, 31)
    ]
    spending = {"all": [(step, 2.98 * math.sqrt(step / 287)) for step in range(288)]}
    given = {
        "title": "digits, dpsgd",
        "headline": headline(overall, groups),
        "overall": overall,
        "groups": groups,
        "curves": curves,
        "spending": spending,
        "budgets": {"all": 3.0},
        "statement": STATEMENT,
        "warnings": (),
        "facts": FACTS,
        "reproduce": REPRODUCE,
        "delta": 1e-4,
    }
    return ReportData(**{**given, **changes})  # type: ignore[arg-type]


def _rise(epoch: int, slowness: float) -> float:
    wobble = 0.012 * math.sin(epoch * slowness * 1.7) * (epoch < 30)
    return max(0.0, min(1.0, (1 - math.exp(-epoch / slowness)) / (1 - math.exp(-30 / slowness)) + wobble))


def _digits() -> dict[str, Estimate]:
    right = (45, 44, 43, 45, 42, 44, 45, 43, 22, 43)
    total = (45, 46, 44, 46, 45, 46, 45, 45, 43, 45)
    return {f"class {i}": estimate(right[i] / total[i], total[i]) for i in range(10)}


@pytest.fixture
def digits() -> ReportData:
    """Ten classes, class 8 lowest, 2.98 of epsilon 3 spent by one owner."""
    return report(_digits())


@pytest.fixture
def make_report() -> Callable[..., ReportData]:
    """A builder of reports: groups, then fields to change."""
    return report


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs headless chromium on a file with these flags."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have chromium (Debian: apt-get install chromium)")
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")

    def run(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [program, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    return run
