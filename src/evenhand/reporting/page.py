"""Builds every HTML page of evenhand from templates: one escape, one content policy, one document.

A page is a title, a style sheet and what its template lays out; most of it are sections, and a section is a heading
with blocks (words, tables, figures and so on) that are plain data. Templates print them: ``blocks.html.j2`` has one
branch for each kind of block.

Guarantees:
    * Every value that a template prints passes ``text.clean`` and is then escaped. Only drawings of ``charts`` and
      ``comparison_charts`` are taken as markup, in ``figure``, and nowhere else.
    * A page carries its policy in its head: its own style sheet and script by hash, and nothing else. It loads
      nothing and sends nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from evenhand.reporting.charts import NARROW, WIDE
from evenhand.reporting.text import clean, label

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_CHOICES = 40  # groups that get a button


@dataclass(frozen=True)
class Words:
    """A paragraph; ``strong`` stands before it in bold, ``mark`` after it in brackets."""

    kind: ClassVar[str] = "words"
    text: str
    strong: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of short texts, each with its mark."""

    kind: ClassVar[str] = "bullets"
    lines: Sequence[Words]


@dataclass(frozen=True)
class Notes:
    """Small print, one paragraph each."""

    kind: ClassVar[str] = "notes"
    remarks: Sequence[str]


@dataclass(frozen=True)
class Chooser:
    """Buttons that show and hide groups in every chart; the style hides them until the script is there.

    Attributes:
        numbers: the number of each group, which charts carry as ``data-g``.
    """

    kind: ClassVar[str] = "chooser"
    numbers: Mapping[str, int]

    @property
    def shown(self) -> list[tuple[str, int]]:
        """Return name and number of the groups that get a button."""
        return list(self.numbers.items())[:_CHOICES]


@dataclass(frozen=True)
class Figure:
    """One chart drawn twice; the style sheet shows the drawing that fits the window. Made by ``figure``."""

    kind: ClassVar[str] = "figure"
    wide: Markup
    narrow: Markup


@dataclass(frozen=True)
class Table:
    """Numbers under a chart; the first cell of each row is a name. ``folded`` hides them behind a line to click."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = True


@dataclass(frozen=True)
class Facts:
    """Names with their values, such as method, data and steps."""

    kind: ClassVar[str] = "facts"
    rows: Mapping[str, str]


@dataclass(frozen=True)
class Commands:
    """Lines to type in a shell."""

    kind: ClassVar[str] = "commands"
    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line to click."""

    kind: ClassVar[str] = "fold"
    summary: str
    blocks: Sequence[Block]
    open: bool = False


@dataclass(frozen=True)
class Choice:
    """Figures by name of which one is shown; the control to choose is hidden until the script is there."""

    kind: ClassVar[str] = "choice"
    label: str
    figures: Mapping[str, Figure]


Block = Words | Bullets | Notes | Chooser | Choice | Figure | Table | Facts | Commands | Fold


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading of its own."""

    heading: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def figure(draw: Callable[[int], str]) -> Figure:
    """Return a chart drawn for wide and for narrow windows.

    This is the one place where text is taken as markup: ``draw`` must be a function of ``charts`` or
    ``comparison_charts``, which escape what they print.

    Examples:
        >>> figure(lambda size: f"<svg width='{size}'/>").narrow
        Markup("<svg width='340'/>")
    """
    from markupsafe import Markup

    return Figure(*(Markup(draw(size)) for size in (WIDE, NARROW)))


def facts_and_commands(facts: Mapping[str, str], commands: str) -> list[Section]:
    """Return the sections that end a report: how it was made, and how to make it again; none where there is nothing.

    Examples:
        >>> [part.heading for part in facts_and_commands({}, "evenhand verify .")]
        ['How to reproduce']
    """
    sections = [Section("How this was made", [Facts(facts)])] if facts else []
    return sections + ([Section("How to reproduce", [Commands(commands)])] if commands.strip() else [])


def document(
    template: str, title: str, *, style: str = "report.css", script: str = "report.js", connect: str = "", **values: Any
) -> str:
    """Return a whole page.

    Args:
        template: name of a template that extends ``page.html.j2``.
        title: the document's title.
        style: the style sheet in ``templates``.
        script: the script in ``templates``; empty for a page without any.
        connect: whom the script may ask: ``'self'`` for a page that the local server answers, else nobody.
        **values: what the template prints.

    Examples:
        >>> document("comparison.html.j2", "A < B", comparison={"title": "x", "research": False}, lead="", mark="",
        ...          failures=[], findings={"lines": []}, sections=[]).count("A &lt; B")
        1
    """
    return (
        _environment().get_template(template).render(title=title, style=style, script=script, connect=connect, **values)
    )


def policy(style: str = "report.css", script: str = "report.js", connect: str = "") -> str:
    """Return the content policy of a page: this style sheet and script by their hashes, and nothing else.

    Examples:
        >>> policy().split("; ")[0], "script" in policy("statement.css", ""), "connect" in policy()
        ("default-src 'none'", False, False)
    """
    admitted = f"style-src 'sha256-{_hash(style)}'" + (f"; script-src 'sha256-{_hash(script)}'" if script else "")
    admitted += f"; connect-src {connect}" if connect else ""
    return f"default-src 'none'; {admitted}; base-uri 'none'; form-action 'none'"


def asset(name: str) -> str:
    """Return a style sheet or script exactly as pages carry it.

    Examples:
        >>> asset("report.css").startswith(":root{")
        True
    """
    return _environment().get_template(name).render()


def _hash(name: str) -> str:
    return base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()


@cache
def _environment() -> Environment:
    """Return the one environment; jinja2 is imported here, so that commands without a page do without it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("evenhand.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )
    environment.filters["label"] = label
    environment.globals["policy"] = policy
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # rows stay in the order of their meaning
    return environment


def _cleaned(value: Any) -> Any:
    """Return a value without characters that break or reorder a line; markup was made by the templates themselves."""
    return value if hasattr(value, "__html__") else clean(value)
