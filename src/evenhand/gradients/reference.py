"""Per-record gradients the slow and obvious way: each record alone through plain autograd.

The tests hold the engine to it, the probe compares with it, and rows that float32 cannot carry are computed by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.measuring import ROW_LIMIT, CarefulGauge
from evenhand.gradients.records import LossFn, WithLoss, batch_size, call, call_with, cast, losses, take

OneByOne: TypeAlias = Iterator[tuple[Tensor, dict[str, Tensor]]]
"""Loss, shape (1,), and gradient by parameter name of one record after the other."""


def reference(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, dtype: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each record and its gradient by parameter name, shape (B, *parameter), in ``dtype`` if given.

    Every record goes through the model as a batch of one, so its gradient cannot depend on the others.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> loss, gradients = reference(model, lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.arange(3.0))
    >>> gradients["weight"][:, 0, 0]
    tensor([0., 1., 2.])
    """
    return _stacked(one_by_one(model, loss_fn, inputs, targets, dtype))


def _stacked(records: OneByOne) -> tuple[Tensor, dict[str, Tensor]]:
    values, rows = zip(*records, strict=True)
    return torch.cat(values), {name: torch.stack([row.pop(name) for row in rows]) for name in list(rows[0])}


def one_by_one(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, dtype: torch.dtype | None = None
) -> OneByOne:
    """`reference` without holding the gradients of more than one record."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    tensors = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    if dtype is not None:
        tensors, inputs, targets = cast(tensors, dtype), cast(inputs, dtype), cast(targets, dtype)
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    state = {WithLoss.PREFIX + name: t for name, t in {**tensors, **leaves}.items()}
    both = WithLoss(model, loss_fn)
    for i in range(batch_size(inputs, targets)):
        with torch.enable_grad():
            value = call_with(both, state, take(inputs, slice(i, i + 1)), take(targets, slice(i, i + 1)))
        refuse_held(value, model)
        yield value.detach(), dict(zip(names, _gradients(value, list(leaves.values())), strict=True))


def precise_reference(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """`reference` in float64, or in the model's own precision if its code insists on that.

    >>> precise_reference(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.ones(3))[0].dtype
    torch.float64
    """
    try:
        return reference(model, loss_fn, inputs, targets, torch.float64)
    except RuntimeError:
        return reference(model, loss_fn, inputs, targets)


def norms_and_sum(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Norm of each record's gradient and the sum of all, as `precise_reference` has them, in little memory.

    >>> norm, total = norms_and_sum(nn.Linear(1, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 1), torch.ones(3))
    >>> norm.shape, total["bias"]
    (torch.Size([3]), tensor([3.], dtype=torch.float64))
    """
    try:
        return _measured(one_by_one(model, loss_fn, inputs, targets, torch.float64))
    except RuntimeError:
        return _measured(one_by_one(model, loss_fn, inputs, targets))


def _measured(records: OneByOne) -> tuple[Tensor, dict[str, Tensor]]:
    norms: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for _, gradient in records:
        norms.append(_norm(list(gradient.values())).reshape(1))
        for name in list(gradient):
            own = gradient.pop(name).double()
            total[name] = total[name].add_(own) if name in total else own.clone(memory_format=torch.contiguous_format)
    return torch.cat(norms), total


def plain_norms(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Tensor:
    """Norms of the records' gradients with the model's own parameters in place, so that others may use the model.

    >>> plain_norms(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.ones(3)).shape
    torch.Size([3])
    """
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms: list[Tensor] = []
    for i in range(batch_size(inputs, targets)):
        one = take(inputs, slice(i, i + 1)), take(targets, slice(i, i + 1))
        with torch.enable_grad():
            value = losses(loss_fn, call(model, one[0]), one[1], 1)
        norms.append(_norm(_gradients(value, list(own.values()))).reshape(1))
    return torch.cat(norms)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Their length together, to a few digits: with few operations in the middle of the range, else with care."""
    norm: Tensor = torch.stack(torch._foreach_norm(gradients)).double().norm()
    if 1 / ROW_LIMIT <= norm.item() <= ROW_LIMIT:
        return norm
    return row_norms({str(i): gradient.unsqueeze(0) for i, gradient in enumerate(gradients)})


def refuse_held(value: Tensor, model: nn.Module) -> None:
    """Raise if ``value`` still depends on the model's own parameters although others were put in their place.

    >>> model = nn.Linear(1, 1)
    >>> refuse_held(model.weight.sum(), model)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenhand.errors.UnsupportedModelError: the parameter 'weight' is also reached past the model's modules ...
    """
    if not value.requires_grad:
        return
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value.sum(), list(own.values()), allow_unused=True, retain_graph=True)
    for name, gradient in zip(own, found, strict=True):
        if gradient is not None:
            raise UnsupportedModelError(
                f"the parameter {name!r} is also reached past the model's modules (kept in a list, a module that is "
                "not registered, or the loss), where its gradient per record cannot be followed; reach it through the "
                "model"
            )


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    dense = (grad if grad is None or not grad.is_sparse else grad.to_dense() for grad in grads)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(dense, leaves, strict=True)]


def row_norms(gradients: dict[str, Tensor]) -> Tensor:
    """Norm of each record's gradient over all parameters, float64, finite whenever the gradient is.

    >>> row_norms({"a": torch.tensor([[3e300], [1.0]], dtype=torch.float64), "b": torch.zeros(2, 1)}).tolist()
    [3e+300, 1.0]
    """
    measure = CarefulGauge()
    norms: Tensor = torch.linalg.vector_norm(torch.stack([measure(rows) for rows in gradients.values()]), dim=0)
    odd = ~torch.isfinite(norms) | (norms < 1e-150)
    if bool(odd.any()):
        flat = torch.cat([rows[odd].reshape(int(odd.sum()), -1).double() for rows in gradients.values()], dim=1)
        scale = flat.abs().amax(1).clamp(min=torch.finfo(torch.float64).tiny)
        norms[odd] = scale * torch.linalg.vector_norm(flat / scale.unsqueeze(1), dim=1)
    return norms
