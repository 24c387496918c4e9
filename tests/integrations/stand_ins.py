"""Parts of other libraries' trainers that the integrations touch, in the order in which those libraries call them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Callback:
    """Lightning's base of callbacks."""


class LightningModule(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None

    device = torch.device("cpu")

    def log_dict(self, values: dict[str, float]) -> None:
        self._trainer.logged |= values

    def forward(self, *inputs: Any) -> Any:
        return super().forward(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure)

    def configure_gradient_clipping(self) -> None: ...

    def on_before_batch_transfer(self, batch: Any) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any) -> Any:
        return batch


class SingleDeviceStrategy:
    def training_step(self, *_: Any) -> Tensor:
        raise AssertionError("the module's own step would be taken")

    def backward(self, loss: Tensor, *_: Any) -> Tensor:
        raise AssertionError("the module's own gradient would be computed")

    def optimizer_step(self, optimizer: Any, closure: Any) -> None:
        raise AssertionError("the optimizer would be stepped")


class Precision: ...


class Source:
    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def is_defined(self) -> bool:
        return True

    def dataloader(self) -> Any:
        return self.instance


class Trainer:
    """A trainer of Lightning 2: fetches a batch ahead, validates after each epoch."""

    precision, gradient_clip_val, accumulate_grad_batches, world_size = "32-true", None, 1, 1
    limit_train_batches, overfit_batches, fast_dev_run, max_steps = 1.0, 0.0, False, -1
    reload_dataloaders_every_n_epochs, ckpt_path, sanity_checking = 0, None, False
    val_check_interval, callbacks = 1.0, ()

    def __init__(self, max_epochs: int, callback: Any, **settings: Any) -> None:
        self.max_epochs, self.callback, self.should_stop = max_epochs, callback, False
        self.strategy: Any = SingleDeviceStrategy()
        self.precision_plugin = Precision()
        vars(self).update(settings)
        self.seen: list[int] = []
        self.logged: dict[str, float] = {}

    def fit(self, module: Any, loader: Any, held_out: Any = None, fails_at: int = -1) -> None:
        module._trainer = self
        validation = types.SimpleNamespace(val_loop=types.SimpleNamespace(_data_source=Source(held_out)))
        self.fit_loop = types.SimpleNamespace(
            _data_source=Source(loader), _combined_loader="old", epoch_loop=validation
        )
        self.optimizers, schedulers = module.configure_optimizers()
        self.lr_scheduler_configs = [types.SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]
        try:
            self.callback.on_fit_start(self, module)
            assert self.fit_loop._combined_loader is None
            self._train(module, self.fit_loop._data_source.dataloader(), fails_at)
            self.callback.on_train_end(self, module)
        except BaseException as error:
            self.callback.on_exception(self, module, error)
            raise
        finally:
            self.callback.teardown(self, module, "fit")

    def _train(self, module: Any, loader: Any, fails_at: int) -> None:
        for epoch in range(self.max_epochs):
            self.callback.on_train_epoch_start(self, module)
            if self.should_stop:
                return
            for place, batch in enumerate(_one_ahead(loader)):
                if len(self.seen) == fails_at:
                    raise KeyboardInterrupt
                self._step(module, batch.to("cpu"), place)
            self.callback.on_validation_start(self, module)
            for config in self.lr_scheduler_configs:
                config.scheduler.step()
            self.callback.on_save_checkpoint(self, module, {"epoch": epoch})
            self.callback.on_train_epoch_end(self, module)

    def _step(self, module: Any, batch: Any, place: int) -> None:
        def closure() -> None:
            loss = self.strategy.training_step(batch, place)
            self.optimizers[0].zero_grad()
            self.strategy.backward(loss, self.optimizers[0])
            assert float(loss) == 0.0, "a raw loss would reach callbacks"

        self.strategy.optimizer_step(self.optimizers[0], closure)
        self.seen.append(len(batch))


def _one_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    waiting = next(batches, None)
    while waiting is not None:
        following = next(batches, None)
        yield waiting
        waiting = following


def install_lightning(patch: pytest.MonkeyPatch) -> Any:
    """Import the integration anew over the stand-in of Lightning, and return it."""
    package = types.ModuleType("lightning")
    module = types.ModuleType("lightning.pytorch")
    module.Callback = Callback  # type: ignore[attr-defined]
    package.pytorch = module  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "lightning", package)
    patch.setitem(sys.modules, "lightning.pytorch", module)
    patch.delitem(sys.modules, "evenhand.integrations.lightning", raising=False)
    import evenhand.integrations.lightning as integration

    patch.delitem(sys.modules, "evenhand.integrations.lightning")
    return integration


class NeuralNet:
    """skorch's net as far as fitting goes."""

    def __init__(self, module: nn.Module, criterion: Any, max_epochs: int = 3, batch_size: int = 8) -> None:
        self.module_, self.criterion_, self.max_epochs, self.batch_size = module, criterion, max_epochs, batch_size
        self.optimizer_ = torch.optim.SGD(module.parameters(), lr=0.1)
        self.device, self.callbacks_, self.history, self.losses = "cpu", [], self, []
        self.recorded: dict[str, int] = {}
        self.train_split: Any = None

    def record(self, name: str, value: int) -> None:
        self.recorded[name] = value

    def notify(self, name: str, **values: Any) -> None:
        getattr(self, name)(self, **values)
        for _, callback in self.callbacks_:
            getattr(callback, name, lambda *_, **__: None)(self, **values)

    def on_batch_begin(self, net: Any, **_: Any) -> None: ...

    on_epoch_end = on_batch_end = on_train_end = on_batch_begin

    def _set_training(self, training: bool) -> None:
        self.module_.train(training)

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        assert not training, "skorch's own order would be drawn"
        return torch.utils.data.DataLoader(dataset, batch_size=self.batch_size)

    def run_single_epoch(self, iterator: Any, training: bool, prefix: str, step_fn: Any) -> None:
        assert not training, "skorch's own step would be taken"
        if iterator is not None:
            for batch in iterator:
                step_fn(batch)

    def get_split_datasets(self, train: Any, valid: Any) -> Any:
        return train, valid

    def fit_loop(self, train: Any, valid: Any) -> None:
        train, valid = self.get_split_datasets(train, valid)
        iterator_train = self.get_iterator(train, training=True)
        iterator_valid = None if valid is None else self.get_iterator(valid, training=False)
        for _ in range(self.max_epochs):
            self.run_single_epoch(iterator_train, True, "train", None)
            self.run_single_epoch(iterator_valid, False, "valid", lambda batch: self.module_(batch[0]))
            self.notify("on_epoch_end")

    def fit(self, train: Any, valid: Any = None) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            self.fit_loop(train, valid)
        self.notify("on_train_end", X=None, y=None)
        return self
