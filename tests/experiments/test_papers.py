"""The page of the five papers: every claim is in its table, and the table says when it holds."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ENDS = re.compile(r"\(([-+][\d.]+) to ([-+][\d.]+)\)$")
ROUNDING = 0.0501


def test_every_interval_of_a_paragraph_is_that_of_a_declared_claim(modules: Any) -> None:
    papers = modules["papers"]
    for paper in papers.PAPERS:
        words = {word for _, word, _, _ in Formatter().parse(paper.short) if word}
        assert words == set(paper.cited), paper.name
        assert {page for page, _ in paper.cited.values()} <= set(paper.studies)
        found = papers.clauses(paper, RESULTS)
        assert len({(clause.page, clause.claim) for clause in found}) == len(found)
        text = "\n\n".join(papers.section(paper, RESULTS))
        for page, claim in paper.cited.values():
            told = [clause.difference for clause in found if (clause.page, clause.claim) == (page, claim)]
            assert all(f"[{difference}]({page}.md)" in text for difference in told)
            assert told or page == papers.DENSITIES


def test_a_claim_holds_where_its_table_says_so(modules: Any) -> None:
    papers = modules["papers"]
    found = [clause for paper in papers.PAPERS for clause in papers.clauses(paper, RESULTS)]
    assert {clause.needed.split()[0] for clause in found} == {"above", "below"}
    for clause in found:
        low, high = map(float, ENDS.search(clause.difference).groups())
        direction, bound = clause.needed.split()
        inside = low - float(bound) if direction == "above" else float(bound) - high
        if clause.verdict == "too small to matter":
            assert -1 <= low <= high <= 1, clause
        else:
            assert inside >= -ROUNDING if clause.verdict == "holds" else inside <= ROUNDING, clause


def test_the_page_has_every_claim_once_and_no_long_paragraph(modules: Any) -> None:
    papers = modules["papers"]
    text = papers.page()
    for paper in papers.PAPERS:
        for clause in papers.clauses(paper, RESULTS):
            assert text.count("| " + " | ".join(clause.row) + " |") == 1
    paragraphs = [part for part in text.split("\n\n") if not part.startswith(("|", "- "))]
    assert max(map(len, paragraphs)) < 1500
    assert text.count("at most 5 seeds") == 1


def test_the_answers_of_the_page_of_densities_are_read_whole(modules: Any) -> None:
    papers = modules["papers"]
    listed = [line for line in (RESULTS / "densities.md").read_text().splitlines() if line.startswith("- ")]
    answers = papers.densities(RESULTS)
    assert len(answers) == len(listed) > 0
    for line, answer in zip(listed, answers, strict=True):
        assert all(part in line for part in answer.values())


def test_the_index_counts_the_claims_of_a_study(modules: Any) -> None:
    study = {"paper": "Somebody 2020", "title": "A study"}
    judged = [{"verdict": words} for words in ("holds", "holds", "not decided by these intervals")]
    told = modules["index_text"]._claims([{"study": study, "experiment": "made", "claims": judged}])
    assert "| paper | study | holds | not decided |" in told
    assert "| Somebody 2020 | [A study](made.md) | 2 | 1 |" in told
    assert modules["index_text"]._claims([]) == "No claim was judged yet."
