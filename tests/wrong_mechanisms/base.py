"""What a member of the zoo is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenhand.methods.queries import Query
from evenhand.methods.rules import Clip, Rule
from evenhand.testing.subjects import Step, Subject


@dataclass(frozen=True)
class Wrong:
    """A mechanism that must be rejected, what is wrong with it, and by which check it must be caught."""

    name: str
    why: str
    subject: Subject
    caught_by: str


def wrong_rule(rule: Rule, caught_by: str, *queries: Query) -> Wrong:
    """A wrong rule in an otherwise right mechanism; its docstring says what is wrong."""
    return Wrong(rule.name, _why(rule), Subject(rule, queries), caught_by)


def _why(part: object) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]


def wrong_step(step: Step, caught_by: str, subject: Subject | None = None, *, name: str = "") -> Wrong:
    """A right rule, plain clipping unless another is given, in a wrong step."""
    placed = replace(subject or Subject(Clip()), step=step)
    return Wrong(name or type(step).__name__, _why(step), placed, caught_by)
