"""Sequences of commands, crashes and exchanged files after which a fork might promise less than was spent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import LOSS, LOWER, OLD, data, further, gone_back, parts, planned, resumed, trained
from torch import nn

import evenhand as eh
from evenhand.accounting.accountant import epsilon
from evenhand.errors import CalibrationError, EvenhandError, LedgerError, UsageError
from evenhand.runs.checkpoints import marks
from evenhand.runs.folder import Folder, write_json
from evenhand.training.attach import start

pytestmark = pytest.mark.usefixtures("slow_steps")


def test_the_old_run_can_neither_go_on_nor_release_nor_fork_again(tmp_path: Path) -> None:
    old, _, _ = gone_back(tmp_path)
    with pytest.raises(LedgerError, match="was withdrawn"):
        resumed(old.path)
    with pytest.raises(LedgerError, match="was withdrawn"):
        eh.rebudget(old.path, eh.Budgets({"a": 9, "b": 9}), train=data())
    with pytest.raises(LedgerError, match="was withdrawn"):
        eh.rebudget(old.path, eh.Budgets({"a": 1, "b": 2.5}), train=data(), out=tmp_path / "second")
    with pytest.raises(LedgerError, match="was withdrawn"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert not old.model_file.exists()
    lines = old.ledger_file.read_bytes().splitlines(keepends=True)
    last = next(place for place, line in enumerate(lines) if line.startswith(b'{"type":"withdrawn"'))
    old.ledger_file.write_bytes(b"".join(lines[:last]))
    assert not eh.verify(old.path)["ok"]
    with pytest.raises(LedgerError, match="shortened"):
        resumed(old.path)


def test_two_copies_that_go_back_are_counted_as_two(tmp_path: Path) -> None:
    trained(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    once = eh.rebudget(tmp_path / "old", LOWER, train=data(), out=tmp_path / "new")
    eh.rebudget(tmp_path / "copy", LOWER, train=data(), out=tmp_path / "other")
    counted = Folder(tmp_path / "other").composition()
    assert counted["runs"] == 3
    whole = [*planned().events(0), *once.from_here().events(0) * 2]
    assert counted["epsilons"]["a"] == pytest.approx(epsilon(whole, 1e-3), rel=1e-6)


def test_lines_that_crashes_cut_stay_charged_and_later_figures_stay_behind(tmp_path: Path) -> None:
    plan = eh.plan("idp_scale", OLD, data=data().facts, epochs=30, batch_size=20)
    long = tmp_path / "long"
    with eh.attach(*parts(), plan, out=long) as private:
        further(private, 5)
    with (long / "ledger.jsonl").open("ab") as file:
        file.write(b'{"type":"reserve","first":5')
    with start(*parts(), plan, Folder(long)) as private:
        assert private.position == 5 + 64
        further(private, 61)
    lines = [{"step": step, "groups": {}, "accuracy": 0.5} for step in (5, 70, 120)]
    Folder(long).metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spent = plan.spent_by_owner(100)
    made = eh.rebudget(long, eh.Budgets(dict(zip("ab", spent, strict=True))), train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert new.ledger().reserved == sum(stage.steps for stage in made.earlier) > 64
    assert new.ledger().committed == new.ledger().reserved - 64
    assert [line["step"] for line in new.metrics()] == [5, 70]
    assert eh.verify(new.path)["ok"]


def test_a_changed_beginning_does_not_verify(tmp_path: Path) -> None:
    _, new, made = gone_back(tmp_path)
    resumed(new.path)
    lines = new.ledger_file.read_bytes().splitlines(keepends=True)
    wrongs = [
        b"".join(lines).replace(b'"count":1,', b'"count":2,', 1),
        b"".join(line for place, line in enumerate(lines) if place != 3),
        b"".join(line for line in lines if b'"type":"fork"' not in line),
        b"".join(lines).replace(b'"charged":25', b'"charged":15'),
    ]
    for wrong in wrongs:
        assert wrong != b"".join(lines)
        new.ledger_file.write_bytes(wrong)
        assert not eh.verify(new.path)["ok"]
        with pytest.raises(EvenhandError):
            resumed(new.path)
    new.ledger_file.write_bytes(b"".join(lines))
    for plan in (made.from_here(), replace(made, earlier=(replace(made.earlier[0], levels=()),))):
        write_json(new.plan_file, plan.to_json())
        assert not eh.verify(new.path)["ok"]


def test_a_public_seed_gives_the_fork_other_noise_than_the_steps_it_left(tmp_path: Path) -> None:
    """The old run was resumed after the point: by number alone the fork's first segment would get that key again."""
    old = trained(tmp_path / "old", 10, insecure_seed=7)
    with start(*parts(), old.plan(), old, insecure_seed=7) as private:
        further(private, 15)
    left = old.ledger().keys
    assert len(left) == 2
    made = eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert len(new.ledger().segments) == 1
    assert new.ledger().keys == left, "those of the steps that were left are remembered"
    with start(*parts(), made, new, insecure_seed=7) as private:
        further(private, 1)
    assert new.ledger().segments[-1]["key"] not in left
    assert new.ledger().segments[-1]["segment"] == 2


