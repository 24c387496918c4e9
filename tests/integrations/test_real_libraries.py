"""The examples, and what only the real libraries can break: ``pytest -m slow`` where they are installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.runs.ledger import read

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "lightning_module": "lightning",
    "skorch_net": "skorch",
    "accelerate_loop": "accelerate",
    "own_loop_resume": "torch",
}
LOSS = nn.CrossEntropyLoss(reduction="none")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """A trainer of several processes leaves its address in the environment, where programs of later tests find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_in_a_verified_run_with_a_report(name: str, tmp_path: Path) -> None:
    pytest.importorskip(EXAMPLES[name])
    script = ROOT / "examples" / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 40
    environment = {**os.environ, "EVENHAND_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon 3.000" in done.stdout
    reading = read(tmp_path / "run" / "ledger.jsonl")
    assert reading.reserved == reading.committed == reading.steps
    assert (reading.foreign, reading.lost) == ((), ())
    assert (tmp_path / "run" / "report.html").exists()
    assert eh.verify(tmp_path / "run")["ok"]


def loaders(tiny: Data) -> tuple[DataLoader[Any], DataLoader[Any]]:
    rows = TensorDataset(*tiny.fetch(torch.arange(40)))
    others = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), rows.tensors[1])
    return DataLoader(rows, batch_size=8, shuffle=True), DataLoader(others, batch_size=20)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("lightning.pytorch")
    return pytest.importorskip(request.param)


def module_of(package: Any) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> None:
            raise AssertionError("a private fit takes private steps")

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Module()


def trainer_of(package: Any, folder: Path, *callbacks: Any, **settings: Any) -> Any:
    usual = {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
    return package.Trainer(**usual | {"logger": False, "callbacks": list(callbacks)} | settings)


def test_lightning_trains_logs_and_saves_what_was_released(package: Any, tiny: Data, tmp_path: Path) -> None:
    from evenhand.integrations.lightning import PrivateCallback

    losses: list[Any] = []

    class Looks(package.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    private = PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path / "run")
    saving = package.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", monitor="accuracy", save_top_k=-1)
    module, (train, test) = module_of(package), loaders(tiny)
    trainer = trainer_of(package, tmp_path, private, saving, Looks())
    trainer.fit(module, train, test)
    assert trainer.global_step == len(losses) == 15
    assert set(losses) == {0.0}
    assert set(trainer.callback_metrics) == {"accuracy", "epsilon", "epsilon_charged"}
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert len(list((tmp_path / "saved").iterdir())) == 3
    reading = read(tmp_path / "run" / "ledger.jsonl")
    assert reading.reserved == reading.committed == 15
    assert reading.foreign == ()
    assert set(reading.told) == {5, 10, 15}
    assert "training_step" not in vars(trainer.strategy)
    assert eh.verify(tmp_path / "run")["ok"]
    assert [row["accuracy"] for row in trainer.validate(module, test, verbose=False)] != []


def test_lightning_stops_by_a_held_out_metric_and_goes_on_by_resume(package: Any, tiny: Data, tmp_path: Path) -> None:
    from evenhand.integrations.lightning import PrivateCallback

    train, test = loaders(tiny)
    private = PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path / "run")
    early = package.callbacks.EarlyStopping("accuracy", mode="max", stopping_threshold=-1.0)
    trainer_of(package, tmp_path, private, early, enable_checkpointing=False).fit(module_of(package), train, test)
    assert read(tmp_path / "run" / "ledger.jsonl").reserved < 15
    assert private.run.privacy.epsilon == max(private.run.plan.epsilons)
    again = PrivateCallback(loss=LOSS, resume=tmp_path / "run")
    trainer = trainer_of(package, tmp_path, again, enable_checkpointing=False)
    trainer.fit(module_of(package), train, test)
    reading = read(tmp_path / "run" / "ledger.jsonl")
    assert (reading.reserved, reading.lost) == (15, ())
    assert trainer.current_epoch <= 3
    assert eh.verify(tmp_path / "run")["ok"]


