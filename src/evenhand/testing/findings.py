"""What the kit found: one line per check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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
      >>> found = Findings("my_rule", (Finding("form", True, "200 cases"), Finding("purity", False, "changes norm")))
      >>> found.ok, [finding.check for finding in found.failed]
      (False, ['purity'])
      >>> print(found)
      my_rule: 1 of 2 checks failed
        ok      form         200 cases
        FAILED  purity       changes norm
    """

    subject: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
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
        """Plain data for ``evenhand check --json``."""
        rows = [{"check": f.check, "ok": f.ok, "message": f.message} for f in self.findings]
        return {"subject": self.subject, "ok": self.ok, "checks": rows}
