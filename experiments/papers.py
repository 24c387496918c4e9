"""What holds of the five papers, from the figures of all pages: one paragraph each, and where each table and figure is.

    python experiments/papers.py        # seconds; writes docs/results/papers.md from docs/results/*.json

Every clause is a claim that was declared with its study; its interval is that of the study's page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import judging
import matched_page
import results
from matched_studies import STUDIES
from page_text import lined_up, listed
from papers_tables import ITEMS, PAPERS, Paper

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
ORDER = (
    ("Holds", "holds"),
    ("Does not hold", "does not hold"),
    ("Too small to matter", "too small to matter"),
    ("Not decided", "not decided"),
)


@dataclass(frozen=True)
class Clause:
    """A claim with its verdict and interval, and the page that it is from."""

    text: str
    page: str
    replicas: int

    @property
    def verdict(self) -> str:
        """Return the verdict as the page has it."""
        return next(verdict for _, verdict in reversed(ORDER) if f"**{verdict}" in self.text)

    @property
    def said(self) -> str:
        """Return the clause without its verdict, with a link."""
        before, after = self.text.split("**", 2)[0], self.text.split("**", 2)[2].lstrip("; ").rstrip(".")
        return f"{before.rstrip(': ')}: {after} ([{self.page}]({self.page}.md))"


def clauses(paper: Paper, out: Path) -> list[Clause]:
    """Return all claims of a paper's studies whose figures are there."""
    found = []
    tables = results.written(out)
    for name in paper.studies:
        file = out / f"{name}.json"
        if not file.exists():
            continue
        table: Mapping[str, Any] = json.loads(file.read_text())
        if name in STUDIES:
            figures = matched_page.Figures(STUDIES[name], table)
            found += [
                Clause(f"{line.removesuffix('.')}, {table['replicas']} replicas", name, table["replicas"])
                for line in matched_page.verdicts(figures)
            ]
        else:
            shown = results.shown(table, tables)
            found += [
                Clause(line, name, claim["seeds"])
                for line, claim in zip(judging.claims(shown), shown["claims"], strict=True)
            ]
    return found


def paragraph(paper: Paper, out: Path) -> str:
    """Return what holds and what does not, each clause with its interval."""
    found = clauses(paper, out)
    parts = [f"**{paper.name}.** {paper.short}"]
    for words, verdict in ORDER:
        chosen = [clause for clause in found if clause.verdict == verdict]
        solid = [clause.said for clause in chosen if clause.replicas >= 20]
        thin = [clause.said for clause in chosen if clause.replicas < 20]
        if solid:
            parts.append(f"{words}, 20 replicas or more: {'; '.join(solid)}.")
        if thin:
            parts.append(f"{words}, fewer replicas: {'; '.join(thin)}.")
    return "\n\n".join(parts)


def items(out: Path) -> str:
    """Return where each table and figure is, or why there is none."""
    body = []
    for item in ITEMS:
        pages = [page for page in item.pages if (out / f"{page}.md").exists()]
        missing = [page for page in item.pages if page not in pages]
        told = ", ".join(f"[{page}]({page}.md)" for page in pages)
        reason = item.note
        if missing:
            told_again = f"`python experiments/results.py {' '.join(missing)} --data-dir FOLDER`"
            reason = f"{reason} Not run yet: {told_again}.".strip()
        body.append([item.paper, item.what, told, reason])
    return lined_up(["paper", "table or figure", "page", "what differs, or why it cannot be had here"], body)


def page(out: Path = RESULTS) -> str:
    """Return the page."""
    parts = [
        "# The five papers: what holds, what does not, under which conditions",
        "Every clause is a claim declared with its study, at true epsilon, with the interval of its page; "
        "intervals of a "
        "study hold for all of its claims together where its page says so. Differences are in points.",
        *(part for paper in PAPERS for part in (f"## {paper.title}", paragraph(paper, out))),
        "## Their tables and figures",
        items(out),
        listed(
            [
                "Lost in our copy means that formulas or numbers of the text that we have were not extracted.",
                "Studies that were not run have a command of their own, which takes less than an hour on one "
                "core unless "
                "the note says otherwise.",
            ]
        ),
        "Made by `python experiments/papers.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    (RESULTS / "papers.md").write_text(page())


if __name__ == "__main__":
    main()
