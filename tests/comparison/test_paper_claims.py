"""The papers' claims, beside golden numbers that were computed independently (shared accounting notes)."""

from __future__ import annotations

import json
import sys

import pytest

from evenhand.cli import main
from evenhand.comparison.paper_claims import (
    DECAYS,
    HAM10000,
    MNIST,
    THINWALL,
    Setting,
    adapt_v2,
    as_published,
    dpsgd_f,
    sad_text,
)
from evenhand.errors import UsageError
from evenhand.methods.schedules import Constant, Phases


@pytest.mark.parametrize(
    ("decay", "truths"),
    [
        ("step decay", (2166, 21_490, 133_573)),
        ("linear decay", (1144, 16_284, 103_654)),
        ("time decay", (1110, 16_138, 102_803)),
        ("no decay", (1080, 16_016, 102_096)),
    ],
)
def test_table_two_of_paper_004(decay: str, truths: tuple[float, ...]) -> None:
    for epsilon, true in zip((1.0, 3.0, 8.0), truths, strict=True):
        found = adapt_v2(MNIST, DECAYS[decay], epsilon=epsilon)
        assert found.true == pytest.approx(true, rel=3e-3)
        assert found.factor == pytest.approx(true / epsilon, rel=3e-3)
        assert "lemma 4 does not apply" in found.why


def test_the_printed_noise_of_paper_004() -> None:
    found = adapt_v2(MNIST, DECAYS["step decay"], epsilon=1.0, noise=0.1916)
    assert found.true is not None
    assert 242_560 < found.true < 270_000


def test_thinwall_of_paper_004() -> None:
    for epsilon, true in zip((1.0, 3.0, 8.0), (1.30, 10.96, 149), strict=True):
        assert adapt_v2(THINWALL, DECAYS["step decay"], epsilon=epsilon).true == pytest.approx(true, rel=5e-3)


def test_a_claim_from_noise_inverts_a_claim_from_epsilon() -> None:
    first = adapt_v2(MNIST, Constant(), epsilon=3.0)
    noise = float(first.setting.split("from ")[1].split(" ")[0])
    assert adapt_v2(MNIST, Constant(), noise=noise).claimed == pytest.approx(3.0, rel=1e-3)


def test_paper_003_holds_only_when_clamped() -> None:
    for setting, noise, claimed in (
        (Setting(54_649, 256, 60, 1e-6), 0.8, 6.55),
        (Setting(36_177, 256, 20, 1e-6), 1, 3.1),
    ):
        published, clamped = dpsgd_f(setting, noise)
        assert published.claimed == pytest.approx(claimed, abs=0.03)
        assert published.true is None
        assert clamped.true is not None
        assert clamped.true < claimed


def test_the_sum_in_the_text_of_paper_000_holds() -> None:
    found = sad_text(HAM10000, 3.0)
    assert found.true == pytest.approx(3.0, rel=2e-3)
    assert "0.918" in found.setting
    assert "1.43" in found.setting


def test_one_paper_at_a_time_and_what_it_needs() -> None:
    assert as_published("002", MNIST, Constant(), 3.0, None)[0].true is None
    assert as_published("000", HAM10000, Phases(n=4), 3.0, None)[0].setting.startswith("4 phases")
    for paper in ("000", "002", "003", "004"):
        with pytest.raises(UsageError, match="needs"):
            as_published(paper, MNIST, Constant(), None, None)
    with pytest.raises(UsageError, match="no paper"):
        as_published("005", MNIST, Constant(), 1.0, None)


def test_the_command_shows_every_paper(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["evenhand", "claims", "--json"])
    with pytest.raises(SystemExit):
        main()
    rows = json.loads(capsys.readouterr().out)
    assert {row["paper"][:3] for row in rows} == {"000", "001", "002", "003", "004"}
    unknown = {row["paper"] for row in rows if row["true"] is None}
    assert {"002 instance-level smoothing", "000 Auto-DPSGD (baseline)"} <= unknown
    assert max(row["true"] or 0 for row in rows) > 240_000
    for row in rows:
        if row["paper"].startswith("001"):
            assert 0.997 * row["claimed"] <= row["true"] <= row["claimed"]
