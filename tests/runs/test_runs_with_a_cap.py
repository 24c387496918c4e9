"""Runs whose records are drawn one by one, with a promise about persons: from a plan to a total over runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from commands import evenhand, result
from evenhand.accounting import accountant
from evenhand.data import Data, wrap
from evenhand.errors import CalibrationError, DataError, PlanMismatchError, UsageError
from evenhand.mechanism.replan import replan
from evenhand.runs import statement_files
from evenhand.runs.dataset_ledger import DatasetLedger
from evenhand.training.config import PYTHON, Config

NAMES = np.repeat(np.arange(60), np.arange(60) % 5 + 1)
CAP = 3


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def people(cap: int | None = CAP, names: np.ndarray | None = NAMES, **changes: object) -> Data:
    inputs = torch.randn(len(NAMES), 3, generator=torch.Generator().manual_seed(0))
    return wrap(inputs, np.arange(len(NAMES)) % 2, labels=[0, 1], persons=names, person_cap=cap, **changes)


def plan(data: Data, method: str = "dpsgd") -> eh.Plan:
    return eh.plan(method, eh.Privacy(1, 1e-3), data=data.facts, epochs=3, batch_size=8)


def entered(data: Data) -> dict:
    return DatasetLedger.of(data).enter(plan(data))


def by_hand(written: Mapping, steps: int | None = None) -> float:
    """Epsilon of a person from the numbers in plan.json alone, by the accountant of dp-accounting."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.stats import binom

    (level,), cap = written["levels"], written["facts"]["person_cap"]
    share = binom.pmf(np.arange(cap + 1), cap, written["rates"][0])
    whole = pld.from_mixture_gaussian_mechanism(
        level["noise"], list(map(float, range(cap + 1))), share.tolist(), value_discretization_interval=1e-3
    ).self_compose(level["count"] if steps is None else steps)
    if "prior" in written:
        whole = whole.compose(
            pld.from_gaussian_mechanism(written["prior"]["noise"] / cap, value_discretization_interval=1e-3)
        )
    return float(whole.get_epsilon_for_delta(written["delta"]))


