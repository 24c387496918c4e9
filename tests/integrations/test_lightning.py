"""PrivateCallback over a stand-in of Lightning's trainer; the real one trains in test_real_libraries.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import LightningModule, Trainer, install_lightning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import BatchReuseError, BudgetExhausted, ForeignLoaderError, UsageError
from evenhand.runs.ledger import read

LOSS = nn.CrossEntropyLoss(reduction="none")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        raise AssertionError("a private fit takes private steps")

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class WithLoss(Module):
    def per_record_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return LOSS(outputs, targets)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install_lightning(monkeypatch)


@pytest.fixture
def loader(tiny: Data) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tiny.fetch(torch.arange(40))), batch_size=8, shuffle=True)


def test_a_fit_is_the_plan_with_our_draws_and_a_verified_run(lightning: Any, loader: Any, tmp_path: Path) -> None:
    names = ["x"] * 30 + ["y"] * 10
    callback = lightning.PrivateCallback(3.0, 1e-3, owners=names, groups=["a", "b"] * 20, out=tmp_path)
    trainer, module = Trainer(3, callback), WithLoss()
    before = module.net.weight.detach().clone()
    trainer.fit(module, loader)
    run = callback.run
    assert run.plan.steps == len(trainer.seen) == 15
    assert len(set(trainer.seen)) > 1, "Poisson draws differ in size"
    assert run.plan.facts.owners == (("x", 30), ("y", 10))
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.reserved == reading.committed == 15
    assert reading.foreign == (), "what the trainer counts is no part of the model"
    assert set(reading.told) == {5, 10, 15}
    assert not torch.equal(before, module.net.weight)
    assert trainer.logged == {"epsilon": run.privacy.epsilon, "epsilon_charged": run.privacy.epsilon}
    assert (tmp_path / "model-card.md").exists()
    assert eh.verify(tmp_path)["ok"]
    assert vars(trainer.strategy) == {}
    assert module._trainer is trainer


def test_an_interrupted_fit_goes_on_with_its_schedule(lightning: Any, loader: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Trainer(3, lightning.PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path)).fit(Module(), loader, fails_at=7)
    assert read(tmp_path / "ledger.jsonl").reserved == 9, "two were drawn, one of them ahead"
    callback, module = lightning.PrivateCallback(loss=LOSS, resume=tmp_path), Module()
    trainer = Trainer(3, callback)
    trainer.fit(module, loader)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1 + 2
    reading = read(tmp_path / "ledger.jsonl")
    assert len(trainer.seen) == 6
    assert reading.lost == ((7, 9),)
    assert eh.verify(tmp_path)["ok"]
    with pytest.raises(BudgetExhausted, match="is finished"):
        Trainer(3, lightning.PrivateCallback(loss=LOSS, resume=tmp_path)).fit(Module(), loader)


class Foreign:
    """A strategy or precision plugin of somebody else."""


class Clips(WithLoss):
    def configure_gradient_clipping(self) -> None: ...


class Moves(WithLoss):
    def on_after_batch_transfer(self, batch: Any) -> Any:
        return [part + 0 for part in batch]


class LearningRateFinder:
    """Lightning's, which trains raw."""


class Finder(LearningRateFinder):
    """One of somebody else's, made from it."""


class Scheduler:
    def going_to_accumulate_grad_batches(self) -> bool:
        return True


