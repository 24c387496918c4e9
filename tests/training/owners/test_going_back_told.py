"""What left a run beside its models: figures that loggers got, and what a withdrawn run says may be shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from forks import LOWER, OLD, data, further, gone_back, parts, planned, resumed, trained
from torch import nn

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.errors import CalibrationError
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import read
from evenhand.runs.statement_files import DECISION, FROM_FACTS, FROM_NOISE, schema
from evenhand.training import loop
from evenhand.training.attach import Private, start
from evenhand.training.goals.serve import Serving
from evenhand.training.loggers import Broadcast
from evenhand.training.steps.callbacks import Callbacks

pytestmark = pytest.mark.usefixtures("slow_steps")


class Keeper:
    """Notes for which steps it got figures, and which the ledger on disk had listed by then."""

    def __init__(self, ledger: Path, last: int = 1000) -> None:
        self.ledger, self.last, self.seen = ledger, last, list[tuple[int, tuple[int, ...]]]()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append((step, read(self.ledger).told))
        if step >= self.last:
            raise KeyboardInterrupt


def held_out() -> Data:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    return wrap(inputs, (inputs[:, 0] > 0).long(), owners=["a", "b"] * 20)


def told(out: Path, *places: int, steps: int = 25) -> Folder:
    """As ``trained``, with figures for a logger after some of the steps, behind the checkpoint if there is one."""
    with eh.attach(*parts(), planned(), out=out) as private:
        for _ in range(steps):
            further(private, 1)
            if private.position in places:
                tell(private)
    return Folder.existing(out)


def output(private: Private, telling: Broadcast) -> Callable[[dict[str, Any]], None]:
    return partial(loop._tell, private, telling, Callbacks((), None, evaluates=False))


def tell(private: Private) -> None:
    telling = Broadcast([Keeper(private.folder.ledger_file)], evaluates=True)
    record = partial(private.folder.add_metrics, least=1)
    loop._evaluate(private, held_out(), loop.Companions(), output(private, telling), record, Serving())


def test_a_run_whose_loggers_got_later_figures_cannot_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.training.loop.CHECKPOINT_SECONDS", 0.0)
    old, options = Folder(tmp_path / "old"), {"privacy": OLD, "method": "idp_scale", "epochs": 3, "batch_size": 20}
    keeper = Keeper(old.ledger_file, last=20)
    with pytest.raises(KeyboardInterrupt):
        eh.fit(nn.Linear(3, 2), data(), test=held_out(), out=old.path, loggers=[keeper], progress=False, **options)
    assert keeper.seen == [(10, (10,)), (20, (10, 20))], "each row is on disk before the figures leave"
    before = old.ledger_file.read_bytes()
    for more in ({}, {"out": tmp_path / "new"}):
        with pytest.raises(CalibrationError, match="given its loggers figures of step 20"):
            eh.rebudget(old.path, LOWER, train=data(), **more)
    assert old.ledger_file.read_bytes() == before
    assert not (tmp_path / "new").exists()
    assert eh.verify(old.path)["ok"]


def test_without_loggers_nothing_is_noted_and_figures_in_the_folder_do_not_bind(tmp_path: Path) -> None:
    with eh.attach(*parts(), planned(), out=tmp_path / "old") as private:
        further(private, 25)
        silent = Broadcast([], evaluates=True)
        record = partial(private.folder.add_metrics, least=1)
        loop._evaluate(private, held_out(), loop.Companions(), output(private, silent), record, Serving())
    old = Folder(tmp_path / "old")
    assert (old.ledger().told, len(old.metrics())) == ((), 1)
    eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    assert Folder(tmp_path / "new").metrics() == []


@pytest.mark.parametrize("resume_first", [False, True])
def test_what_was_told_up_to_the_point_is_remembered_by_the_fork(resume_first: bool, tmp_path: Path) -> None:
    """Also if another row lies between the checkpoint and the telling: a second fork further back must be refused."""
    if resume_first:
        old = trained(tmp_path / "old", 10)
        with start(*parts(), old.plan(), old) as private:
            tell(private)
            further(private, 15)
    else:
        old = told(tmp_path / "old", 5, 10)
    eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    new = Folder.existing(tmp_path / "new")
    assert new.ledger().forks[0]["from"] == 10
    assert new.ledger().told == old.ledger().told == ((10,) if resume_first else (5, 10))
    with pytest.raises(CalibrationError, match="given its loggers figures of step 10"):
        eh.rebudget(new.path, eh.Budgets({"a": 1.0, "b": 2.2}), train=data(), out=tmp_path / "third")
    assert resumed(new.path)["ok"]


def test_one_step_more_than_the_checkpoint_is_too_much(tmp_path: Path) -> None:
    told(tmp_path / "old", 11)
    with pytest.raises(CalibrationError, match="figures of step 11"):
        eh.rebudget(tmp_path / "old", LOWER, train=data(), out=tmp_path / "new")


def test_figures_between_a_checkpoint_and_its_release_do_not_hide_the_release(tmp_path: Path) -> None:
    """The last evaluation of a run comes behind its last checkpoint: that model stays one to go back to."""
    with eh.attach(*parts(), planned(), out=tmp_path / "old") as private:
        further(private, 30)
        tell(private)
        private.release()
    old = Folder(tmp_path / "old")
    raised = eh.rebudget(old.path, eh.Budgets({"a": 4, "b": 8}), epochs=2, train=data())
    with start(*parts(), raised, old) as private:
        further(private, 12)
    eh.rebudget(old.path, eh.Budgets({"a": 2.1, "b": 4.2}), train=data(), out=tmp_path / "new")
    new = Folder(tmp_path / "new").ledger()
    assert (new.forks[0]["from"], new.told, new.released) == (30, (30,), old.ledger().released)


def test_a_withdrawn_run_says_that_nothing_it_computed_may_be_shared(tmp_path: Path) -> None:
    old = trained(tmp_path / "old")
    line = {"step": 25, "groups": {"g": 0.8125}, "accuracy": 0.8125}
    old.add_metrics(line, 1)
    assert not old.statement_file.exists()
    assert old.statement()["groups"] == {"g": 0.8125}
    eh.rebudget(old.path, LOWER, train=data(), out=tmp_path / "new")
    written = json.loads(old.statement_file.read_bytes())
    jsonschema.Draft202012Validator(schema()).validate(written)
    assert written["sharing"]["may_be_shared"] == [name for name in FROM_FACTS if name != "audit.json"]
    assert {*FROM_NOISE} - {DECISION} <= set(written["sharing"]["must_not_be_shared"])
    assert written["sharing"]["intermediate_checkpoints"].startswith("must be deleted")
    assert written["covers"] == []
    words = (old.path / "statement.md").read_text()
    assert f"Must not be shared: {', '.join(name for name in FROM_NOISE if name != DECISION)}" in words
    assert "no extra cost" not in words
    for name in FROM_FACTS:
        assert not (old.path / name).exists() or b"0.8125" not in (old.path / name).read_bytes()
    assert eh.verify(old.path)["ok"], eh.verify(old.path)["problems"]


def test_the_page_of_a_withdrawn_folder_agrees_with_its_statement(tmp_path: Path) -> None:
    old, new, _ = gone_back(tmp_path)
    may, must_not = (old.path / "README.md").read_text().split("Must not be shared:")
    assert "withdrawn" in may
    assert all(name in may for name in FROM_FACTS)
    assert not any(name in may for name in FROM_NOISE)
    assert all(name in must_not for name in old.statement()["sharing"]["must_not_be_shared"])
    assert "withdrawn" not in (new.path / "README.md").read_text()
    resumed(new.path)
    assert "model.safetensors" in new.statement()["sharing"]["may_be_shared"]
