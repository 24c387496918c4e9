"""Arguments of Opacus' ``make_private`` in evenhand's terms; what cannot be mapped is an error that says so."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Required, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils.data import DataLoader, Dataset

from evenhand.data.dataset import Data, wrap
from evenhand.errors import DataError, ForeignLoaderError, UsageError
from evenhand.methods.catalogue import Method
from evenhand.methods.catalogue import method as find_method
from evenhand.training.losses import Loss

_LOOKED_AT = 256
"""Records whose shapes are compared before anything is planned."""
MODES = ("hooks", "functorch", "ew", "ghost")
_ADAPTIVE: dict[str, Callable[[float, float], tuple[str, float]]] = {
    "target_unclipped_quantile": lambda value, _: ("quantile", value),
    "clipbound_learning_rate": lambda value, _: ("rate", value),
    "min_clipbound": lambda value, bound: ("least", value / bound),
    "max_clipbound": lambda value, bound: ("most", value / bound),
    "unclipped_num_std": lambda value, _: ("noise", 2 * value),  # of a count that one record moves by 1/2
}
"""Arguments of ``clipping="adaptive"``, as settings of the method ``bounded_adaptive``."""


class Arguments(TypedDict, total=False):
    """Arguments that ``make_private`` and ``make_private_with_epsilon`` of Opacus both take."""

    module: Required[nn.Module]
    optimizer: Required[torch.optim.Optimizer]
    data_loader: Required[Any]
    max_grad_norm: Required[float]
    criterion: Any
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    target_unclipped_quantile: float
    clipbound_learning_rate: float
    min_clipbound: float
    max_clipbound: float
    unclipped_num_std: float


class _Singly(Dataset[Any]):
    """Records as a loader's ``collate_fn`` makes them, each collated alone, so that none depends on its company."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._shapes: list[torch.Size] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        parts = self._collate([self._dataset[number]])
        if not isinstance(parts, tuple | list) or len(parts) < 2 or not all(isinstance(part, Tensor) for part in parts):
            raise DataError("The loader must yield tensors: inputs, and the targets last. For dicts use eh.attach.")
        shapes = [part.shape[1:] for part in parts]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise DataError(
                "Records have different shapes: a collate_fn that pads to the longest of a batch lets records "
                "influence each other. Pad all to one length. Nothing was released."
            )
        inputs = tuple(part[0] for part in parts[:-1])
        return (inputs if len(inputs) > 1 else inputs[0]), parts[-1][0]


def records(loader: Any) -> tuple[Data, int]:
    """Return the records behind a loader and its batches per epoch; its sampler is not used."""
    if not isinstance(loader, DataLoader):
        raise ForeignLoaderError("data_loader= takes a torch DataLoader over a dataset with a length.")
    try:
        per_epoch, singly = len(loader), _Singly(loader.dataset, loader.collate_fn)
    except TypeError:
        raise ForeignLoaderError("The loader's dataset has no length, so rows cannot be sampled from it.") from None
    if not per_epoch:
        raise DataError("The loader has no batches: give it fewer records per batch, or drop_last=False.")
    for number in range(min(_LOOKED_AT, len(singly))):
        singly[number]
    data = wrap(singly)
    facts = dataclasses.replace(data.facts, inputs=f"items of {type(loader.dataset).__name__}")
    return dataclasses.replace(data, facts=facts), per_epoch


def expected_batch(records: int, per_epoch: int, epochs: float) -> float:
    """Return records / batches per epoch, rounded so that the plan has exactly epochs * per_epoch steps."""
    batch = records / per_epoch
    while math.ceil(epochs * records / batch) > math.ceil(epochs * per_epoch):
        batch = math.nextafter(batch, math.inf)
    return batch


def method(bound: Any, clipping: str, others: dict[str, Any]) -> Method:
    """Return the method that clips as asked; arguments of adaptive clipping are taken out of ``others``."""
    if isinstance(bound, list | tuple) or clipping == "per_layer":
        raise UsageError("Bounds per layer have no counterpart: give one max_grad_norm for the norm of all parameters.")
    if clipping == "flat":
        return find_method("dpsgd", {"bound": bound})
    if clipping != "adaptive":
        raise UsageError(f"clipping={clipping!r} has no counterpart: 'flat' and 'adaptive' have.")
    asked = [rename(others.pop(name), bound) for name, rename in _ADAPTIVE.items() if name in others]
    return find_method("bounded_adaptive", {"bound": bound, **dict(asked)})


def refuse_others(others: Mapping[str, Any]) -> None:
    """Raise for arguments that would change what is accounted, and for unknown ones."""
    usual = {"batch_first": True, "poisson_sampling": True, "loss_reduction": "mean", "wrap_model": True}
    why = {
        "batch_first": "the first dimension of every tensor is the batch; inside the model a layer may do otherwise.",
        "poisson_sampling": "only Poisson sampling is what the accountant counts.",
        "loss_reduction": "the sum of gradients is divided by the expected batch size; multiply lr by it for a sum.",
        "wrap_model": "the loop calls the returned model; the one you passed stays as it is.",
    }
    for name, value in others.items():
        if name not in usual:
            raise UsageError(f"The argument {name!r} has no counterpart: leave it out. Nothing was spent.")
        if value != usual[name]:
            raise UsageError(f"{name}={value!r} cannot be mapped: {why[name]} Nothing was spent.")


def per_record(criterion: Any) -> Loss:
    """Return the criterion with one value per record."""
    if criterion is None:
        return nn.CrossEntropyLoss(reduction="none")
    if isinstance(criterion, _Loss):
        single = copy.copy(criterion)
        single.reduction = "none"
        return single
    named = inspect.isfunction(criterion) and "reduction" in inspect.signature(criterion).parameters
    loss: Loss = partial(criterion, reduction="none") if named else criterion
    return loss
