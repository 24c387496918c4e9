"""Which of two ways to train by person has less noise: said by the plan, from public facts, and computed."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

import evenhand as eh
from commands import result
from evenhand.mechanism.ways_by_person import compare_ways
from evenhand.types import Facts


def test_a_plan_says_which_of_both_ways_has_less_noise() -> None:
    facts = Facts(5000, (("all", 5000),), person_cap=10, persons=1000)
    planned = eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=facts, epochs=5, batch_size=100)
    ways = compare_ways(planned)
    assert ways is not None
    by_person = eh.plan(
        *("dpsgd", eh.Privacy(planned.epsilons[0], 1e-5)),
        data=Facts(1000, (("all", 1000),), unit="person"),
        epochs=planned.steps * 100 / 1000,
        batch_size=100,
    )
    assert by_person.steps == planned.steps
    assert ways.by_person == pytest.approx(by_person.levels[0].noise / 100, rel=1e-3)
    assert ways.one_by_one == planned.levels[0].noise / 100
    assert ways.better == "by person"
    assert str(ways) in str(planned)
    many = eh.plan("dpsgd", eh.Privacy(8, 1e-5), data=facts, epochs=1, batch_size=2500)
    crowded = compare_ways(many)
    assert crowded is not None
    assert (crowded.records, crowded.persons) == (3, 2500 / 3)
    assert "shorter the less alike they are" in str(crowded)
    full = Facts(4590, (("all", 4590),), person_cap=2, persons=2295)
    single = compare_ways(eh.plan("dpsgd", eh.Privacy(8, 1e-5), data=full, epochs=0.8, batch_size=3500))
    assert single is not None
    assert single.one_by_one < single.by_person, "it is computed, not assumed"
    by_record = eh.plan("dpsgd", eh.Privacy(1, 1e-3), data=Facts(60, (("all", 60),)))
    assert compare_ways(by_record) is None
    silent = eh.plan("dpsgd", eh.FixedNoise(1e7, 1e-5), data=facts, epochs=2, batch_size=100)
    assert silent.epsilons == (0.0,)
    assert "by person in two ways" not in str(silent), "there is no noise that spends an epsilon of 0"
    two = Facts(60, (("a", 30), ("b", 30)), person_cap=2, persons=40)
    owners = eh.plan("idp_sample", eh.Budgets({"a": 1, "b": 2}, 1e-3), data=two, epochs=2, batch_size=6)
    assert compare_ways(owners) is None


@pytest.mark.parametrize("seed", range(12))
def test_by_person_has_less_noise_wherever_a_batch_has_no_more_records_than_there_are_persons(seed: int) -> None:
    """One record of a drawn person weighs less on a person than a number of them with the same mean."""
    random = np.random.default_rng(seed)
    persons, cap = int(10 ** random.uniform(1.5, 3.5)), int(random.choice([1, 2, 5, 20]))
    records = persons * cap if seed % 2 else int(random.integers(persons, persons * cap + 1))
    facts = Facts(records, (("all", records),), person_cap=cap, persons=persons)
    asked = {"epochs": float(random.choice([0.5, 3.0])), "batch_size": float(random.uniform(1, persons))}
    ways = compare_ways(eh.plan("dpsgd", eh.Privacy(10 ** random.uniform(-0.5, 1.0), 1e-5), data=facts, **asked))
    assert ways is not None
    assert ways.records == 1
    assert ways.one_by_one >= ways.by_person * (1 - 1e-3)
    if cap == 1:
        assert ways.better == "alike"


def test_the_command_line_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = np.repeat(np.arange(60), np.arange(60) % 5 + 1)
    data = eh.data.wrap(
        torch.zeros(len(names), 3), np.arange(len(names)) % 2, labels=[0, 1], persons=names, person_cap=2
    )
    monkeypatch.setattr(eh.data, "load", lambda *_, **__: (data, None))
    asked = ("plan", "--data", "digits", "--epsilon", "3", "--delta", "1e-3", "--epochs", "2", "--batch-size", "10")
    planned = result(*asked)
    ways = compare_ways(eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=data.facts, epochs=2, batch_size=10))
    assert ways is not None
    assert planned["by_person_in_two_ways"] == {**asdict(ways), "better": "by person"}
