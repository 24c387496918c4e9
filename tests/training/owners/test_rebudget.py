"""Budgets that change while a run goes on: what was spent stays, the rest is exact, and nothing is forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn

import evenhand as eh
from commands import evenhand, result
from evenhand.accounting.accountant import epsilon
from evenhand.accounting.plan import Plan
from evenhand.data import Data, wrap
from evenhand.errors import CalibrationError, PlanMismatchError, UsageError
from evenhand.runs.folder import Folder, write_json
from evenhand.training.rebudget import replan
from evenhand.types import Facts

FACTS = Facts(2000, (("strict", 800), ("usual", 800), ("open", 400)))
OLD = eh.Budgets({"strict": 1, "usual": 2, "open": 3}, 1e-5)
NEW = eh.Budgets({"strict": 1, "usual": 3, "open": 6}, 1e-5)


def old(method: str = "idp_sample") -> Plan:
    return eh.plan(method, OLD, data=FACTS, epochs=10, batch_size=40)


@pytest.mark.parametrize(
    "method", ["dpsgd", "idp_sample", "idp_scale", "dpsgd_f", "global_adapt", "adaptive_clip", "group_dro"]
)
def test_raised_budgets_are_met_by_all_steps_together(method: str) -> None:
    before = old(method)
    made = replan(before, NEW, 200)
    spent = before.spent_by_owner(200)
    for owner, (budget, epsilon_all) in enumerate(zip(made.budgets, made.epsilons, strict=True)):
        assert epsilon_all <= budget
        assert made.events(owner, 200) == before.events(owner, 200)
        assert made.spent(200, owner) == spent[owner]
        whole = made.events(owner)
        assert sum(count for _, _, count in whole) == made.steps == 500
        assert epsilon(whole, 1e-5) == pytest.approx(epsilon_all, rel=1e-9)
        if method in ("idp_sample", "idp_scale"):
            assert epsilon_all > 0.99 * budget
    rest = sum(records * rate for (_, records), rate in zip(FACTS.owners, made.rates, strict=True))
    assert rest == pytest.approx(40)


def test_the_whole_is_less_than_the_sum_of_epsilons_and_agrees_with_dp_accounting() -> None:
    made = replan(old(), NEW, 200)
    for owner in range(3):
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for rate, noise, count in made.events(owner):
            accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), count)
        assert accountant.get_epsilon(1e-5) == pytest.approx(made.epsilons[owner], rel=3e-3)
        parts = epsilon(made.events(owner, 200), 1e-5) + epsilon(made.from_here().events(owner), 1e-5)
        assert made.epsilons[owner] < 0.95 * parts


def test_budgets_can_change_twice_and_fall_to_what_is_left() -> None:
    once = replan(old(), NEW, 200)
    lower = eh.Budgets({"strict": 0.9, "usual": 2.2, "open": 4}, 1e-5)
    twice = replan(once, lower, 300)
    assert [stage.steps for stage in twice.earlier] == [200, 100]
    assert [stage.plan for stage in twice.earlier] == [old().digest, once.digest]
    assert Plan.from_json(json.loads(json.dumps(twice.to_json()))) == twice
    for owner, budget in enumerate((0.9, 2.2, 4)):
        assert twice.events(owner, 300) == once.events(owner, 300)
        assert 0.99 * budget < twice.epsilons[owner] <= budget
    assert twice.scales_at(0) == old().scales
    assert twice.level_at(250).noise == once.level_at(250).noise != twice.level_at(300).noise


def test_an_owner_with_nothing_left_is_left_out_or_refused() -> None:
    finished = old()
    made = replan(finished, NEW, finished.steps, epochs=2)
    assert made.rates[0] == 0
    assert min(made.rates[1:]) > 0
    assert made.epsilons[0] == finished.epsilons[0]
    for method in ("dpsgd", "idp_scale"):
        with pytest.raises(CalibrationError, match="nothing left"):
            replan(old(method), NEW, 500, epochs=2)


def test_what_cannot_be_promised_is_refused() -> None:
    before = old()
    with pytest.raises(CalibrationError, match=r"Owner 'usual' has spent .* would be promised 0\.5"):
        replan(before, eh.Budgets({"strict": 1, "usual": 0.5, "open": 3}, 1e-5), 300)
    with pytest.raises(UsageError, match="No step of the plan remains"):
        replan(before, NEW, before.steps)
    with pytest.raises(UsageError, match="delta cannot change"):
        replan(before, replace(NEW, delta=1e-6), 100)
    with pytest.raises(UsageError, match="have no budget"):
        replan(before, eh.Budgets({"strict": 5}, 1e-5), 100)
    with pytest.raises(UsageError, match="no established epsilon"):
        replan(eh.plan("sgd", None, data=FACTS), NEW, 10)


def test_many_classes_in_order_are_certified_together() -> None:
    facts = Facts(3600, tuple((f"o{index:02d}", 300) for index in range(12)))
    budgets = np.linspace(1, 3, 12)

    def promised(values: np.ndarray) -> eh.Budgets:
        return eh.Budgets(dict(zip(facts.owner_names, values.tolist(), strict=True)), 1e-5)

    before = eh.plan("idp_sample", promised(budgets), data=facts, epochs=5, batch_size=80)
    made = replan(before, promised(budgets * 1.5 + 0.2), 100)
    for owner in (0, 7, 11):
        exact = epsilon(made.events(owner), 1e-5)
        assert exact * (1 - 1e-6) <= made.epsilons[owner] <= min(exact * 1.004, budgets[owner] * 1.5 + 0.2)


def data(seed: int = 1) -> Data:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 3, generator=generator)
    return wrap(inputs, (inputs[:, 0] > 0).long(), owners=["a", "b"] * 100)


def stopped(out: Path, steps: int = 3) -> Folder:
    plan = eh.plan("idp_scale", eh.Budgets({"a": 1, "b": 2}, 1e-3), data=data().facts, epochs=3, batch_size=20)
    model = nn.Linear(3, 2)
    with eh.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(reduction="none"), plan, out=out
    ) as private:
        for _, batch in zip(range(steps), private.batches(data()), strict=False):
            private.step(batch)
        private.checkpoint()
    return Folder.existing(out)


def resumed(folder: Folder) -> dict:
    held_out = data(seed=2).take(torch.arange(20))
    eh.resume(folder.path, model=nn.Linear(3, 2), train=data(), test=held_out, progress=False)
    return eh.verify(folder.path)


def test_a_run_goes_on_under_its_new_budgets(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    charged = folder.ledger().reserved
    made = eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 5}), train=data())
    assert folder.plan() == made
    assert folder.ledger().plan == made.digest
    assert folder.ledger().replans == ((made.earlier[0].plan, charged),)
    assert eh.verify(tmp_path)["ok"]
    found = resumed(folder)
    assert found["ok"], found["problems"]
    assert found["steps"] == 30
    assert 1.98 < found["owners"]["a"] <= 2
    assert 4.95 < found["owners"]["b"] <= 5
    (warning,) = [text for text in folder.statement()["warnings"] if "budgets changed after" in text]
    assert f"after {charged} steps" in warning
    assert folder.composition()["runs"] == 2


def test_a_finished_model_can_be_trained_on_and_what_was_released_stays_counted(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    assert resumed(folder)["ok"]
    first = folder.ledger().released
    eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 5}), epochs=1, train=data())
    assert eh.verify(tmp_path)["ok"], "the statement follows the new plan at once"
    found = resumed(folder)
    assert found["ok"], found["problems"]
    assert found["steps"] == 40
    assert folder.ledger().released[: len(first)] == first


def test_a_refused_change_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(CalibrationError, match="cannot be taken back"):
        eh.rebudget(tmp_path, eh.Budgets({"a": 0.01, "b": 5}), train=data())
    with pytest.raises(PlanMismatchError, match="other public facts"):
        eh.rebudget(tmp_path, eh.Budgets({"a": 3, "b": 5}), train=data().take(torch.arange(100)))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    assert resumed(folder)["ok"]


def test_a_crash_between_ledger_and_plan_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stopped(tmp_path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("evenhand.training.rebudget._finish", lambda folder: crash() if _waiting(folder) else None)
        with pytest.raises(KeyboardInterrupt):
            eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 5}), train=data())
    assert not eh.verify(tmp_path)["ok"]
    eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 6}), train=data())
    assert len(folder.plan().earlier) == 2
    assert resumed(folder)["ok"]


def _waiting(folder: Folder) -> bool:
    return (folder.private / "next-plan.json").exists()


def test_a_plan_that_forgets_what_was_spent_does_not_verify(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    made = eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 5}), train=data())
    for wrong in (made.from_here(), replace(made, earlier=(replace(made.earlier[0], levels=()),))):
        write_json(folder.plan_file, wrong.to_json())
        assert not eh.verify(tmp_path)["ok"]
    write_json(folder.plan_file, made.to_json())
    assert eh.verify(tmp_path)["ok"]


def test_steps_under_earlier_budgets_are_held_to_their_own_noise(tmp_path: Path) -> None:
    """A louder stage must not excuse a quiet step before it: each commit is checked by the stage it belongs to."""
    folder = stopped(tmp_path)
    made = eh.rebudget(tmp_path, eh.Budgets({"a": 2, "b": 5}), train=data())
    (commit, *_) = folder.ledger().commits
    needed = made.level_at(0).noise * max(
        value / scale for value, scale in zip(commit.sensitivity, made.scales_at(0), strict=True)
    )
    assert commit.std == pytest.approx(needed)
    assert made.levels[0].noise < made.level_at(0).noise
    assert made.scales_at(0) != made.scales


def test_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ("--epochs", 1, "--model", "linear")
    result("train", "--data", "digits", "--epsilon", 1, *flags, "--out", out)
    assert evenhand("resume", out, "--epochs", 1).returncode == 2
    assert evenhand("resume", out, "--epsilon", 0.5, "--epochs", 1).returncode == 2
    found = result("resume", out, "--epsilon", 3, "--epochs", 1)
    assert 2.97 < found["epsilon"] <= 3
    assert found["owners"]["all"]["budget"] == 3
    assert result("verify", out)["ok"]
