"""One run trained by two processes of a Ray cluster on this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.errors import UsageError
from evenhand.integrations import ray
from evenhand.runs.dataset_ledger import state_folder
from evenhand.training.steps.surroundings import Surroundings

SCRIPT = """
import sys, torch, evenhand as eh
from evenhand.integrations import ray
from evenhand.errors import UsageError

def make():
    train, test = eh.data.digits()
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(64, 10), "train": train, "test": test}

def other():
    given = make()
    return {**given, "model": torch.nn.Linear(64, 10)}

if __name__ == "__main__":
    run = ray.train(make, processes=2, out="run", epsilon=3.0, delta=1e-5, epochs=1, batch_size=128)
    checked = eh.verify("run")
    assert checked["ok"], checked["problems"]
    print(checked["steps"], run.privacy.epsilon <= 3)
    try:
        ray.train(make, processes=2, out="refused", epsilon=-1.0)
    except UsageError as error:
        print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install evenhand[ray]")
def test_two_processes_of_a_local_cluster_train_one_run(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(SCRIPT)
    environment = {**os.environ, "EVENHAND_STATE": str(tmp_path / "state"), "RAY_TRAIN_V2_ENABLED": "1"}
    command = [sys.executable, "start.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "10 True" in done.stdout
    assert "refused: epsilon=-1" in done.stdout
    assert list((tmp_path / "state").glob("shared-*")) == [], "the file that proved the shared folder is gone"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(UsageError, match=r"evenhand\[ray\]"):
        ray.train(dict, processes=2, out=tmp_path / "run")


def test_a_machine_that_does_not_share_the_state_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    with Surroundings.shared() as shared:
        monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "elsewhere"))
        shared.take()
        assert state_folder() == tmp_path / "state"
    with pytest.raises(UsageError, match="EVENHAND_STATE to a folder that all machines share"):
        shared.take()
