"""Micro-batches, memory and precision change how gradients are computed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from commands import evenhand, result
from evenhand.data import Data, wrap
from evenhand.errors import UsageError
from evenhand.gradients import Engine, record_by_record
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.record_blocks import Blocks
from evenhand.mechanism.step import Mechanism, early_weights, private_gradient
from evenhand.training.attach import Private
from evenhand.training.config import from_toml
from evenhand.types import Batch

LOSS = nn.CrossEntropyLoss(reduction="none")


class Small(nn.Module):
    """A model on a device that holds at most ``most`` rows; ``drop`` draws row by row, so parts draw as the whole."""

    def __init__(self, most: int | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.most, self.drop = nn.Linear(3, 5), nn.Linear(5, 2), most, drop
        self.largest = self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.most is not None and len(x) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.largest = max(self.largest, len(x))
        hidden = torch.tanh(self.first(x))
        return self.last(hidden * (torch.rand(hidden.shape) >= self.drop) if self.drop else hidden)


def data() -> Data:
    torch.manual_seed(5)
    owners = ["x"] * 60 + ["y"] * 40
    return wrap(torch.randn(100, 3), [i % 2 for i in range(100)], groups=["a", "b"] * 50, owners=owners)


METHODS = {
    "dpsgd": eh.Privacy(3, 1e-3),
    "psac": eh.Privacy(3, 1e-3),
    "dpsgd_f": eh.Privacy(3, 1e-3),
    "ino_scale": eh.Budgets({"x": 1, "y": 4}, delta=1e-3),
}


def charges(private: Private) -> list[tuple]:
    """What every step used; how many of them share a row of the ledger depends on the clock."""
    commits = private.folder.ledger().commits
    return [(commit.sensitivity, commit.std, commit.queries) for commit in commits for _ in range(commit.count)]


def weights(method: str, out: Path, most: int | None = None, drop: float = 0.0, **options: object) -> tuple:
    rows = data()
    plan = eh.plan(method, METHODS[method], data=rows.facts, epochs=1, batch_size=25)
    torch.manual_seed(0)
    model = Small(most, drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with eh.attach(
        model, optimizer, LOSS, plan, out=out, insecure_seed=2, compose=False, compute=eh.Compute(**options)
    ) as private:
        for batch in private.batches(rows):
            private.step(batch)
        private.release()
    reading = private.folder.ledger()
    assert reading.reserved == reading.committed == plan.steps
    assert eh.verify(out)["ok"]
    return model, torch.cat([p.detach().flatten() for p in model.parameters()]), charges(private)


@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("method", METHODS)
def test_memory_that_runs_out_changes_nothing(method: str, drop: float, tmp_path: Path) -> None:
    _, whole, commits = weights(method, tmp_path / "whole", drop=drop)
    model, split, charged = weights(method, tmp_path / "split", most=4, drop=drop)
    assert model.failures
    assert model.largest <= 4
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    assert charged == commits, "the same noise, once"


@pytest.mark.parametrize("options", [{"micro_batch": 7}, {"lean": True}, {"micro_batch": 1, "lean": True}])
def test_settings_change_nothing(options: dict, tmp_path: Path) -> None:
    _, whole, commits = weights("dpsgd", tmp_path / "whole")
    model, found, charged = weights("dpsgd", tmp_path / "other", **options)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    assert charged == commits
    assert model.largest <= options.get("micro_batch", 100) + 3, "but for the comparison with autograd"
    assert (tmp_path / "whole" / "plan.json").read_bytes() == (tmp_path / "other" / "plan.json").read_bytes()


def test_one_record_that_does_not_fit_is_named_and_nothing_is_released(tmp_path: Path) -> None:
    model, rows = Small(), data()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=rows.facts, epochs=1, batch_size=25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with eh.attach(model, optimizer, LOSS, plan, out=tmp_path) as private:
        batch = next(private.batches(rows))
        model.most = 0
        before = model.first.weight.detach().clone()
        with pytest.raises(UsageError, match="one record alone"):
            private.step(batch)
        assert torch.equal(before, model.first.weight)
        model.most = None
        assert len(private.step(batch)) == len(batch), "its noise was not used yet"
        assert private.folder.ledger().reserved == 1


def mechanism(private: Private) -> Mechanism:
    return private._mechanism


@pytest.mark.parametrize(("method", "passes"), [("dpsgd", 1), ("psac", 1), ("dpsgd_f", 2), ("ino_scale", 2)])
def test_a_rule_that_looks_at_rows_alone_needs_one_pass(
    method: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = Engine.run

    def counted(self: Engine, inputs: Tensor, targets: Tensor, blocks: Blocks) -> object:
        runs.append(len(inputs))
        return run(self, inputs, targets, blocks)

    rows = data()
    plan = eh.plan(method, METHODS[method], data=rows.facts, epochs=1, batch_size=25)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with eh.attach(model, optimizer, LOSS, plan, out=tmp_path, compute=eh.Compute(micro_batch=5)) as private:
        batch = next(private.batches(rows))
        monkeypatch.setattr(Engine, "run", counted)
        private.step(batch)
    assert sum(runs) == passes * len(batch)


def test_early_weights_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    rows = data()
    plan = eh.plan("psac", eh.Privacy(3, 1e-3), data=rows.facts, epochs=1, batch_size=25)
    model = Small()
    with eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), LOSS, plan, out=tmp_path) as private:
        drawn = next(private.batches(rows))
        early = early_weights(mechanism(private), drawn, {})
        assert early is not None
        result = MicroBatches(model, LOSS).run(drawn.inputs, drawn.targets)
        result.norm[3] = float("nan")
        asked: list[Tensor] = []

        def summed(weights: Tensor) -> dict[str, Tensor]:
            asked.append(weights)
            return result.weighted_sum(weights)

        private_gradient(mechanism(private), type(result)(result.loss, result.norm, summed), drawn, {})
        parts = [slice(0, 2), slice(2, 7), slice(7, len(drawn))]
        found = torch.cat([early(result.norm[part], result.loss[part], part) for part in parts])
    assert torch.equal(found, asked[0])
    assert found[3] == 0


def test_added_rows_are_refused_with_micro_batches_too(tiny: Data, tiny_plan: eh.Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with eh.attach(model, optimizer, LOSS, tiny_plan, out=tmp_path, compute=eh.Compute(micro_batch=2)) as private:
        drawn = next(private.batches(tiny))
        inputs, targets = torch.cat([drawn.inputs] * 2), torch.cat([drawn.targets] * 2)
        twice = Batch(inputs, targets, drawn.group, drawn.owner, drawn.record, drawn.position, drawn.token)
        with pytest.raises(eh.errors.DataError, match="never add any"):
            private.step(twice)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}])
def test_bf16_changes_the_model_only(options: dict, tiny: Data, tiny_plan: eh.Plan, tmp_path: Path) -> None:
    """Products inside the model have few digits; what is summed, bounded and noised has all of them."""
    seen: dict[str, list[torch.dtype]] = {"inside": [], "summed": []}

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model.register_forward_hook(lambda *call: seen["inside"].append(call[2].dtype))
    found = []
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        compute = eh.Compute(precision=precision, **options)
        with eh.attach(
            model, optimizer, LOSS, tiny_plan, out=tmp_path / precision, insecure_seed=1, compose=False, compute=compute
        ) as private:
            update = private._update

            def noted(gradient: dict[str, Tensor], update: object = update) -> None:
                seen["summed"] += [value.dtype for value in gradient.values()]
                update(gradient)  # type: ignore[operator]

            private._update = noted  # type: ignore[method-assign]
            for batch in private.batches(tiny):
                private.step(batch)
        found.append((model[0].weight.detach().clone(), charges(private)))
    assert torch.bfloat16 in seen["inside"]
    assert torch.bfloat16 not in seen["summed"]
    assert not torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.05, atol=0.05)
    assert found[0][1] == found[1][1], "the same noise"


def test_sums_under_autocast_move_by_no_more_than_the_bound() -> None:
    """A sum rounded to bf16 would jump by more when one record comes in."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), torch.randn(64, 6), torch.randint(0, 3, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        result = Engine(model, LOSS).run(x, y)
        most = 1 / result.norm
        total = result.weighted_sum(most)
        without = result.weighted_sum(most * (torch.arange(64) != 9))
    moved = torch.cat([(total[name] - without[name]).flatten() for name in total])
    assert total["weight"].dtype == torch.float32
    assert moved.norm().item() <= 1 + 1e-5