class NoForward(LightningModule):
    configure_optimizers = Module.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"gradient_clip_val": 1.0}, WithLoss, "bounds no record"),
        ({"accumulate_grad_batches": 2}, WithLoss, "micro_batch"),
        ({"callbacks": [Scheduler()]}, WithLoss, "micro_batch"),
        ({"callbacks": [Finder()]}, WithLoss, "LearningRateFinder trains on the training records without privacy"),
        ({"val_check_interval": 0.5}, WithLoss, "number of batches"),
        ({"world_size": 2}, WithLoss, "draw batches in each"),
        ({"strategy": Foreign()}, WithLoss, "strategy Foreign"),
        ({"precision": "16-mixed"}, WithLoss, "precision"),
        ({"precision_plugin": Foreign()}, WithLoss, "precision"),
        ({"optimizers": []}, Module, "loss per record"),
        ({"limit_train_batches": 0.5}, WithLoss, "fast_dev_run"),
        ({"max_epochs": -1}, WithLoss, "max_epochs"),
        ({"max_steps": 10}, WithLoss, "max_steps"),
        ({"reload_dataloaders_every_n_epochs": 1}, WithLoss, "back in the place"),
        ({"ckpt_path": "last.ckpt"}, WithLoss, "resume=RUN"),
        ({}, Clips, "configure_gradient_clipping"),
        ({}, Moves, "on_after_batch_transfer"),
        ({}, NoForward, "forward"),
    ],
)
def test_what_would_void_the_promise_is_refused_before_a_folder_exists(
    settings: dict[str, Any], kind: Any, message: str, lightning: Any, loader: Any, tmp_path: Path
) -> None:
    callback = lightning.PrivateCallback(3.0, 1e-3, out=tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        Trainer(**{"max_epochs": 3, "callback": callback, **settings}).fit(kind(), loader)
    assert not (tmp_path / "run").exists()


def test_all_that_stands_in_the_way_is_named_at_once(lightning: Any, loader: Any, tmp_path: Path) -> None:
    callback = lightning.PrivateCallback(3.0, 1e-3, out=tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"(?s)- gradient_clip_val.*- fast_dev_run.*- The module has no forward.*def per_record_loss"
    ):
        Trainer(max_epochs=3, callback=callback, gradient_clip_val=1.0, limit_train_batches=0.5).fit(
            NoForward(), loader
        )


def test_validation_on_training_records_is_refused(lightning: Any, loader: Any, tmp_path: Path) -> None:
    for held_out in (DataLoader(loader.dataset, batch_size=20), {"one": [DataLoader(loader.dataset, batch_size=20)]}):
        callback = lightning.PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path / "run")
        with pytest.raises(UsageError, match="validation data hold training records"):
            Trainer(3, callback).fit(Module(), loader, held_out)
    assert not (tmp_path / "run").exists()
    others = TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    callback = lightning.PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path / "run")
    Trainer(1, callback).fit(Module(), loader, [DataLoader(others, batch_size=20), ["no records"]])
    assert eh.verify(tmp_path / "run")["ok"]


def test_several_optimizers_and_manual_steps_are_refused(lightning: Any, loader: Any, tmp_path: Path) -> None:
    class Two(WithLoss):
        def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
            optimizers, schedules = super().configure_optimizers()
            return optimizers * 2, schedules

    class Manual(WithLoss):
        automatic_optimization = False

    for kind in (Two, Manual):
        with pytest.raises(UsageError, match="exactly one optimizer"):
            Trainer(3, lightning.PrivateCallback(3.0, 1e-3, out=tmp_path / "run")).fit(kind(), loader)
    with pytest.raises(ForeignLoaderError, match="TensorDataset"):
        Trainer(3, lightning.PrivateCallback(3.0, 1e-3, out=tmp_path / "run")).fit(WithLoss(), loader.dataset)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_a_callback_replaced_is_not_stepped(lightning: Any, loader: Any, tmp_path: Path) -> None:
    class Replacing(Trainer):
        def _step(self, module: Any, batch: Any, place: int) -> None:
            super()._step(module, tuple(batch), place)

    with pytest.raises(BatchReuseError, match="not drawn by this run"):
        Replacing(3, lightning.PrivateCallback(3.0, 1e-3, out=tmp_path)).fit(WithLoss(), loader)


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "evenhand.integrations.lightning", raising=False)
    integration = importlib.import_module("evenhand.integrations.lightning")
    monkeypatch.delitem(sys.modules, "evenhand.integrations.lightning")
    with pytest.raises(UsageError, match=r"evenhand\[lightning\]"):
        integration.PrivateCallback(3.0)
