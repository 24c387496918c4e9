"""The audit of a run's own promise: in statement, report and verify; above the promise it blocks, for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch import nn
from typer.testing import CliRunner

import evenhand as eh
from evenhand.cli import app
from evenhand.density import noisy_sums
from evenhand.errors import AuditError, LedgerError, UsageError
from evenhand.mechanism import step
from evenhand.mechanism.audit import attack
from evenhand.runs import statement_files
from evenhand.runs.audits import record
from evenhand.runs.folder import Folder
from evenhand.runs.run_files import write_json
from evenhand.training import fit, from_config
from evenhand.training.config import Config
from evenhand.types import Facts


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attack._WORK, "quick", 2e6)


def trained(out: Path, **options: Any) -> eh.Run:
    train, test = eh.data.digits()
    return eh.fit(
        *(nn.Linear(64, 10), train),
        **{"epsilon": 3.0, "delta": 1e-5, "epochs": 1, "test": test, "out": out, "audit": "quick", **options},
    )


def too_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.noise_std
    monkeypatch.setattr(step, "noise_std", lambda *numbers: (real(*numbers)[0], 0.2 * real(*numbers)[1]))


def test_the_audit_is_in_statement_report_and_page_and_verifies(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    audit = run.privacy.data["audit"]
    bound = audit["per_owner"]["all"]
    assert 0.5 < bound["lower_bound"] < bound["claim"] <= 3.0 < bound["ceiling"]
    assert audit["ok"]
    assert "Audited without data: epsilon is at least" in str(run.privacy)
    assert "Audited without data" in (run.path / "statement.md").read_text(encoding="utf-8")
    assert "<h2>Audit</h2>" in (run.path / "report.html").read_text(encoding="utf-8")
    assert "audit.json" in run.privacy.data["sharing"]["may_be_shared"]
    written = json.loads(run.folder.statement_file.read_text(encoding="utf-8"))
    jsonschema.validate(written, statement_files.schema())
    assert eh.verify(run.path)["problems"] == []


def test_a_bound_above_the_promise_blocks_the_run_before_anything_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_quiet(monkeypatch)
    with pytest.raises(AuditError, match="blocked"):
        trained(tmp_path / "run")
    folder = Folder(tmp_path / "run")
    reading = folder.ledger()
    assert reading.reserved == 0
    assert reading.released == ()
    assert [row["cause"] for row in reading.blocked] == ["audit"]
    assert not folder.model_file.exists()
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="blocked"):
        eh.resume(folder.path, model=nn.Linear(64, 10), train=eh.data.digits()[0])
    assert "audit certified more" in " ".join(eh.verify(folder.path)["problems"])
    with pytest.raises(UsageError, match="blocked"):
        trained(folder.path)


def test_a_finished_run_that_is_audited_later_is_blocked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", audit=None)
    assert run.privacy.data["audit"] is None
    assert eh.audit(run, record=True).ok
    assert eh.verify(run.path)["problems"] == []
    assert run.privacy.data["audit"]["ok"]
    too_quiet(monkeypatch)
    assert not eh.audit(run, record=True).ok
    found = eh.verify(run.path)
    assert not found["ok"]
    assert found["epsilon"] is None
    assert run.privacy.epsilon is None
    assert "model.safetensors" in run.privacy.data["sharing"]["must_not_be_shared"]
    monkeypatch.undo()
    assert eh.audit(run, record=True).ok
    assert not eh.verify(run.path)["ok"], "a later audit does not lift the block"
    assert not run.privacy.data["audit"]["ok"], "nor does it hide why"


def test_a_run_that_stops_before_its_first_step_keeps_its_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(fit.goals, "begin", fails)
        with pytest.raises(RuntimeError):
            trained(tmp_path / "run")
    file = tmp_path / "run" / "audit.json"
    before = file.read_bytes()
    write_json(file, json.loads(before) | {"ok": False})
    with pytest.raises(AuditError):
        eh.resume(tmp_path / "run", model=nn.Linear(64, 10), train=eh.data.digits()[0])
    write_json(file, json.loads(before))
    run = eh.resume(tmp_path / "run", model=nn.Linear(64, 10), train=eh.data.digits()[0])
    assert (run.path / "audit.json").read_bytes() == before
    assert run.privacy.data["audit"]["ok"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ok": False}, "verdict"),
        ({"kind": "canary"}, "verdict"),
        ({"per_owner": {"all": {"claim": 9.0, "lower_bound": 1.0, "ceiling": 20.0, "trials": 9}}}, "another epsilon"),
        ({"per_owner": {"all": {"claim": 3.0}}}, "damaged or edited"),
        ({"confidence": 7.0}, "no audit of this plan"),
        ({"delta": 0.5}, "no audit of this plan"),
        ({"private": True}, "no audit of this plan"),
    ],
)
def test_a_forged_audit_does_not_verify(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    run = trained(tmp_path / "run")
    file = run.path / "audit.json"
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | change)  # with its row in the ledger
    assert words in " ".join(eh.verify(run.path)["problems"])


@pytest.mark.parametrize("change", [{"lower_bound": -5.0}, {"ceiling": 0.01}, {"trials": -4}])
def test_impossible_bounds_do_not_verify(tmp_path: Path, change: dict[str, Any]) -> None:
    run = trained(tmp_path / "run")
    audit = json.loads((run.path / "audit.json").read_text(encoding="utf-8"))
    audit["per_owner"]["all"] |= change
    write_json(run.path / "audit.json", audit)
    assert "no audit of this plan" in " ".join(eh.verify(run.path)["problems"])


def test_the_audit_of_a_plan_of_many_owners_verifies(tmp_path: Path) -> None:
    """Their epsilons are certified together, a little above what each owner's is alone."""
    budgets = {f"owner {k}": 0.5 + k / 100 for k in range(700)}
    facts = Facts(7000, tuple((name, 10) for name in budgets))
    plan = eh.plan("idp_scale", eh.Budgets(budgets, 1e-6), data=facts, epochs=1, batch_size=100)
    outcome = eh.audit(plan, trials=300)
    write_json(tmp_path / "audit.json", outcome.to_json())
    assert record.problems(tmp_path, plan, blocked=False) == []


