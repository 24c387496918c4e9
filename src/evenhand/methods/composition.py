"""A method: sampling + rule + queries + schedule, and what of that cannot go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from evenhand.errors import UsageError
from evenhand.methods.queries import Query
from evenhand.methods.rules import Rule
from evenhand.methods.rules.base import built
from evenhand.methods.schedules import Constant, Schedule


@dataclass(frozen=True)
class Method:
    """A point in the space of methods. Nothing in it depends on data.

    ``sampling="owner"`` gives every owner class the sampling rate that spends its own budget, ``bounds="owner"`` the
    clip bound that does; otherwise all classes are treated alike, by the strictest budget. ``package`` is the name and
    version of another package whose function composed the method; evenhand sets it.

    Examples:
      >>> from evenhand.methods.rules import Ordered, Psac
      >>> from evenhand.methods.schedules import Phases
      >>> Method(Ordered(over=Psac(r=0.05)), schedule=Phases(bound=0.5), sampling="owner").name
      'ordered'
    """

    rule: Rule
    queries: tuple[Query, ...] = ()
    schedule: Schedule = field(default_factory=Constant)
    sampling: Literal["uniform", "owner"] = "uniform"
    bounds: Literal["uniform", "owner"] = "uniform"
    name: str = ""
    package: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise UsageError(f"Method needs a rule such as eh.rules.Clip(), not {type(self.rule).__name__}.")
        if sum(query.share or 0.0 for query in self.queries) >= 1:
            raise UsageError("The shares of the side queries leave nothing for the gradient: keep their sum below 1.")
        if self.sampling == self.bounds == "owner":
            raise UsageError("Owners differ in their sampling rate or in their clip bound, not in both: choose one.")
        if self.bounds == "owner" and any(query.share is not None for query in self.queries):
            raise UsageError(
                "With a clip bound per owner a side query needs a fixed noise=, since a share of the step's "
                "privacy would differ between owners."
            )
        answers = [query.name for query in self.queries]
        if len(set(answers)) < len(answers):
            raise UsageError("Two side queries have the same name, so a rule could not tell their answers apart.")
        missing = [name for name in self.rule.needs if name not in answers]
        if missing:
            raise UsageError(
                f"The rule {self.rule.name!r} reads the noisy answer of the side query {missing[0]!r}, which this "
                "method does not ask: pass queries=[...] with it from eh.queries, for example with share=0.01."
            )
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "name", self.name or self.rule.name)

    @property
    def parts(self) -> list[type]:
        """Return the classes of its rule, of the rules inside that, of its schedule and its queries."""
        rule: Any = self.rule
        classes = [type(rule), type(self.schedule), *map(type, self.queries)]
        while over := getattr(rule, "over", None):
            rule = built(over)
            classes.append(type(rule))
        return classes

    @property
    def ours(self) -> bool:
        """Return whether evenhand has all its parts itself."""
        return not self.package and all(part.__module__.startswith("evenhand.") for part in self.parts)
