"""Exact gradients of each record for any model: one record at a time, or by vmap over records.

Each record goes through the model as a batch of one, so its gradient cannot depend on the others. One record at a time
(`reference`) is the slow and obvious way: the tests hold the engine to it, the probe compares with it, and rows that
float32 cannot carry are computed by it. `Fallback` serves the whole model as soon as one trainable parameter is not
served by a kernel.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenhand.errors import EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients.batch_utils import LossFn, WithLoss, batch_size, call, call_with, cast, losses, take
from evenhand.gradients.memory import KEPT_BYTES
from evenhand.gradients.pass_context import RandomState, full, now
from evenhand.gradients.record_blocks import Blocks
from evenhand.gradients.row_norms import ROW_LIMIT, CarefulRowNorms, chunks, numbers, working_dtype

OneByOne: TypeAlias = Iterator[tuple[Tensor, dict[str, Tensor]]]
"""Loss, shape (1,), and gradient by parameter name of one record after the other."""


def reference(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, dtype: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss of each record and its gradient by parameter name, shape (B, *parameter), in ``dtype`` if given.

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
    """Yield what `reference` gives, without holding the gradients of more than one record."""
    for value, leaves in _losses(model, loss_fn, inputs, targets, dtype):
        yield value.detach(), dict(zip(leaves, _gradients(value, list(leaves.values())), strict=True))


def _losses(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, dtype: torch.dtype | None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the loss of each record, shape (1,), and the leaves by name that stand in for the parameters."""
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
        yield value, leaves


