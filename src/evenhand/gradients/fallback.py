"""Exact per-record gradients of any model: vmap over records in chunks, or one record at a time where vmap cannot.

Used for the whole model as soon as one trainable parameter is not served by a kernel. Each record goes through the
model as a batch of one, so its gradient cannot depend on the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenhand.errors import EvenhandError, UsageError
from evenhand.gradients.blocks import Blocks
from evenhand.gradients.measuring import chunks, working_dtype
from evenhand.gradients.precision import full, now
from evenhand.gradients.randomness import RandomState
from evenhand.gradients.records import LossFn, WithLoss, batch_size, call_with, take
from evenhand.gradients.reference import reference, refuse_held, row_norms
from evenhand.gradients.rooms import KEPT_BYTES

Compute: TypeAlias = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
CHUNK = 1 << 24
"""Gradient elements instantiated at a time."""
DOUBLED = 1 << 20
"""Gradient elements in float64 at a time."""


def vectorised(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of each record by ``vmap(grad)``; random layers draw separately for every record.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> vectorised(model, lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.arange(3.0))[1]["weight"][:, 0, 0]
    tensor([0., 1., 2.])
    """
    both = WithLoss(model, loss_fn)
    parameters = {WithLoss.PREFIX + n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    leaves, spec = tree_flatten((inputs, targets))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    mapped = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def one(values: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for place, row in zip(mapped, rows, strict=True):
            filled[place] = row.unsqueeze(0)
        inputs, targets = tree_unflatten(filled, spec)
        return call_with(both, values, inputs, targets).squeeze(0)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        gradients, loss = vmap(grad_and_value(one), in_dims=(None, 0), randomness="different")(
            parameters, [leaves[i] for i in mapped]
        )
    refuse_held(loss, model)
    return loss.detach(), {name.removeprefix(WithLoss.PREFIX): rows for name, rows in gradients.items()}


class Instances:
    """The gradients of some records, instantiated chunk by chunk: kept while they fit, otherwise computed again."""

    def __init__(self, model: nn.Module, compute: Compute, inputs: Any, targets: Any):
        self._compute, self._inputs, self._targets, self._model = compute, inputs, targets, model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._versions = [p._version for p in self._parameters]
        self._precision = now()
        per_row = sum(p.numel() for p in self._parameters)
        self._chunks: list[tuple[slice, RandomState, dict[str, Tensor] | None]] = []
        loss, norm, held = [], [], 0
        for rows in chunks(batch_size(inputs, targets), per_row, CHUNK):
            state = RandomState(model)
            values, gradients = compute(take(inputs, rows), take(targets, rows))
            gradients = {name: grad.to(working_dtype(grad.dtype)) for name, grad in gradients.items()}
            held += sum(g.numel() * g.element_size() for g in gradients.values())
            self._chunks.append((rows, state, gradients if held <= KEPT_BYTES else None))
            loss.append(values)
            norm.append(row_norms(gradients))
        self.loss, self.norm = torch.cat(loss), torch.cat(norm)

    def weighted_sum(
        self, weights: Tensor, usable: Tensor | None, blocks: Blocks | None = None, last: bool = False
    ) -> dict[str, Tensor]:
        """Return ``sum_i weights_i g_i`` in float64 over the rows where ``usable`` is true (None: everywhere).

        Other rows are not touched. In float64 no blocks are needed. What is kept by chunk goes with the pass, ``last``
        or not.
        """
        usable = torch.ones_like(self.norm, dtype=torch.bool) if usable is None else usable
        total: dict[str, Tensor] = {}
        for rows, state, gradients in self._chunks:
            index = usable[rows].nonzero().squeeze(1)
            if not len(index):
                continue
            for name, grad in (gradients or self._again(rows, state)).items():
                with full():
                    part = _summed(weights[rows][index].double(), grad, index).view(grad.shape[1:])
                total[name] = total[name] + part if name in total else part
        return total

    def _again(self, rows: slice, state: RandomState) -> dict[str, Tensor]:
        if [p._version for p in self._parameters] != self._versions:
            raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")
        now = RandomState(self._model)
        state.restore()
        try:
            with self._precision():
                gradients = self._compute(take(self._inputs, rows), take(self._targets, rows))[1]
            return {name: grad.to(working_dtype(grad.dtype)) for name, grad in gradients.items()}
        finally:
            now.restore()


def _summed(weights: Tensor, gradients: Tensor, index: Tensor) -> Tensor:
    """Return the weighted sum of some rows in float64, with a few of them at a time in that precision."""
    total = gradients.new_zeros(gradients[0].numel(), dtype=torch.float64)
    for part in chunks(len(index), gradients[0].numel(), DOUBLED):
        total += weights[part] @ gradients[index[part]].reshape(len(index[part]), -1).double()
    return total


class Fallback:
    """Per-record gradients of one model, vectorised if its operators allow it; the decision is remembered."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        self._model, self._loss_fn = model, loss_fn
        self._vectorise = True

    def run(self, inputs: Any, targets: Any) -> Instances:
        """Gradients of all records of a batch."""
        state = RandomState(self._model)
        if self._vectorise:
            try:
                return self._instances(vectorised, inputs, targets)
            except EvenhandError:
                raise
            except Exception:  # vmap refuses data-dependent control flow and some operators; the loop takes anything
                self._vectorise = False
                state.restore()
        return self._instances(reference, inputs, targets)

    def _instances(self, method: Callable[..., Any], inputs: Any, targets: Any) -> Instances:
        return Instances(self._model, lambda x, y: method(self._model, self._loss_fn, x, y), inputs, targets)
