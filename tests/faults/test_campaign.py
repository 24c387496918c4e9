"""The campaign of faults finds nothing: a few of each kind in CI, the whole behind ``-m slow``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("campaign.py")
SOURCE = Path(__file__).parents[2] / "src"
NO_SHIM = 77


def found(*arguments: str) -> dict[str, int]:
    """Return how often each class was found by a part of the campaign."""
    command = [sys.executable, str(PROGRAM), *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == NO_SHIM:
        pytest.skip(done.stdout.strip())
    assert done.stdout, done.stderr
    print(done.stdout)
    counted = json.loads(done.stdout.splitlines()[-1])
    assert all(part.pop("faults") for part in counted.values()), "no fault happened"
    return {f"{name}: {kind}": count for name, part in counted.items() for kind, count in part.items() if count}


def test_a_few_faults_of_each_kind_leave_nothing_behind() -> None:
    assert found("quick") == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kills", "errors", "disks", "environment"])
def test_the_whole_campaign_leaves_nothing_behind(part: str) -> None:
    assert found(part) == {}
