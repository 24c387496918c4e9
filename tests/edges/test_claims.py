"""The table of claims: each row says what it speaks of, and no paper is accused of what it did not do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evenhand.cli import claims as shown
from evenhand.comparison.paper_claims import (
    ASSUMED,
    DECAYS,
    HAM10000,
    SAD_CODE,
    TEXT,
    THINWALL,
    Claim,
    Setting,
    adapt_v2,
    claims,
    dpsgd_f,
    owner_budgets,
    sad,
    sad_text,
    smoothing,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Claim]:
    """Every row, with 1 for true epsilons, which take long to compute: what a row speaks of does not depend on them."""
    monkeypatch.setattr("evenhand.comparison.paper_claims.accountant.epsilon", lambda events, delta: 1.0)
    return claims()


def test_every_row_speaks_of_a_text_of_code_at_a_commit_or_of_an_assumption(rows: list[Claim]) -> None:
    for claim in rows:
        commit = re.fullmatch(r"its public code \(.+ at [0-9a-f]{7,}\)", claim.speaks_of)
        assert claim.speaks_of in (TEXT, ASSUMED) or commit


def test_the_command_shows_what_each_row_speaks_of(rows: list[Claim]) -> None:
    assert {shown.row(claim)["speaks_of"] for claim in rows} >= {TEXT, ASSUMED}
    assert "| paper | speaks of |" in shown.table(rows)
    assert all(f"| {claim.paper} | {claim.speaks_of} |" in shown.table(rows) for claim in rows)


@pytest.mark.parametrize(("claimed", "would"), [(3.0, 2.1), (8.0, 5.0), (16.0, 9.5)])
def test_the_code_of_paper_000_would_over_protect_but_shuffles(claimed: float, would: float) -> None:
    code, poisson = sad(SAD_CODE, claimed)
    assert code.true is None
    assert "its loader shuffles" in code.why
    assert "at 63a15ca" in code.speaks_of
    assert poisson.true == pytest.approx(would, rel=0.05)
    assert poisson.speaks_of == ASSUMED


def test_no_row_says_that_paper_000_spends_more_than_it_claims() -> None:
    found = [sad_text(HAM10000, 3.0), *(claim for epsilon in (3.0, 8.0, 16.0) for claim in sad(SAD_CODE, epsilon))]
    assert all(claim.factor is None or claim.factor <= 1 for claim in found)
    assert found[0].speaks_of == TEXT


def test_the_noise_of_that_code_starts_at_the_calibrated_sigma_and_grows() -> None:
    code, _ = sad(SAD_CODE, 3.0)
    found = re.search(r"sigma from ([\d.]+) to ([\d.]+)", code.setting)
    assert found is not None
    first, last = map(float, found.groups())
    assert last == pytest.approx(first / 0.64, rel=1e-3)
    assert first == pytest.approx(1.155, abs=2e-3)


def test_what_the_readme_says_follows_from_the_rows() -> None:
    said = " ".join((ROOT / "README.md").read_text().split())
    assert "Two of the five papers" not in said
    for words in ("sound (001)", "false (004)", "establishes nothing (002)", "needs a clamp (003)"):
        assert words in said
    assert all(claim.true <= claim.claimed for claim in owner_budgets(Setting(6000, 60, 1, 1e-5), (1.0, 3.0)))
    assert smoothing().true is None
    published, clamped = dpsgd_f(Setting(36_177, 256, 20, 1e-6), 1.0)
    assert published.true is None
    assert clamped.factor is not None
    assert adapt_v2(THINWALL, DECAYS["step decay"], epsilon=3.0).factor > 3