def test_a_run_that_released_a_later_model_cannot_go_back(tmp_path: Path) -> None:
    old = trained(tmp_path / "old")
    before = old.ledger_file.read_bytes()
    resumed(old.path)
    for options in ({}, {"out": tmp_path / "new"}):
        with pytest.raises(CalibrationError, match="released a model after step"):
            eh.rebudget(old.path, LOWER, train=data(), **options)
    old.ledger_file.write_bytes(before)
    old.model_file.unlink()
    with pytest.raises(LedgerError, match="shortened"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    old.model_file.write_bytes(b"weights")  # as a crash between the file and its row leaves it
    old.statement_file.unlink()
    shutil.copy(old.kept / "000000025.pt", old.checkpoint_file)
    write_json(old.private / "checkpoint.json", {"ledger_head": old.ledger().head, "position": 25})
    for file in old.kept.glob("*30.*"):
        file.unlink()
    with pytest.raises(CalibrationError, match="released a model after step"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert not (tmp_path / "new" / "ledger.jsonl").exists()
    assert old.ledger().withdrawn is None


def test_what_was_released_before_the_point_stays_covered(tmp_path: Path) -> None:
    """Finished, raised, trained on, lowered again: back to the model that was released, which the fork counts."""
    old = trained(tmp_path / "old")
    resumed(old.path)
    released, spent = old.ledger().released, eh.verify(old.path)["owners"]
    raised = eh.rebudget(old.path, eh.Budgets({"a": 4, "b": 8}), epochs=2, train=data())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = torch.load(old.checkpoint_file, weights_only=True)
    kept = {name: _Anything() for name in state["kept"]}
    with start(model, optimizer, LOSS, raised, old, extras=kept) as private:
        further(private, 12)
    made = eh.rebudget(old.path, eh.Budgets({"a": 2.1, "b": 4.2}), train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert sum(stage.steps for stage in made.earlier) == 30
    assert new.ledger().released == released
    assert made.spent_by_owner(30) == (spent["a"], spent["b"])
    assert eh.verify(old.path)["ok"], "its statement was written again"
    assert "withdrawn" in (old.path / "statement.md").read_text()
    found = resumed(new.path)
    assert found["ok"], found["problems"]
    assert found["owners"]["a"] <= 2.1


class _Anything:
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, _: object) -> None:
        return


def test_exchanged_checkpoints_are_not_used(tmp_path: Path) -> None:
    """Later weights under an earlier marker would be sold for less than they spent."""
    old = trained(tmp_path / "old")
    latest, *_, first = marks(old)
    for mark in marks(old)[1:]:
        shutil.copy(latest.file, mark.file)
    with pytest.raises(UsageError, match="was exchanged"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert old.ledger().withdrawn is None
    for mark in marks(old)[1:]:
        write_json(mark.file.with_suffix(".json"), {"ledger_head": latest.head, "position": first.position})
    with pytest.raises(CalibrationError, match="No checkpoint that was kept fits"):
        eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")


def test_the_old_weights_cannot_be_put_into_the_fork(tmp_path: Path) -> None:
    old, new, _ = gone_back(tmp_path)
    shutil.copy(old.checkpoint_file, new.checkpoint_file)
    with pytest.raises(LedgerError, match="shortened"):
        resumed(new.path)
    shutil.copy(old.checkpoint_file.with_suffix(".json"), new.checkpoint_file.with_suffix(".json"))
    assert not eh.verify(new.path)["ok"]


def test_a_foreign_change_in_the_checkpoint_is_not_forgotten(tmp_path: Path) -> None:
    """Weights changed after a step and then saved: the next step may note it, behind the row of the cut."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, planned(), out=tmp_path / "old") as private:
        further(private, 4)
        private.step(next(private.batches(data())))
        with torch.no_grad():
            model.weight.add_(1.0)
        private.checkpoint()
        further(private, 20)
    old = Folder(tmp_path / "old")
    assert set(old.ledger().foreign) == {5}
    for mark in marks(old):
        if 5 < mark.position < 25:
            mark.file.with_suffix(".json").unlink()
    eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert (new.ledger().forks[0]["from"], set(new.ledger().foreign)) == (5, {5})
    assert resumed(new.path)["ok"]


def test_a_fork_that_trained_since_a_crash_keeps_its_charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash lies between the new ledger and the removal of the file that it was made from."""
    old, unlink = trained(tmp_path / "old"), Path.unlink

    def crash(file: Path, missing_ok: bool = False) -> None:
        if file.name == "fork.jsonl":
            raise KeyboardInterrupt
        unlink(file, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert "withdrawn" in (old.path / "statement.md").read_text(), "said before the fork can begin"
    with start(*parts(), new.plan(), new) as private:
        further(private, 3)
        with pytest.raises(LedgerError, match="Another process"):
            eh.rebudget(old.path, LOWER, train=data(), out=new.path)
    before = new.ledger_file.read_bytes()
    assert new.ledger().reserved == 13
    waiting = new.private / "fork.jsonl"
    kept = waiting.read_bytes()
    eh.rebudget(old.path, LOWER, train=data(), out=new.path)
    assert new.ledger_file.read_bytes() == before
    assert not waiting.exists()
    waiting.write_bytes(kept)
    shutil.copy(old.ledger_file, new.ledger_file)
    with pytest.raises(LedgerError, match="is not that of the run which was begun there"):
        eh.rebudget(old.path, LOWER, train=data(), out=new.path)
    assert new.ledger_file.read_bytes() == old.ledger_file.read_bytes()
    new.ledger_file.write_bytes(before)
    assert resumed(new.path)["ok"]


def test_steps_charged_before_the_checkpoint_but_run_after_it_stay_charged(tmp_path: Path) -> None:
    """A checkpoint in the middle of a block: the fork charges the whole block and does not run its rest again."""
    old = trained(tmp_path / "old", 25)
    (tenth,) = [mark for mark in marks(old) if mark.position == 10]
    state = torch.load(tenth.file, weights_only=True)
    torch.save({**state, "position": 8}, tenth.file)
    write_json(tenth.file.with_suffix(".json"), {"ledger_head": tenth.head, "position": 8})
    for mark in marks(old):
        if mark.position in (15, 20):
            mark.file.with_suffix(".json").unlink()
    made = eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert sum(stage.steps for stage in made.earlier) == 10
    found = resumed(tmp_path / "new")
    assert found["ok"]
    assert found["owners"]["a"] <= 1.3
