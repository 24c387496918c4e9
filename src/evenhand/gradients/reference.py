"""Per-record gradients the slow and obvious way: each record alone through plain autograd.

The tests hold the engine to it, the probe compares with it, and rows that float32 cannot carry are computed by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from evenhand.gradients.kernels import row_squares
from evenhand.gradients.records import LossFn, WithLoss, batch_size, cast, take


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
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    tensors = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    if dtype is not None:
        tensors, inputs, targets = cast(tensors, dtype), cast(inputs, dtype), cast(targets, dtype)
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    state = {WithLoss.PREFIX + name: t for name, t in {**tensors, **leaves}.items()}
    both = WithLoss(model, loss_fn)
    values: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(batch_size(inputs, targets)):
        with torch.enable_grad():
            value = functional_call(both, state, (take(inputs, slice(i, i + 1)), take(targets, slice(i, i + 1))))
        values.append(value.detach())
        for name, grad in zip(names, _gradients(value, list(leaves.values())), strict=True):
            rows[name].append(grad)
    return torch.cat(values), {name: torch.stack(grads) for name, grads in rows.items()}


def precise_reference(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """`reference` in float64, or in the model's own precision if its code insists on that.

    >>> precise_reference(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.ones(3))[0].dtype
    torch.float64
    """
    try:
        return reference(model, loss_fn, inputs, targets, torch.float64)
    except RuntimeError:
        return reference(model, loss_fn, inputs, targets)


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
    norms = torch.stack([row_squares(rows) for rows in gradients.values()]).sum(0).sqrt_()
    odd = ~torch.isfinite(norms) | (norms < 1e-150)
    if bool(odd.any()):
        flat = torch.cat([rows[odd].flatten(1).double() for rows in gradients.values()], dim=1)
        scale = flat.abs().amax(1).clamp(min=torch.finfo(torch.float64).tiny)
        norms[odd] = scale * torch.linalg.vector_norm(flat / scale.unsqueeze(1), dim=1)
    return norms
