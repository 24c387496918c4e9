"""Several held-out records of one person: intervals hold the truth all the same, and small cells count persons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import evenhand as eh
from commands import evenhand
from evenhand._numbers import interval
from evenhand.comparison.viewer.released import read
from evenhand.comparison.write_results import without_small_groups
from evenhand.methods.priors import Prior
from evenhand.reporting import replicas
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.group_metrics import estimate
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.held_out.small_cells import shareable
from evenhand.reporting.run_findings import per_group, recorded, worst_group
from evenhand.reporting.uncertainty import Split
from evenhand.training import evaluate
from evenhand.training.goals import parity
from evenhand.training.goals.frontier import Held, frontier
from evenhand.training.goals.goal import Goal
from evenhand.training.goals.serve import held, split

TRIALS = 1000


@pytest.mark.parametrize(("alike", "at_least"), [(1.0, 0.93), (0.5, 0.93), (0.0, 0.94)])
def test_intervals_hold_the_truth_however_alike_a_persons_records_are(alike: float, at_least: float) -> None:
    """Persons with 1 to 20 records; a record is answered as its person is, or by itself."""
    draw = np.random.default_rng(0)
    held_true, held_by_records = 0, 0
    for _ in range(TRIALS):
        whose = np.repeat(np.arange(60), draw.integers(1, 21, 60))
        of_person, of_record = draw.random(60) < 0.8, draw.random(len(whose)) < 0.8
        right = np.where(draw.random(len(whose)) < alike, of_person[whose], of_record)
        ends = estimate(float(right.mean()), len(whose), effective_records.effective(whose))
        held_true += ends.low <= 0.8 <= ends.high
        plain = estimate(float(right.mean()), len(whose))
        held_by_records += plain.low <= 0.8 <= plain.high
    assert held_true >= at_least * TRIALS
    if alike >= 0.5:
        assert held_by_records < 0.85 * TRIALS, "else the simulation shows nothing"


def visits(persons: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[str], np.ndarray]:
    draw = np.random.default_rng(seed)
    whose = np.repeat(np.arange(persons), draw.integers(1, 9, persons)) + 1000 * seed
    inputs = torch.from_numpy(draw.standard_normal((len(whose), 3))).float()
    groups = ["a" if number % 3 else "b" for number in whose]
    return inputs, (inputs[:, 0] > 0).long(), groups, whose


def test_a_run_by_person_says_how_many_records_its_intervals_count(tmp_path: Path) -> None:
    (x, y, groups, whose), (tx, ty, tgroups, twhose) = visits(200, 0), visits(80, 1)
    train = eh.data.wrap(x, y, labels=[0, 1], groups=groups, persons=whose)
    test = eh.data.wrap(tx, ty, labels=[0, 1], groups=tgroups, persons=twhose)
    run = eh.fit(torch.nn.Linear(3, 2), train, epsilon=8.0, delta=1e-3, epochs=3, test=test, out=tmp_path / "run")
    last = run.folder.last_evaluation()
    counts = np.unique(twhose, return_counts=True)[1]
    assert last["records"] == len(twhose)
    assert last["effective_records"] == int(counts.sum() ** 2 / (counts**2).sum()) < len(counts)
    inside = np.array(tgroups) == "b"
    assert last["group_effective"]["b"] == effective_records.effective(twhose[inside]) < inside.sum()
    frame, wide = recorded(last), estimate(last["accuracy"], last["effective_records"])
    assert (frame.overall.low, frame.overall.high) == (wide.low, wide.high)
    assert frame.overall.count == len(twhose)
    run.report(test).save(tmp_path / "report.html")
    page = " ".join((tmp_path / "report.html").read_text().split())
    assert f"intervals count the {len(twhose)} as {last['effective_records']}" in page
    assert f"as {last['effective_records']}," in run.card()
    assert eh.verify(run.path)["ok"]
    assert read(run.path).groups["b"].independent == last["group_effective"]["b"]


def test_records_that_splits_keep_together_count_for_less_on_the_command_line(tmp_path: Path) -> None:
    x, y, _, whose = visits(300, 2)
    lines = ["age,ill,patient", *(f"{row[0]:.3f},{label},{who}" for row, label, who in zip(x, y, whose, strict=True))]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    asked = ("--label", "ill", "--labels", "0,1", "--number", "age=-4:4", "--only-declared", "--out", "visits.toml")
    assert evenhand("init", "visits.csv", *asked, cwd=tmp_path).returncode == 0
    way = ("--keep-together", "patient", "--epsilon", "8", "--model", "linear", "--out", "run", "--json")
    done = evenhand("train", "visits.toml", *way, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert 1 <= told["effective_records"] < told["records"]
    wide = estimate(told["accuracy"], told["effective_records"])
    assert told["interval"] == [wide.low, wide.high]


def test_nothing_is_said_where_everybody_has_one_record() -> None:
    x, y, groups, _ = visits(50, 3)
    model = torch.nn.Linear(3, 2)
    alone = eh.data.wrap(x, y, labels=[0, 1], groups=groups)
    several = eh.data.wrap(x, y, labels=[0, 1], groups=groups, keep_together=np.arange(len(y)))
    lines = [evaluate.row(model, data, 1, 1.0) for data in (alone, several)]
    assert lines[0] == lines[1]
    assert not [key for key in lines[0] if "effective" in key]


def test_rates_and_the_worst_group_rest_on_independent_records() -> None:
    row = {
        "groups": {"a": 0.9, "b": 0.6},
        "group_records": {"a": 400, "b": 400},
        "group_metrics": {"base_rate": {"a": 0.5, "b": 0.5}, "tpr": {"a": 0.9, "b": 0.6}},
    }
    fewer = {**row, "group_effective": {"a": 40, "b": 12}}
    assert worst_group(row["groups"], effective_records.sizes(row)) == "b"
    assert worst_group(row["groups"], effective_records.sizes(fewer)) is None, "twelve are too few to tell"
    rate = per_group(fewer)["tpr"]["b"]
    assert (rate.count, rate.independent) == (200, 6)
    assert rate.high - rate.low > 4 * (per_group(row)["tpr"]["b"].high - per_group(row)["tpr"]["b"].low)
    rows, few = {seed: row | {"accuracy": 0.75, "records": 800} for seed in range(3)}, Split()
    together = {seed: one | fewer | {"effective_records": 52} for seed, one in rows.items()}
    narrow, wide = replicas.share(rows, few, "b"), replicas.share(together, few, "b")
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert wide.count == narrow.count == 400
    assert replicas.large(together) == ["a"]


def test_a_group_of_twenty_records_of_two_persons_is_not_shown() -> None:
    row = {"accuracy": 0.9, "records": 320, "groups": {"a": 0.9, "b": 1.0}, "group_records": {"a": 300, "b": 20}}
    assert "left_out" not in shareable(row)
    shown = shareable({**row, "effective_records": 80, "group_effective": {"a": 75, "b": 2}})
    assert shown["left_out"]["groups"] == ["a", "b"], "two persons, and the group from which they would follow"
    assert shown["groups"] == shown["group_records"] == shown["group_effective"] == {}


def one_person() -> tuple[eh.data.Data, np.ndarray]:
    """Group b has 2,000 negatives of as many persons, and 100 positives of one."""
    persons = np.array([*range(600), *range(1000, 3000), *([5000] * 100)])
    truth = torch.tensor([i % 2 for i in range(600)] + [0] * 2000 + [1] * 100)
    groups = ["a"] * 600 + ["b"] * 2100
    inputs = torch.randn(2700, 3, generator=torch.Generator().manual_seed(0))
    return eh.data.wrap(inputs, truth, labels=[0, 1], groups=groups, keep_together=persons), persons


def test_the_rate_of_one_person_is_not_shown() -> None:
    data, _ = one_person()
    line = evaluate.row(torch.nn.Linear(3, 2), data, 1, 1.0)
    assert line["side_effective"]["second"] == {"a": 300, "b": 1, "": 15}
    assert line["side_effective"]["first"]["b"] == 2000
    shown = shareable(line)
    assert shown["group_metrics"]["tpr"]["b"] is None
    assert shown["group_metrics"]["base_rate"]["b"] is None
    assert "b" not in shown["side_effective"]["second"]
    wide = per_group(line)
    assert (wide["tpr"]["b"].count, wide["tpr"]["b"].independent) == (100, 1)
    assert wide["fpr"]["b"].independent == 2000


def test_rates_of_a_few_persons_hold_the_truth() -> None:
    """Of 2,000 single negatives and 200 positives of ten persons, each answered alike."""
    draw, inside = np.random.default_rng(3), 0
    whose = np.array([*range(2000), *np.repeat(np.arange(3000, 3010), 20)])
    truth, code = np.array([0] * 2000 + [1] * 200), np.zeros(2200, dtype=int)
    sides = {"second": truth == 1, "first": truth == 0}
    known = effective_records.by_side(whose, code, ["a"], sides)
    for _ in range(400):
        tpr = float(np.repeat(draw.random(10) < 0.6, 20).mean())
        row = {"group_records": {"a": 2200}, "group_effective": {"a": effective_records.effective(whose)}, **known}
        row |= {"groups": {"a": 0.9}, "group_metrics": {"base_rate": {"a": 1 / 11}, "tpr": {"a": tpr}}}
        ends = per_group(row)["tpr"]["a"]
        inside += ends.low <= 0.6 <= ends.high
    assert inside >= 0.93 * 400


def test_the_same_five_persons_in_two_groups_are_five() -> None:
    row = {"records": 540, "accuracy": 0.9, "groups": {"a": 0.9, "b": 0.5, "c": 0.6}}
    row |= {"group_records": {"a": 500, "b": 20, "c": 20}, "effective_records": 400}
    shown = shareable({**row, "group_effective": {"a": 390, "b": 5, "c": 5}})
    assert shown["left_out"]["groups"] == ["a", "b", "c"], "else total less a would be the figure of five"


def test_parity_is_refused_where_a_threshold_would_follow_from_few_persons() -> None:
    goal, groups, truth = Goal.parse("parity:fpr"), ["a", "b"] * 80, [0, 0, 1, 1] * 40
    parity.refuse_unsuited(goal, "classes", 2, groups, truth)
    with pytest.raises(eh.errors.UsageError, match="follow from a few people"):
        parity.refuse_unsuited(goal, "classes", 2, groups, truth, whose=[i % 4 for i in range(160)])


def test_halves_never_share_a_person() -> None:
    data, persons = one_person()
    first, second = (set(persons[rows.numpy()].tolist()) for rows in split(held(torch.nn.Linear(3, 2), data)))
    assert not first & second
    assert len(first | second) == len(set(persons.tolist()))


def test_halves_are_never_empty() -> None:
    """Also where every person is the only one of their class and group."""
    truth, whose = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 7, 7])
    first, second = split(Held(torch.zeros(4, 2), truth, "classes", (), ("a", "a", "b", "b"), whose))
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3]
    assert len(first) == len(second) == 2


def test_one_person_cannot_settle_a_goal(tmp_path: Path) -> None:
    (x, y, groups, whose), test = visits(50, 5), visits(1, 6)
    held_out = eh.data.wrap(*test[:2], labels=[0, 1], keep_together=np.zeros(len(test[1])))
    data = eh.data.wrap(x, y, labels=[0, 1], groups=groups, persons=whose)
    wanted = {"goal": "worst", "tau": "held-out", "epsilon": 3.0, "delta": 1e-3, "epochs": 1}
    with pytest.raises(eh.errors.UsageError, match="of one person or one record"):
        eh.fit(torch.nn.Linear(3, 2), data, test=held_out, out=tmp_path / "run", **wanted)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_charts_of_rates_count_persons_of_their_own_side(tmp_path: Path) -> None:
    data, _ = one_person()
    x, y, groups, whose = visits(200, 7)
    train = eh.data.wrap(x, y, labels=[0, 1], groups=groups, persons=whose)
    told = {"epsilon": 8.0, "delta": 1e-3, "epochs": 1, "least_records": 0, "out": tmp_path / "run"}
    run = eh.fit(torch.nn.Linear(3, 2), train, test=data, **told)
    last = run.folder.last_evaluation()
    rate, by_group = per_group(last)["tpr"]["b"], {key: last[key] for key in last if key != "side_effective"}
    run.report().save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert rate.independent == 1
    assert interval(rate.low, rate.high, "%", rate.count) in page
    narrow = per_group(by_group)["tpr"]["b"]
    assert interval(narrow.low, narrow.high, "%", narrow.count) not in page


def test_a_label_counts_the_persons_of_its_smaller_side() -> None:
    truth = torch.tensor([[1.0]] * 50 + [[0.0]] * 100)
    whose = torch.tensor([*range(50), *([99] * 100)])
    records = Held(torch.zeros(150, 1), truth, "labels", ("x",), (), whose)
    assert records.behind(truth.numpy(), 0).independent == 1


def test_small_groups_of_a_comparison_say_no_number_of_records() -> None:
    rows = {
        seed: {"records": 660, "accuracy": 0.8, "groups": {"a": 0.9, "b": 0.5}, "group_records": {"a": 600, "b": 60}}
        | {"effective_records": 500, "group_effective": {"a": 480, "b": 3}}
        for seed in range(3)
    }
    assert replicas.small(rows) == {"b": 3}
    assert without_small_groups(Entry("dpsgd", 3.0, rows=rows), 10).small == {"b": 0}


def test_the_frontier_counts_persons_too() -> None:
    x, y, groups, whose = visits(150, 4)
    model = torch.nn.Linear(3, 2)
    data = eh.data.wrap(x, y, labels=[0, 1], groups=groups, keep_together=whose)
    rows = frontier(held(model, data), Prior.declared([1, 1]), trained_tau=0.0)
    cell, inside = rows[0]["groups"]["b"], np.array(groups) == "b"
    assert cell["n"] == inside.sum()
    assert cell["effective"] == effective_records.effective(whose[inside])
    worst = rows[0]["worst_group"]
    assert worst["interval"] == [*_ends(worst["accuracy"], worst["effective"])]


def _ends(share: float, records: int) -> tuple[float, float]:
    one = estimate(share, records)
    return one.low, one.high
