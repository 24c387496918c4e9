"""The kit rejects every wrong mechanism, by the check that should, with words that show the fault."""

from __future__ import annotations

import re

import pytest

from evenhand.methods import registry
from evenhand.methods.rules import Clip
from evenhand.testing import CHECKS, assert_conforms, check
from wrong_mechanisms import ZOO
from wrong_mechanisms.base import Wrong


@pytest.mark.parametrize("wrong", ZOO, ids=[f"{wrong.name}-{wrong.caught_by}" for wrong in ZOO])
def test_the_kit_rejects(wrong: Wrong) -> None:
    (finding,) = check(wrong.subject, only=[wrong.caught_by])
    assert not finding.ok, f"{wrong.name} passed: {finding.message}"
    assert finding.message
    assert wrong.why.endswith(".")


def test_the_zoo_is_complete_and_kept_out_of_the_registry() -> None:
    assert len(ZOO) >= 60
    assert {wrong.caught_by for wrong in ZOO} == set(CHECKS)
    names = [(wrong.name, wrong.caught_by) for wrong in ZOO]
    assert len(set(names)) == len(names)
    known = {*registry.names("rule"), *registry.names("query")}
    assert not known & {wrong.name for wrong in ZOO}


@pytest.mark.parametrize(
    ("name", "least"),
    [("reanchored", 1.2), ("squeezed", 1.1), ("realised_length", 1.2), ("top_losses", 1.5), ("without_smallest", 3.0)],
)
def test_the_search_finds_how_far_a_wrong_rule_goes(name: str, least: float) -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == name]
    (finding,) = check(wrong.subject, only=["sensitivity"])
    moved = re.search(r"by ([\d.]+) times", finding.message)
    assert moved is not None
    assert float(moved.group(1)) >= least


def test_a_counterexample_is_small() -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == "never_clipped"]
    (finding,) = check(wrong.subject, only=["sensitivity"])
    assert finding.message == (
        "removing row 0 moves the weighted sum by 2 times the declared sensitivity. "
        "Smallest input found: (norm 2, loss 0, group 0, owner 0); bounds 1, 1, 1"
    )


def test_a_failure_is_an_assertion_with_the_whole_table() -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == "negative"]
    with pytest.raises(
        AssertionError, match=r"negative: 1 of 2 checks failed\n  FAILED  form(.|\n)*ok      round_trip"
    ):
        assert_conforms(wrong.subject, only=["form", "round_trip"])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ZOO, ids=[f"{wrong.name}-{wrong.caught_by}" for wrong in ZOO])
def test_the_whole_kit_rejects_and_never_falls_over(wrong: Wrong) -> None:
    found = check(wrong.subject)
    assert wrong.caught_by in [finding.check for finding in found.failed]


def test_results_are_the_same_at_every_run() -> None:
    assert check(Clip(), only=["noise", "audit"]) == check(Clip(), only=["noise", "audit"])
