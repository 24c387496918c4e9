"""Goals: the loss is per record and exact, one training gives the frontier, decisions are measured and verified."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import evenhand as eh
from evenhand.errors import UsageError, VerificationError
from evenhand.gradients import Engine
from evenhand.methods.priors import Prior
from evenhand.reporting.page import Table
from evenhand.training import evaluate
from evenhand.training.goals.decision import Decision, read
from evenhand.training.goals.decision_sections import frontier_section
from evenhand.training.goals.frontier import Held, frontier
from evenhand.training.goals.goal import Goal, check_tau
from evenhand.training.goals.serve import held, split

COUNTS = [50.0, 30.0, 15.0, 5.0]
LOG = (torch.tensor(COUNTS) / 100).log()


def outputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("tau", [0.0, 1.0, 2.5])
def test_the_loss_is_cross_entropy_of_moved_outputs(tau: float) -> None:
    scores, targets = outputs(6, 4), torch.tensor([0, 1, 2, 3, 3, 0])
    loss = eh.losses.LogitAdjusted(COUNTS, tau)
    wanted = functional.cross_entropy(scores + tau * LOG, targets, reduction="none")
    assert torch.allclose(loss(scores, targets), wanted, atol=1e-6)
    alone = torch.cat([loss(scores[i : i + 1], targets[i : i + 1]) for i in range(6)])
    assert torch.allclose(alone, wanted, atol=1e-6)  # a neighbour changes nothing


def test_a_single_output_several_labels_and_tokens() -> None:
    one, targets = outputs(6, 1), torch.tensor([0, 1, 1, 0, 0, 1])
    odds = torch.tensor(1 / 9).log()
    wanted = functional.binary_cross_entropy_with_logits(one[:, 0] + 2 * odds, targets.float(), reduction="none")
    assert torch.allclose(eh.losses.LogitAdjusted([9, 1], 2.0)(one, targets), wanted, atol=1e-5)
    several = Prior(((50.0, 10.0),), kind="each label", records=100)
    scores, present = outputs(3, 2), torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    moved = scores + torch.tensor([0.0, torch.tensor(1 / 9).log()])
    wanted = functional.binary_cross_entropy_with_logits(moved, present, reduction="none").mean(1)
    assert torch.allclose(eh.losses.LogitAdjusted(several, 1.0)(scores, present), wanted, atol=1e-5)
    words, places = outputs(3, 5, 4), torch.randint(0, 4, (3, 5))
    wanted = functional.cross_entropy((words + LOG).transpose(1, 2), places, reduction="none").mean(1)
    assert torch.allclose(eh.losses.LogitAdjusted(COUNTS, 1.0)(words, places), wanted, atol=1e-6)


def test_the_engine_serves_the_loss_exactly() -> None:
    model, inputs, targets = torch.nn.Linear(5, 4), outputs(8, 5), torch.arange(8) % 4
    fast = Engine(model, eh.losses.LogitAdjusted(COUNTS, 2.0)).run(inputs, targets)
    for row in range(8):
        loss = functional.cross_entropy(model(inputs[row : row + 1]) + 2 * LOG, targets[row : row + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        assert fast.norm[row] == pytest.approx(float(norm), rel=1e-4)
        assert fast.loss[row] == pytest.approx(float(loss.detach()), rel=1e-4)


@pytest.mark.parametrize("goal", ["wrst", "parity", "parity:accuracy", "worst:fpr"])
def test_an_unknown_goal_is_refused(goal: str) -> None:
    with pytest.raises(UsageError):
        Goal.parse(goal)


@pytest.mark.parametrize("tau", [-1.0, float("nan"), float("inf"), "much", True])
def test_a_wrong_strength_is_refused(tau: object) -> None:
    with pytest.raises(UsageError, match="tau"):
        check_tau(tau, Goal("worst"))


def test_a_goal_without_counts_or_labels_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    train, test = eh.data.digits()
    numbers = eh.data.wrap(outputs(50, 3), outputs(50, 1))
    names = ["a" if place % 4 < 2 else "b" for place in range(78)]  # 19 of a cell, which is one too few
    few, held = (eh.data.wrap(outputs(78, 3) + shift, torch.arange(78) % 2, groups=names) for shift in (0, 1))
    cases = [
        (torch.nn.Linear(64, 10), train, {"goal": "worst", "prior": False}, "counts"),
        (torch.nn.Linear(64, 10), train, {"goal": "worst", "prior": [9, 1]}, "10 labels"),
        (torch.nn.Linear(64, 10), train, {"goal": "parity:fpr", "test": test}, "two classes"),
        (torch.nn.Linear(64, 10), train, {"goal": "worst", "tau": "held-out"}, "held-out"),
        (torch.nn.Linear(3, 1), numbers, {"goal": "worst"}, "real numbers"),
        (torch.nn.Linear(3, 2), few, {"goal": "parity:fpr", "test": held}, "at least 20 held-out records of either"),
        (torch.nn.Linear(3, 2), few, {"goal": "parity:fpr", "test": held, "least_records": 12}, "least-records 12 in"),
    ]
    for place, (model, data, asked, words) in enumerate(cases):
        with pytest.raises(UsageError, match=words):
            eh.fit(model, data, epsilon=3.0, epochs=1, out=tmp_path / str(place), **asked)
        assert not (tmp_path / str(place)).exists()


def test_a_goal_leaves_the_plan_alone_and_its_decision_is_verified(tmp_path: Path) -> None:
    train, test = eh.data.digits()
    runs = {}
    for goal in ("overall", "worst"):
        torch.manual_seed(0)
        options = {"epsilon": 3.0, "delta": 1e-5, "epochs": 1, "test": test, "insecure_seed": 1}
        runs[goal] = eh.fit(torch.nn.Linear(64, 10), train, out=tmp_path / goal, goal=goal, **options)
        assert eh.verify(tmp_path / goal)["ok"]
    assert runs["overall"].plan.digest == runs["worst"].plan.digest
    run = runs["worst"]
    last, decision = run.folder.last_evaluation(), read(run.path)
    assert decision is not None
    assert decision.plain
    assert last["goal"] == "worst"
    assert last["tau"] == decision.tau == decision.trained_tau
    assert run.prior == decision.prior
    for row in last["frontier"]:  # equal to evaluating the moved model, without training
        assert run.prior is not None
        moved = Decision.of(Goal("worst"), run.prior, tau=row["tau"], trained_tau=last["tau"])
        measured = evaluate.row(run.model, test, 0, 0.0, moved)
        assert row["accuracy"] == pytest.approx(measured["accuracy"])
        assert row["worst"] == pytest.approx(min(measured["groups"].values()))
    file = run.path / "decision.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tau": 9.0}))
    assert not eh.verify(run.path)["ok"]
    file.write_text("{}")
    with pytest.raises(VerificationError, match=r"decision\.json"):
        read(run.path)


def test_a_class_with_few_records_is_not_named_on_the_frontier() -> None:
    scores, truth = torch.tensor([[1.0, 0.0]] * 12), torch.tensor([0] * 9 + [1] * 3)
    records = Held(scores, truth, "classes")
    prior = Prior.declared([9, 1])
    few, every = (frontier(records, prior, trained_tau=0.0, least=least)[0] for least in (5, 1))
    assert (few["worst"], few["balanced"], few["classes_not_shown"]) == (None, None, 2), (
        "one of two classes would tell the other"
    )
    assert (every["worst"], every["classes_not_shown"]) == (0.0, 0)
    assert every["worst_class"]["n"] == 3
    assert every["worst_class"]["too_few_to_tell"]


def test_no_class_is_called_the_worst_while_one_is_hidden() -> None:
    """The rare class is served worst and hidden: the majority class must not stand there as the worst."""
    truth = torch.tensor([0] * 50 + [1] * 40 + [2] * 12 + [3] * 3)
    records = Held(torch.nn.functional.one_hot(truth.clamp(max=1), 4).float(), truth, "classes")
    row = frontier(records, Prior.declared([50, 40, 12, 3]), trained_tau=0.0, least=5)[0]
    assert (row["worst"], row.get("worst_class"), row["classes_not_shown"]) == (None, None, 2)
    section = frontier_section([{"goal": "overall", "tau": 0.0, "frontier": [row]}])
    assert section is not None
    assert "2 classes have too few held-out records" in str(section.blocks[1])
    (cells,) = (block.rows for block in section.blocks if isinstance(block, Table))
    assert cells == [["0", "85.7", "not shown", "not shown"]]


def records_of(cells: dict[tuple[str, int], int]) -> Held:
    """So many held-out records of each group and class, of which every answer is class 0."""
    rows = [cell for cell, count in cells.items() for _ in range(count)]
    scores = torch.tensor([[1.0, 0.0]] * len(rows))
    return Held(scores, torch.tensor([truth for _, truth in rows]), "classes", groups=[group for group, _ in rows])


def test_every_strength_has_the_figure_of_each_class_and_group_that_may_be_shared() -> None:
    records = records_of({("a", 0): 30, ("a", 1): 10, ("b", 0): 20, ("b", 1): 20, ("c", 1): 10})
    rows = frontier(records, Prior.declared([5, 4]), trained_tau=0.0, least=10)
    assert rows[0]["groups"] == {
        "a": {"accuracy": 0.75, "n": 40},
        "b": {"accuracy": 0.5, "n": 40},
        "c": {"accuracy": 0.0, "n": 10},
    }
    assert rows[0]["classes"] == {"0": {"accuracy": 1.0, "n": 50}, "1": {"accuracy": 0.0, "n": 40}}
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_a_small_group_is_in_no_row_of_the_frontier_nor_the_next_that_would_tell_it() -> None:
    records = records_of({("a", 0): 40, ("a", 1): 30, ("b", 0): 15, ("b", 1): 11, ("c", 0): 4})
    for row in frontier(records, Prior.declared([5, 4]), trained_tau=0.0, least=10):
        assert set(row["groups"]) == {"a"}
        assert "classes" not in row, "of class 0 group c has 4 records"


def test_classes_beside_groups_tell_of_no_few_records() -> None:
    """Group a is class 0 and three others: accuracy of a and recall of class 0 would give the three away."""
    prior = Prior.declared([5, 4])
    mixed = records_of({("a", 0): 40, ("a", 1): 3, ("b", 1): 40})
    assert "classes" not in frontier(mixed, prior, trained_tau=0.0, least=10)[0]
    refined = records_of({("a", 0): 40, ("b", 0): 4, ("c", 1): 40})
    assert "classes" not in frontier(refined, prior, trained_tau=0.0, least=10)[0]
    alike = records_of({("a", 0): 40, ("b", 1): 12})
    assert set(frontier(alike, prior, trained_tau=0.0, least=10)[0]["classes"]) == {"0", "1"}
    few = records_of({("a", 0): 40, ("b", 1): 4})
    assert "classes" not in frontier(few, prior, trained_tau=0.0, least=10)[0]


def test_of_very_many_groups_only_the_worst_is_recorded() -> None:
    records = records_of({(f"group {number}", number % 2): 10 for number in range(101)} | {("group 0", 1): 10})
    row = frontier(records, Prior.declared([5, 4]), trained_tau=0.0, least=10)[0]
    assert "groups" not in row
    assert row["worst_group"]["n"] == 10


def test_halves_share_no_record_and_have_each_class_alike() -> None:
    _, test = eh.data.digits()
    records = held(torch.nn.Linear(64, 10), test)
    first, second = split(records)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(len(test)))
    sizes = [torch.bincount(records.truth[half]) for half in (first, second)]
    assert (sizes[0] - sizes[1]).abs().max() <= 1


@pytest.mark.parametrize("metric", ["fpr", "equalized_odds"])
def test_parity_moves_thresholds_by_group(tmp_path: Path, metric: str) -> None:
    inputs = outputs(1200, 3)
    group = (torch.arange(1200) % 3 == 0).float()
    inputs[:, 2] = group
    targets = (inputs[:, 0] + 1.5 * group + 0.5 * inputs[:, 1] > 0.8).long()
    names = ["b" if value else "a" for value in group.tolist()]
    train = eh.data.wrap(inputs[:600], targets[:600], groups=names[:600])
    test = eh.data.wrap(inputs[600:], targets[600:], groups=names[600:])
    torch.manual_seed(0)
    run = eh.fit(torch.nn.Linear(3, 2), train, epsilon=8.0, epochs=3, test=test, out=tmp_path, goal=f"parity:{metric}")
    assert eh.verify(tmp_path)["ok"]
    decision = read(tmp_path)
    assert decision is not None
    assert decision.groups == ("a", "b")
    assert bool(decision.mixtures) == (metric == "equalized_odds")
    assert "does not cover" in decision.chosen
    stored = [above for mixture in decision.mixtures for _, above in mixture.thresholds if 0 < above < 1]
    stored += [1 / (1 + math.exp(row[1])) for row in decision.offsets]
    assert all(float(f"{min(share, 1 - share):.3g}") == pytest.approx(min(share, 1 - share)) for share in stored)
    with pytest.raises(UsageError, match="group"):
        run.predict(inputs[:4])
    assert len(run.predict(inputs[:4], groups=names[:4]).predicted) == 4
    if metric == "fpr":  # on the records that set the thresholds the rates agree to a record
        outcomes = evaluate.measure_model(run.model, test, decision)
        code = test.group.numpy()
        rates = [outcomes.guess[(code == place) & (outcomes.truth == 0)].mean() for place in (0, 1)]
        assert abs(rates[0] - rates[1]) < 0.03
