"""The same list of runs on a Ray cluster; here one on this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.comparison import executors
from evenhand.errors import UsageError

SCRIPT = """
import json, sys
from evenhand.comparison import executors
from evenhand.comparison.sweep import Sweep
from evenhand.comparison.compare import compare
from evenhand.training.config import Config
from evenhand.errors import UsageError

def work(task):
    if task == "refuse":
        raise UsageError("Not like this.")
    if task == "fail":
        raise RuntimeError("a private value")

failed = executors.run_on_ray({"a": "good", "b": "refuse", "c": "fail"}, work, jobs=1, threads=1)
assert sorted(failed) == ["b", "c"], failed
assert failed["b"].reason == "Not like this."
assert "private value" not in failed["c"].reason and "private value" in failed["c"].details
sweep = Sweep(Config(epochs=1.0, model="linear", compose=False), epsilons=(3.0,), seeds=2)
first = compare(sweep, sys.argv[1], jobs=1, progress=False, executor="ray")
assert first.failed == [], first.failed
again = compare(sweep, sys.argv[1], jobs=1, progress=False)
import os, pathlib
def where(task):
    pathlib.Path(task).write_text(json.dumps([os.environ["EVENHAND_STATE"], os.environ["EVENHAND_DATA"], os.getcwd()]))
place = str(pathlib.Path(sys.argv[1]) / "where")
assert executors.run_on_ray({"a": place}, where, jobs=1, threads=1) == {}
there = json.loads(pathlib.Path(place).read_text())
assert there == [os.environ["EVENHAND_STATE"], os.environ["EVENHAND_DATA"], os.getcwd()], there
print(json.dumps([first.reused, again.reused, first.entries[0].seeds, first.entries[0].spent]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install evenhand[ray]")
def test_a_comparison_on_a_local_ray(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "start.py"), str(tmp_path / "out")]
    environment = {**os.environ, "EVENHAND_STATE": str(tmp_path / "state"), "EVENHAND_DATA": str(tmp_path / "data")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import json

    before, after, seeds, spent = json.loads(done.stdout.splitlines()[-1])
    assert (before, after, seeds) == (0, 2, 2)
    assert 2.97 <= spent <= 3.0
    assert len(list((tmp_path / "out").glob("dpsgd-*/statement.json"))) == 2


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"evenhand\[ray\]"):
        executors.run_on_ray({"a": 1}, print, jobs=1, threads=1)


def test_nothing_to_run_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert executors.run_on_ray({}, print, jobs=1, threads=1) == {}
