"""Write what holds of the five papers, by the figures of all pages: a paragraph each, claims, tables and figures.

    python experiments/papers.py        # seconds; writes docs/results/papers.md from docs/results/*.json

Every claim was declared with its study; its interval is that of the study's page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import idp_mnist
import judging
import matched_page
import results
from index_text import VERDICTS, verdict
from matched_studies import STUDIES
from page_text import lined_up, listed
from papers_tables import ITEMS, PAPERS, Paper

from evenhand.comparison import declared_claims

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
COUNTED = dict(zip(VERDICTS, ("hold", "do not hold", "are too small to matter", "are not decided"), strict=True))
MANY = 20
"""Replicas from which a study's claims stand before those of others."""
DENSITIES = "densities"
_LINE = re.compile(
    r"^- (?P<data>.+), epsilon (?P<epsilon>[\d.]+): (?P<measure>[\w ]+) of `(?P<form>.+)` less the linear model's: "
    r"(?P<difference>.+) points(?:; (?P<goal>.+): (?P<met>yes|no))?\.$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Clause:
    """A claim with its verdict, and the paired difference in points that it rests on.

    ``needed`` says where the interval must lie for the claim to hold.
    """

    claim: str
    verdict: str
    difference: str
    needed: str
    page: str
    replicas: int

    @property
    def row(self) -> list[str]:
        """Return the clause as a row of its paper's table."""
        words = f"**{self.verdict}**" if self.verdict in VERDICTS[:2] else self.verdict
        study = f"[{self.page}]({self.page}.md)"
        return [words, self.claim, study, self.difference, self.needed, str(self.replicas)]


def clauses(paper: Paper, out: Path) -> list[Clause]:
    """Return all claims of a paper's studies whose figures are there."""
    found, tables = [], results.written(out)
    for name in paper.studies:
        file = out / f"{name}.json"
        if file.exists():
            table: Mapping[str, Any] = json.loads(file.read_text())
            if name == idp_mnist.CODE.page:
                found += _promised(name, table)
            else:
                found += _matched(name, table) if name in STUDIES else _compared(name, results.shown(table, tables))
    return found


def _promised(name: str, table: Mapping[str, Any]) -> list[Clause]:
    judged = idp_mnist.claims(table["runs"])
    promise = "(budgets 1 to 3)"
    return [
        Clause(f"{one.text} {promise}", one.verdict, idp_mnist.printed(one.points), "above 0", name, one.seeds)
        for one in judged
    ]


def _matched(name: str, table: Mapping[str, Any]) -> list[Clause]:
    return [
        Clause(
            f"{each.claim.text} ({each.claim.promise})",
            each.verdict,
            matched_page.printed(each.difference, signed=True),
            f"above {each.claim.least:g}",
            name,
            table["replicas"],
        )
        for each in matched_page.judged(matched_page.Figures(STUDIES[name], table))
    ]


def _compared(name: str, table: Mapping[str, Any]) -> list[Clause]:
    needed = {claim.text: _needed(claim) for claim in results.declared(table)}
    return [
        Clause(
            f"{each['text']} ({each['promise']})",
            verdict(each),
            judging.points(each["difference"]),
            needed[each["text"]],
            name,
            each["seeds"],
        )
        for each in table["claims"]
    ]


def _needed(claim: declared_claims.Claim) -> str:
    if claim.direction == "higher":
        return f"above {claim.margin:g}"
    return f"below {0.0 - claim.margin:g}"


def paragraph(paper: Paper, differences: Mapping[tuple[str, str], str]) -> str:
    """Return what holds, what does not and where; every interval is that of a claim and links to its study."""
    links = {word: f"[{differences[claim]}]({claim[0]}.md)" for word, claim in paper.cited.items()}
    return f"**{paper.name}.** {paper.short.format(**links)}"


def claims(found: Sequence[Clause]) -> list[str]:
    """Return how many claims have which verdict, and the table of all of them, those of many replicas first."""
    if not found:
        return []
    ordered = sorted(found, key=lambda clause: (VERDICTS.index(clause.verdict), clause.replicas < MANY))
    counts = [(words, sum(clause.verdict == kind for clause in found)) for kind, words in COUNTED.items()]
    told = ", ".join(f"{count} {words}" for words, count in counts if count)
    head = ["verdict", "claim", "study", "difference", "holds if", "replicas"]
    return [f"Of {len(found)} claims {told}.", lined_up(head, [clause.row for clause in ordered])]


def densities(out: Path) -> list[dict[str, str]]:
    """Return the answers of the page of densities: its questions had few goals, and its runs are in no JSON file."""
    file = out / f"{DENSITIES}.md"
    return [found.groupdict("") for found in _LINE.finditer(file.read_text())] if file.exists() else []


def _answers(lines: Sequence[Mapping[str, str]]) -> list[str]:
    body = [
        [
            *(line["data"], line["epsilon"], line["measure"], f"`{line['form']}`", line["difference"]),
            f"{line['goal']}: {line['met']}" if line["goal"] else "",
        ]
        for line in lines
    ]
    told = f"The best density less the linear model of DP-SGD, from [{DENSITIES}]({DENSITIES}.md), at most 5 seeds:"
    return [told, lined_up(["data", "epsilon", "measure", "density", "difference", "goal"], body)] if body else []


def section(paper: Paper, out: Path) -> list[str]:
    """Return what is said of a paper."""
    found, lines = clauses(paper, out), densities(out) if DENSITIES in paper.studies else []
    differences = {(clause.page, clause.claim): clause.difference for clause in found}
    for line in lines:
        differences[DENSITIES, f"{line['data']}, epsilon {line['epsilon']}, {line['measure']}"] = line["difference"]
    return [f"## {paper.title}", paragraph(paper, differences), *claims(found), *_answers(lines)]


def items(out: Path) -> str:
    """Return where each table and figure is, or why there is none."""
    body = []
    for item in ITEMS:
        pages = [page for page in item.pages if (out / f"{page}.md").exists()]
        missing = [page for page in item.pages if page not in pages]
        told = ", ".join(f"[{page}]({page}.md)" for page in pages)
        reason = item.note
        if missing:
            again = f"`python experiments/results.py {' '.join(missing)} --data-dir FOLDER`"
            reason = f"{reason} Not run yet: {again}.".strip()
        body.append([item.paper, item.what, told, reason])
    return lined_up(["paper", "table or figure", "page", "what differs, or why it cannot be had here"], body)


def page(out: Path = RESULTS) -> str:
    """Return the page."""
    parts = [
        "# The five papers: what holds, what does not, under which conditions",
        "A paragraph for each paper, then every claim that was declared with its studies, at true epsilon. "
        "The difference, in points, has the 95 % interval of its study's page; the claim holds if the whole interval "
        'lies where "holds if" says. Intervals of a study hold for all of its claims together where its page says so. '
        f"Claims with {MANY} replicas or more come first: with fewer, most studies have one split of the data, and "
        "their intervals are wide. All verdicts follow one rule, today's, whatever the rule was when a study ran. "
        "An interval in a paragraph links to its study.",
        *(part for paper in PAPERS for part in section(paper, out)),
        "## Their tables and figures",
        items(out),
        listed(
            [
                "Lost in our copy means that formulas or numbers of the text that we have were not extracted.",
                "Studies that were not run have a command of their own, which takes less than an hour on one "
                "core unless the note says otherwise.",
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
