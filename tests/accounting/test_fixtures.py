"""300 random compositions against dp-accounting's bounds (made by make_fixtures.py)."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from evenhand.accounting.accountant import epsilon

CASES: list[dict[str, Any]] = json.loads((pathlib.Path(__file__).parent / "fixtures" / "random_cases.json").read_text())


def events_of(case: dict[str, Any]) -> list[tuple[float, float, int]]:
    """The recipe of make_fixtures.events_of; repeated so that reading the file does not import dp-accounting."""
    levels, steps, rates = case["levels"], case["steps"], case["rates"]
    return [
        (
            rates[i * len(rates) // levels] * (1 - case["drift"] * i / levels),
            case["scale"] * case["span"] ** (i / levels),
            steps * (i + 1) // levels - steps * i // levels,
        )
        for i in range(levels)
    ]


@pytest.mark.parametrize("part", range(10))
def test_never_below_the_optimistic_bound_and_hardly_above_the_pessimistic(part: int) -> None:
    for number, case in enumerate(CASES[part::10]):
        spent = epsilon(events_of(case), case["delta"], relation=case["relation"])
        assert case["lower"] <= spent <= case["upper"] + max(0.002 * case["upper"], 0.002), (part, number)


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) == 300
    assert min(c["delta"] for c in CASES) < 1e-11
    assert max(c["steps"] for c in CASES) > 50_000
    assert {1, 10_000} <= {c["levels"] for c in CASES}
    assert max(len(events_of(c)) for c in CASES) == 10_000
    assert min(c["aim"] for c in CASES) < 0.02 < 40 < max(c["aim"] for c in CASES)
