"""Claims of papers under attack: the false ones are exposed, the true ones are not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from evenhand.auditing import published_claims
from evenhand.auditing.published_claims import STEPS, _last, audit_published_smoothing, audit_steps
from evenhand.cli import app, claims
from evenhand.comparison import paper_claims
from evenhand.comparison.paper_claims import DECAYS, MNIST, adapt_v2, owner_budgets, sad_text, smoothing
from evenhand.mechanism.audit.result import Bound


def test_the_printed_noise_of_paper_004_is_certified_above_40_where_it_claims_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Already in its last epoch of a hundred; ``evenhand claims --audit`` looks at two."""
    monkeypatch.setattr(published_claims, "STEPS", 938)
    bound = audit_steps(MNIST.events(DECAYS["step decay"], 0.1916), MNIST.delta, 1.0, trials=1000)
    assert 40 < bound.lower <= bound.ceiling
    assert not bound.ok


def test_the_printed_smoothing_of_paper_002_is_certified_above_its_claim() -> None:
    bound = audit_published_smoothing(3.0, 1e-5, fits=200)
    assert 3.0 < bound.lower <= bound.ceiling


def test_true_claims_stay_unbroken() -> None:
    owners = owner_budgets(paper_claims.Setting(6000, 300, 2, 1e-5), (1.0, 3.0))
    for claim in (sad_text(paper_claims.Setting(8012, 512, 2, 1e-3), 3.0), *owners):
        assert claim.events is not None
        assert claim.claimed is not None
        assert audit_steps(claim.events, claim.delta, claim.claimed, trials=4000).ok


def test_only_the_last_steps_are_looked_at_in_their_order() -> None:
    events = [(0.1, 1.0, 5), (0.1, 2.0, STEPS - 10), (0.1, 3.0, 20)]
    assert _last(events) == [(0.1, 2.0, STEPS - 20), (0.1, 3.0, 20)]
    assert _last(events[:1]) == events[:1]


def test_the_command_prints_bound_and_ceiling_beside_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    thin = adapt_v2(paper_claims.THINWALL, DECAYS["step decay"], epsilon=8.0)
    monkeypatch.setattr(paper_claims, "claims", lambda told: [thin, smoothing()])
    monkeypatch.setattr(published_claims, "STEPS", 300)
    monkeypatch.setattr(published_claims, "audit_published_smoothing", lambda *_: Bound(3.0, 5.0, 5.5, 100))
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["claims", "--audit", "--json"]).stdout)
    assert rows[0]["audit"]["lower_bound"] > rows[0]["claimed"]
    assert not rows[0]["audit"]["ok"]
    assert "certified | trials can show" in claims.table([thin, smoothing()], claims.audited([thin]))
    assert "audit" not in json.loads(runner.invoke(app, ["claims", "--json"]).stdout)[0]
