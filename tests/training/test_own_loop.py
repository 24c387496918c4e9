"""A loop of one's own: epochs, batches drawn ahead, epsilon so far, and going on after anything that stops it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import BatchReuseError, BudgetExhausted, PlanMismatchError, UnsupportedModelError, UsageError
from evenhand.mechanism.make_plan import Plan
from evenhand.runs.ledger import read
from evenhand.training.attach import Private
from evenhand.training.steps.raw_losses import RawLosses
from evenhand.types import Batch

LOSS = nn.CrossEntropyLoss(reduction="none")


def attached(plan: Plan | None, model: nn.Module | None = None, **options: object) -> Private:
    model = model or nn.Linear(3, 2)
    return eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), LOSS, plan, **options)


def reserved(run: Path) -> int:
    return read(run / "ledger.jsonl").reserved


def test_epochs_are_passes_and_one_left_early_goes_on(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        seen = []
        for epoch in private.epochs(tiny):
            lengths = len(epoch)
            count = 0
            for batch in epoch:
                count += len(private.step(batch)) >= 0
                if private.position == 7:
                    break
            seen.append((epoch.number, lengths, count))
        assert seen == [(0, 5, 5), (1, 5, 2), (1, 3, 3), (2, 5, 5)]
        assert list(private.epochs(tiny)) == []
    assert reserved(tmp_path) == read(tmp_path / "ledger.jsonl").committed == tiny_plan.steps


def test_an_epoch_that_nobody_runs_is_no_endless_loop(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private, pytest.raises(BatchReuseError, match="iterate over each epoch"):
        for _ in private.epochs(tiny):
            pass


def test_a_loop_of_epochs_around_batches_says_that_the_first_pass_was_all(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        passes = [sum(1 for batch in private.batches(tiny) if len(private.step(batch)) >= 0) for _ in range(2)]
    assert passes == [tiny_plan.steps, 0]
    assert "private.epochs(data)" in capsys.readouterr().err


def test_batches_drawn_ahead_are_charged_first_and_stepped_in_order(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        batches = private.batches(tiny, ahead=2)
        first, second, third = (next(batches) for _ in range(3))
        assert reserved(tmp_path) == 3
        with pytest.raises(BatchReuseError, match="drawn but not stepped"):
            next(batches)
        for early in (second, third):
            with pytest.raises(BatchReuseError, match="in the order"):
                private.step(early)
        private.step(first)
        with pytest.raises(BatchReuseError, match="used already"):
            private.step(first)
        private.step(second)
        again = private.batches(tiny, ahead=2)
        assert next(again) is third, "a draw that was made is not made again"
        assert next(again).position == 3
        private.step(third)
        assert private.position == 3


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_run_with_batches_ahead_takes_the_steps_of_one_without(
    ahead: int, tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    weights = []
    for number in (0, ahead):
        torch.manual_seed(0)
        with attached(tiny_plan, out=tmp_path / str(number), insecure_seed=3) as private:
            waiting: list[Batch] = []
            for batch in private.batches(tiny, ahead=number):
                waiting.append(batch)
                if len(waiting) > number:
                    private.step(waiting.pop(0))
            for batch in waiting:
                private.step(batch)
            private.release()
        weights.append(private.model.weight.detach().clone())
        assert eh.verify(tmp_path / str(number))["ok"]
    assert torch.equal(*weights)


@pytest.mark.parametrize("ahead", [-1, 0.5, True])
def test_ahead_is_a_number_of_batches(ahead: object, tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private, pytest.raises(UsageError, match="ahead"):
        next(private.batches(tiny, ahead=ahead))
    assert reserved(tmp_path) == 0


def test_a_fork_cannot_draw_or_step(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        batches = private.batches(tiny, ahead=1)
        batch = next(batches)
        for action in (lambda: next(batches), lambda: private.step(batch)):
            child = os.fork()
            if child == 0:
                try:
                    action()
                except BatchReuseError:
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class StoppedError(RuntimeError):
    pass


def interrupted(how: str, private: Private, data: Data) -> None:
    """Run until something ends the loop, in one of the ways in which loops end."""
    private.step(next(private.batches(data)))
    private.checkpoint()
    batches = private.batches(data, ahead=2)
    if how == "skipped":
        list(batches)
    if how == "twice":
        batch = next(batches)
        private.step(batch)
        private.step(batch)
    if how == "out of order":
        _, second = next(batches), next(batches)
        private.step(second)
    if how == "dropped":
        next(batches)
        next(batches)
        raise StoppedError
    if how == "raised":
        for batch in batches:
            private.step(batch)
            raise StoppedError


@pytest.mark.parametrize(
    ("how", "charged"), [("skipped", 4), ("twice", 2), ("out of order", 3), ("dropped", 3), ("raised", 2)]
)
def test_what_ends_a_loop_keeps_its_charges_and_a_resume_takes_the_rest(
    how: str, charged: int, tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises((BatchReuseError, StoppedError)), attached(tiny_plan, out=tmp_path) as private:
        interrupted(how, private, tiny)
    assert reserved(tmp_path) == charged
    with attached(None, resume=tmp_path) as private:
        assert (private.segment, private.restored_position, private.position) == (1, 1, charged)
        assert sum(1 for batch in private.batches(tiny) if len(private.step(batch)) >= 0) == tiny_plan.steps - charged
        private.release()
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.lost == (((1, charged),) if charged > 1 else ())
    assert len(set(reading.keys)) == 2
    assert eh.verify(tmp_path)["ok"]


def test_a_resume_restores_weights_optimizer_and_extras(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with eh.attach(model, optimizer, LOSS, tiny_plan, out=tmp_path, extras={"schedule": schedule}) as private:
        for epoch in private.epochs(tiny):
            for batch in epoch:
                private.step(batch)
                schedule.step()
            private.checkpoint()
            break
    other = nn.Linear(3, 2)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for wrong, message in (({}, "pass schedule="), ({"schedule": schedule, "average": schedule}, "without average")):
        with pytest.raises(UsageError, match=message):
            eh.attach(other, fresh, LOSS, tiny_plan, resume=tmp_path, extras=wrong)
    again = torch.optim.lr_scheduler.StepLR(fresh, 2, gamma=0.5)
    with eh.attach(other, fresh, LOSS, tiny_plan, resume=tmp_path, extras={"schedule": again}) as private:
        assert torch.equal(other.weight, model.weight)
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.025
        assert again.last_epoch == 5
        assert torch.equal(
            fresh.state[other.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"]
        )
        assert private.position == 5


def test_another_plan_model_or_data_cannot_continue_a_run(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with attached(tiny_plan, out=run) as private:
        private.step(next(private.batches(tiny)))
        private.checkpoint()
    larger = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=tiny.facts, epochs=3, batch_size=10)
    with pytest.raises(PlanMismatchError, match="leave the plan out"):
        attached(larger, resume=run)
    with pytest.raises(UsageError, match="does not fit the model"):
        attached(None, nn.Linear(3, 4), resume=run)
    with pytest.raises(UsageError, match="its own folder"):
        attached(None, resume=run, out=tmp_path / "other")
    for options in ({}, {"out": tmp_path / "other"}):
        with pytest.raises(UsageError, match="needs a plan and a folder"):
            attached(None, **options)
    with pytest.raises(UsageError, match="not a run folder"):
        attached(None, resume=tmp_path / "nothing")
    moved = eh.data.wrap(
        torch.zeros(40, 3), [i % 2 for i in range(40)], groups=["a", "b"] * 20, owners=["x"] * 30 + ["y"] * 10
    )
    with attached(tiny_plan, resume=run) as private:
        with pytest.raises(PlanMismatchError, match="not the records"):
            next(private.batches(moved))
        assert reserved(run) == 1
        for batch in private.batches(tiny):
            private.step(batch)
        private.release()
    with pytest.raises(BudgetExhausted, match="is finished"):
        attached(None, resume=run)


def test_a_run_of_fit_is_not_continued_without_its_goal_and_schedule(tiny: Data, tmp_path: Path) -> None:
    eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, epochs=1, batch_size=8, out=tmp_path, progress=False)
    with pytest.raises(UsageError, match=r"evenhand\.resume"):
        attached(None, resume=tmp_path)


def test_epsilon_so_far_is_that_of_the_charged_steps_with_the_prior(tiny: Data, tmp_path: Path) -> None:
    budgets = eh.Budgets({"x": 1.0, "y": 3.0}, delta=1e-3)
    plan = eh.plan("idp_sample", budgets, data=tiny.facts, epochs=3, batch_size=8, prior="labels")
    with attached(plan, out=tmp_path) as private:
        counts_only = plan.spent_by_owner(0)
        assert private.epsilon == max(counts_only) > 0, "the counts are charged whether or not they are released"
        so_far = []
        for batch in private.batches(tiny, ahead=1):
            charged = reserved(tmp_path)
            assert charged > private.position, "a draw is charged before it is made"
            assert private.epsilons == dict(zip("xy", plan.spent_by_owner(charged), strict=True))
            so_far.append(private.epsilon)
            private.step(batch)
        assert so_far == sorted(so_far)
        assert private.epsilons == private.planned == dict(zip("xy", plan.epsilons, strict=True))
        assert private.epsilon == private.epsilons["y"]


def test_asking_for_epsilon_in_every_step_computes_it_once_a_charge(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    computed = Plan.spent_by_owner

    def counted(plan: Plan, steps: int | None = None) -> tuple[float | None, ...]:
        asked.append(-1 if steps is None else steps)
        return computed(plan, steps)

    monkeypatch.setattr(Plan, "spent_by_owner", counted)
    with attached(tiny_plan, out=tmp_path) as private:
        asked.clear()
        private.step(next(private.batches(tiny)))
        assert len({private.epsilon for _ in range(50)}) == 1
        assert asked == [1]


def test_no_epsilon_is_told_where_none_holds(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    plain = eh.plan("sgd", None, data=tiny.facts, epochs=1, batch_size=8)
    with attached(plain, out=tmp_path / "plain") as private:
        private.step(next(private.batches(tiny)))
        assert private.epsilon is None
        assert private.planned == {"x": None, "y": None}
    with attached(tiny_plan, out=tmp_path / "blocked") as private:
        private._ledger.blocked(0, "records")
        assert private.epsilon is None
        assert set(private.epsilons.values()) | set(private.planned.values()) == {None}


def test_losses_of_a_step_are_marked_as_raw(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        losses = private.step(next(private.batches(tiny)))
    assert isinstance(losses, RawLosses)
    for raw in (losses, losses.mean(), losses.detach() * 2, torch.stack([losses.sum()])):
        assert "not private" in repr(raw)
    assert f"{losses.mean():.3f}" == f"{losses.mean().item():.3f}"
    assert type(losses.mean().item()) is float
    torch.save(losses, tmp_path / "losses.pt")
    assert torch.equal(torch.load(tmp_path / "losses.pt", weights_only=True), losses)


def test_a_batch_unpacks_and_gives_its_parts_by_name(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        batch = next(private.batches(tiny))
        x, y = batch
        assert x is batch["inputs"] is batch[0] is batch.inputs
        assert y is batch["targets"] is batch["labels"] is batch[1] is batch.targets
        assert list(dict(batch)) == ["inputs", "labels"]
        assert "labels" in batch
        assert "token" not in batch
        assert batch.get("token", 3) == 3
        assert [name for name, _ in batch.items()] == list(batch.keys())
        assert next(iter(batch.values())) is batch.get("inputs")
        with pytest.raises(KeyError):
            batch["token"]
        moved = batch.to("cpu", non_blocking=True)
        assert (moved.position, moved.token, len(moved)) == (batch.position, batch.token, len(batch))
        assert len(private.step(moved)) == len(batch)


def test_columns_of_a_batch_go_into_a_model_by_name() -> None:
    one = torch.zeros(1, dtype=torch.long)
    batch = Batch({"left": torch.ones(1, 2), "right": torch.ones(1, 2)}, one, one, one, one, 0, 0)

    def model(left: Tensor, right: Tensor, labels: Tensor) -> Tensor:
        return left + right + labels

    assert model(**batch).tolist() == [[2.0, 2.0]]
    assert batch["left"] is batch.inputs["left"]
    assert batch.to(torch.float64).inputs["left"].dtype == torch.float64


def test_a_loop_that_forgets_to_release_loses_nothing(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with attached(tiny_plan, out=tmp_path) as private:
        for batch in private.batches(tiny):
            private.step(batch)
        trained = {name: value.clone() for name, value in private.model.state_dict().items()}
    assert "nothing was released: call private.release()" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UsageError, match="The run is closed"):
        private.release()
    with attached(None, resume=tmp_path) as again:
        again.release()
    assert eh.verify(tmp_path)["ok"]
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in trained.items())


def test_steps_that_a_loop_lost_are_told_when_it_goes_on(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = attached(tiny_plan, out=tmp_path)
    private.step(next(private.batches(tiny)))
    private.close()
    attached(None, resume=tmp_path).close()
    assert "charged but are not in the checkpoint" in capsys.readouterr().err


def test_a_plan_is_made_of_facts_and_a_promise(tiny: Data) -> None:
    with pytest.raises(UsageError, match="not the data themselves"):
        eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=tiny)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Say what is promised"):
        eh.plan("dpsgd", 3, data=tiny.facts)  # type: ignore[arg-type]


def test_more_outputs_than_classes_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    inputs = torch.randn(80, 3, generator=torch.Generator().manual_seed(3))
    train, test = (inputs[:60], [0, 1] * 30), (inputs[60:], [0, 1] * 10)
    with pytest.raises(UsageError, match="3 outputs and the training data 2 classes"):
        eh.fit(nn.Linear(3, 3), train, epsilon=3.0, delta=1e-3, test=test, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run = eh.fit(
        nn.Linear(3, 2), train, persons=[n // 2 for n in range(60)], epsilon=3.0, delta=1e-3, out=tmp_path / "p"
    )
    assert run.plan.unit == "person"


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (
            nn.Linear(3, 2),
            torch.zeros(60, 3, dtype=torch.float64),
            "parameters are torch.float32 and its inputs torch.float64",
        ),
        (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2)), torch.full((60, 3), 7), "beyond a table"),
        (nn.Linear(4, 2), torch.zeros(60, 3), "give its first layer that many inputs"),
    ],
)
def test_inputs_that_a_model_cannot_take_are_told_by_their_reason(
    model: nn.Module, inputs: Tensor, words: str, tmp_path: Path
) -> None:
    records = torch.utils.data.TensorDataset(inputs, torch.arange(60) % 2)
    with pytest.raises(UnsupportedModelError, match=words):
        eh.fit(model, eh.data.wrap(records, labels=[0, 1]), epsilon=3.0, delta=1e-3, out=tmp_path / "run")
