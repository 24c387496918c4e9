"""Train a skorch net privately: put ``PrivateNet`` before the net's class.

``class PrivateClassifier(PrivateNet, NeuralNetClassifier)`` has all that skorch's net has, with private steps in the
place of ``train_step``, the plan's Poisson draws in that of the training iterator, and a run folder behind ``fit``. The
history has no training loss: that would be a raw value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evenhand.accounting.budgets import Promise
from evenhand.data.dataset import wrap
from evenhand.data.estimators.learning_steps import refuse_learned_before
from evenhand.errors import UsageError
from evenhand.integrations.ask import Ask, finish
from evenhand.integrations.loaders import EpochLoader, refuse_same_records, whole_of, wrap_dataset
from evenhand.methods.catalogue import Method
from evenhand.runs.known_records import origin_of
from evenhand.training import losses
from evenhand.training.losses import Loss


class PrivateNet:
    """A mixin for skorch's nets: ``fit`` trains privately; ``private_`` is the run meanwhile, ``run_`` its end.

    ``max_epochs`` and ``batch_size`` of the net go into the plan; the validation split is not covered by the statement.
    Each call of ``fit`` or ``partial_fit`` is a run of its own, and budgets of those that share a record add up, as the
    folds of a search do.

    Args:
      epsilon: promise to every record; or give ``privacy`` (Privacy, Budgets, FixedNoise).
      delta: see ``evenhand.fit``; so are ``privacy``, ``method`` and ``settings``.
      privacy: see ``delta``.
      method: see ``delta``.
      settings: see ``delta``.
      groups: one name per record that is passed to ``fit``.
      owners: the budget class of each of these records.
      record_loss: one value per record from outputs and targets; default the net's criterion without its reduction.
      out: the run folder; default a new one in runs/.
      options: further arguments of ``evenhand.attach``.
    """

    def __init__(
        self,
        *args: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        privacy: Promise | None = None,
        method: str | Method = "dpsgd",
        settings: Mapping[str, Any] | None = None,
        groups: Iterable[Any] | None = None,
        owners: Iterable[Any] | None = None,
        record_loss: str | Loss | None = None,
        out: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.epsilon, self.delta, self.privacy, self.method, self.settings = epsilon, delta, privacy, method, settings
        self.groups, self.owners, self.record_loss, self.out, self.options = groups, owners, record_loss, out, options

    trains_privately = True
    """Tells ``evenhand.sklearn.make_private_pipeline``, which asks its last step, that ``fit`` is private."""

    def get_split_datasets(self, *args: Any, **kwargs: Any) -> Any:
        """Return skorch's split, and remember the held-out part, which must hold no training record."""
        train, self.held_out_ = super().get_split_datasets(*args, **kwargs)  # type: ignore[misc]
        return train, self.held_out_

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Return skorch's iterator over held-out records; over training records start the run and return its epochs."""
        if not training:
            return super().get_iterator(dataset, training=training)  # type: ignore[misc]
        net: Any = self
        refuse_learned_before(net)
        refuse(net)
        data = wrap_dataset(dataset, self.groups, self.owners)
        data = replace(data, origin=partial(_counted_as, dataset))
        refuse_same_records(data, [] if self.held_out_ is None else self.held_out_)
        ask = Ask(
            *(self.epsilon, self.delta, self.privacy, self.method, self.settings),
            out=self.out,
            options=self.options or {},
        )
        self.private_ = ask.attach(
            *(net.module_, net.optimizer_, _loss(self.record_loss, net.criterion_), data),
            epochs=net.max_epochs,
            batch_size=len(data) if net.batch_size == -1 else net.batch_size,
        )
        return EpochLoader(self.private_, data.on(torch.device(net.device)))

    def run_single_epoch(
        self, iterator: Any, training: bool, prefix: str, step_fn: Callable[..., Any], **fit_params: Any
    ) -> None:
        """Run an epoch; what held-out records say of the weights is recorded in the ledger before it leaves the run."""
        net: Any = self
        if not training:
            if iterator is not None:
                self.private_.told()
            super().run_single_epoch(iterator, training, prefix, step_fn, **fit_params)  # type: ignore[misc]
            return
        if fit_params:
            raise UsageError("A private step calls the module with the inputs alone: leave out fit_params.")
        net._set_training(True)
        steps = 0
        for steps, batch in enumerate(iterator, 1):  # noqa: B007 - counted
            net.notify("on_batch_begin", batch=tuple(batch), training=True)
            self.private_.step(batch)
            net.notify("on_batch_end", batch=tuple(batch), training=True, y_pred=None, loss=None)
        net.history.record(f"{prefix}_batch_count", steps)

    def fit_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run skorch's loop of epochs; if it fails, close the run, whose steps stay charged."""
        try:
            return super().fit_loop(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            if hasattr(self, "private_"):
                self.private_.close()
                del self.private_
            raise

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Release the model with its statement, also when a callback ended the training early."""
        super().on_train_end(net, X=X, y=y, **kwargs)  # type: ignore[misc]
        if hasattr(self, "private_"):
            self.run_ = finish(self.private_)
            del self.private_


_REPLACED = ("train_step", "train_step_single", "infer")
"""Methods of a net that a private step takes the place of."""
_DRAWS = ("sampler", "batch_sampler", "collate_fn")
"""Settings of a loader that the plan's draws would not follow."""


def refuse(net: Any) -> None:
    """Raise if a callback looks at training values or changes gradients, or if the net does what steps would not."""
    for words in _not_followed(net):
        raise UsageError(f"{words} Nothing was spent.")
    for name, callback in net.callbacks_:
        if type(callback).__name__ == "GradientNormClipping":
            raise UsageError(
                "GradientNormClipping clips the mean gradient of a batch, which bounds no record: leave it out. The "
                "bound is set by settings={'bound': 1.0}. Nothing was spent."
            )
        if getattr(callback, "on_train", False) and type(callback).__name__ != "PassthroughScoring":
            raise UsageError(
                f"The callback {name!r} scores training records, which no epsilon covers: let it score the validation "
                "split, on_train=False. Nothing was spent."
            )


def _not_followed(net: Any) -> Iterator[str]:
    """Yield what the net sets or overrides, and a private step would pass over in silence."""
    kind = type(net).__name__
    for name in (*_REPLACED, *(() if net.record_loss is not None else ("get_loss",))):
        if _overridden(net, name):
            yield (
                f"{kind}.{name} is not called by a private step, which takes the module and one loss per record: pass "
                "record_loss=, a function of outputs and targets, and leave the override out."
            )
    if getattr(net, "iterator_train", DataLoader) is not DataLoader:
        yield "iterator_train draws rows itself, and the plan draws them here: leave it out."
    for name in _DRAWS:
        if getattr(net, f"iterator_train__{name}", None) is not None:
            yield (
                f"iterator_train__{name} is not followed: rows are drawn by the plan's Poisson sampler, as the "
                "accountant counts them. Leave it out, and change records in the dataset."
            )


def _overridden(net: Any, name: str) -> bool:
    """Return whether a method is not skorch's own."""
    kind = next((kind for kind in type(net).__mro__ if name in vars(kind)), None)
    return not (kind is None or kind.__name__ == "NeuralNet" or kind.__module__.startswith("skorch."))


def _counted_as(dataset: Any) -> str:
    """Return the name under which runs on these records add up, with those on folds and samples of the same arrays."""
    return origin_of(wrap(whole_of(dataset)))


def _loss(given: str | Loss | None, criterion: Any) -> Loss:
    """Return the loss with one value per record: as given, or the criterion's before it is reduced."""
    return losses.named(given) if given is not None else RecordLoss(criterion)


class RecordLoss:
    """A criterion of skorch with one value per record. Probabilities for ``NLLLoss`` become logarithms, as in skorch.

    Examples:
      >>> RecordLoss(nn.MSELoss())(torch.zeros(2, 1), torch.tensor([1.0, 2.0]))
      tensor([1., 4.])
    """

    def __init__(self, criterion: Any) -> None:
        if not hasattr(criterion, "reduction"):
            raise UsageError(
                f"{type(criterion).__name__} cannot be asked for one value per record: pass record_loss=, a function "
                "of outputs and targets. Nothing was spent."
            )
        self._criterion = copy.copy(criterion)
        self._criterion.reduction = "none"
        self._logarithm = isinstance(criterion, nn.NLLLoss)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per record."""
        if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        if self._logarithm:
            outputs = torch.log(outputs + torch.finfo(outputs.dtype).eps)
        each: Tensor = self._criterion(outputs, targets)
        return each if each.dim() == 1 else each.flatten(1).mean(1)