def density(out: Path) -> eh.Run:
    train, test = eh.data.digits()
    return from_config.train(Config(method="moment_density", epsilon=3.0, audit="quick"), train, test, out)


def test_a_density_is_audited_before_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = density(tmp_path / "run")
    bound = run.privacy.data["audit"]["per_owner"]["all"]
    assert 0.5 < bound["lower_bound"] < bound["claim"] <= 3.0
    assert eh.verify(run.path)["problems"] == []
    honest = noisy_sums.release
    monkeypatch.setattr(
        noisy_sums, "release", lambda summed, std, *rest, **options: honest(summed, std / 5, *rest, **options)
    )
    with pytest.raises(AuditError, match="blocked"):
        density(tmp_path / "broken")
    folder = Folder(tmp_path / "broken")
    reading = folder.ledger()
    assert (reading.reserved, reading.released) == (0, ())
    assert [row["cause"] for row in reading.blocked] == ["audit"]
    assert not folder.model_file.exists()
    with pytest.raises(UsageError, match="blocked"):
        density(folder.path)


def test_an_audit_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    run, other = trained(tmp_path / "run"), trained(tmp_path / "other", epochs=2)
    write_json(run.path / "audit.json", json.loads((other.path / "audit.json").read_text(encoding="utf-8")))
    assert run.privacy.data["audit"] is None


@pytest.mark.parametrize("options", [{"method": "sgd", "epsilon": None, "delta": None}, {"audit": "endless"}])
def test_what_cannot_be_audited_is_refused_before_there_is_a_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        trained(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_command_trains_with_an_audit_and_audits_a_run(tmp_path: Path) -> None:
    run = CliRunner()
    flags = ["--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "1", "--audit", "quick", "--quiet"]
    done = run.invoke(app, ["train", *flags, "--out", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "audit.json").exists()
    again = run.invoke(app, ["audit", str(tmp_path / "run"), "--json", "--quiet"])
    assert again.exit_code == 0, again.output
    figures = json.loads(again.stdout)
    assert {"kind", "claim", "lower_bound", "confidence", "per_owner", "ok"} <= figures.keys()
    canary = run.invoke(
        app, ["audit", str(tmp_path / "run"), "--kind", "canary", "--set", "canaries=200", "--json", "--quiet"]
    )
    assert canary.exit_code == 0, canary.output
    page = tmp_path / "run" / "private" / "audit-canary.html"
    assert "Do not share" in page.read_text(encoding="utf-8")
    assert eh.verify(tmp_path / "run")["problems"] == []
    for setting in ("plan=3", "announce=1"):
        wrong = run.invoke(app, ["audit", str(tmp_path / "run"), "--set", setting])
        assert "setting of audits" in str(wrong.exception)
    kinds = run.invoke(app, ["audit", str(tmp_path / "run"), "--kind", "sharp"])
    assert isinstance(kinds.exception, UsageError)