def table(folder: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{draw.integers(0, 100)},{'no' if draw.random() < 0.5 else 'yes'},person {p}" for p in NAMES]
    (folder / "people.csv").write_text("age,ill,who\n" + "\n".join(rows) + "\n")
    init = ("init", "people.csv", "--label", "ill", "--labels", "no,yes", "--number", "age=0:100", "--only-declared")
    assert evenhand(*init, cwd=folder).returncode == 0


def test_from_a_file_to_a_statement_about_persons(tmp_path: Path) -> None:
    table(tmp_path)
    asked = ("--persons", "who", "--epsilon", "3", "--epochs", "2", "--model", "linear", "--batch-size", "10")
    done = evenhand("train", "people.toml", *asked, "--person-cap", str(CAP), "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    statement, written = result("statement", run), json.loads((run / "plan.json").read_text())
    assert (statement["guarantee"]["unit"], written["unit"]) == ("person", "person")
    inputs = statement["public_inputs"]
    assert (inputs["persons"], inputs["person_cap"]) == ("who", CAP)
    assert inputs["number_of_persons"] <= 60 < inputs["records"] < len(NAMES)
    assert statement["guarantee"]["epsilon"] == pytest.approx(by_hand(written), rel=1e-3)
    words = " ".join((run / "statement.md").read_text().split())
    assert "If one person is added or removed, with all of their records," in words
    assert f"at most {CAP} records of each person" in words
    assert "Each person behind the" in words
    assert "several records of one person" not in words
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads((run / "statement.json").read_text()), statement_files.schema())
    checked = result("verify", run)
    assert checked["ok"], checked["problems"]
    assert (checked["unit"], checked["epsilon"]) == ("person", pytest.approx(by_hand(written), rel=1e-3))
    shared = [file for file in run.iterdir() if file.is_file()]
    assert not [file for file in shared if b"person 1" in file.read_bytes()], "names of persons are in no file"
    page = Path(result("report", run)["report"]).read_text()
    assert "per person, add/remove" in page
    assert "per record" not in page
    for wrong, said in (
        (("--records-per-person", "2"), "records_per_person or person_cap"),
        (("--person-cap", "0"), "person_cap"),
        (("--method", "moment_density"), "Densities promise for single records"),
        (("--audit", "quick"), "drawn by themselves"),
    ):
        refused = evenhand(
            "train", "people.toml", *asked, "--person-cap", "2", *wrong, "--out", f"wrong-{wrong[0]}", cwd=tmp_path
        )
        assert refused.returncode == 2, (wrong, refused.stderr)
        assert said in " ".join(refused.stderr.split()), wrong
        assert not (tmp_path / f"wrong-{wrong[0]}" / "ledger.jsonl").exists()
    nobody = evenhand("train", "people.toml", "--epsilon", "3", "--person-cap", "2", cwd=tmp_path)
    assert (nobody.returncode, "person_cap is about persons" in nobody.stderr) == (2, True)


def test_a_plan_with_a_cap_is_made_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lesions = replace(people(None, None), together=torch.from_numpy(NAMES), together_by="lesion")
    monkeypatch.setattr(eh.data, "load", lambda *_, **__: (lesions, None))
    asked = ("plan", "--epsilon", "3", "--delta", "1e-3", "--epochs", "2", "--batch-size", "10")
    planned = result(*asked, "--data", "ham10000", "--persons", "lesion", "--person-cap", "2")
    assert planned["unit"] == "person"
    assert planned["facts"]["records"] == 12 * (1 + 4 * 2)
    assert (planned["facts"]["person_cap"], planned["facts"]["persons"]) == (2, 60)
    assert planned["epsilons"][0] == pytest.approx(by_hand(planned), rel=1e-3)
    assert eh.Plan.from_json({k: v for k, v in planned.items() if k in plan(people()).to_json()}).cap == 2
    with pytest.raises(UsageError, match="records_per_person or person_cap"):
        Config(data="ham10000", persons="lesion", records_per_person=2, person_cap=2).load_data()
    with pytest.raises(UsageError, match="person_cap is about persons"):
        Config(person_cap=2)
    nobody = evenhand(*asked, "--records", "100", "--person-cap", "2")
    assert (nobody.returncode, "--person-cap is about persons" in nobody.stderr) == (2, True)


class Crash:
    """A logger that ends the process's work at the first evaluation."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["dpsgd", "ino_sample", "adaptive_clip"])
def test_a_run_goes_on_with_the_same_records_only(method: str, tmp_path: Path) -> None:
    data = people()
    test = wrap(torch.randn(50, 3, generator=torch.Generator().manual_seed(7)), [0, 1] * 25, labels=[0, 1])
    asked = {"epsilon": 3.0, "delta": 1e-3, "epochs": 6, "batch_size": 8, "test": test, "method": method}
    with pytest.raises(KeyboardInterrupt):
        eh.fit(nn.Linear(3, 2), data, **asked, out=tmp_path / "run", loggers=[Crash()])
    before = eh.verify(tmp_path / "run")
    assert before["ok"]
    again = {"model": nn.Linear(3, 2), "test": test}
    for other in (people(None), people(2), people(CAP, np.roll(NAMES, 1))):
        with pytest.raises(PlanMismatchError, match=r"other public facts|not the records"):
            eh.resume(tmp_path / "run", train=other, **again)
    moved = NAMES.copy()
    moved[[2, 5]] = moved[[5, 2]]
    with pytest.raises(PlanMismatchError, match="not the records that this run was started on"):
        eh.resume(tmp_path / "run", train=people(CAP, moved), **again)
    run = eh.resume(tmp_path / "run", train=people(), **again)
    after = eh.verify(tmp_path / "run")
    assert after["ok"], after["problems"]
    assert 0 < before["steps"] < after["steps"] == run.plan.steps
    events = run.plan.events_of_each()
    assert after["epsilon"] == pytest.approx(accountant.epsilon(events, 1e-3, cap=CAP), rel=1e-6)
    assert after["epsilon"] > 1.3 * accountant.epsilon(events, 1e-3)
    if method == "dpsgd":
        assert after["epsilon"] == pytest.approx(by_hand(run.plan.to_json()), rel=1e-3)


def test_names_can_be_given_to_fit(tmp_path: Path) -> None:
    inputs, targets = torch.randn(len(NAMES), 3), torch.arange(len(NAMES)) % 2
    asked = {"epsilon": 3.0, "delta": 1e-3, "epochs": 1, "batch_size": 8, "persons": NAMES, "person_cap": 2}
    run = eh.fit(nn.Linear(3, 2), (inputs, targets), **asked, out=tmp_path / "run")
    assert (run.plan.cap, run.plan.unit) == (2, "person")
    assert "per person" in run._repr_html_()


def test_rows_taken_twice_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    data = people()
    twice = data.take(torch.arange(len(data)).repeat(2)[: len(data) + 30])
    with pytest.raises((DataError, UsageError), match="more than 3 of these records"):
        eh.fit(nn.Linear(3, 2), twice, epsilon=3.0, delta=1e-3, epochs=1, batch_size=8, out=tmp_path / "run")
    assert eh.verify(tmp_path / "run")["steps"] == 0


def test_runs_add_up_each_with_its_own_cap() -> None:
    first, other, single = entered(people()), entered(people(2)), entered(people(None))
    assert [found["runs"] for found in (first, other, single)] == [1, 2, 3]
    assert [found["uncounted"] for found in (first, other, single)] == [0, 0, 0]
    parts = [(event, one.cap) for one in map(plan, map(people, (CAP, 2, None))) for event in one.events_of_each()]
    together = accountant.epsilon([event for event, _ in parts], 1e-3, cap=[cap for _, cap in parts])
    assert single["epsilons"]["all"] == pytest.approx(together, rel=1e-6)
    assert first["epsilons"]["all"] < other["epsilons"]["all"] < together < 3 * first["epsilons"]["all"]


def test_runs_with_a_cap_are_in_no_total_of_a_run_by_record_nor_of_other_persons() -> None:
    entered(people())
    by_record = entered(people(None, None))
    assert (by_record["runs"], by_record["uncounted"]) == (2, 1)
    assert by_record["epsilons"]["all"] == pytest.approx(accountant.epsilon(plan(people(None, None)).events(), 1e-3))
    others = entered(people(CAP, np.roll(NAMES, 1)))
    assert (others["runs"], others["uncounted"]) == (3, 2)
    assert others["epsilons"]["all"] == pytest.approx(plan(people()).epsilons[0], rel=1e-2)


def test_a_plan_with_another_cap_than_its_epsilon_does_not_verify(tmp_path: Path) -> None:
    data = people()
    run = eh.fit(nn.Linear(3, 2), data, epsilon=3.0, delta=1e-3, epochs=1, batch_size=8, out=tmp_path / "run")
    written = run.plan.to_json()
    wrong = {**written, "facts": {**written["facts"], "person_cap": 4}}
    (tmp_path / "run" / "plan.json").write_text(json.dumps(wrong))
    assert not eh.verify(tmp_path / "run")["ok"]
    assert eh.Plan.from_json(wrong).spent(run.plan.steps) > 1.2 * run.plan.epsilons[0]  # type: ignore[operator]
    for facts in ({"person_cap": 0}, {"person_cap": 1}, {"persons": 0}, {"unit": "person"}, {"person_cap": 10**6}):
        with pytest.raises(UsageError, match="damaged or edited"):
            eh.Plan.from_json({**written, "facts": {**written["facts"], **facts}})
    with pytest.raises(UsageError, match="damaged or edited"):
        eh.Plan.from_json({**written, "unit": "one record"})


def test_what_looks_at_single_records_is_refused() -> None:
    planned = plan(people())
    with pytest.raises(UsageError, match="drawn by themselves"):
        planned.events()
    with pytest.raises(UsageError, match="drawn by themselves"):
        eh.audit(planned)
    for kind in ("canary", "lira"):
        with pytest.raises(UsageError, match="the promise is about persons"):
            eh.audit(Config(data=PYTHON, model="linear", epsilon=1.0), kind=kind, train=people())
    assert plan(people(1)).events() == plan(people(1)).events_of_each(), "one record of each person is a record"


def test_owners_have_their_own_budgets_as_long_as_they_are_few() -> None:
    owners = np.where(np.arange(60) % 2 == 0, "strict", "open")[NAMES]
    budgets = eh.Budgets({"strict": 1.0, "open": 4.0}, delta=1e-3)
    for method in ("idp_sample", "idp_scale", "ino_sample", "ino_scale"):
        planned = eh.plan(method, budgets, data=people(owners=owners).facts, epochs=3, batch_size=8)
        named = dict(zip(planned.facts.owner_names, planned.epsilons, strict=True))
        assert 0.99 < named["strict"] <= 1.0  # type: ignore[operator]
        assert 3.96 < named["open"] <= 4.0  # type: ignore[operator]
        for owner, epsilon in enumerate(planned.epsilons):
            assert epsilon == pytest.approx(accountant.epsilon(planned.events_of_each(owner), 1e-3, cap=CAP), rel=1e-6)
    many = eh.Budgets({str(n): 1 + n / 10 for n in range(20)}, delta=1e-3)
    facts = people(owners=[str(n % 20) for n in NAMES]).facts
    for method in ("idp_sample", "idp_scale"):
        with pytest.raises(CalibrationError, match="at most 8 distinct budgets"):
            eh.plan(method, many, data=facts, epochs=3, batch_size=8)


def test_budgets_can_change_on_the_way() -> None:
    before = plan(people())
    after = replan(before, eh.Privacy(2, 1e-3), charged=20)
    assert after.cap == CAP
    assert 1.98 < after.epsilons[0] <= 2  # type: ignore[operator]
    spent = accountant.epsilon(after.events_of_each(), 1e-3, cap=CAP)
    assert after.epsilons[0] == pytest.approx(spent, rel=1e-6)