def test_gradients_that_are_computed_again_are_computed_in_the_same_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_by_record, "KEPT_BYTES", 0)
    torch.manual_seed(0)

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,ij,bj->b", x, self.layer, x).unsqueeze(1) * torch.tensor([1.0, -1.0])

    x, y = torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        result = Engine(Squared(), lambda out, target: LOSS(out.float(), target)).run(x, y)
        sums = [result.weighted_sum(row)["layer"].norm() for row in torch.eye(4)]
    torch.testing.assert_close(torch.stack(sums).double(), result.norm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"micro_batch": 0}, {"micro_batch": 2.5}, {"precision": "fp16"}])
def test_settings_that_cannot_be_are_refused(options: dict) -> None:
    with pytest.raises(UsageError):
        eh.Compute(**options)


def test_the_command_line_takes_them_and_resume_keeps_them(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ("train", "--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "1", "--out", out)
    assert result(*short, "--micro-batch", "50", "--lean")["epsilon"] <= 3
    kept = from_toml(out / "config.toml")
    assert (kept.micro_batch, kept.lean, kept.precision) == (50, True, "float32")
    done = evenhand(*short[:-1], tmp_path / "other", "--precision", "bf61")
    assert done.returncode == 2
    assert "Did you mean 'bf16'" in done.stderr
