"""A batch as records: its size, some of its rows, and one loss per record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from evenhand.errors import DataError, UnsupportedModelError, UsageError
from evenhand.model_io import Shared, concatenated, moved, of_one_width, picked, plain

LossFn: TypeAlias = Callable[[Any, Any], Tensor]
_COPIES: ContextVar[Mapping[int, Tensor]] = ContextVar("_COPIES", default=MappingProxyType({}))
"""Copies that are put back when the open contexts end, by the identity of the tensor that each is a copy of."""


def batch_size(inputs: Any, targets: Any) -> int:
    """Return number of records: the first dimension of every tensor in inputs and targets.

    >>> batch_size({"x": torch.zeros(3, 2), "flag": True}, torch.zeros(3))
    3
    """
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        first, second = inputs.shape, targets.shape
        if first and second and first[0] == second[0]:
            return first[0]
    tensors = [leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor)]
    sizes = {t.shape[0] if t.dim() else -1 for t in tensors}
    if len(sizes) != 1 or -1 in sizes:
        raise UsageError(
            "the first dimension of every tensor in inputs and targets must be the batch, and the same everywhere; "
            "declare what all records share (masks, positions): evenhand.gradients.Shared(tensor), in wrap shared={...}"
        )
    return sizes.pop()


def hollow(inputs: Any) -> bool:
    """Return whether an input is nothing for a kernel: without numbers (a sequence of length zero), or nested.

    >>> hollow(torch.zeros(3, 0, 2)), hollow((torch.zeros(3, 1), None))
    (True, False)
    """
    leaves = [inputs] if isinstance(inputs, Tensor) else tree_leaves(inputs)
    return any(isinstance(leaf, Tensor) and (leaf.is_nested or not leaf.numel()) for leaf in leaves)


def finite_rows(inputs: Any, targets: Any) -> Tensor:
    """Return numbers of the records whose values are all finite: any other row spoils a comparison, coupled or not.

    >>> finite_rows(torch.tensor([[1.0], [torch.nan]]), torch.ones(2))
    tensor([0])
    """
    good = torch.ones(batch_size(inputs, targets), dtype=torch.bool)
    for leaf in tree_leaves((inputs, targets)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(leaf):
            leaf = of_one_width(leaf) if leaf.is_nested else leaf
            good &= torch.isfinite(leaf).flatten(1).all(1).cpu() if leaf.dim() > 1 else torch.isfinite(leaf).cpu()
    return good.nonzero().squeeze(1)


def spoilt_rows(inputs: Any) -> Tensor | None:
    """Return a mask of the records with an input that is not finite, None if there is none.

    >>> spoilt_rows((torch.ones(2), None)), spoilt_rows({"x": torch.tensor([[1.0], [torch.inf]])})
    (None, tensor([False,  True]))
    """
    floating = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not any(leaf.is_nested or not math.isfinite(float(leaf.detach().sum())) for leaf in floating):
        return None
    rows = finite_rows(inputs, None)
    spoilt = torch.ones(batch_size(inputs, None), dtype=torch.bool).index_fill_(0, rows, False)
    return spoilt if bool(spoilt.any()) else None


def versions(tree: Any) -> list[int]:
    """Return how often each tensor was written in place.

    >>> x = torch.zeros(1)
    >>> before = versions((x, None)); before == versions((x.add_(1), None))
    False
    """
    leaves = [tree] if isinstance(tree, Tensor) else tree_leaves(tree)
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


def take(tree: Any, rows: Any) -> Any:
    """Return the structure with only some rows of every tensor.

    >>> take((torch.arange(4), None), slice(1, 3))
    (tensor([1, 2]), None)
    """
    return tree_map_only(Tensor, lambda leaf: picked(leaf, rows) if leaf.is_nested else leaf[rows], tree)


def join(leaves: Sequence[Tensor]) -> Tensor:
    """Return the rows of several tensors, one after the other.

    >>> join([torch.ones(1), torch.zeros(1)])
    tensor([1., 0.])
    """
    return concatenated(leaves) if leaves[0].is_nested else torch.cat(list(leaves))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return the structure with every floating tensor in ``dtype``.

    >>> cast(torch.ones(1), torch.float64).dtype
    torch.float64
    """

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, Shared):
            return moved(leaf, dtype)
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return tree_map_only((Tensor, Shared), converted, tree)


