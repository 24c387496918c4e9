"""Data with a cap of records a person: which records are kept, what the facts say, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.data.fingerprint import assignment, fingerprint, identity
from evenhand.data.owners_and_groups import owned
from evenhand.data.persons import capped, keep, refuse_beyond_cap
from evenhand.data.tables import split
from evenhand.errors import DataError, UsageError
from evenhand.types import Facts

NAMES = np.repeat([f"person {number}" for number in range(40)], np.arange(40) % 7 + 1)
INPUTS = torch.arange(float(len(NAMES)))[:, None]


def people(names: np.ndarray = NAMES, cap: int | None = 3, **changes: object) -> Data:
    return wrap(INPUTS[: len(names)], np.arange(len(names)) % 3, persons=names, person_cap=cap, **changes)


def kept(data: Data) -> list[int]:
    return data.fetch(torch.arange(len(data)))[0][:, 0].long().tolist()


def test_rows_are_records_and_each_person_keeps_as_many_as_the_cap() -> None:
    data = people(owners=np.where(np.char.endswith(NAMES, "1"), "strict", "open"))
    counts = {name: int((NAMES[kept(data)] == name).sum()) for name in np.unique(NAMES)}
    assert counts == {name: min(3, int((name == NAMES).sum())) for name in np.unique(NAMES)}
    assert kept(data) == sorted(kept(data)), "the order of the records stays"
    facts = data.facts
    assert (facts.records, facts.persons, facts.person_cap) == (len(data), 40, 3)
    assert (facts.unit, facts.promised) == ("record", "person")
    assert dict(facts.owners) == {
        owner: sum(count for name, count in counts.items() if (name[-1] == "1") == (owner == "strict"))
        for owner in ("open", "strict")
    }
    everybody = people(cap=7)
    assert len(everybody) == len(NAMES), "a cap that nobody reaches leaves nothing out"
    assert everybody.facts.person_cap == 7, "it is what is promised all the same"


def test_what_is_kept_of_a_person_depends_on_nobody_else() -> None:
    random = np.random.default_rng(0)
    numbers = random.permutation(np.repeat(random.integers(-(2**62), 2**62, 50), random.integers(1, 30, 50)))
    before = keep(numbers, 4)
    for gone in np.unique(numbers)[::5]:
        rest = numbers != gone
        assert np.array_equal(keep(numbers[rest], 4), before[rest])
    others = random.permutation(len(numbers))
    moved = numbers[others]
    again = keep(moved, 4)
    for number in np.unique(numbers):
        places = [np.flatnonzero(of[column == number]) for of, column in ((before, numbers), (again, moved))]
        assert np.array_equal(*places), "it follows from the name and the places among the person's own records"


def test_every_place_among_the_records_of_a_person_is_kept_alike() -> None:
    persons, size, cap = 20_000, 7, 3
    chosen = keep(np.repeat(np.random.default_rng(1).integers(-(2**62), 2**62, persons), size), cap).reshape(-1, size)
    assert (chosen.sum(1) == cap).all()
    assert stats.chisquare(chosen.sum(0)).pvalue > 1e-6


def test_the_same_data_keep_the_same_records_and_are_told_from_others() -> None:
    data = people()
    assert kept(people()) == kept(data)
    assert identity(people()) == identity(data)
    assert fingerprint(people(cap=2)) == fingerprint(data) == fingerprint(people(cap=None))
    swapped = NAMES.copy()
    swapped[[1, 3]] = swapped[[3, 1]]
    assert len({identity(one) for one in (data, people(cap=2), people(swapped), people(cap=None))}) == 4
    assert assignment(people(cap=2)) == assignment(data), "the same persons, whatever is kept of them"
    assert assignment(people(swapped)) != assignment(data)


def test_splits_keep_the_cap_and_rows_taken_twice_are_refused() -> None:
    data = people()
    train, test = split(data, 0.3, 0)
    assert train.facts.person_cap == 3
    assert not set(NAMES[kept(train)]) & set(NAMES[kept(test)])
    assert train.facts.persons == len(set(NAMES[kept(train)])) < 40
    assert eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=train.facts, epochs=1, batch_size=5).facts.persons < 40
    refuse_beyond_cap(train)
    with pytest.raises(DataError, match="more than 3 of these records"):
        refuse_beyond_cap(data.take(torch.arange(len(data)).repeat(2)))


def test_wrong_data_are_refused() -> None:
    with pytest.raises(DataError, match="of different owners"):
        people(owners=np.arange(len(NAMES)) % 2)
    for cap in (0, -1, 1.5, "3"):
        with pytest.raises(UsageError, match="person_cap"):
            people(cap=cap)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"person_cap= is about persons"):
        wrap(INPUTS, [0] * len(INPUTS), person_cap=2)
    with pytest.raises(UsageError, match="records_per_person or person_cap"):
        people(records_per_person=2)
    with pytest.raises(DataError, match="wrapped already"):
        wrap(people(), person_cap=2)
    with pytest.raises(DataError, match="by person already"):
        capped(people(), torch.arange(len(people())), 2)
    with pytest.raises(UsageError, match="belong to records"):
        owned(people(), ["a"] * len(people()))


@pytest.mark.parametrize(("cap", "persons", "records"), [(2, 10, 21), (2, 0, 10), (0, 5, 10), (3, 20, 10)])
def test_facts_that_no_data_have_are_refused(cap: int, persons: int, records: int) -> None:
    facts = Facts(records, (("all", records),), person_cap=cap, persons=persons)
    with pytest.raises(UsageError, match="do not have"):
        eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=facts)


def test_more_records_than_are_accounted_for_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(UsageError, match="more records of a person than are accounted for"):
        eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=people(cap=10_001).facts)
