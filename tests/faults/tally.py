"""What came of each fault, and the counts of a part of the campaign."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import checker
from checker import Finding


@dataclass(frozen=True)
class Outcome:
    """One fault and what came of it."""

    scenario: str
    fault: str
    target: str
    end: str
    findings: tuple[Finding, ...]
    seconds: float


@dataclass
class Tally:
    """Counts of a part of the campaign, printed at its end."""

    part: str
    log: Path | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome, and write it to the log."""
        self.outcomes.append(outcome)
        if self.log is not None:
            line = {"part": self.part, **vars(outcome), "findings": [vars(finding) for finding in outcome.findings]}
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def counts(self) -> dict[str, int]:
        """Return the number of faults after which each class was found."""
        found = Counter(kind for outcome in self.outcomes for kind in {finding.kind for finding in outcome.findings})
        return {kind: found[kind] for kind in checker.CLASSES}

    def text(self) -> str:
        """Return everything in a few lines: faults, ends, classes with an example each."""
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        lines = [f"{self.part}: {len(self.outcomes)} faults, {seconds / max(1, len(self.outcomes)):.1f} s each"]
        lines.append(f"  scenarios: {dict(Counter(outcome.scenario for outcome in self.outcomes))}")
        commands = Counter((outcome.scenario, outcome.target) for outcome in self.outcomes)
        files = Counter(outcome.target for outcome in self.outcomes)
        least = min(commands.values(), default=0), min(files.values(), default=0)
        lines.append(f"  {len(commands)} writes of commands, each hit {least[0]} times or more")
        lines.append(f"  {len(files)} files over all commands, each hit {least[1]} times or more")
        lines.append(f"  ends: {dict(Counter(outcome.end for outcome in self.outcomes))}")
        for kind, count in self.counts().items():
            lines.append(f"  {count:5d}  {kind}{self._example(kind)}")
        return "\n".join(lines)

    def _example(self, kind: str) -> str:
        for outcome in self.outcomes:
            for finding in outcome.findings:
                if finding.kind == kind:
                    return f", e.g. {outcome.scenario}, {outcome.fault} ({outcome.target}): {finding.detail}"
        return ""
