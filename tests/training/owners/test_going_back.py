"""Budgets lowered below what is spent: a fork of an earlier checkpoint keeps them, and both runs are counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import LOWER, OLD, data, further, gone_back, parts, planned, recounted, resumed, trained
from torch import nn

import evenhand as eh
from commands import evenhand, result
from evenhand.accounting.accountant import epsilon
from evenhand.errors import CalibrationError, LedgerError, PlanMismatchError, UsageError
from evenhand.mechanism.replan import replan, replan_from_checkpoint
from evenhand.runs.checkpoints import KEPT, marks, spread
from evenhand.runs.folder import Folder
from evenhand.training.attach import Private, start

pytestmark = pytest.mark.usefixtures("slow_steps")


def test_a_fork_keeps_the_lower_budgets_and_verifies(tmp_path: Path) -> None:
    old, new, made = gone_back(tmp_path)
    whole, start = old.ledger(), new.ledger()
    point = start.forks[0]["from"]
    assert (point, whole.reserved) == (10, 25)
    assert planned().spent_by_owner(15)[0] > 1.3, "the checkpoint after it would not fit"
    assert start.forks[0]["head"] == whole.withdrawn["prev"], "the old head, before it was withdrawn"
    shared = start.hashes.index(start.forks[0]["prev"]) + 1
    assert start.hashes[:shared] == whole.hashes[:shared], "the chain is the old one"
    assert new.ledger_file.read_bytes()[:500] == old.ledger_file.read_bytes()[:500]
    assert eh.verify(new.path)["ok"]
    found = resumed(new.path)
    assert found["ok"], found["problems"]
    assert found["steps"] == made.steps == 30
    for owner, (name, budget) in enumerate((("a", 1.3), ("b", 2.8))):
        assert 0.97 * budget < found["owners"][name] <= budget
        assert recounted(new, made, owner) == pytest.approx(found["owners"][name], rel=3e-3)
    keys = new.ledger().keys
    assert len(set(keys)) == len(keys)
    assert new.ledger().segments[-1]["key"] not in old.ledger().keys, "new noise after the fork"


def test_the_statement_says_what_the_promise_rests_on(tmp_path: Path) -> None:
    old, new, _ = gone_back(tmp_path)
    resumed(new.path)
    words = (new.path / "statement.md").read_text()
    assert "of the 25 steps that another run had charged" in words
    assert "is ever released" in words
    assert "Delete them: whoever sees both sees both spends" in words
    assert any("must never be released" in text for text in new.statement()["does_not_cover"])
    assert any("budgets were lowered" in note for note in eh.verify(new.path)["notes"])
    found = eh.verify(old.path)
    assert found["ok"]
    assert found["steps"] == 25
    assert found["owners"]["a"] > 1.5, "what it spent stays spent"
    assert any("withdrawn" in note for note in found["notes"])


def test_both_runs_are_counted_on_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new, made = gone_back(tmp_path)
    counted = new.composition()
    assert counted["runs"] == 2
    for owner, name in enumerate("ab"):
        both = [*planned().events(owner), *made.from_here().events(owner)]
        assert counted["epsilons"][name] == pytest.approx(epsilon(both, 1e-3), rel=1e-6)
        spent = [*planned().events(owner, 25), *made.from_here().events(owner)]
        assert counted["epsilons"][name] >= epsilon(spent, 1e-3)
    assert resumed(new.path)["ok"]
    assert new.composition() == counted, "the fork is not entered a second time"
    shutil.rmtree(new.path)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "another machine"))
    fresh = trained(tmp_path / "fresh")
    shutil.rmtree(tmp_path / "another machine")
    eh.rebudget(fresh.path, LOWER, train=data(), out=tmp_path / "new")
    assert Folder(tmp_path / "new").composition()["runs"] == 2, "where the old run is not known it is entered too"
    again = Folder(tmp_path / "new").composition()["epsilons"]
    assert all(again[name] >= counted["epsilons"][name] for name in "ab"), "who owned what in it is not known there"


def test_a_run_that_was_not_counted_stays_so(tmp_path: Path) -> None:
    trained(tmp_path / "old", compose=False)
    eh.rebudget(tmp_path / "old", LOWER, train=data(), out=tmp_path / "new")
    resumed(tmp_path / "new")
    assert "NOT added up" in (tmp_path / "new" / "statement.md").read_text()


def test_a_fork_is_killed_and_resumed(tmp_path: Path) -> None:
    _, new, made = gone_back(tmp_path)
    script = f"""
import os
from evenhand.training.attach import Private, start
from evenhand.runs.folder import Folder
from forks import data, parts
new = Folder.existing({str(new.path)!r})
private = start(*parts(), new.plan(), new)
for batch in private.batches(data()):
    private.step(batch)
    if private.position == {made.steps - 4}:
        os.kill(os.getpid(), 9)
