"""The engine: one forward and one backward, exact for every model it accepts.

Layers with a kernel are served during the backward (``tape.py``, ``bookkeeping.py``). If any trainable parameter gets
past its kernel the whole model is differentiated record by record (``fallback.py``). Rows that float32 cannot carry are
computed again in float64 (``reference.py``). A row that is not finite even then contributes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients.bookkeeping import Bookkeeping
from evenhand.gradients.fallback import Fallback, Instances
from evenhand.gradients.kernels import ROW_LIMIT, within, working_dtype
from evenhand.gradients.locking import exclusive
from evenhand.gradients.randomness import RandomState, means, preserved
from evenhand.gradients.records import LossFn, batch_size, buffers_restored, call, losses, take
from evenhand.gradients.reference import precise_reference, reference, row_norms
from evenhand.gradients.refusals import refuse
from evenhand.gradients.structure import Modules, Trainable, modules_of, trainable_of
from evenhand.gradients.tape import Site, Tape, sites
from evenhand.types import Pass

LARGEST = torch.finfo(torch.float64).max


def per_sample(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Pass:
    """Per-record losses, gradient norms and, for weights chosen afterwards, the weighted gradient sum.

    ``inputs`` is a tensor, a tuple (arguments) or a dict (keyword arguments); the first dimension of every tensor is
    the batch. ``loss_fn(outputs, targets)`` gives one loss per record. For many steps keep an `Engine`.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> result = per_sample(model, lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.tensor([0.0, 1.0, 2.0]))
    >>> [round(n, 4) for n in result.norm.tolist()]
    [0.0, 1.4142, 2.8284]
    >>> result.weighted_sum(torch.tensor([1.0, 1.0, 0.5]))
    {'weight': tensor([[2., 2.]])}
    """
    return Engine(model, loss_fn).run(inputs, targets)


class Engine:
    """Per-record norms and weighted sums of one model and loss, batch after batch.

    What is known about the model is found on the first batch and remembered: which layers are served by kernels, and
    whether everything else needs the exact and slow way. Guards stay on for every batch. A trainable parameter that no
    batch has used so far is an error on the first batch it is missing from; one that an earlier batch used may be
    absent from a later batch, where its gradient is zero.

    Guarantee: norms and sums are those of the records' own gradients, to rounding; a model for which that cannot be had
    raises `UnsupportedModelError`. The model keeps no trace of the pass: no attribute, gradient, hook or changed mode.

    >>> engine = Engine(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> engine.run(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])).norm.shape
    torch.Size([4])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        self._model, self._loss_fn = model, loss_fn
        self._fallback = Fallback(model, loss_fn)
        self._served: dict[tuple[bool, tuple[str, ...]], bool] = {}
        self._used: set[str] = set()

    def run(self, inputs: Any, targets: Any) -> Pass:
        """One forward and one backward. ``loss`` and ``norm`` are float64 columns; sums have the parameters' dtype.

        An empty batch is an ordinary one: no rows, and sums of zero.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("gradients cannot be taken under torch.inference_mode(); leave that context first")
        size = batch_size(inputs, targets)
        modules = modules_of(self._model)
        with exclusive(modules), torch.enable_grad():
            refuse(modules)
            trainable = trainable_of(modules)
            if not trainable:
                raise UsageError("the model has no trainable parameter; call requires_grad_(True) on what is to learn")
            if size == 0:
                nothing = torch.zeros(0, dtype=torch.float64, device=next(iter(trainable.values())).device)
                return Pass(nothing, nothing.clone(), lambda weights: {name: _zero(p) for name, p in trainable.items()})
            raw = self._differentiate(modules, trainable, inputs, targets, size)
            return _Finished(self._model, self._loss_fn, trainable, raw, inputs, targets).result()

    def _differentiate(
        self, modules: Modules, trainable: Trainable, inputs: Any, targets: Any, size: int
    ) -> Bookkeeping | Instances:
        key = (self._model.training, tuple(trainable))
        if self._served.get(key, True):
            before = RandomState(self._model)
            served = sites(modules)
            verified = key in self._served or self._verify(trainable, served, inputs, targets, size)
            kept = self._taped(trainable, served if verified else [], inputs, targets, size)
            self._demand_use(trainable)
            if verified is not None:
                self._served[key] = kept is not None
            if kept is not None:
                return kept
            before.restore()
        return self._fallback.run(inputs, targets)

    def _taped(
        self, trainable: Trainable, served: list[Site], inputs: Any, targets: Any, size: int
    ) -> Bookkeeping | None:
        """Norms and sums by kernels, or None if a parameter was also used past them."""
        tape = Tape(size)
        with tape.recording(served):
            loss = losses(self._loss_fn, call(self._model, inputs), targets, size)
            tape.forward_done = True
            gradients: tuple[Tensor | None, ...] = (None,) * (len(trainable) + 1)
            if loss.requires_grad:
                wanted = [tape.anchor, *trainable.values()]
                gradients = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
        past = {name for name, gradient in zip(trainable, gradients[1:], strict=True) if gradient is not None}
        names = {id(p): name for name, p in trainable.items()}
        self._used |= past | {names[id(p)] for c in tape.calls for p in c.site.parameters.values()}
        if past or tape.bypassed:
            return None
        return Bookkeeping(loss.detach().double(), tape.calls, names)

    def _demand_use(self, trainable: Trainable) -> None:
        missing = sorted(set(trainable) - self._used)
        if missing:
            raise UnsupportedModelError(
                f"the loss does not depend on the trainable parameter {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + "; freeze what is not trained with requires_grad_(False)"
            )

    def _verify(self, trainable: Trainable, served: list[Site], inputs: Any, targets: Any, size: int) -> bool | None:
        """Whether the kernels agree with plain autograd on a few records, in two orders and another batch size.

        Kernels take the first dimension of a layer's input for the records in their order. A layer fed with
        (time, batch, features), or with records that the model has sorted, would pass for that by coincidence.
        None if a record that is not finite kept the comparison from telling.
        """
        coarse = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        tolerance = max(0.1 if coarse else 1e-3, *(16 * torch.finfo(p.dtype).eps for p in trainable.values()))
        floor = norm_floor(trainable)
        some, conclusive = torch.arange(2 if size == 3 else 3) % size, True
        with preserved(self._model), buffers_restored(self._model), means():
            for rows in (some, some.flip(0)):
                x, y = take(inputs, rows), take(targets, rows)
                kept = self._taped(trainable, served, x, y, len(rows))
                if kept is None:
                    return False
                norm = row_norms(precise_reference(self._model, self._loss_fn, x, y)[1])
                finite = torch.isfinite(norm) & torch.isfinite(kept.norm) & torch.isfinite(kept.slip)
                apart = (kept.norm - norm).abs() > tolerance * norm + 10 * kept.slip + floor
                if bool((apart & finite).any()):
                    return False
                conclusive &= bool(finite.all())
        return True if conclusive else None


class _Finished:
    """A differentiated batch with its extreme rows computed again in float64."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        trainable: Trainable,
        raw: Bookkeeping | Instances,
        inputs: Any,
        targets: Any,
    ):
        self._model, self._trainable, self._raw = model, trainable, raw
        self.loss, self.norm = raw.loss.double(), raw.norm
        self._usable: Tensor | None = None
        self._rescued: tuple[Tensor, Tensor, Instances] | None = None
        limit = ROW_LIMIT if any(p.dtype != torch.float64 for p in trainable.values()) else 1e150
        unsure = raw.unsure if isinstance(raw, Bookkeeping) else None
        if unsure is None and within(self.norm, 0.0, limit) and within(self.loss, -LARGEST, LARGEST):
            return
        extreme = ~(self.norm <= limit) | ~torch.isfinite(self.loss)
        if unsure is not None:
            extreme |= unsure
        if bool(extreme.any()):
            self._usable = ~extreme
            self._rescue(loss_fn, extreme, inputs, targets)

    def _rescue(self, loss_fn: LossFn, extreme: Tensor, inputs: Any, targets: Any) -> None:
        rows = extreme.nonzero().squeeze(1)
        with preserved(self._model):
            try:
                rescued = Instances(
                    self._model,
                    lambda x, y: reference(self._model, loss_fn, x, y, torch.float64),
                    take(inputs, rows),
                    take(targets, rows),
                )
            except RuntimeError:  # code that insists on float32: the rows count as not finite and contribute nothing
                self.norm = self.norm.masked_fill(extreme, torch.nan)
                return
        finite = torch.isfinite(rescued.loss) & torch.isfinite(rescued.norm)
        self.loss[rows] = rescued.loss
        self.norm[rows] = torch.where(finite | ~torch.isfinite(rescued.norm), rescued.norm, torch.nan)
        self._rescued = (rows, finite, rescued)

    def result(self) -> Pass:
        """The pass that rules and the step see."""
        return Pass(self.loss, self.norm, self.weighted_sum)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``sum_i weights_i g_i`` by parameter name; rows whose norm is not finite are left out."""
        if weights.shape != self.norm.shape:
            expected, got = tuple(self.norm.shape), tuple(weights.shape)
            raise UsageError(f"expected one weight per record, shape {expected}, got {got}")
        weights = weights.detach().to(self.norm.device)
        if not within(weights, -LARGEST, LARGEST) and bool(
            (~torch.isfinite(weights) & torch.isfinite(self.norm)).any()
        ):
            raise UsageError("a weight of a row with a finite norm is not finite; a rule must give every row a number")
        with exclusive(modules_of(self._model)), torch.no_grad():
            total = self._raw.weighted_sum(weights, self._usable)
            if self._rescued is not None:
                rows, finite, rescued = self._rescued
                for name, part in rescued.weighted_sum(weights[rows].double(), finite).items():
                    total[name] = (total[name] + part if name in total else part).to(
                        working_dtype(self._trainable[name].dtype)
                    )
        return {name: total[name] if name in total else _zero(p) for name, p in self._trainable.items()}


def norm_floor(trainable: Trainable) -> float:
    """Gradient norms below this are rounding: a record that fits well leaves ``1 - probability``, which cancels."""
    return max(1000 * torch.finfo(parameter.dtype).eps for parameter in trainable.values())


def _zero(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=working_dtype(parameter.dtype))
