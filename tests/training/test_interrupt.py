"""Stopping and crashing: signals, kill -9, and what a resume makes of it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from commands import evenhand
from evenhand.runs.folder import Folder
from evenhand.runs.verify import verify
from processes import Started, started

TRAIN = ["train", "--data", "digits", "--epsilon", "3", "--epochs", "15", "--batch-size", "64", "--seed", "0"]
TRAIN += ["--model", "linear"]


def witnessed(witness: str, *arguments: str) -> None:
    """Run a command; every executed step writes its position before the update, outside of evenhand's own ledger."""
    import evenhand.training.attach as attachment
    from evenhand.cli import main

    seen = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    update = attachment.Private._update

    def noted(self: attachment.Private, gradient: dict[str, Tensor]) -> None:
        os.write(seen, f"{self.position} {self._mechanism.stream.fingerprint}\n".encode())
        update(self, gradient)

    attachment.Private._update = noted
    sys.argv = ["evenhand", *arguments]
    main()


def start(witness: Path, arguments: Sequence[str]) -> Started:
    return Started(witnessed, str(witness), *arguments)


def executed(witness: Path) -> list[tuple[int, str]]:
    lines = witness.read_text().splitlines() if witness.exists() else []
    return [(int(position), key) for position, key in (line.split() for line in lines)]


def wait_for_steps(process: Started, witness: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(executed(witness)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.005)


def crash_and_resume(tmp_path: Path, moment: float, extra: float) -> None:
    """One run, one kill -9 at a random moment of real training, one resume; everything that must hold after it."""
    out, witness = tmp_path / "run", tmp_path / "witness"
    process = start(witness, [*TRAIN, "--out", str(out)])
    wait_for_steps(process, witness, 1 + int(moment * 250))
    time.sleep(extra)
    process.kill()
    process.communicate()
    ran = executed(witness)
    reading = Folder(out).ledger()
    assert reading.reserved >= len(ran)
    assert reading.reserved > max(position for position, _ in ran) - 1
    assert verify(out)["ok"], verify(out)["problems"]
    resumed = started("resume", out, "--json")
    output, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert found["epsilon"] <= 3.0
    checked = verify(out)
    assert checked["ok"], checked["problems"]
    final = Folder(out).ledger()
    assert final.reserved == Folder(out).plan().steps
    keys = [row["key"] for row in final.segments]
    assert len(set(keys)) == len(keys) == 2


@pytest.mark.parametrize("seed", range(1))
def test_kill_nine_loses_no_charge(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    crash_and_resume(tmp_path, source.random(), source.random() * 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_runs_with_one_kill_nine_each(seed: int, tmp_path: Path) -> None:
    source = random.Random(1000 + seed)
    crash_and_resume(tmp_path, source.random(), source.random() * 0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_block_and_loses_nothing(number: signal.Signals, tmp_path: Path) -> None:
    out, witness = tmp_path / "run", tmp_path / "witness"
    process = start(witness, [*TRAIN, "--out", str(out)])
    wait_for_steps(process, witness, 40)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "evenhand resume" in errors
    assert "Traceback" not in errors
    reading = Folder(out).ledger()
    marker = json.loads((out / "private" / "checkpoint.json").read_text())
    assert reading.reserved == reading.committed == marker["position"] == len(executed(witness))
    again = start(witness, ["resume", str(out), "--json"])
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["steps"] == Folder(out).plan().steps
    positions = [position for position, _ in executed(witness)]
    assert positions == list(range(1, len(positions) + 1)), "no step was lost or repeated"


def test_resuming_a_finished_run_exits_with_three(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = evenhand("train", "--data", "digits", "--epsilon", 3, "--epochs", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    again = started("resume", out)
    _, errors = again.communicate()
    assert again.returncode == 3, errors
    assert "finished" in errors


def test_a_hostile_checkpoint_is_not_executed(tmp_path: Path) -> None:
    import pickle

    import torch

    import evenhand as eh

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    train, _ = eh.data.digits()
    plan = eh.plan("dpsgd", eh.Privacy(3), data=train.facts, epochs=1)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    with eh.attach(model, optimizer, loss, plan, out=tmp_path / "run") as private:
        private.step(next(private.batches(train)))
    for payload in (pickle.dumps(Hostile(), protocol=2), b"\x80\x02not a checkpoint"):
        (tmp_path / "run" / "private" / "checkpoint.pt").write_bytes(payload)
        with pytest.raises(eh.errors.UsageError, match="damaged or is not one of ours"):
            eh.resume(tmp_path / "run", model=model, train=train)
    assert not (tmp_path / "owned").exists()
