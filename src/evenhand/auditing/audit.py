"""Attack a promise: ``audit`` is the one door to every kind of audit."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from evenhand import _validate
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.mechanism.audit.forecast_words import announce
from evenhand.mechanism.audit.result import Audit
from evenhand.reporting.audits.section import attack_page
from evenhand.runs.folder import Folder, write_durably, write_json
from evenhand.terminal import note
from evenhand.training.config import Config, from_toml
from evenhand.training.fit import choose_promise
from evenhand.training.from_config import planned, read_budgets
from evenhand.training.guards.promise_audit import attack_on, write_audit
from evenhand.training.run import Run

KINDS = ("mechanism", "canary", "lira")
_ATTACKS = {"canary": ("canary", "audit_with_canaries"), "lira": ("lira", "audit_with_models")}
"""Module and function of the attacks on trained models; they are imported when they are asked for."""


def audit(
    target: Run | Plan | Config | str | Path, kind: str = "mechanism", *, record: bool = False, **options: Any
) -> Audit:
    """Attack a promise and return what the attack could show, beside what is promised.

    Every kind says first, on the terminal, what it costs, on which data it runs, and what it can find at most.

    Args:
      target: a run, its folder, a plan, or settings (a TOML file or a Config).
      kind: "mechanism" needs no data: worst-case gradients go through the plan's own steps. "canary" trains once with
        records that were put in by secret coins, "lira" trains many models: both need the training's settings and data.
      record: write the outcome into the run's folder. That of the mechanism becomes a part of statement and report,
        and blocks the run if a lower bound exceeds its claim; others become a page in ``private``.
      options: of the kind, such as ``confidence``.

    Raises:
      UsageError: the target cannot be attacked in this way; nothing was spent.
    """
    _validate.known(kind, KINDS, "kind of audit")
    attacked = read(target) if isinstance(target, str | Path) else target
    attack = _attack(kind, attacked)
    _, *settings = (name for name in inspect.signature(attack).parameters if name != "announce")
    for name in options:
        _validate.known(name, settings, f"setting of audits of the kind {kind!r}")
    if record and not (isinstance(attacked, Run) and attacked.folder.begun):
        raise UsageError("Only the audit of a run can be recorded, in its folder: pass the run. Nothing was spent.")
    outcome: Audit = (
        attack(plan_of(attacked), announce=announce, **options) if kind == "mechanism" else attack(attacked, **options)
    )
    if record and isinstance(attacked, Run):
        write(attacked, outcome)
    return outcome


def write(run: Run, outcome: Audit) -> Path:
    """Write an audit into the folder of its run and return the file for people; durable on return."""
    if outcome.kind != "mechanism":
        file = run.folder.private / f"audit-{outcome.kind}"
        write_json(file.with_suffix(".json"), outcome.to_json())
        write_durably(file.with_suffix(".html"), attack_page(outcome.to_json()).encode())
        return file.with_suffix(".html")
    write_audit(run.folder, outcome)
    if run.folder.signature_file.exists():
        note(
            "The statement has changed, so that the signature does not cover it any more: sign it again, evenhand "
            f"statement {run.path} --sign KEY."
        )
    page, full = run.path / "report.html", run.folder.private / "report-full.html"
    if page.exists():
        run.report().save(page)
    if full.exists():
        run.report(training_records=bool(run.folder.metrics(training_records=True)), full=True).save(full)
    if (run.path / "model-card.md").exists():
        write_durably(run.path / "model-card.md", run.card().encode())
    return page if page.exists() else run.path / "audit.json"


def read(path: str | Path) -> Run | Config:
    """Return the run of a folder, without its model, or the settings of a TOML file."""
    place = Path(path)
    return from_toml(place) if place.suffix == ".toml" else Run(Folder.existing(place))


def plan_of(target: Run | Plan | Config) -> Plan:
    """Return the plan that a run followed, or that settings would lead to; the latter reads the data for their facts.

    Examples:
      >>> plan_of(Config(epsilon=3.0, epochs=1)).epsilons[0] <= 3.0
      True
    """
    if isinstance(target, Plan):
        return target
    if isinstance(target, Run):
        return target.plan
    data = target.load_data()[0]
    budgets = read_budgets(target, data)
    promise = choose_promise(target.epsilon, target.delta if budgets is None else None, target.noise, budgets)
    return planned(target, data.facts, promise)


def _attack(kind: str, target: Run | Plan | Config) -> Any:
    """Return the function that attacks in this way; attacks on trained models are imported when they are asked for."""
    if kind == "mechanism":
        return attack_on(target.plan.method if isinstance(target, Run) else target.method)
    name, function = _ATTACKS[kind]
    return getattr(importlib.import_module(f"evenhand.auditing.{name}"), function)
