"""Several processes train one run: the weights of one process, one ledger, one clear end whatever happens to one."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import evenhand as eh
from evenhand.methods.catalogue import catalogue
from processes import wait_for
from training import ranks

METHODS = [recipe.name for recipe in catalogue()]
WAYS = [(2, "float64", 1e-12), (3, "float32", 1e-5)]


@pytest.mark.parametrize(("size", "dtype", "most"), WAYS)
def test_the_weights_are_those_of_one_process(size: int, dtype: str, most: float, tmp_path: Path) -> None:
    compare_with_one_process(METHODS[size::4], size, dtype, most, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype", "most"), [*WAYS, (2, "float32", 1e-5), (3, "float64", 1e-12)])
def test_every_method_has_the_weights_of_one_process(size: int, dtype: str, most: float, tmp_path: Path) -> None:
    compare_with_one_process(METHODS, size, dtype, most, tmp_path)


def compare_with_one_process(methods: list[str], size: int, dtype: str, most: float, tmp_path: Path) -> None:
    """Train by each method in one process and in several, and compare weights, charges and what owners spent."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir(), together.mkdir()
    started = ranks.launched(size, tmp_path, ranks.train_all, methods, [dtype], str(together))
    ranks.train_all(0, methods, [dtype], str(alone))
    assert [code for code, _ in ranks.ended(started)] == [0] * size
    for method in methods:
        name = f"{method}-{dtype}"
        expected = ranks.weights(alone / f"{name}-0.pt")
        for rank in range(size):
            assert float((ranks.weights(together / f"{name}-{rank}.pt") - expected).abs().max()) <= most, (method, rank)
        one, several = (eh.verify(folder / name) for folder in (alone, together))
        assert several["ok"], several["problems"]
        assert one["steps"] == several["steps"] == ranks.STEPS
        assert one["owners"] == several["owners"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("data", "Process 1 has other data than process 0"),
        ("plan", "Process 1 has other plan"),
        ("weights", "Process 1 has other initial weights"),
        ("seed", "Process 1 has other insecure seed"),
        ("versions", "Process 1 has other versions of the software"),
        ("optimizer", "Process 1 has other optimizer"),
    ],
)
def test_processes_that_differ_stop_before_anything_is_spent(way: str, words: str, tmp_path: Path) -> None:
    started = ranks.launched(2, tmp_path, ranks.refused, str(tmp_path), way)
    assert [code for code, _ in ranks.ended(started)] == [0, 0]
    for rank in range(2):
        kind, message = json.loads((tmp_path / f"said{rank}").read_text())
        assert (kind, words in message, "\n" in message) == ("UsageError", True, False), message
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert not ledger.exists() or not eh.verify(tmp_path / "run")["steps"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raises", "ProcessError: Process 1 stopped with ValueError."),
        ("loss fails", "ProcessError: Process 1 stopped with RuntimeError."),
        ("weights", "ProcessError: Process 1 has other weights than process 0"),
        ("other key", "ProcessError: Process 1 drew other records than process 0"),
        ("stale step", "ProcessError: Process 1 is at step 2 and process 0 at step 3"),
        ("long sum", "ProcessError: The sum of process 1 is longer than the gradients of its records"),
        ("NaN sum", "ProcessError: The sum of process 1 is longer than the gradients of its records"),
    ],
)
def test_what_goes_wrong_in_one_process_stops_all_before_anything_is_released(
    way: str, words: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    started = ranks.launched(2, tmp_path, ranks.stepped, str(out), str(tmp_path), 20, False, way)
    (first, said), (second, _) = ranks.ended(started)
    assert 0 not in (first, second)
    assert words in said
    assert "private value" not in said
    for rank in range(2):
        assert (tmp_path / f"executed{rank}").read_text().split() == ["0", "1", "2"], "step 3 changed no weights"
    assert eh.verify(out)["steps"] == 4, "it stays charged"
    assert not (out / "model.safetensors").exists()
    finish(out, 3, tmp_path)


def test_a_process_that_stalls_ends_the_run_after_the_time_of_the_group(tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = ranks.launched(2, tmp_path, ranks.stepped, str(out), str(tmp_path), 20, False, "stalls", wait=5)
    said = started[0].communicate()[1]
    started[1].kill()
    started[1].communicate()
    assert "A process of this run does not answer" in said
    assert "4 of 20 steps are charged and stay charged. Go on, with any number of processes: evenhand resume" in said
    assert eh.verify(out)["steps"] == 4


def finish(out: Path, size: int, tmp_path: Path) -> None:
    """Resume with another number of processes, to the end, and verify."""
    started = ranks.launched(size, tmp_path, ranks.stepped, str(out), str(tmp_path), 20, True)
    assert [code for code, _ in ranks.ended(started)] == [0] * size
    checked = eh.verify(out)
    assert checked["ok"], checked["problems"]
    assert checked["steps"] == 20


@pytest.mark.parametrize("killed", [0, 1])
def test_after_a_kill_nothing_ran_that_is_not_charged(killed: int, tmp_path: Path) -> None:
    kill_at_a_moment(killed, 3 + 2 * killed, 1 + killed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(50))
def test_fifty_kills_of_either_process(moment: int, tmp_path: Path) -> None:
    draw = random.Random(moment)
    kill_at_a_moment(moment % 2, draw.uniform(0, 19), draw.choice([1, 2, 3]), tmp_path)


def kill_at_a_moment(killed: int, moment: float, size_after: int, tmp_path: Path) -> None:
    """Kill one of two processes about when so many steps are taken; compare what ran with what is charged; resume."""
    out = tmp_path / "run"
    started = ranks.launched(2, tmp_path, ranks.stepped, str(out), str(tmp_path))
    log = tmp_path / f"executed{killed}"
    wait_for(lambda: log.exists() and len(log.read_text().split()) >= int(moment))
    time.sleep((moment % 1) * 0.02)
    started[killed].kill()
    codes = [code for code, _ in ranks.ended(started)]
    assert codes[killed] in (-9, 0)  # it may have been at its end
    logs = [file.read_text().split() for file in tmp_path.glob("executed*")]
    executed = max(int(step) for steps in logs for step in steps) + 1
    assert eh.verify(out)["steps"] >= executed
    if not (out / "model.safetensors").exists():
        finish(out, size_after, tmp_path)


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = ranks.launched(2, tmp_path, ranks.fitted, str(out), str(tmp_path))
    wait_for(lambda: (out / "ledger.jsonl").exists() and eh.verify(out)["steps"] > 10)
    started[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in ranks.ended(started)] == [0, 0]
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "nothing is lost" in said[0]


def test_a_released_gradient_is_that_of_a_slow_reference(tmp_path: Path) -> None:
    started = ranks.launched(2, tmp_path, ranks.watched, str(tmp_path))
    assert [code for code, _ in ranks.ended(started)] == [0, 0]
    for method in ranks.WATCHED:
        for step, (released, expected) in enumerate(ranks.released_and_expected(method, tmp_path)):
            assert float((released - expected).abs().max()) < 1e-9, (method, step)


def test_fit_divides_whatever_it_trains(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir(), together.mkdir()
    started = ranks.launched(2, tmp_path, ranks.fit_all, str(together))
    ranks.fit_all(0, str(alone))
    ends = ranks.ended(started)
    assert [code for code, _ in ends] == [0, 0], ends
    for name in ranks.FITS:
        first, second = (ranks.weights(together / f"{name}-{rank}.pt") for rank in range(2))
        assert torch.equal(first, second), name
        if name != "dropout":  # masks of other rows: as likely, and not the same
            assert float((first - ranks.weights(alone / f"{name}-0.pt")).abs().max()) < 1e-5, name
        assert eh.verify(together / name)["ok"]
        assert (together / name / "private" / "report-full.html").exists()
