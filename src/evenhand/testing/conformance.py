"""``check``: every check that the kit has for a rule, a query or a whole mechanism, and the findings of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand import _validate
from evenhand.methods.queries import Query
from evenhand.methods.rules import Rule
from evenhand.testing import attack_check, noise_checks, rule_checks, step_checks
from evenhand.testing import rule_checks as purity_checks
from evenhand.testing import step_checks as engine_checks
from evenhand.testing.subjects import Subject


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; when it failed, ``message`` says on which input, the smallest that was found."""

    check: str
    ok: bool
    message: str


@dataclass(frozen=True)
class Findings:
    """Every check of one subject.

    Examples:
      >>> table = Findings("my_rule", (Finding("form", True, "200 cases"), Finding("purity", False, "changes norm")))
      >>> table.ok, [finding.check for finding in table.failed]
      (False, ['purity'])
      >>> print(table)
      my_rule: 1 of 2 checks failed
        ok      form         200 cases
        FAILED  purity       changes norm
    """

    subject: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether every check passed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The checks that did not pass."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        head = f"{len(self.failed)} of {count} checks failed" if self.failed else f"{count} checks passed"
        lines = [f"  {'ok' if f.ok else 'FAILED':<6}  {f.check:<11}  {f.message}" for f in self.findings]
        return "\n".join([f"{self.subject}: {head}", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``evenhand check --json``."""
        rows = [{"check": f.check, "ok": f.ok, "message": f.message} for f in self.findings]
        return {"subject": self.subject, "ok": self.ok, "checks": rows}


Check = Callable[[Subject], tuple[bool, str]]

CHECKS: dict[str, Check] = {
    "form": rule_checks.form,
    "sensitivity": rule_checks.sensitivity,
    "isolation": rule_checks.isolation,
    "order": rule_checks.order,
    "purity": purity_checks.purity,
    "memory": purity_checks.memory,
    "round_trip": purity_checks.round_trip,
    "step": step_checks.step,
    "ledger": step_checks.ledger,
    "large": engine_checks.large,
    "noise": noise_checks.noise,
    "audit": attack_check.audit,
    "sampling": noise_checks.sampling,
    "accounting": step_checks.accounting,
}
"""Every check by name, in the order in which they run."""

_OF_CLAIMS = {"sensitivity", "step", "ledger", "large", "noise", "audit", "accounting"}


def check(part: Subject | Rule | Query, *, only: Sequence[str] = ()) -> Findings:
    """Try to show that a rule, a query or a whole mechanism is wrong.

    Args:
      part: an instance; a rule comes with the queries it needs, a query beside plain clipping. To test another step,
        noise, sampler or accounting, put it in a ``Subject``.
      only: names of the checks to run; all of them by default. A search is the same at every run.

    Formal guarantees:
      None: a part that passes was not caught. What fails is wrong, up to a false-alarm rate below 1e-6 a check.

    Examples:
      >>> from evenhand.methods.rules import Clip
      >>> check(Clip(), only=["form", "isolation"]).ok
      True
    """
    subject = Subject.of(part)
    names = [_validate.known(name, CHECKS, "check") for name in only] or list(CHECKS)
    return Findings(subject.name, tuple(_finding(subject, name) for name in names))


def assert_conforms(part: Subject | Rule | Query, *, only: Sequence[str] = ()) -> None:
    """Raise AssertionError with the whole table of ``check`` if anything failed.

    Examples:
      >>> from evenhand.methods.rules import Clip
      >>> assert_conforms(Clip(), only=["round_trip"])
    """
    findings = check(part, only=only)
    if not findings.ok:
        raise AssertionError(str(findings))


def _finding(subject: Subject, name: str) -> Finding:
    if name in _OF_CLAIMS and not subject.private:
        return Finding(name, True, "not tried: the rule says that it is not private")
    try:
        ok, message = CHECKS[name](subject)
    except Exception as error:
        ok, message = False, f"raises {type(error).__name__}: {error}"
    return Finding(name, ok, message)
