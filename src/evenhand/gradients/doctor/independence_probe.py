"""The independence probe: before any budget is spent, is a record's gradient really its own?

A bound on a record's contribution means nothing if the record also changes what the others contribute: through batch
statistics, a loss that averages over the batch, or state that forward writes from the data. Which module is to blame is
found by its outputs for a record alone, beside those for it among others.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from evenhand.errors import EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients.batch_utils import (
    LossFn,
    WithLoss,
    as_plain,
    batch_size,
    buffers_restored,
    call,
    call_with,
    cast,
    finite_rows,
    join,
    losses,
    take,
)
from evenhand.gradients.doctor.python_state import PlainState
from evenhand.gradients.doctor.refusals import refuse, refuse_wrapped
from evenhand.gradients.engine import Engine
from evenhand.gradients.model_layout import modules_of
from evenhand.gradients.pass_context import exclusive, means, preserved
from evenhand.gradients.record_by_record import Fold, apart, each_gradient, folded, norms_and_folds
from evenhand.gradients.self_check import norm_floor


@dataclass(frozen=True)
class _Seen:
    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def first_coupled_module(model: nn.Module, alone: Any, company: Any, place: int, tolerance: float) -> str | None:
    """Return the name of the first module whose output for a record differs in company although its input does not.

    If already the input differs, records were mixed by the code of the module around it, and that one is named. None
    if no output differs.

    >>> class Centred(nn.Module):
    ...     def forward(self, x): return x - x.mean(0)
    >>> x = torch.eye(2)
    >>> first_coupled_module(nn.Sequential(nn.Linear(2, 2), Centred()), x[:1], x, 0, 1e-3)
    "'1' (Centred)"
    """
    one, many = _watch(model, alone, 0), _watch(model, company, place)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for a, b in zip(one, many, strict=False):
        if a.name != b.name:
            return _title(a.name, a.kind)
        if _differ(a.outputs, b.outputs, tolerance):
            name = a.name if a.name == "" or not _differ(a.inputs, b.inputs, tolerance) else a.name.rpartition(".")[0]
            return _title(name, kinds[name])
    return None


def _title(name: str, kind: str) -> str:
    return f"{name!r} ({kind})" if name else f"the model's own forward ({kind})"


def _watch(model: nn.Module, inputs: Any, place: int) -> list[_Seen]:
    """Return what each module took in and gave out for the record at ``place``, in the order of completion."""
    size = batch_size(inputs, None)
    seen: list[_Seen] = []

    def rows(tree: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.dim() and t.shape[0] % size == 0]
        return [t.detach().clone().reshape(size, -1)[place] for t in tensors if t.shape[0]]

    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            seen.append(_Seen(name, type(module).__name__, rows((args, kwargs)), rows(output)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with preserved(model):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _differ(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
    if [t.shape for t in a] != [t.shape for t in b]:
        return True
    floats = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return any(bool(torch.norm(x - y) > tolerance * (torch.norm(x) + 1e-6)) for x, y in floats)


RECORDS = 4
COUPLING = 1e-6
ENGINE = 1e-3
Found: TypeAlias = dict[str, tuple[Fold, Fold]]
"""Folds of a record's loss, which has no name, and of its gradient by the parameter's."""


def probe(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> None:
    """Raise `UnsupportedModelError` unless each record's loss and gradient alone equal those among others.

    The first few records are tried alone, in the given company, and in another company; random layers are replaced by
    their means meanwhile. The message names the first module whose output for a record depends on the others, or the
    loss. State that forward writes from the data is refused by the buffer's name, a label outside the model's outputs
    as `DataError`. Last, the engine is compared with plain autograd. Model, mode, buffers and global random state are
    left as they were.

    This falsifies; it cannot prove independence for inputs it has not seen.

    >>> mean_free = lambda out, y: (out - out.mean(0))[:, 0] * y
    >>> probe(nn.Linear(2, 1), mean_free, torch.eye(2), torch.ones(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenhand.errors.UnsupportedModelError: the loss of a record depends on the other records of the batch...
    """
    inputs = as_plain(inputs)
    rows = finite_rows(inputs, targets)[:RECORDS]
    size = len(rows)
    if size == 0:
        raise UsageError("the probe needs at least one record whose values are all finite")
    inputs, targets = take(inputs, rows), take(targets, rows)
    refuse_wrapped(model)
    modules = modules_of(model)
    before = PlainState({"model": model, "loss": loss_fn}).snapshot()
    with (
        exclusive(frozenset(id(module) for _, module in modules)),
        torch.enable_grad(),
        preserved(model),
        buffers_restored(model),
        means(),
    ):
        refuse(modules)
        _check_state(model, inputs, size)
        outputs = call(model, inputs)
        if isinstance(outputs, Tensor) and (outputs.dim() == 0 or outputs.shape[0] != size):
            raise UnsupportedModelError(
                f"the model's output has shape {tuple(outputs.shape)} for {size} records; its first dimension must be "
                "the batch"
            )
        losses(loss_fn, outputs, targets, size)
        _check_company(model, loss_fn, inputs, targets, size)
        _check_engine(model, loss_fn, inputs, targets)
        before.restore()


def _try(model: nn.Module, record: Any) -> None:
    """Run the model on one record; refuse a model that cannot take its shape. What torch says may hold data values."""
    try:
        call(model, record)
    except (torch.OutOfMemoryError, EvenhandError):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise UnsupportedModelError(_not_taken(model, record, error)) from None


def _not_taken(model: nn.Module, record: Any, error: Exception) -> str:
    """Return why a model did not take a record, as far as shapes and kinds of numbers tell."""
    tensors = [leaf for leaf in tree_leaves(record) if isinstance(leaf, Tensor)]
    kinds = {leaf.dtype for leaf in tensors if leaf.is_floating_point()}
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    shapes = ", ".join(str(tuple(leaf.shape[1:])) for leaf in tensors)
    if tensors and own and not kinds and isinstance(error, RuntimeError):
        return (
            f"the inputs are {', '.join(sorted({str(leaf.dtype) for leaf in tensors}))} and the model's parameters "
            f"{', '.join(sorted(map(str, own)))}: if they are numbers and no tokens, pass inputs.float() or "
            "X.astype('float32')"
        )
    if kinds and own and not kinds & own:
        (first, *_), (wanted, *_) = sorted(map(str, kinds)), sorted(map(str, own))
        return (
            f"the model's parameters are {wanted} and its inputs {first}: pass inputs of that kind, for example "
            "X.astype('float32') or inputs.float(), or a model of the other kind, model.double()"
        )
    if isinstance(error, IndexError):
        return (
            f"a number among the inputs (of shape {shapes} a record) is beyond a table of the model, such as a token "
            "that an Embedding has no row for: give it more rows (num_embeddings, vocab_size), or mend the tokens"
        )
    return (
        f"the model cannot take inputs of shape {shapes} a record ({type(error).__name__}): give its first layer that "
        "many inputs, or reshape the inputs; made-up rows of this shape show what torch says"
    )


def _check_state(model: nn.Module, inputs: Any, size: int) -> None:
    """Refuse buffers and parameters that forward sets to something that depends on the records."""
    names = [name for name, _ in _state(model)]
    first: dict[str, Tensor] = {}
    for rows in [take(inputs, slice(i, i + 1)) for i in range(size)] + [take(_altered(inputs), slice(0, 1))]:
        with buffers_restored(model):
            _try(model, rows)
            after = dict(_state(model))
            first = first or {name: tensor.clone() for name, tensor in after.items()}
            changed = [name for name in names if name in after and not _same(after[name], first[name])]
        if changed:
            raise UnsupportedModelError(
                f"forward writes {changed[0]!r} from the data, which would be released without noise; use a layer "
                "that keeps no statistics of its inputs (such as nn.GroupNorm), or freeze the module with .eval()"
            )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def _altered(tree: Any) -> Any:
    """Return the records with other values where values are continuous."""
    return tree_map_only(Tensor, lambda leaf: leaf * 0.5 if leaf.is_floating_point() else leaf, tree)


def _company(tree: Any, i: int, size: int) -> Any:
    """Return record ``i`` at the end of a batch whose other records have another order and other values."""
    others = torch.tensor([j for j in reversed(range(size)) if j != i] or [i])
    changed, record = _altered(take(tree, others)), take(tree, slice(i, i + 1))
    flat, spec = tree_flatten(record)
    pairs = zip(tree_flatten(changed)[0], flat, strict=True)
    return tree_unflatten([join([a, b]) if isinstance(a, Tensor) else b for a, b in pairs], spec)


class _Precise:
    """Loss and gradient of one record of a batch, folded, in float64 where the model's code allows it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, dtype: torch.dtype | None):
        originals = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._dtype = dtype
        tensors = {name: _copied(t, dtype) for name, t in originals.items()}
        self._leaves = {n: tensors[n].requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        self._state = {WithLoss.PREFIX + name: t for name, t in tensors.items()}
        self._both = WithLoss(model, loss_fn)
        self._before = PlainState({"model": model, "loss": loss_fn}).snapshot()

    def __call__(self, inputs: Any, targets: Any, i: int, seed: int) -> Found:
        if self._dtype is not None:
            inputs, targets = cast(inputs, self._dtype), cast(targets, self._dtype)
        self._before.restore()
        with preserved(self._both.model):
            loss = call_with(self._both, self._state, inputs, targets)[i]
        folds = {"": folded(loss, seed)}
        if loss.requires_grad:
            each_gradient(loss, self._leaves, lambda name, gradient: folds.update({name: folded(gradient, seed)}))
        return folds


def _copied(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype, copy=True) if dtype is not None and tensor.is_floating_point() else tensor.clone()


def _check_company(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, size: int) -> None:
    precise, tolerance = _Precise(model, loss_fn, torch.float64), COUPLING
    try:
        precise(inputs, targets, 0, 0)
    except RuntimeError:  # code that insists on its own precision
        precise, tolerance = _Precise(model, loss_fn, None), ENGINE
    for i in range(size):
        alone = take(inputs, slice(i, i + 1)), take(targets, slice(i, i + 1))
        among = [((inputs, targets), i), ((_company(inputs, i, size), _company(targets, i, size)), max(size - 1, 1))]
        seed = secrets.randbits(64)
        expected = precise(alone[0], alone[1], 0, seed)
        for batch, place in among:
            if not _alike(expected, precise(batch[0], batch[1], place, seed), tolerance):
                culprit = first_coupled_module(model, alone[0], batch[0], place, ENGINE)
                raise UnsupportedModelError(_coupled(culprit))


def _coupled(culprit: str | None) -> str:
    if culprit is None:
        return (
            "the loss of a record depends on the other records of the batch; compute it per record (reduction='none', "
            "no mean, count or weight taken over the batch)"
        )
    return (
        f"the output of {culprit} for a record depends on the other records of the batch, so no bound on a record's "
        "gradient holds; normalise within the record (nn.GroupNorm, nn.LayerNorm) and keep statistics of the batch out"
    )


def _check_engine(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> None:
    """Compare the engine with plain autograd, record by record: catches kernels that compute something else."""
    before = PlainState({"model": model, "loss": loss_fn}).snapshot()
    result = Engine(model, loss_fn).run(inputs, targets)
    before.restore()
    norm = norms_and_folds(model, loss_fn, inputs, targets, {})[0]
    rows = torch.isfinite(norm) & torch.isfinite(result.norm)
    floor = norm_floor({name: p for name, p in model.named_parameters() if p.requires_grad})
    if bool(((result.norm - norm).abs() > ENGINE * norm + floor)[rows].any()):
        raise UnsupportedModelError(
            "the engine's gradient norms differ from plain autograd for a record alone; the model mixes records, or a "
            "kernel added with register_kernel is wrong"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two values are equal; not-a-number equals itself."""
    if a.shape != b.shape or torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _alike(some: Found, others: Found, tolerance: float) -> bool:
    """Return whether losses, and gradients over all parameters, are equal up to a relative error.

    What is not finite must be so at the same places.
    """
    if some.keys() != others.keys() or any((some[name][1] != others[name][1]).any() for name in some):
        return False
    for names in ([name for name in some if not name], [name for name in some if name]):
        first, second = ({name: folds[name][0] for name in names} for folds in (some, others))
        if not apart(first, second) <= tolerance * (apart({}, second) + 1e-6):
            return False
    return True
