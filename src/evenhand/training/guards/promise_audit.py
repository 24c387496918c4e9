"""Attack a plan's own mechanism before a run releases anything, and keep the outcome in the run folder."""

from __future__ import annotations

from collections.abc import Callable

from evenhand.accounting.plan import Plan
from evenhand.density import METHODS
from evenhand.density.audit_releases import audit_releases, prepare_releases
from evenhand.errors import AuditError
from evenhand.mechanism.audit.attack import audit_mechanism, prepare
from evenhand.mechanism.audit.forecast_words import announce
from evenhand.mechanism.audit.result import Audit
from evenhand.mechanism.processes.group import Group
from evenhand.runs.audits import record
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger
from evenhand.runs.run_files import write_json
from evenhand.terminal import note


def attack_on(method: str) -> Callable[..., Audit]:
    """Return the function that attacks plans of this method without data: its steps, or the releases of a density.

    Examples:
      >>> attack_on("dpsgd").__name__, attack_on("moment_density").__name__
      ('audit_mechanism', 'audit_releases')
    """
    return audit_releases if method in METHODS else audit_mechanism


def refuse_unauditable(plan: Plan, effort: str | None) -> None:
    """Raise UsageError if an audit is asked for that this plan does not allow; without an effort none is."""
    if effort is not None:
        (prepare_releases if plan.method in METHODS else prepare)(plan, effort=effort)


def audit_before_release(group: Group, folder: Folder, plan: Plan, effort: str | None) -> None:
    """Attack the plan of a run that has spent nothing yet, and write the outcome into its folder.

    Worst-case gradients go through the plan's own sampler, step and noise; no data are read. What is certified becomes
    a part of the statement. Without an effort nothing is done; a run that is resumed, and has an audit of this plan, is
    not attacked again. Of several processes the first one attacks.

    Raises:
      AuditError: a lower bound exceeds the promise. The ledger blocks the run, for good.
    """
    if effort is not None:
        group.first(lambda: _audit(folder, plan, effort))


def _audit(folder: Folder, plan: Plan, effort: str) -> None:
    audit = record.read(folder.path, plan.digest)
    if audit is None:
        outcome = attack_on(plan.method)(plan, effort=effort, announce=announce)
        write_audit(folder, outcome)
        audit = outcome.to_json()
    if not audit["ok"]:
        most = max(bound["lower_bound"] for bound in audit["per_owner"].values())
        raise AuditError(
            f"The audit certified an epsilon of {most:.3g}, above what was promised: the noise, the sampler or the "
            f"accounting of this plan is wrong. The run in {folder.path} is blocked: nothing more is trained or "
            "released. Please report this with audit.json and plan.json, which hold no data."
        )


def write_audit(folder: Folder, outcome: Audit) -> None:
    """Write an audit without data into a run folder, and the statement anew if there is one; durable on return.

    If a lower bound exceeds its claim, the ledger blocks the run first. Such an audit stays: a later one that passes
    is not written over it.
    """
    before = record.read(folder.path, outcome.details["plan"])
    if before is not None and not before["ok"] and outcome.ok:
        note("An audit of this run failed before: that one stays in the folder, and the run stays blocked.")
        return
    if not outcome.ok and not folder.ledger().blocked:
        with Ledger.writing(folder.ledger_file) as ledger:
            ledger.blocked(ledger.reserved, "audit")
    write_json(folder.path / record.FILE, outcome.to_json())
    if folder.statement_file.exists():
        folder.write_statement()