def test_lightning_takes_a_datamodule_and_schedules_by_step_and_no_step_is_skipped(tiny: Data, tmp_path: Path) -> None:
    package = pytest.importorskip("lightning.pytorch")
    from evenhand.integrations.lightning import PrivateCallback

    class Rows(package.LightningDataModule):
        train_dataloader = staticmethod(lambda: loaders(tiny)[0])
        val_dataloader = staticmethod(lambda: loaders(tiny)[1])

    module = module_of(package)
    planned: list[float] = []

    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        planned.append(module.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=int(planned[0]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Skips(package.Callback):
        """Ends an epoch early, when a batch of it was fetched ahead."""

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.on_train_batch_start = lambda *_: (
                -1 if trainer.global_step == 7 and trainer.current_epoch == 1 else 0
            )

    module.configure_optimizers = configure
    private = PrivateCallback(plan=None, epsilon=3.0, delta=1e-3, loss=LOSS, out=tmp_path / "run")
    trainer = trainer_of(package, tmp_path, private, Skips(), max_epochs=4, enable_checkpointing=False)
    trainer.fit(module, datamodule=Rows())
    reading = read(tmp_path / "run" / "ledger.jsonl")
    assert planned == [20]
    assert trainer.global_step == reading.committed == 7 + 3 + 5, "the epoch that was left goes on as the next one"
    assert private.run.privacy.epsilon == max(private.run.plan.epsilons)
    assert eh.verify(tmp_path / "run")["ok"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 0.5}, "bounds no record"),
        ({"accumulate_grad_batches": 2}, "micro_batch"),
        ({"precision": "bf16-mixed"}, "bfloat16"),
        ({"precision": "64-true"}, "bfloat16"),
        ({"strategy": "ddp", "devices": 1}, "draw batches in each"),
        ({"fast_dev_run": True}, "fast_dev_run"),
        ({"limit_train_batches": 2}, "fast_dev_run"),
        ({"max_steps": 3}, "max_steps"),
        ({"max_epochs": -1}, "max_epochs"),
        ({}, "hold training records"),
    ],
)
def test_lightning_is_refused_what_would_void_the_promise(
    settings: dict[str, Any], message: str, tiny: Data, tmp_path: Path
) -> None:
    package = pytest.importorskip("lightning.pytorch")
    from evenhand.integrations.lightning import PrivateCallback

    private, (train, test) = PrivateCallback(3.0, 1e-3, loss=LOSS, out=tmp_path / "run"), loaders(tiny)
    trainer = trainer_of(package, tmp_path, private, enable_checkpointing=False, **settings)
    with pytest.raises(UsageError, match=message):
        trainer.fit(module_of(package), train, train if message == "hold training records" else test)
    assert not (tmp_path / "run").exists()


def test_skorch_clones_and_predicts(tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    skorch = pytest.importorskip("skorch")
    from sklearn.base import clone

    from evenhand.integrations.skorch import PrivateNet

    class Net(PrivateNet, skorch.NeuralNetClassifier):
        pass

    inputs, targets = (part.numpy() for part in tiny.fetch(torch.arange(40)))
    options = {"module__in_features": 3, "module__out_features": 2, "max_epochs": 2, "batch_size": 8, "verbose": 0}
    net = Net(nn.Linear, criterion=nn.CrossEntropyLoss, epsilon=3.0, delta=1e-3, out=tmp_path / "one", **options)
    other = clone(net).set_params(out=tmp_path / "two", epsilon=1.0, callbacks=[skorch.callbacks.EarlyStopping()])
    assert net.fit(inputs, targets).predict(inputs).shape == (40,)
    assert other.fit(inputs, targets).run_.privacy.epsilon <= 1.0
    assert "train_loss" not in net.history[-1]
    assert np.isfinite(net.history[:, "valid_loss"]).all()
    composed = (tmp_path / "two" / "composition.json").read_text()
    assert '"runs": 2' in composed, "runs on parts of one set of records add up"
    clipping = clone(net).set_params(callbacks=[skorch.callbacks.GradientNormClipping(1.0)], out=tmp_path / "three")
    with pytest.raises(UsageError, match="bounds no record"):
        clipping.fit(inputs, targets)


def test_fabric_runs_a_loop_of_ones_own(tiny: Data, tiny_plan: Any, tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, data = nn.Linear(3, 2).to(fabric.device), tiny.on(fabric.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, tiny_plan, out=tmp_path) as private:
        for epoch in private.epochs(data):
            for batch in epoch:
                private.step(batch)
            fabric.log("epsilon_charged", private.epsilon)
        private.release()
    assert eh.verify(tmp_path)["ok"]


def test_the_real_accelerator_is_read_as_the_stand_in(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    integration = importlib.import_module("evenhand.integrations.accelerate")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    assert integration.refuse(accelerator, model, optimizer) == "float32"
    with pytest.raises(UsageError, match=r"accelerator\.prepare already"):
        integration.refuse(accelerator, model, accelerator.prepare(optimizer))
