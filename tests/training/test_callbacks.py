"""Callbacks see released values only, may stop a run, and change nothing of what it promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.runs.ledger import read
from evenhand.training.run import Run


@pytest.fixture
def held_out() -> Data:
    return eh.data.wrap([[0.0, 1.0, 2.0]] * 20, [0, 1] * 10, groups=["a", "b"] * 10)


def fit(train: Data, out: Path, **options: object) -> Run:
    made = {"epsilon": 3.0, "delta": 1e-3} | options
    return eh.fit(nn.Linear(3, 2), train, epochs=5, batch_size=8, out=out, progress=False, prior=False, **made)


class Notes(eh.Callback):
    def __init__(self) -> None:
        self.notes: list[object] = []
        self.values: list[Mapping[str, float]] = []

    def on_start(self, plan: Plan) -> None:
        self.notes.append(plan.steps)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.notes.append(step)
        self.values.append(values)

    def on_end(self, run: Run) -> None:
        self.notes.append(run.path)


def test_callbacks_are_told_released_values_in_order(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    notes = Notes()
    run = fit(tiny, tmp_path, test=held_out, callbacks=[notes])
    assert notes.notes == [25, 5, 10, 15, 20, 25, tmp_path]
    assert read(tmp_path / "ledger.jsonl").told == (5, 10, 15, 20, 25)
    for values, line in zip(notes.values, run.evaluations, strict=True):
        assert values["accuracy"] == line["accuracy"]
        assert values["log_loss"] == line["metrics"]["log_loss"]
        assert values["epsilon"] == run.privacy.epsilon
    raw = (tmp_path / "private" / "training.jsonl").read_text()
    losses = {json.loads(line)["loss"] for line in raw.splitlines()}
    assert not losses & {value for values in notes.values for value in values.values()}


def test_a_stop_by_a_metric_keeps_the_planned_epsilon_and_can_be_resumed(
    tiny: Data, held_out: Data, tmp_path: Path
) -> None:
    run = fit(tiny, tmp_path, test=held_out, stop=eh.EarlyStopping("epsilon", patience=1))
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.reserved < reading.steps
    assert reading.reserved == reading.committed, "the charged steps were finished first"
    assert run.privacy.epsilon == max(run.plan.epsilons), "the stop looked at the data: the whole plan counts"
    assert eh.verify(tmp_path)["ok"]
    again = eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny, test=held_out)
    assert read(tmp_path / "ledger.jsonl").reserved == reading.steps
    assert again.privacy.epsilon == run.privacy.epsilon
    assert read(tmp_path / "ledger.jsonl").lost == ()


def test_early_stopping_waits_for_its_patience() -> None:
    worst = eh.EarlyStopping("worst group", patience=2)
    values = [{"accuracy/a": 0.9, "accuracy/b": low} for low in (0.1, 0.2, 0.2, 0.1)]
    assert [worst(step, value) for step, value in enumerate(values)] == [False, False, False, True]
    loss = eh.EarlyStopping("log_loss", patience=1, largest=False, least=0.1)
    assert [loss(0, {"log_loss": value}) for value in (1.0, 0.8, 0.75)] == [False, False, True]
    with pytest.raises(UsageError, match="there is no metric"):
        loss(0, {"accuracy": 1.0})
    with pytest.raises(UsageError, match="patience"):
        eh.EarlyStopping(patience=0)


class Fails(eh.Callback):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "hook"):
            raise KeyError("a secret address")
        return object.__getattribute__(self, name)


def test_what_fails_later_is_switched_off_with_its_reason(
    tiny: Data, held_out: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [Fails("on_evaluation"), Fails("on_end")]
    fit(tiny, tmp_path, test=held_out, callbacks=failing, stop=eh.EarlyStopping("acuracy"))
    assert read(tmp_path / "ledger.jsonl").reserved == 25
    told = capsys.readouterr().err
    assert told.count("Fails failed (KeyError) and is switched off") == 2
    assert "EarlyStopping failed (UsageError: there is no metric 'acuracy'; there are " in told
    assert "secret" not in told


def test_a_callback_can_refuse_the_plan_before_anything_is_spent(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fit(tiny, tmp_path, test=held_out, callbacks=[Fails("on_start")])
    assert read(tmp_path / "ledger.jsonl").reserved == 0
    fit(tiny, tmp_path, test=held_out)


def test_figures_of_training_records_reach_no_callback_and_stop_nothing(tiny: Data, tmp_path: Path) -> None:
    notes = Notes()
    with pytest.raises(UsageError, match="held-out"):
        fit(tiny, tmp_path, test=tiny, training_records=True, stop=eh.EarlyStopping())
    fit(tiny, tmp_path, test=tiny, training_records=True, callbacks=[notes])
    assert notes.values == []
    assert read(tmp_path / "ledger.jsonl").told == ()


@pytest.mark.parametrize("wrong", [{"callbacks": [print]}, {"stop": 3}, {"callbacks": [eh.EarlyStopping()]}])
def test_what_is_no_callback_is_refused_before_anything_is_spent(
    wrong: dict[str, object], tiny: Data, held_out: Data, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"takes|callback"):
        fit(tiny, tmp_path, test=held_out, **wrong)
    assert not (tmp_path / "ledger.jsonl").exists()
