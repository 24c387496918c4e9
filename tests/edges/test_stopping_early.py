"""A run that ends before its plan does promises the plan's epsilon, unless its stop is declared independent of data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import evenhand as eh
from commands import evenhand
from edges.runs_made import STEPS, begun, planned, records
from evenhand._numbers import rounded_up
from evenhand.errors import LedgerError, UsageError
from evenhand.runs import statement as statements
from evenhand.runs.folder import Folder
from evenhand.runs.ledger_rows import encode_row, parse
from evenhand.runs.statement_page import render_statement as page
from evenhand.training.run import Run

SOME = 5


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Released after five of twenty steps, and nothing declared."""
    out = tmp_path_factory.mktemp("early")
    with begun(out, SOME) as private:
        private.release()
    return Folder.existing(out)


@pytest.fixture
def declared(tmp_path: Path) -> Folder:
    with begun(tmp_path, SOME) as private:
        private.release(stopped_independently=True)
    return Folder.existing(tmp_path)


def test_an_early_release_states_the_epsilon_of_the_whole_plan(early: Folder) -> None:
    plan = early.plan()
    so_far = plan.spent(SOME)
    written = json.loads(early.statement_file.read_bytes())
    assert so_far is not None
    assert so_far < 2 < plan.epsilons[0]
    for found in (written, early.statement(), Run(early).privacy.data):
        assert found["guarantee"]["epsilon"] == plan.epsilons[0]
        assert [row["epsilon"] for row in found["owners"]] == list(plan.epsilons)
        assert (found["mechanism"]["steps_charged"], found["mechanism"]["steps_counted"]) == (SOME, STEPS)


def test_every_printed_form_of_an_early_release_shows_the_plans_epsilon_only(early: Folder) -> None:
    statement, so_far = early.statement(), early.plan().spent(SOME)
    assert so_far is not None
    for text in (
        (early.path / "statement.md").read_text(),
        page(statement),
        Run(early).card(),
        Run(early).report().page,
        str(Run(early).privacy),
    ):
        assert rounded_up(early.plan().epsilons[0] or 0.0) in text or "epsilon 3" in text
        assert rounded_up(so_far) not in text
        assert "those of the whole plan" in text


def test_profile_and_guess_rate_of_an_early_release_are_the_plans(early: Folder, tmp_path: Path) -> None:
    with begun(tmp_path, STEPS) as private:
        private.release()
    keys = ("mu", "guess_rate_at_1_percent", "profile")
    whole, cut = Folder.existing(tmp_path).statement()["guarantee"], early.statement()["guarantee"]
    assert [cut[key] for key in keys] == [whole[key] for key in keys]


def test_verify_prints_the_promise_and_what_is_charged_beside_it(early: Folder) -> None:
    found, plan = eh.verify(early.path), early.plan()
    assert found["ok"]
    assert (found["epsilon"], found["charged"]) == (plan.epsilons[0], plan.spent(SOME))
    shown = evenhand("verify", str(early.path)).stdout
    assert "5 of 20 steps charged, epsilon 3.000" in shown or "epsilon 2.99" in shown
    assert "whole plan; charged so far" in shown


def test_a_declared_stop_counts_the_charged_steps_and_is_named(declared: Folder) -> None:
    found, so_far = declared.statement(), declared.plan().spent(SOME)
    assert found["guarantee"]["epsilon"] == so_far
    assert found["mechanism"]["stop"] == "declared independent of the data"
    words = (declared.path / "statement.md").read_text()
    assert "Declared by the trainer" in words
    assert "Declared by the trainer" in page(found)
    checked = eh.verify(declared.path)
    assert checked["ok"]
    assert checked["epsilon"] == so_far
    assert any("trainer declares" in note for note in checked["notes"])


def test_a_declaration_stands_in_the_ledger_so_that_taking_it_out_is_noticed(declared: Folder) -> None:
    lines = declared.ledger_file.read_bytes().splitlines(keepends=True)
    assert sum(b'"type":"stopped"' in line for line in lines) == 1
    declared.ledger_file.write_bytes(b"".join(line for line in lines if b'"type":"stopped"' not in line))
    assert not eh.verify(declared.path)["ok"]


def test_a_smaller_epsilon_in_the_statement_without_a_declaration_is_noticed(tmp_path: Path) -> None:
    with begun(tmp_path, SOME) as private:
        private.release()
    folder = Folder.existing(tmp_path)
    written = json.loads(folder.statement_file.read_bytes())
    written["guarantee"]["epsilon"] = written["owners"][0]["epsilon"] = folder.plan().spent(SOME)
    written["digest"] = statements.digest(written)
    folder.statement_file.write_bytes((json.dumps(written, indent=1) + "\n").encode())
    (folder.path / "statement.md").write_text(statements.markdown(written))
    assert not eh.verify(tmp_path)["ok"]


