"""What an independent reviewer broke once; each stays mended."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import BatchReuseError, DataError, LedgerError, UnsupportedModelError, UsageError
from evenhand.mechanism.make_plan import Plan
from evenhand.runs.folder import as_json
from evenhand.runs.ledger import read
from evenhand.runs.recorder import TIMED
from evenhand.runs.statement import digest, markdown
from evenhand.runs.verify import verify
from evenhand.training.attach import Private

LOSS = nn.CrossEntropyLoss(reduction="none")


def attached(plan: Plan, out: Path, model: nn.Module | None = None, **options: object) -> Private:
    model = model or nn.Linear(3, 2)
    return eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, plan, out=out, **options)


def trained(data: Data, plan: Plan, out: Path, **options: object) -> Private:
    with attached(plan, out, **options) as private:
        for batch in private.batches(data):
            private.step(batch)
        private.checkpoint()
        private.release()
    return private


def test_a_shortened_ledger_cannot_be_resumed(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with attached(tiny_plan, tmp_path, model) as private:
        batches = private.batches(tiny)
        for _ in range(10):
            private.step(next(batches))
        private.checkpoint()
    rows = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(rows[:2]))
    with pytest.raises(LedgerError, match="shortened"):
        eh.resume(tmp_path, model=model, train=tiny)


def test_a_second_start_cannot_remove_the_ledger_of_a_running_one(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        with pytest.raises(LedgerError, match="Another process"):
            attached(tiny_plan, tmp_path)
        private.step(next(private.batches(tiny)))
        assert read(tmp_path / "ledger.jsonl").reserved == 1


@pytest.mark.parametrize("left", ["model.safetensors", "statement.json", "private/checkpoint.pt"])
def test_weights_without_their_ledger_are_not_trained_on(
    left: str, tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    trained(tiny, tiny_plan, tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    for name in {"model.safetensors", "statement.json", "private/checkpoint.pt"} - {left}:
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="ledger is missing"):
        attached(tiny_plan, tmp_path)


def test_threads_do_not_share_a_position(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batches = private.batches(tiny)
        for _ in range(tiny_plan.steps):
            batch, done = next(batches), []

            def take(batch: object = batch, done: list[object] = done) -> None:
                try:
                    done.append(private.step(batch))
                except BatchReuseError:
                    done.append(None)

            threads = [threading.Thread(target=take) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sum(result is not None for result in done) == 1
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.committed == reading.reserved == tiny_plan.steps


def test_a_run_cannot_be_copied_or_forked(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batch = next(private.batches(tiny))
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(BatchReuseError, match="same noise"):
                duplicate(private)
        private._process = os.getpid() + 1
        with pytest.raises(BatchReuseError, match="another process"):
            private.step(batch)
        private._process = os.getpid()
        private.step(batch)


class CoupledInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.mean(0) if self.training else x)


def test_a_change_of_mode_is_probed_again(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = CoupledInTraining().eval()
    with attached(tiny_plan, tmp_path, model) as private:
        batch = next(private.batches(tiny))
        model.train()
        with pytest.raises(UnsupportedModelError):
            private.step(batch)


class Remembers(nn.Module):
    """Keeps a row of the data in a buffer, but only after the probe has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed and x.shape[0]:
            self.seen.copy_(x[0].detach())
        return self.layer(x)