"""
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": tests}, capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr
    assert eh.verify(new.path)["ok"]
    found = resumed(new.path)
    assert found["ok"], found["problems"]
    assert found["steps"] == made.steps
    assert found["owners"]["a"] <= 1.3
    assert len(set(new.ledger().keys)) == len(new.ledger().keys) == 3


def test_lowering_again_goes_back_further_and_remembers_every_key(tmp_path: Path) -> None:
    _, new, made = gone_back(tmp_path)
    with start(*parts(), made, new) as private:
        further(private, 6)
    again = eh.rebudget(new.path, eh.Budgets({"a": 1.0, "b": 2.2}), train=data(), out=tmp_path / "third")
    third = Folder.existing(tmp_path / "third")
    assert set(new.ledger().keys) == set(third.ledger().keys)
    assert third.composition()["runs"] == 3
    found = resumed(third.path)
    assert found["ok"], found["problems"]
    assert again.steps == found["steps"]
    assert found["owners"]["a"] <= 1.0
    with pytest.raises(CalibrationError, match="released a model after step"):
        eh.rebudget(third.path, eh.Budgets({"a": 0.9, "b": 2}), train=data(), out=tmp_path / "fourth")


def test_where_nothing_is_left_the_model_is_taken_as_it_was(tmp_path: Path) -> None:
    spent = planned().spent_by_owner(15)
    exactly = eh.Budgets(dict(zip("ab", spent, strict=True)))
    _, new, made = gone_back(tmp_path, exactly)
    assert (made.steps, made.epsilons) == (15, spent)
    weights = torch.load(new.checkpoint_file, weights_only=True)["model"]
    found = resumed(new.path)
    assert found["ok"], found["problems"]
    assert (found["steps"], new.composition()["runs"]) == (15, 2)
    assert torch.equal(torch.load(new.checkpoint_file, weights_only=True)["model"]["weight"], weights["weight"])
    assert "0 steps" not in str(made) or "15 steps" in str(made)
    with pytest.raises(eh.errors.BudgetExhausted):
        resumed(new.path)
    eh.rebudget(new.path, OLD, epochs=1, train=data())
    assert resumed(new.path)["ok"]


def test_what_cannot_be_gone_back_to_is_said(tmp_path: Path) -> None:
    old = trained(tmp_path / "old")
    files = {file: file.read_bytes() for file in old.path.rglob("*") if file.is_file()}
    with pytest.raises(
        CalibrationError, match=r"cannot be taken back. Promise at least that, or go back: pass out=NEW"
    ):
        eh.rebudget(old.path, LOWER, train=data())
    with pytest.raises(CalibrationError, match="No checkpoint that was kept fits"):
        eh.rebudget(old.path, eh.Budgets({"a": 0.01, "b": 2}), train=data(), out=tmp_path / "new")
    with pytest.raises(UsageError, match="cover all that is spent"):
        eh.rebudget(old.path, eh.Budgets({"a": 3, "b": 5}), train=data(), out=tmp_path / "new")
    with pytest.raises(UsageError, match="holds a run already"):
        eh.rebudget(old.path, LOWER, train=data(), out=old.path)
    with pytest.raises(PlanMismatchError, match="other public facts"):
        eh.rebudget(old.path, LOWER, train=data().take(torch.arange(100)), out=tmp_path / "new")
    assert {file: file.read_bytes() for file in old.path.rglob("*") if file.is_file()} == files
    with start(*parts(), old.plan(), old), pytest.raises(LedgerError, match="Another process"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert resumed(tmp_path / "new")["ok"]


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_the_withdrawal_is_mended(after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = trained(tmp_path / "old")
    place = "evenhand.training.rebudget._begin_ledger" if after else "evenhand.training.rebudget.Ledger.withdraw"

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, crash)
        with pytest.raises(KeyboardInterrupt):
            eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    with pytest.raises(LedgerError, match="no ledger"):
        resumed(tmp_path / "new")
    assert (old.ledger().withdrawn is not None) == after
    if after:
        with pytest.raises(LedgerError, match="was withdrawn"):
            eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "elsewhere")
    made = eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert made == Folder(tmp_path / "new").plan()
    found = resumed(tmp_path / "new")
    assert found["ok"], found["problems"]
    assert found["owners"]["a"] <= 1.3


def test_back_into_an_earlier_stage_forgets_the_later_ones() -> None:
    before = planned()
    raised = replan(before, eh.Budgets({"a": 4, "b": 8}), 20)
    made = replan_from_checkpoint(raised, LOWER, 8, 0)
    assert made.earlier == (replace(raised.earlier[0], levels=made.earlier[0].levels),)
    assert made.events(0, 8) == before.events(0, 8)
    assert made.earlier[0].plan == before.digest
    with pytest.raises(CalibrationError, match="has spent"):
        replan_from_checkpoint(raised, LOWER, 25, 1)


def test_kept_checkpoints_are_spread_over_the_run() -> None:
    for count in (5, 6, 17, 100, 1000):
        kept: list[int] = []
        for position in range(1, count + 1):
            kept = spread([*kept, position])
        gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
        assert len(kept) == KEPT
        assert kept[-1] == count
        assert max(gaps) <= max(2, 0.5 * count)


def test_a_run_keeps_a_few_of_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.training.loop.CHECKPOINT_SECONDS", 0.0)
    run = eh.fit(nn.Linear(3, 2), data(), privacy=OLD, epochs=3, batch_size=20, out=tmp_path / "run", progress=False)
    assert len(marks(run.folder)) == KEPT
    lines = [json.loads(file.read_text()) for file in run.folder.kept.glob("*.json")]
    assert max(line["position"] for line in lines) == 30
    assert len(list(run.folder.kept.glob("*.pt"))) == KEPT


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def killed(private: Private) -> bool:
        if private.position == 15:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr("evenhand.training.loop._epoch_ends", killed)
        patch.setattr("evenhand.training.loop.CHECKPOINT_SECONDS", 0.0)
        evenhand("train", "--data", "digits", "--epsilon", 2, "--epochs", 2, "--model", "linear", "--out", old)
    assert evenhand("resume", old, "--out", new).returncode == 2
    assert evenhand("resume", old, "--epsilon", 1.3).returncode == 2
    done = evenhand("resume", old, "--epsilon", 1.3, "--out", new, "--json")
    assert "is withdrawn: delete what it computed" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["epsilon"] <= 1.3
    assert result("verify", new)["ok"]
    assert evenhand("resume", old).returncode != 0