def precise_reference(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `reference` in float64, or in the model's own precision if its code insists on that.

    >>> precise_reference(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.ones(3))[0].dtype
    torch.float64
    """
    try:
        return reference(model, loss_fn, inputs, targets, torch.float64)
    except RuntimeError:
        return reference(model, loss_fn, inputs, targets)


def norms_and_folds(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, seeds: Mapping[str, int]
) -> tuple[Tensor, dict[str, Fold]]:
    """Return norm of each record's gradient, as `precise_reference` has it, and the fold of the sum of all, by name.

    The gradient of one parameter is there at a time. Folds are made for the names that have a seed, see `folded`.

    >>> one = lambda out, y: out[:, 0] * y
    >>> norm, folds = norms_and_folds(nn.Linear(1, 1), one, torch.ones(3, 1), torch.ones(3), {"bias": 0})
    >>> norm.shape, folds
    (torch.Size([3]), {'bias': array([3.])})
    """
    try:
        return _folded(_losses(model, loss_fn, inputs, targets, torch.float64), seeds)
    except RuntimeError:
        return _folded(_losses(model, loss_fn, inputs, targets, None), seeds)


def _folded(
    records: Iterator[tuple[Tensor, dict[str, Tensor]]], seeds: Mapping[str, int]
) -> tuple[Tensor, dict[str, Fold]]:
    norms: list[Tensor] = []
    folds: dict[str, Fold] = {}
    lengths: list[float] = []

    def use(name: str, gradient: Tensor) -> None:
        if gradient.numel():
            lengths.append(float(_norm([gradient])))
        if name in seeds:
            fold = fold_of(gradient, seeds[name])
            folds[name] = folds[name] + fold if name in folds else fold

    for value, leaves in records:
        lengths.clear()
        if value.requires_grad:
            each_gradient(value.sum(), leaves, use)
        norms.append(value.new_tensor([math.hypot(*lengths)], dtype=torch.float64))
    return torch.cat(norms), folds


def plain_norms(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Tensor:
    """Return gradient norms with the model's own parameters in place, so that others may use the model.

    >>> plain_norms(nn.Linear(2, 1), lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.ones(3)).shape
    torch.Size([3])
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms: list[Tensor] = []
    for i in range(batch_size(inputs, targets)):
        one = take(inputs, slice(i, i + 1)), take(targets, slice(i, i + 1))
        with torch.enable_grad():
            value = losses(loss_fn, call(model, one[0]), one[1], 1)
        norms.append(_norm(_gradients(value, list(parameters.values()))).reshape(1))
    return torch.cat(norms)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return their joint length to a few digits: with few operations in the middle of the range, else with care."""
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
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True, retain_graph=True)
    for name, gradient in zip(parameters, gradients, strict=True):
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
    """Return norm of each record's gradient over all parameters, float64, finite whenever the gradient is.

    >>> row_norms({"a": torch.tensor([[3e300], [1.0]], dtype=torch.float64), "b": torch.zeros(2, 1)}).tolist()
    [3e+300, 1.0]
    """
    measure = CarefulRowNorms()
    norms: Tensor = torch.linalg.vector_norm(torch.stack([measure(rows) for rows in gradients.values()]), dim=0)
    odd = ~torch.isfinite(norms) | (norms < 1e-150)
    if bool(odd.any()):
        flat = torch.cat([rows[odd].reshape(int(odd.sum()), -1).double() for rows in gradients.values()], dim=1)
        scale = flat.abs().amax(1).clamp(min=torch.finfo(torch.float64).tiny)
        norms[odd] = scale * torch.linalg.vector_norm(flat / scale.unsqueeze(1), dim=1)
    return norms


Compute: TypeAlias = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
CHUNK = 1 << 24
"""Gradient elements instantiated at a time."""
DOUBLED = 1 << 20
"""Gradient elements in float64 at a time."""


def vectorised(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradient of each record by ``vmap(grad)``; random layers draw separately for every record.

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


class HeldGradients:
    """The gradients of some records, instantiated chunk by chunk: kept while they fit, otherwise computed again."""

    def __init__(self, model: nn.Module, compute: Compute, inputs: Any, targets: Any):
        self._compute, self._inputs, self._targets, self._model = compute, inputs, targets, model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._versions = [p._version for p in self._parameters]
        self._precision = now()
        per_row = sum(p.numel() for p in self._parameters)
        self._chunks: list[tuple[slice, RandomState, dict[str, Tensor] | None]] = []
        loss, norm, nbytes = [], [], 0
        for rows in chunks(batch_size(inputs, targets), per_row, CHUNK):
            state = RandomState(model)
            values, gradients = compute(take(inputs, rows), take(targets, rows))
            gradients = {name: grad.to(working_dtype(grad.dtype)) for name, grad in gradients.items()}
            nbytes += sum(g.numel() * g.element_size() for g in gradients.values())
            self._chunks.append((rows, state, gradients if nbytes <= KEPT_BYTES else None))
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
        self.vectorises = True

    def run(self, inputs: Any, targets: Any) -> HeldGradients:
        """Return gradients of all records of a batch."""
        state = RandomState(self._model)
        if self.vectorises:
            try:
                return self._instances(vectorised, inputs, targets)
            except EvenhandError:
                raise
            except Exception:  # vmap refuses data-dependent control flow and some operators; the loop takes anything
                self.vectorises = False
                state.restore()
        return self._instances(reference, inputs, targets)

    def _instances(self, method: Callable[..., Any], inputs: Any, targets: Any) -> HeldGradients:
        return HeldGradients(self._model, lambda x, y: method(self._model, self._loss_fn, x, y), inputs, targets)


WIDTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
"""Numbers that stand for a longer tensor, one of these; shorter ones stay as they are.

Primes, since layers are often as wide as a power of two: a column of a matrix would fall on few of so many numbers,
where it could cancel.
"""
PIECE = 1 << 16
"""Numbers that are folded at a time, at most; of a small tensor an eighth."""
Fold: TypeAlias = NDArray[np.float64]
_NOTHING = np.zeros(1)


def folded(values: Tensor, seed: int) -> tuple[Fold, Fold]:
    """Return sums of the numbers with random signs, and sums that mark places that are not finite (counted as 0).

    The fold of a sum is the sum of the folds. Its length is that of the values, give or take some 4 %, whatever they
    are: the signs are independent. So the fold of a difference tells how large that is.

    >>> one, other = torch.randn(2, 50_000)
    >>> length = np.linalg.norm(folded(one, 7)[0] - folded(other, 7)[0]) / float((one - other).norm())
    >>> bool(0.8 < length < 1.2)
    True
    """
    flat = values.detach().reshape(-1)
    every = numbers(flat if flat.dtype in (torch.float32, torch.float64) else flat.double())
    count, draw = len(every), np.random.default_rng(seed)
    width = int(draw.choice(WIDTHS))
    total, odd = np.zeros((2, min(width, count)))
    step = max(1, min(PIECE, count // 8) // width) * width
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, step):
            piece = every[start : start + step].astype(np.float64)
            signs = _signs(draw, len(piece)) if count > width else np.ones(count)
            finite = np.isfinite(piece)
            if not finite.all():
                _add(odd, (2.0 + signs) * ~finite)  # of one sign, so that no two of them make none
                piece[~finite] = 0.0
            _add(total, signs * piece)
    return total, odd


def fold_of(values: Tensor, seed: int) -> Fold:
    """Return the fold of finite numbers; if one is not finite, none of it is a number.

    >>> fold_of(torch.tensor([1.0, torch.inf]), 0)
    array([nan, nan])
    """
    total, odd = folded(values, seed)
    return np.full_like(total, np.nan) if odd.any() else total


def _signs(draw: np.random.Generator, count: int) -> Fold:
    bits = np.unpackbits(np.frombuffer(draw.bytes(-(-count // 8)), np.uint8))[:count]
    return bits.astype(np.float64) * 2.0 - 1.0


def _add(total: Fold, signed: Fold) -> None:
    """Add every number at its place modulo the width; pieces begin at the first."""
    whole = len(signed) // len(total) * len(total)
    total += signed[:whole].reshape(-1, len(total)).sum(0)
    total[: len(signed) - whole] += signed[whole:]


def apart(some: Mapping[str, Fold], others: Mapping[str, Fold]) -> float:
    """Return the length of the difference over all names; what one of the two does not have is zero.

    >>> apart({"a": np.array([3.0]), "b": np.array([1.0])}, {"b": np.array([-3.0])})
    5.0
    """
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = [(some.get(name, _NOTHING), others.get(name, _NOTHING)) for name in {**some, **others}]
        return math.hypot(*[float(np.linalg.norm(one - other)) for one, other in pairs])


def each_gradient(loss: Tensor, leaves: Mapping[str, Tensor], use: Callable[[str, Tensor], None]) -> None:
    """Hand the gradient of every leaf that the loss depends on to ``use``, dense, and let go of it at once.

    >>> leaves = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(1, requires_grad=True)}
    >>> each_gradient((leaves["a"] * 3).sum(), leaves, lambda name, gradient: print(name, gradient))
    a tensor([3., 3.])
    """

    def hand_over(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            use(name, gradient.to_dense() if gradient.is_sparse else gradient)

    handles = [_after(leaf, partial(hand_over, name)) for name, leaf in leaves.items()]
    try:
        loss.backward(inputs=list(leaves.values()))  # type: ignore[no-untyped-call]
    finally:
        for handle, leaf in zip(handles, leaves.values(), strict=True):
            handle.remove()
            leaf.grad = None


def _after(leaf: Tensor, use: Callable[[Tensor], None]) -> Any:
    return leaf.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]