def test_a_buffer_written_from_data_stops_the_run_and_is_never_released(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    with attached(tiny_plan, tmp_path, Remembers()) as private:
        private.step(next(private.batches(tiny)))
        batch = next(private.batches(tiny))
        private.model.armed = True
        with pytest.raises(UnsupportedModelError, match="'seen'"):
            private.step(batch)
        for leave in (private.checkpoint, private.release):
            with pytest.raises(UnsupportedModelError, match="'seen'"):
                leave()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_rewritten_statement_is_noticed(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    trained(tiny, tiny_plan, tmp_path)
    assert verify(tmp_path)["ok"], verify(tmp_path)["problems"]
    original = json.loads((tmp_path / "statement.json").read_text())
    for part, key, value in (
        ("guarantee", "epsilon", 0.01),
        ("mechanism", "steps_charged", 1),
        ("accounting", "runs_composed", 0),
    ):
        forged = json.loads(json.dumps(original))
        forged[part][key] = value
        forged["digest"] = digest(forged)
        (tmp_path / "statement.json").write_bytes(as_json(forged))
        (tmp_path / "statement.md").write_text(markdown(forged))
        assert any("statement.json" in problem for problem in verify(tmp_path)["problems"]), part


def test_a_replaced_model_is_noticed_without_a_statement(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    trained(tiny, tiny_plan, tmp_path)
    (tmp_path / "statement.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    assert not verify(tmp_path)["ok"]


def test_rows_are_charged_before_they_are_drawn(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        next(private.batches(tiny))
        assert read(tmp_path / "ledger.jsonl").reserved == 1


def test_who_was_sampled_is_taken_from_the_draw(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    with attached(tiny_plan, tmp_path) as private:
        batch = next(private.batches(tiny))
        everyone = tiny.fetch(torch.arange(40))
        chosen = dataclasses.replace(
            batch, inputs=everyone[0], targets=everyone[1], record=torch.arange(40), owner=tiny.owner, group=tiny.group
        )
        with pytest.raises(DataError, match="never add any"):
            private.step(chosen)


def test_a_public_seed_and_foreign_updates_are_noted(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with attached(tiny_plan, tmp_path, model, insecure_seed=1) as private:
        for batch in private.batches(tiny):
            private.step(batch)
            if private.position == 5:
                with torch.no_grad():
                    model.weight.add_(1.0)
        private.release()
    notes = " ".join(verify(tmp_path)["notes"])
    assert "public seed" in notes
    assert "outside of private steps" in notes
    assert "outside of private steps" in (tmp_path / "statement.md").read_text()


def test_a_change_after_the_last_step_is_noted_at_the_release(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with attached(tiny_plan, tmp_path, model) as private:
        for batch in private.batches(tiny):
            private.step(batch)
        with torch.no_grad():
            model.weight.add_(1.0)
        private.release()
    assert "outside of private steps" in " ".join(verify(tmp_path)["notes"])


def test_a_raw_gradient_that_a_parameter_holds_is_never_stepped_along(
    tiny: Data, tiny_plan: Plan, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with attached(tiny_plan, tmp_path, model) as private:
        batches = private.batches(tiny)
        private.step(next(batches))
        inputs, targets = tiny.fetch(torch.arange(40))
        LOSS(model(inputs), targets).mean().backward()  # a look at gradients
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        private.step(next(batches))
        assert torch.equal(model[0].weight, before)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_of_the_loss_does_not_print_labels(tiny: Data, tiny_plan: Plan, tmp_path: Path) -> None:
    class Late:
        calls = 0

        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            Late.calls += 1
            if Late.calls > 200:
                raise RuntimeError("index 4711 is out of bounds")
            return LOSS(outputs, targets)

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, Late(), tiny_plan, out=tmp_path) as private:
        private.step(next(private.batches(tiny)))
        batch = next(private.batches(tiny))
        Late.calls = 1000
        with pytest.raises(DataError) as caught:
            private.step(batch)
    assert "4711" not in str(caught.value)


def test_block_sizes_are_one_power_of_two(tiny: Data, tmp_path: Path) -> None:
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=tiny.facts, epochs=60, batch_size=8)
    trained(tiny, plan, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    counts = [row["count"] for row in rows if row["type"] == "reserve"]
    assert counts[:TIMED] == [1] * TIMED
    assert len(set(counts[TIMED:-1])) == 1
    assert counts[TIMED] & (counts[TIMED] - 1) == 0


def test_an_optimizer_that_evaluates_several_times_is_refused(tiny_plan: Plan, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="LBFGS"):
        eh.attach(model, torch.optim.LBFGS(model.parameters()), LOSS, tiny_plan, out=tmp_path)