def as_plain(inputs: Any) -> Any:
    """Return inputs as a tensor, a tuple or a dict, see `model_io.plain`.

    >>> as_plain([1, 2])
    (1, 2)
    """
    return inputs if isinstance(inputs, Tensor) else plain(inputs)


def fitted(model: nn.Module, inputs: Any) -> Any:
    """Return plain inputs, the floating ones in the precision of a model that is all float16, bfloat16 or float64.

    Inputs of a float32 model, or of one with several precisions, stay as they are.

    Examples:
      >>> fitted(nn.Linear(1, 1).double(), torch.ones(1, 1)).dtype, fitted(nn.Linear(1, 1), torch.ones(1, 1)).dtype
      (torch.float64, torch.float32)
    """
    inputs = as_plain(inputs)
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(floating, torch.float32)
    if dtype == torch.float32 or (isinstance(inputs, Tensor) and inputs.dtype == dtype):
        return inputs
    return cast(inputs, dtype) if all(other == dtype for other in floating) else inputs


def arguments(inputs: Any, *, shared: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with: a tuple is its arguments, a Mapping its keyword arguments, else one argument.

    What all records share is taken out of its `Shared`, unless ``shared`` says that the model does that.

    >>> arguments({"x": 1, "flag": Shared(True)}), arguments((1, 2)), arguments(3)
    (((), {'x': 1, 'flag': True}), ((1, 2), {}), ((3,), {}))
    """
    inputs = as_plain(inputs)
    inputs = inputs if shared else unwrapped(inputs)
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def unwrapped(tree: Any) -> Any:
    """Return the structure with every `Shared` replaced by its value.

    >>> unwrapped({"flag": Shared(True)})
    {'flag': True}
    """
    return tree if isinstance(tree, Tensor) else tree_map_only(Shared, lambda leaf: leaf.value, tree)


def call(model: nn.Module, inputs: Any) -> Any:
    """Apply the model to a batch, see `arguments`; inputs of a half or double model are in its precision.

    >>> call(nn.Identity(), (torch.ones(1),))
    tensor([1.])
    """
    args, kwargs = arguments(fitted(model, inputs), shared=getattr(model, "takes_shared", False) is True)
    return model(*args, **kwargs)


def logits(outputs: Any) -> Tensor:
    """Return the scores among a model's outputs: the tensor itself, ``.logits``, or the first of a tuple.

    A loss that the model computed is never used: it is a mean over the batch, so no bound on one record would hold.

    Raises:
      UnsupportedModelError: there are no scores, or a loss of the model's own stands beside them.

    Examples:
      >>> logits({"logits": torch.zeros(2, 3), "hidden": None}).shape, logits((torch.ones(2), None)).shape
      (torch.Size([2, 3]), torch.Size([2]))
      >>> logits({"loss": torch.tensor(0.5)})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      evenhand.errors.UnsupportedModelError: the model computed a loss of its own, ...
    """
    if isinstance(outputs, Tensor):
        return outputs
    given = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    scores = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if scores is None and isinstance(outputs, tuple | list) and outputs:
        scores = outputs[0]
    computed = given if scores is None or given is not None else scores
    if isinstance(computed, Tensor) and computed.dim() == 0:
        raise UnsupportedModelError(
            "the model computed a loss of its own, a mean over the batch that bounds no record's gradient: keep labels "
            "out of its inputs (name their column, label='labels'), so that it returns logits"
        )
    if not isinstance(scores, Tensor):
        raise UnsupportedModelError(
            f"the model returned a {type(outputs).__name__} without logits: return a tensor, an object or dict with "
            "logits, or a tuple whose first element they are; or pass a loss of your own that reads what it returns"
        )
    return scores


def reads_logits(loss: Any) -> bool:
    """Return whether a loss is given the logits: ours and torch's are; another function gets all that a model returns.

    Examples:
      >>> reads_logits(nn.CrossEntropyLoss(reduction="none")), reads_logits(lambda out, y: out.logits)
      (True, False)
    """
    return isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "reads_logits", False) is True


def apply_loss(loss_fn: LossFn, outputs: Any, targets: Any) -> Any:
    """Return the loss of a model's outputs: our losses and torch's are given the logits, see `logits`.

    >>> apply_loss(nn.MSELoss(reduction="none"), {"logits": torch.ones(1)}, torch.zeros(1))
    tensor([1.])
    """
    if isinstance(outputs, Tensor):
        return loss_fn(outputs, targets)
    if reads_logits(loss_fn):
        return loss_fn(logits(outputs), targets)
    try:
        return loss_fn(outputs, targets)
    except (AttributeError, TypeError):
        pass  # raised outside, so that the original message, which may hold values, is not attached
    raise UnsupportedModelError(
        f"the model returned a {type(outputs).__name__} and the loss cannot take it: in a loss of your own read "
        "outputs.logits, or pass a loss of torch or evenhand.losses, which are given the logits"
    )


def losses(loss_fn: LossFn, outputs: Any, targets: Any, size: int) -> Tensor:
    """Return one loss per record, checked; a label outside the model's outputs is reported without its value.

    >>> losses(nn.CrossEntropyLoss(reduction="none"), torch.zeros(2, 2), torch.tensor([0, 1]), 2)
    tensor([0.6931, 0.6931])
    """
    value: Any = None
    outside = False
    try:
        value = apply_loss(loss_fn, outputs, targets)
    except IndexError:
        outside = True
    if outside:  # raised here, so that the original message, which names the label, is not attached
        raise DataError(
            "a label does not fit the model's outputs: class labels must be 0 .. C-1 for a model with C outputs"
        )
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size == value.numel():
        value = value.reshape(size)  # one output a record, as of (B, 1) beside targets of (B, 1)
    if isinstance(value, Tensor) and size > 1 and value.shape == (size, size):
        raise UnsupportedModelError(
            f"the loss of {size} records has shape {(size, size)}: outputs and targets differ in shape, such as (B, 1) "
            "and (B,), so that torch compared every record with every other. Give targets the shape of the outputs: "
            "targets.unsqueeze(1)"
        )
    if not isinstance(value, Tensor) or value.shape != (size,) or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedModelError(
            f"loss_fn must return one loss per record, but for {size} records returned {got}; use reduction='none' "
            "(and average over what lies within a record), for example torch.nn.CrossEntropyLoss(reduction='none')"
        )
    return value


def without_values(error: Exception) -> DataError:
    """Return an error of the model or the loss without its message, which may contain labels or other data."""
    return DataError(
        f"The model or the loss failed on a batch ({type(error).__name__}); the message is withheld since it may "
        "contain data values. Check that every label has an output and every row the same shape; made-up rows show it."
    )


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and parameters on exit: the objects that they were, with the values that they had.

    One copy serves contexts within each other, as long as nothing was written in between.

    >>> model = nn.BatchNorm1d(1)
    >>> with buffers_restored(model): output = model(torch.randn(4, 1))
    >>> model.running_mean
    tensor([0.])
    """
    outer = _COPIES.get()
    copies = [(*place, _copy(place[2], outer.get(id(place[2])))) for place in _places(model) if place[2] is not None]
    token = _COPIES.set({**outer, **{id(tensor): copy for _, _, tensor, copy in copies}})
    try:
        yield
    finally:
        with torch.no_grad():
            for places, name, tensor, copy in copies:
                places[name] = tensor
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)
        _COPIES.reset(token)


