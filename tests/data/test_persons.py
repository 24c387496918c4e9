"""Data by person: who is drawn, which of their records, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.data.fingerprint import assignment, fingerprint, identity, persons_of, survey
from evenhand.data.persons import by_person
from evenhand.data.tables import split
from evenhand.errors import DataError, UsageError
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.types import Batch

NAMES = np.repeat([f"person {number}" for number in range(40)], np.arange(40) % 7 + 1)
COUNT = len(NAMES)


def people(names: np.ndarray = NAMES, **changes: object) -> Data:
    numbers = np.arange(len(names))
    return wrap(
        torch.arange(float(len(names)))[:, None], numbers % 3, groups=(numbers % 2).tolist(), persons=names, **changes
    )


def records_of(data: Data, person: int) -> set[int]:
    assert data.persons is not None
    return set(data.persons.order[data.persons.starts[person] : data.persons.starts[person + 1]].tolist())


def test_a_row_is_a_person_and_facts_count_persons() -> None:
    data = people(owners=np.where(np.char.endswith(NAMES, "1"), "strict", "open"))
    assert len(data) == data.facts.records == 40
    assert data.facts.unit == "person"
    assert dict(data.facts.owners) == {"open": 36, "strict": 4}
    assert len(data.by_record) == COUNT
    assert data.by_record.facts.unit == "record"
    for person in range(40):
        assert len({NAMES[record] for record in records_of(data, person)}) == 1
    assert set().union(*(records_of(data, person) for person in range(40))) == set(range(COUNT))


def test_a_batch_holds_one_record_of_each_drawn_person_chosen_anew_in_every_step() -> None:
    data = people()
    sampler = PoissonSampler(data.owner, [1.0], Stream.insecure(0, 0))
    chosen = np.zeros((2_000, 40), dtype=np.int64)
    for step in range(len(chosen)):
        batch = draw(data, sampler, step, 0)
        assert sorted(batch.record.tolist()) == list(range(40))
        taken = batch.inputs[:, 0].long()
        assert all(
            record in records_of(data, person)
            for person, record in zip(batch.record.tolist(), taken.tolist(), strict=True)
        )
        assert torch.equal(batch.targets, taken % 3)
        assert torch.equal(batch.group, taken % 2), "a record brings its own group"
        chosen[step, batch.record] = taken
    again = draw(data, sampler, 7, 0)
    assert again.inputs[:, 0].tolist() == chosen[7][again.record].tolist(), "a function of key and step"
    for person in range(40):
        counts = [int((chosen[:, person] == record).sum()) for record in records_of(data, person)]
        assert sum(counts) == len(chosen)
        assert len(counts) == 1 or stats.chisquare(counts).pvalue > 1e-7
    full = [person for person in range(40) if len(records_of(data, person)) == 7]
    places = np.array(
        [[sorted(records_of(data, p)).index(r) for p, r in zip(full, row[full], strict=True)] for row in chosen]
    )
    steps = np.corrcoef(places[:-1].ravel(), places[1:].ravel())[0, 1]
    others = np.corrcoef(places[:, 0], places[:, 1])[0, 1]
    assert abs(steps) < 5 / np.sqrt(places.size)
    assert abs(others) < 5 / np.sqrt(len(places))


def test_a_person_more_changes_nobody_elses_record() -> None:
    """The last person goes: with the same key all others bring the same records."""
    data = people()
    fewer = data.take(torch.arange(39))
    for step in range(50):
        stream = Stream.insecure(3, 0)
        one, two = (draw(part, PoissonSampler(part.owner, [1.0], stream), step, 0) for part in (data, fewer))
        left = one.record != 39
        assert torch.equal(one.record[left], two.record)
        assert torch.equal(one.inputs[left], two.inputs)


@pytest.mark.parametrize("most", [1, 3])
def test_ten_thousand_records_of_one_person_are_one_row(most: int) -> None:
    names = np.array(["crowd"] * 10_000 + ["alone"])
    data = wrap(torch.zeros(10_001, 1), [0, 1] * 5_000 + [0], persons=names, records_per_person=most)
    batch = draw(data, PoissonSampler(data.owner, [1.0], Stream.insecure(0, 0)), 0, 0)
    assert len(batch) == len(data) == 2


def used(data: Data, step: int, stream: Stream | None = None) -> tuple[Batch, dict[int, list[int]]]:
    """Return the batch of a step in which everybody is drawn, and the records that it uses of each person."""
    batch = draw(data, PoissonSampler(data.owner, [1.0], stream or Stream.insecure(0, 0)), step, 0)
    _, shares = batch.targets
    assert torch.allclose(shares.sum(1), torch.ones(len(batch), dtype=torch.float64))
    taken = batch.inputs[..., 0].long()
    assert all((share[share > 0] == share.max()).all() for share in shares)
    return batch, {
        person: row[share > 0].tolist() for person, row, share in zip(batch.record.tolist(), taken, shares, strict=True)
    }


def test_several_records_of_a_person_are_distinct_of_one_group_and_chosen_anew_in_every_step() -> None:
    data, most = people(records_per_person=3), 3
    assert data.facts.records_per_person == most
    full = [person for person in range(40) if len(records_of(data, person)) == 7]
    counted = {person: dict.fromkeys(records_of(data, person), 0) for person in full}
    firsts: list[list[int]] = []
    for step in range(400):
        batch, chosen = used(data, step)
        for person, group in zip(batch.record.tolist(), batch.group.tolist(), strict=True):
            records = chosen[person]
            assert len(set(records)) == len(records)
            assert {record % 2 for record in records} == {group}, "the records of a step have one group"
            assert set(records) <= records_of(data, person)
            alike = [record for record in records_of(data, person) if record % 2 == group]
            assert len(records) == min(most, len(alike)), "all of them if there are fewer"
        firsts.append([chosen[person][0] for person in full])
        for person in full:
            counted[person][chosen[person][0]] += 1
    assert torch.equal(used(data, 7)[0].inputs, used(data, 7)[0].inputs)
    assert all(stats.chisquare(list(counts.values())).pvalue > 1e-7 for counts in counted.values())
    one, two = (np.array(firsts)[:, place] for place in (0, 1))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / np.sqrt(len(one))
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 5 / np.sqrt(len(one))


def test_nobody_elses_records_change_when_a_person_goes() -> None:
    data = people(records_per_person=3)
    fewer = data.take(torch.arange(39))
    assert fewer.facts.records_per_person == 3
    for step in range(20):
        one, two = (used(part, step, Stream.insecure(3, 0))[1] for part in (data, fewer))
        assert {person: records for person, records in one.items() if person != 39} == two


def test_rows_outside_of_steps_are_first_records_and_as_drawn_they_have_places() -> None:
    data = people(records_per_person=2)
    assert data.fetch(torch.tensor([3, 0]))[0].shape == (2, 1)
    inputs, (targets, shares) = data.as_drawn.fetch(torch.tensor([1, 0]))
    assert inputs.shape == (2, 2, 1)
    assert targets.shape == shares.shape == (2, 2)
    assert shares.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert people().as_drawn.fetch(torch.tensor([1]))[0].shape == (1, 1)
    empty = draw(data, PoissonSampler(data.owner, [1e-300], Stream.insecure(0, 0)), 0, 0)
    assert empty.inputs.shape == (0, 2, 1)


def test_records_per_person_is_about_persons() -> None:
    with pytest.raises(DataError, match="say whose record each is"):
        wrap(torch.zeros(2, 1), [0, 1], records_per_person=2)
    with pytest.raises(UsageError, match="records_per_person"):
        wrap(torch.zeros(2, 1), [0, 1], persons=["a", "b"], records_per_person=0)
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    data = wrap(nested, [0, 1], persons=["a", "b"], records_per_person=2)
    with pytest.raises(DataError, match="different length"):
        draw(data, PoissonSampler(data.owner, [1.0], Stream.insecure(0, 0)), 0, 0)


def test_parts_and_splits_are_of_whole_persons() -> None:
    data = people()
    some = data.take(torch.tensor([5, 2, 9]))
    assert len(some) == 3
    assert some.facts.unit == "person"
    assert len(some.by_record) == sum(len(records_of(data, person)) for person in (5, 2, 9))
    assert some.fetch(torch.tensor([0]))[0].item() == min(records_of(data, 5))
    train, test = split(data, 0.3, 1)
    assert train.facts.unit == "person"
    assert test.facts.unit == "record", "held-out records are measured one by one"
    assert len(train.by_record) + len(test) == COUNT
    assert not set(train.together.tolist()) & set(test.together.tolist())


def test_runs_by_record_and_by_person_are_on_the_same_data() -> None:
    data, records = people(), people().by_record
    assert fingerprint(data) == fingerprint(records) == fingerprint(data.take(torch.arange(5)))
    renamed, other = people(np.char.add("x", NAMES)), people(np.roll(NAMES, 1))
    assert persons_of(data) == persons_of(renamed) != persons_of(other)
    assert assignment(data) == assignment(renamed) != assignment(other)
    assert identity(data) == identity(renamed) != identity(other)
    assert survey(data).records == COUNT, "also records that no person's row shows are looked at"


def test_the_device_of_the_records_is_that_of_the_data() -> None:
    moved = people().on(torch.device("meta"))
    assert moved.persons is not None
    assert moved.persons.records.fetch(torch.arange(2))[0].is_meta


def test_columns_of_a_frame_name_persons_and_owners() -> None:
    frame = eh.data.Table(
        {"age": list(range(8)), "ill": ["no", "yes"] * 4, "who": ["a", "a", "b", "b"] * 2, "by": ["x"] * 8}
    )
    data = wrap(frame, label="ill", numbers={"age": (0, 10)}, categories={"by": ["x", "y"]}, persons="who", owners="by")
    assert len(data) == 2
    assert data.facts.owners == (("x", 2),)


def test_wrong_uses_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"20 person\(s\) have records of different owners"):
        wrap(torch.zeros(60, 1), [0, 1] * 30, owners=["a", "b", "a"] * 20, persons=np.repeat(np.arange(20), 3))
    with pytest.raises(DataError, match="one per record"):
        wrap(torch.zeros(2, 1), [0, 1], persons=["a"])
    with pytest.raises(DataError, match="have no name"):
        wrap(torch.zeros(2, 1), [0, 1], persons=["a", None])
    with pytest.raises(DataError, match="persons or keep_together"):
        wrap(torch.zeros(2, 1), [0, 1], persons=["a", "b"], keep_together=["a", "b"])
    with pytest.raises(DataError, match="by person already"):
        by_person(people(), torch.arange(40))
    with pytest.raises(DataError, match="wrapped already"):
        wrap(people(), persons=NAMES)
    budgets = eh.Budgets.per_record([1.0, 2.0] * 20, delta=1e-3)
    with pytest.raises(UsageError, match="before or together with persons="):
        eh.fit(torch.nn.Linear(1, 3), people(), privacy=budgets, method="idp_sample", out=tmp_path / "run")
    from evenhand.density import MomentDensity

    with pytest.raises(UsageError, match="Densities promise for single records"):
        MomentDensity(epsilon=1.0, delta=1e-3, out=tmp_path / "density").fit_data(people(), eh.Privacy(1.0, 1e-3))
    assert not (tmp_path / "run").exists()


def test_facts_of_persons_are_in_plan_json_only_where_there_are_any() -> None:
    data = people()
    for facts in (data.facts, data.by_record.facts, people(records_per_person=4).facts):
        plan = eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=facts, epochs=2, batch_size=8)
        again = type(plan).from_json(plan.to_json())
        assert again == plan
        assert ("unit" in plan.to_json()["facts"]) == (facts.unit == "person")
        assert plan.unit == {"person": "person", "record": "one record"}[facts.unit]
    by_unit = replace(data.facts, unit="record")
    same = [
        eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=facts, epochs=2, batch_size=8) for facts in (data.facts, by_unit)
    ]
    assert same[0].levels == same[1].levels, "a person is accounted as a record is"
    assert same[0].digest != same[1].digest
