"""Every registered rule and query passes the kit, whoever wrote it; so do the right ones that the zoo starts from."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from evenhand.methods.queries import GroupCounts
from evenhand.methods.rules import Clip, GroupClip, GroupReweight, Ordered, Psac, SampleRule, SoftAdaClip
from evenhand.testing import CHECKS, Finding, Findings, ReferenceStep, Subject, assert_conforms, check, registered
from evenhand.types import State, Stats
from wrong_mechanisms.batch_rules import Clipping
from wrong_mechanisms.ordered_rules import Tail

OF_RULES = ["form", "sensitivity", "isolation", "order", "purity", "memory", "round_trip"]


@pytest.mark.parametrize("subject", registered(), ids=lambda subject: subject.name)
def test_every_registered_part_conforms(subject: Subject) -> None:
    found = check(subject)
    assert found.ok, str(found)
    assert [finding.check for finding in found] == list(CHECKS)


@pytest.mark.parametrize(
    "rule",
    [
        Ordered(order="random"),
        Ordered(order="owner", length=0.2),
        Ordered(order="ascending", tail="step"),
        Ordered(over=Psac(r=0.05), a=2.0, b=0.5),
        Ordered(over="group_clip", tail=(1.0, 0.5, 0.0)),
    ],
    ids=str,
)
def test_every_way_of_ordering_conforms(rule: Ordered) -> None:
    assert_conforms(rule, only=OF_RULES)


@pytest.mark.parametrize(
    "rule", [GroupClip(memory="full"), GroupReweight(memory=0.9), SoftAdaClip(normalize=True)], ids=str
)
def test_memories_and_normalized_sums_conform(rule: SampleRule) -> None:
    assert_conforms(rule, only=OF_RULES)


@pytest.mark.parametrize("rule", [Clipping(), Tail()], ids=lambda rule: rule.name)
def test_what_the_wrong_rules_start_from_is_right(rule: Clipping | Tail) -> None:
    assert_conforms(rule, only=OF_RULES)


def test_what_the_wrong_steps_start_from_is_right() -> None:
    assert_conforms(Subject(Clip(), (GroupCounts(noise=3.0),), step=ReferenceStep()))


def test_a_query_is_asked_with_a_rule_that_needs_it() -> None:
    assert Subject.of(GroupCounts(noise=3.0)).name == "group_clip + group_counts"
    assert Subject.of(GroupCounts(noise=3.0)).queries == (GroupCounts(noise=3.0),)


def test_an_unknown_check_or_part_is_an_error_that_helps() -> None:
    with pytest.raises(ValueError, match="Did you mean 'noise'"):
        check(Clip(), only=["noises"])
    with pytest.raises(ValueError, match="rules and queries, not str"):
        check("clip")  # type: ignore[arg-type]


def test_the_page_on_checking_names_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "check-a-rule.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(CHECKS)


def test_findings_say_what_failed() -> None:
    found = Findings("mine", (Finding("form", True, "fine"), Finding("order", False, "not fine")))
    assert not found.ok
    assert found.to_json() == {
        "subject": "mine",
        "ok": False,
        "checks": [
            {"check": "form", "ok": True, "message": "fine"},
            {"check": "order", "ok": False, "message": "not fine"},
        ],
    }
    assert "FAILED  order        not fine" in str(found)


@dataclass(frozen=True)
class Scalars(SampleRule):
    """A user's rule with plain numbers in its formula, which vmap cannot run on no rows."""

    name = "scalars"
    r: float = 0.1

    def weight(self, row: Stats, state: State) -> Tensor:
        return state.bound[row.owner] / (row.norm + self.r / (row.norm + self.r))

    def sensitivity(self, state: State) -> Tensor:
        return state.bound


def test_a_users_rule_survives_an_empty_batch() -> None:
    assert_conforms(Scalars(), only=["form", "step", "ledger"])


@dataclass(frozen=True)
class Kept(Scalars):
    """A rule that takes the normal which Python's generator kept: no word of its state changes."""

    name = "kept"

    def weight(self, row: Stats, state: State) -> Tensor:
        if random.getstate()[2] is not None:
            random.gauss(0.0, 1.0)
        return super().weight(row, state)


def test_a_normal_that_was_kept_is_a_draw_too() -> None:
    before = random.getstate()
    random.gauss(0.0, 1.0)
    found = check(Kept(), only=["purity"])
    random.setstate(before)
    assert not found.ok
    assert "draws from a global random generator" in str(found)