def test_a_stop_can_be_declared_later_by_command(tmp_path: Path) -> None:
    with begun(tmp_path, SOME) as private:
        private.release()
    folder = Folder.existing(tmp_path)
    shown = evenhand("statement", str(tmp_path), "--stopped-independently")
    assert shown.returncode == 0
    assert "Declared by the trainer" in shown.stdout
    assert json.loads(folder.statement_file.read_bytes())["guarantee"]["epsilon"] == folder.plan().spent(SOME)
    assert eh.verify(tmp_path)["ok"]


def test_a_run_that_goes_on_after_a_declared_stop_counts_its_whole_plan_again(declared: Folder) -> None:
    eh.resume(declared.path, model=nn.Linear(3, 2), train=records(), progress=False)
    assert not declared.ledger().stopped
    assert declared.statement()["guarantee"]["epsilon"] == declared.plan().epsilons[0]
    assert eh.verify(declared.path)["ok"]


def test_a_finished_run_has_no_stop_to_declare(tmp_path: Path) -> None:
    with begun(tmp_path, STEPS) as private:
        private.release(stopped_independently=True)
    folder = Folder.existing(tmp_path)
    assert not folder.ledger().stopped
    assert folder.statement()["mechanism"]["stop"] is None
    with pytest.raises(UsageError, match="no early stop to declare"):
        folder.declare_stopped()


def test_a_run_that_was_interrupted_promises_its_plan(tmp_path: Path) -> None:
    begun(tmp_path, SOME).close()
    folder = Folder.existing(tmp_path)
    assert folder.statement()["guarantee"]["epsilon"] == folder.plan().epsilons[0] == eh.verify(tmp_path)["epsilon"]


def test_changed_budgets_put_the_new_plan_in_place_of_a_declared_stop(declared: Folder) -> None:
    made = eh.rebudget(declared.path, eh.Privacy(4), train=records())
    assert not declared.ledger().stopped
    assert declared.statement()["guarantee"]["epsilon"] == made.epsilons[0]
    assert 3.9 < (made.epsilons[0] or 0) <= 4
    assert eh.verify(declared.path)["ok"]


def test_each_owner_of_an_early_release_has_its_planned_epsilon(tmp_path: Path) -> None:
    data = records(owners="ab")
    plan = planned(data, eh.Budgets({"a": 1.0, "b": 4.0}, 1e-4), "idp_sample")
    with begun(tmp_path, SOME, data, plan) as private:
        private.release()
    folder = Folder.existing(tmp_path)
    assert [row["epsilon"] for row in folder.statement()["owners"]] == list(plan.epsilons)
    assert tuple(eh.verify(tmp_path)["owners"].values()) == plan.epsilons
    table = (tmp_path / "owners.csv").read_text()
    assert all(str(epsilon) in table for epsilon in plan.epsilons)


def test_other_runs_on_the_data_add_up_with_the_whole_plan_of_an_unfinished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    begun(tmp_path / "one", 1).close()
    with begun(tmp_path / "two", STEPS) as private:
        private.release()
    plan = Folder.existing(tmp_path / "two").plan()
    both = eh.epsilon([*plan.events(0), *plan.events(0)], plan.delta)
    accounting = Folder.existing(tmp_path / "two").statement()["accounting"]
    assert accounting["runs_composed"] == 2
    assert accounting["epsilon_all_runs"] == pytest.approx(both)


def test_loggers_are_given_the_plans_epsilon_at_every_step(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []

    class Keeper:
        def log(self, step: int, values: dict[str, float]) -> None:
            told.append(values)

    data = records()
    run = eh.fit(
        nn.Linear(3, 2),
        data,
        epsilon=3.0,
        delta=1e-4,
        epochs=2,
        batch_size=40,
        test=eh.data.wrap([[0.5, 9.0, 1.0]] * 4, [0, 1, 0, 1], labels=(0, 1)),
        out=tmp_path,
        loggers=[Keeper()],
        progress=False,
    )
    assert {values["epsilon"] for values in told} == {run.plan.epsilons[0]}
    assert told[0]["epsilon_charged"] < told[-1]["epsilon_charged"] == run.privacy.epsilon


@pytest.mark.parametrize("later", ["reserve", "replan"])
def test_a_stopped_row_is_void_once_something_follows_that_goes_on(later: str) -> None:
    rows: list[dict[str, object]] = [
        {"type": "open", "plan": "p", "steps": 9},
        {"type": "reserve", "first": 0, "count": 4},
        {"type": "stopped", "position": 4},
    ]
    follow = {
        "reserve": {"type": "reserve", "first": 4, "count": 1},
        "replan": {"type": "replan", "plan": "q", "steps": 6, "from": 4},
    }
    assert parse(ledger(rows)).counted == 4
    after = parse(ledger([*rows, follow[later]]))
    assert after.counted == after.steps


def test_a_stopped_row_at_another_place_than_the_charges_is_damage() -> None:
    rows: list[dict[str, object]] = [{"type": "open", "plan": "p", "steps": 9}, {"type": "stopped", "position": 3}]
    with pytest.raises(LedgerError, match="stopped row"):
        parse(ledger(rows))


def ledger(rows: list[dict[str, object]]) -> bytes:
    data, head = b"", "0" * 64
    for row in rows:
        line, head = encode_row(row, head)
        data += line
    return data
