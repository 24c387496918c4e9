"""State that no private step writes: buffers, frozen parameters, ``.data``, plain attributes of model and loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import CoupledError, LedgerError, UnsupportedModelError
from evenhand.mechanism.make_plan import Plan
from evenhand.runs.ledger import read
from evenhand.runs.verify import verify
from evenhand.training.attach import Private
from evenhand.training.guards import state_guard
from evenhand.training.guards.model_guards import Compute

LOSS = nn.CrossEntropyLoss(reduction="none")


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def half_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def attached(model: nn.Module, plan: Plan, out: Path, loss: object = LOSS, **options: object) -> Private:
    trained = [p for p in model.parameters() if p.requires_grad]
    return eh.attach(model, torch.optim.SGD(trained, lr=0.1), loss, plan, out=out, **options)


def rest(private: Private, data: Data) -> None:
    for batch in private.batches(data):
        private.step(batch)


def look_in_train_mode(model: nn.Module, data: Data) -> None:
    model.train()(data.fetch(torch.arange(8))[0])
    model.eval()


def test_a_look_in_train_mode_is_noticed_at_the_next_step_and_can_be_taken_back(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    model = normalised()
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        before = {name: t.clone() for name, t in model.named_buffers()}
        batch = next(private.batches(tiny))
        look_in_train_mode(model, tiny)
        with pytest.raises(UnsupportedModelError, match=r"'1\.running_mean'.*model\.eval\(\)"):
            private.step(batch)
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
        private.step(batch)
        rest(private, tiny)
        private.release()
    assert verify(tmp_path)["ok"]
    assert not read(tmp_path / "ledger.jsonl").foreign


@pytest.mark.parametrize("leave", ["checkpoint", "release"])
def test_statistics_that_moved_after_the_last_step_do_not_leave_the_run(
    leave: str, tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    model = normalised()
    with attached(model, tiny_plan, tmp_path) as private:
        rest(private, tiny)
        look_in_train_mode(model, tiny)
        with pytest.raises(UnsupportedModelError, match="running_mean"):
            getattr(private, leave)()
    assert not (tmp_path / "model.safetensors").exists()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.shift)


def exchanged(model: Shifted, mean: Tensor) -> None:
    model.shift = mean


def written(model: Shifted, mean: Tensor) -> None:
    model.shift.data.copy_(mean)


def added(model: Shifted, mean: Tensor) -> None:
    model.register_buffer("mean", mean)


@pytest.mark.parametrize("write", [exchanged, written, added])
def test_a_buffer_set_by_hand_is_refused(write: object, tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = Shifted()
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        batch = next(private.batches(tiny))
        write(model, tiny.fetch(torch.arange(40))[0].mean(0))
        with pytest.raises(UnsupportedModelError, match="a buffer or a frozen parameter"):
            private.step(batch)
        with pytest.raises(UnsupportedModelError, match="without noise"):
            private.release()


def test_a_frozen_parameter_written_through_data_is_refused(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = half_frozen()
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        batch = next(private.batches(tiny))
        model[0].weight.data.mul_(2.0)
        with pytest.raises(UnsupportedModelError, match=r"'0\.weight'"):
            private.step(batch)


def test_large_state_is_found_at_the_end_of_a_block_and_blocks_the_run_for_good(
    tiny: Data, tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_guard, "COPIED", 0)
    model = half_frozen()
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        batch = next(private.batches(tiny))
        model[0].weight.data.mul_(2.0)
        with pytest.raises(CoupledError, match=r"'0\.weight'.*start a new"):
            private.step(batch)
        for leave in (private.checkpoint, private.release):
            with pytest.raises(LedgerError, match="blocked"):
                leave()
    (row,) = read(tmp_path / "ledger.jsonl").blocked
    assert (row["position"], row["cause"]) == (1, "state")
    with pytest.raises(LedgerError, match="blocked"):
        eh.resume(tmp_path, model=half_frozen(), train=tiny, loss=LOSS, optimizer=torch.optim.SGD)
    found = verify(tmp_path)
    assert not found["ok"]
    assert found["epsilon"] is None


@pytest.mark.parametrize("copied", [state_guard.COPIED, 0])
def test_trained_weights_written_through_data_are_stated(
    copied: int, tiny: Data, tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_guard, "COPIED", copied)
    model = nn.Linear(3, 2)
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        model.bias.data.add_(0.5)
        rest(private, tiny)
        private.release()
    assert read(tmp_path / "ledger.jsonl").foreign == (1,)
    warnings = json.loads((tmp_path / "statement.json").read_text())["warnings"]
    assert any("outside of private steps" in text for text in warnings)


def test_weights_may_be_loaded_before_the_first_step_and_read_at_any_time(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    model, other = normalised(), normalised()
    other[1].running_mean.fill_(0.3)
    with attached(model, tiny_plan, tmp_path) as private:
        batches = private.batches(tiny)
        batch = next(batches)
        private.checkpoint()
        model.load_state_dict(other.state_dict())
        private.step(batch)
        for batch in batches:
            model(batch.inputs)
            model.load_state_dict(model.state_dict())
            private.step(batch)
        private.checkpoint()
        private.release()
    assert not read(tmp_path / "ledger.jsonl").foreign


def test_freezing_more_layers_on_the_way_is_no_change_of_state(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with attached(model, tiny_plan, tmp_path) as private:
        private.step(next(private.batches(tiny)))
        model[0].requires_grad_(False)
        rest(private, tiny)
        private.release()
    assert not read(tmp_path / "ledger.jsonl").foreign


class Counting(nn.Module):
    """Counts its passes in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_buffer_that_every_pass_moves_moves_once_a_step_however_many_records_there_are(
    micro_batch: int | None, tiny: Data, tmp_path: Path
) -> None:
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=tiny.facts, epochs=5, batch_size=2)
    model = Counting()
    with attached(model, plan, tmp_path, compute=Compute(micro_batch=micro_batch)) as private:
        sizes = []
        for batch in private.batches(tiny):
            sizes.append(len(batch))
            before = int(model.count)
            private.step(batch)
            assert int(model.count) == before + 1
        assert min(sizes) == 0, "an empty batch must be among them"
        private.release()


class Tempered:
    def __init__(self) -> None:
        self.temperature = 2.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out / self.temperature, y, reduction="none")


def test_settings_of_the_loss_that_change_between_steps_are_stated(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    loss = Tempered()
    with attached(nn.Linear(3, 2), tiny_plan, tmp_path, loss) as private:
        private.step(next(private.batches(tiny)))
        loss.temperature = 1.0
        rest(private, tiny)
        private.release()
    assert read(tmp_path / "ledger.jsonl").foreign == (1,)


def test_an_average_may_be_released(tiny: Data, tmp_path: Path) -> None:
    run = eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, delta=1e-3, epochs=2, batch_size=8, average=0.9, out=tmp_path)
    assert not run.folder.ledger().foreign
    assert verify(tmp_path)["ok"]