def _copy(tensor: Tensor, known: Tensor | None) -> Tensor:
    """Return the known copy if it still is one, else a new one."""
    alike = known is not None and (known.dtype, known.device) == (tensor.dtype, tensor.device)
    return known if known is not None and alike and torch.equal(known, tensor) else tensor.detach().clone()


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return where the model keeps its buffers and parameters, and what is there."""
    tables = [table for module in model.modules() for table in (module._buffers, module._parameters)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items()]


class WithLoss(nn.Module):
    """Model and loss as one module, so that a loss that reads the model's parameters sees the substituted ones."""

    PREFIX = "model."

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        """Return one loss per record."""
        return losses(self.loss_fn, call(self.model, inputs), targets, batch_size(inputs, targets))


def call_with(both: WithLoss, state: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
    """Return one loss per record with other tensors in place of the model's own, which are put back.

    torch's ``functional_call`` leaves the other tensors in a module that has two names.

    >>> both = WithLoss(nn.Linear(1, 1), lambda out, y: out[:, 0])
    >>> call_with(both, {"model.weight": torch.zeros(1, 1), "model.bias": torch.ones(1)}, torch.ones(2, 1), None)
    tensor([1., 1.])
    """
    originals = _places(both)
    try:
        loss: Tensor = functional_call(both, state, (inputs, targets))
        return loss
    finally:
        for places, name, tensor in originals:
            if places.get(name) is not tensor:
                places[name] = tensor
