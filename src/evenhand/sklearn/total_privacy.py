"""Say what a fitted estimator cost: the total over all runs on the same records first, this fit alone second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenhand import _notebook
from evenhand._numbers import rounded_up
from evenhand.training.run import Run, Statement


@dataclass(frozen=True)
class TotalPrivacy:
    """The privacy that the records of a fit have spent on this machine; printing it gives the words.

    Attributes:
      epsilon: of a record over all runs that were counted on these records, this fit included; of the owner class that
        spends most. None if no guarantee is established.
      this_fit: epsilon of this fit alone.
      delta: of both.
      runs: how many runs were counted, None if counting was switched off (``compose=False``).
      uncounted: runs among them that are in no total, such as those whose noise seed is public.
      statement: the statement of this fit's run folder.
    """

    epsilon: float | None
    this_fit: float | None
    delta: float
    runs: int | None
    uncounted: int
    statement: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, run: Run) -> TotalPrivacy:
        """Return what a finished run's statement and its count of runs say."""
        statement = run.privacy
        counted = run.folder.composition() or {"runs": None}
        alone, total = statement.epsilon, statement.epsilon
        if counted["runs"] is not None and counted["runs"] > 1 and alone is not None:
            total = max([alone, *counted["epsilons"].values()])
        delta = float(statement.data["guarantee"]["delta"])
        return cls(total, alone, delta, counted["runs"], int(counted.get("uncounted", 0)), statement.data)

    def __str__(self) -> str:
        return f"{self._opening}\n\n{Statement(self.statement)}"

    @property
    def _opening(self) -> str:
        if self.epsilon is None or self.this_fit is None:
            return "No privacy guarantee is established for this fit, so no epsilon is printed."
        unit = f"for each record ({self.statement['guarantee']['adjacency']}), delta {self.delta:g}"
        alone = f"epsilon {rounded_up(self.this_fit)}"
        if self.runs is None:
            return f"This fit alone: {alone} {unit}. Other runs on these records were not counted (compose=False)."
        if self.runs == 1:
            return f"In total: {alone} {unit}; no other run on these records was counted on this machine."
        rest = f"; {self.uncounted} of them are in no total" if self.uncounted else ""
        return (
            f"In total: epsilon {rounded_up(self.epsilon)} {unit}, over {self.runs} runs on these records{rest}. This "
            f"fit alone: {alone}."
        )

    def _repr_html_(self) -> str:
        words = ["none" if value is None else rounded_up(value) for value in (self.epsilon, self.this_fit)]
        facts = {"Epsilon over all runs": words[0], "Of this fit": words[1], "Delta": self.delta}
        return _notebook.facts("Privacy", facts, [self._opening])
