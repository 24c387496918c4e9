"""The sensitivity claim once more, searched by hypothesis: another generator, with hill climbing on the ratio."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings, target
from hypothesis import strategies as st

from evenhand.methods.rules import SampleRule
from evenhand.testing import Subject, registered
from evenhand.testing.rule_checks import movements
from evenhand.testing.subjects import ANSWERS, BATCHES, BOUNDS, LAST, LOSSES, NORMS, SCALES, Case, Row
from wrong_mechanisms import ZOO

ROWS = st.builds(
    Row,
    st.sampled_from(NORMS) | st.floats(0.0, 12.0),
    st.sampled_from(LOSSES) | st.floats(-4.0, 4.0),
    st.integers(0, 2),
    st.integers(0, 2),
)
CASES = st.builds(
    Case,
    rows=st.lists(ROWS, min_size=1, max_size=7).map(tuple),
    bound=st.sampled_from(BOUNDS),
    scales=st.sampled_from(SCALES),
    answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=4).map(tuple),
    age=st.integers(0, 2),
    step=st.sampled_from((0, LAST)),
    batch=st.sampled_from(BATCHES),
)
PRIVATE = [subject for subject in registered() if subject.private]
SEARCH = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def ratio(subject: Subject, case: Case) -> float:
    state = case.state(subject)
    found = movements(subject.rule, case, state) / subject.rule.sensitivity(state)[case.stats().owner]
    return float(found.max())


def holds(subject: Subject, examples: int) -> None:
    @settings(SEARCH, max_examples=examples)
    @given(CASES)
    def one(case: Case) -> None:
        found = ratio(subject, case)
        target(min(found, 1e6))
        assert found <= 1 + 1e-9

    one()


@pytest.mark.parametrize("subject", PRIVATE, ids=lambda subject: subject.name)
def test_no_record_moves_the_sum_further_than_declared(subject: Subject) -> None:
    holds(subject, 100 if isinstance(subject.rule, SampleRule) else 300)


@pytest.mark.slow
@pytest.mark.parametrize("subject", PRIVATE, ids=lambda subject: subject.name)
def test_no_record_moves_the_sum_further_in_a_long_search(subject: Subject) -> None:
    holds(subject, 5000)


@pytest.mark.parametrize("name", ["squeezed", "on_grid", "without_smallest"])
def test_hypothesis_finds_the_wrong_ones_too(name: str) -> None:
    (wrong,) = [wrong for wrong in ZOO if wrong.name == name]
    worse = partial(ratio, wrong.subject)
    unshrunk = settings(SEARCH, max_examples=2000, phases=(Phase.generate,))
    assert worse(find(CASES, lambda case: worse(case) > 1 + 1e-9, settings=unshrunk)) > 1
