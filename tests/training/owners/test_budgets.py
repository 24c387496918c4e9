"""Budgets by name, by record and by column; many of them stay readable."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.accounting import owner_classes
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.training.progress import Progress
from evenhand.types import Facts

SECRET = 4711.25


def many(count: int = 40, method: str = "idp_sample") -> Plan:
    budgets = eh.Budgets.per_record(np.linspace(1, 4, count), 1e-5)
    facts = Facts(100 * count, tuple((name, 100) for name in budgets.epsilons))
    return eh.plan(method, budgets, data=facts, epochs=5, batch_size=2 * count)


def test_a_value_per_record_makes_a_class_per_distinct_value() -> None:
    made = eh.Budgets.per_record(np.array([3, 1, 3, 2.5]), delta=1e-5)
    assert made.epsilons == {"1": 1.0, "2.5": 2.5, "3": 3.0}
    assert made.owners == ("3", "1", "3", "2.5")
    close = eh.Budgets.per_record([1.0, np.nextafter(1.0, 2.0)])
    assert len(close.epsilons) == 2
    assert eh.Budgets.named(made.epsilons, 1e-5) == made


@pytest.mark.parametrize("wrong", [[1, -SECRET], [1, None], [1, float("nan")], [1, "x"], [1, True], [], [1, 0]])
def test_what_is_no_epsilon_is_refused_by_its_place_and_never_printed(wrong: list[object]) -> None:
    with pytest.raises(UsageError) as caught:
        eh.Budgets.per_record(wrong)
    assert "the first being record 2" in str(caught.value) or not wrong
    assert str(SECRET) not in str(caught.value)


def test_fifty_thousand_values_are_named_apart() -> None:
    made = eh.Budgets.per_record(np.linspace(1, 8, 50_000))
    assert len(made.epsilons) == 50_000
    assert [float(name) for name in made.owners or ()] == np.linspace(1, 8, 50_000).tolist()


def test_each_record_is_promised_its_own_epsilon(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 4, generator=generator)
    budgets = eh.Budgets.per_record(np.linspace(1, 6, 300), delta=1e-3)
    run = eh.fit(
        *(nn.Linear(4, 2), (inputs, (inputs[:, 0] > 0).long())),
        owners=budgets.owners,
        privacy=budgets,
        method="idp_scale",
        epochs=2,
        batch_size=60,
        out=tmp_path,
        compose=False,
    )
    found = eh.verify(tmp_path)
    assert found["ok"], found["problems"]
    assert all(0.99 * float(name) < epsilon <= float(name) for name, epsilon in found["owners"].items())
    table = (tmp_path / "owners.csv").read_text().splitlines()
    assert len(table) == 301
    assert table[0].startswith("owner,records,promised_epsilon,spent_epsilon,rate,clip_bound_least")
    words = str(run.privacy)
    assert words.count("Each of the") == 50
    assert "300 owner classes; most is spent by '6'" in words
    assert len(words) < 20_000


def test_budgets_of_held_out_records_do_not_have_to_occur() -> None:
    budgets = eh.Budgets.per_record([1, 2, 3], 1e-3)
    facts = Facts(100, (("1", 50), ("3", 50)))
    assert eh.plan("idp_sample", budgets, data=facts, epochs=1, batch_size=10).budgets == (1.0, 3.0)
    with pytest.raises(UsageError, match="1 budget\\(s\\) have no records"):
        eh.plan("idp_sample", eh.Budgets({"1": 1, "2": 2, "3": 3}, 1e-3), data=facts, epochs=1, batch_size=10)


def test_a_plan_shows_each_class_or_their_quantiles() -> None:
    few = eh.plan(
        "idp_scale", eh.Budgets({"a": 1, "b": 4}, 1e-5), data=Facts(900, (("a", 300), ("b", 600))), batch_size=30
    )
    lines = [line for line in str(few).splitlines() if "records of owner" in line]
    for line, row in zip(lines, owner_classes.rows(few, few.epsilons), strict=True):
        assert f"noise multiplier {row['noise_multiplier'][0]:.4g}" in line
        assert f"bound {row['bound'][0]:.4g}" in line
        assert row["noise_multiplier"][0] == pytest.approx(few.levels[0].noise / row["bound_scale"])
    text = str(many())
    assert "40 owner classes; most is spent by '4', at delta 1e-05 (add/remove one record):" in text
    assert "promised epsilon: 1 to 4 (quartiles" in text
    assert len(text.splitlines()) < 15


def test_a_summary_tells_the_dearest_class_and_the_quantiles() -> None:
    made = many()
    found = owner_classes.summary(owner_classes.rows(made, made.epsilons))
    rates = sorted(made.rates)
    assert found["rate"]["least"] == rates[0]
    assert found["rate"]["most"] == rates[-1]
    assert found["rate"]["middle"] == rates[20]
    assert found["dearest"] == "4"
    assert owner_classes.within(owner_classes.rows(made, made.epsilons))


class Bar:
    """A bar that only remembers what it was last told."""

    words = ""

    def __init__(self, total: int, done: int) -> None: ...

    def update(self, done: int, words: str) -> None:
        Bar.words = words

    def stop(self) -> None: ...


def test_progress_shows_every_owner_or_the_cheapest_and_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.training.progress.TerminalBar", Bar)
    facts = Facts(900, (("a", 300), ("b", 600)))
    two = eh.plan("idp_sample", eh.Budgets({"a": 1, "b": 4}, 1e-5), data=facts, batch_size=30)
    for plan, words in (
        (two, r"epsilon a (0.99\d|1.000) of 1, b (3.99\d|4.000) of 4  loss 1.000"),
        (many(), r"epsilon 1 (0.99\d|1.000) of 1 to 4 (3.99\d|4.000) of 4 \(40 owners\)  loss 1.000"),
    ):
        with Progress(plan, 0, enabled=True) as shown:
            shown.step(plan.steps, torch.ones(1))
        assert re.fullmatch(words, Bar.words), Bar.words


def test_a_plan_in_json_names_each_owner() -> None:
    from commands import result

    found = result("plan", "--owners", "a=300,b=600", "--budgets", "a=1,b=4", "--method", "idp_scale")
    assert set(found["owners"]) == {"a", "b"}
    assert found["owners"]["a"]["budget"] == 1
    assert found["owners"]["a"]["records"] == 300
    assert found["owners"]["a"]["recall"] is None
    assert found["owners"]["a"]["epsilon"] == pytest.approx(1, rel=1e-3)
    json.dumps(found)
