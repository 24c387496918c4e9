"""The engine: one forward and one backward, exact for every model it accepts.

Layers with a kernel are served during the backward (``tape.py``, ``bookkeeping.py``). If any trainable parameter gets
past its kernel the whole model is differentiated record by record (``fallback.py``). Rows that float32 cannot carry are
computed again in float64 (``reference.py``). A row that is not finite even then contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.errors import EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients.blocks import Blocks
from evenhand.gradients.bookkeeping import Book, Bookkeeping
from evenhand.gradients.chain import Chain, Unchained
from evenhand.gradients.comparing import Comparison
from evenhand.gradients.dense import DenseBook
from evenhand.gradients.direct import uses
from evenhand.gradients.fallback import Fallback
from evenhand.gradients.finishing import Finished, Raw, zero
from evenhand.gradients.footprint import out_of_memory
from evenhand.gradients.habits import Habits
from evenhand.gradients.locking import exclusive
from evenhand.gradients.precision import plain
from evenhand.gradients.randomness import RandomState
from evenhand.gradients.records import LossFn, batch_size, call, losses, versions
from evenhand.gradients.rooms import Room
from evenhand.gradients.serving import Before, Layout, Served
from evenhand.gradients.slopes import gradients
from evenhand.gradients.structure import modules_of
from evenhand.gradients.tape import Call, Tape
from evenhand.gradients.views import Viewed
from evenhand.types import Pass

_ORDER = (
    "gradients by kernels were right at first and are wrong for this batch: the model treats records in an order or a "
    "way that depends on the batch. Steps since the last comparison may not have been bounded, so what they trained "
    "must not be released; keep records in their order in the model"
)


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
    A ``watcher`` is shown the model's layout before every pass. ``expected`` is how many records a pass is expected to
    have: what is kept in memory is decided by it, see `Room`.

    >>> engine = Engine(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> engine.run(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])).norm.shape
    torch.Size([4])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, *, lean: bool = False):
        self._model, self._loss_fn, self._lean = model, loss_fn, lean
        self._views = model.views if isinstance(model, Viewed) else 1
        self._fallback = Fallback(model, loss_fn)
        self._layout: Layout | None = None
        self._chain: Chain | None = None
        self._served: dict[tuple[bool, bool, tuple[str, ...]], Habits | None] = {}
        self._used: set[str] = set()
        self._satisfied: Layout | None = None
        self._rooms: list[Room] = []
        self._newest = 0
        self._since = 0
        self._turns = self._chains = True
        self.watcher: Callable[[Layout], None] | None = None
        self.expected: int | None = None

    def forget(self) -> None:
        """Give back the memory that is kept from batch to batch."""
        self._rooms.clear()
        self._layout = None
        self._newest += 1

    def layout(self) -> Layout:
        """The model as it is now; the same object as long as modules, parameters, modes and hooks stay the same."""
        with exclusive(self._identities()):
            return self._current()

    def _identities(self) -> frozenset[int]:
        if self._layout is None:
            return frozenset(id(module) for _, module in modules_of(self._model))
        return self._layout.identities

    def _current(self) -> Layout:
        before, now = self._layout, self._layout.current() if self._layout else Layout.read(self._model)
        if now is not before:
            self._layout, self._chain = now, Chain.of(now)
            self._served.clear()
        return now

    def run(self, inputs: Any, targets: Any, blocks: Blocks | None = None) -> Pass:
        """Run one forward and one backward; return a pass whose ``loss`` and ``norm`` are float64 columns.

        Sums have the parameters' dtype, float64 where ``blocks`` say that the batch is too large for that. Rows beyond
        those of ``blocks`` only fill the batch: they belong to no record and enter no sum.

        An empty batch is an ordinary one: no rows, and sums of zero. The next run takes back the memory of this one,
        whose ``weighted_sum`` then raises.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("gradients cannot be taken under torch.inference_mode(); leave that context first")
        size = batch_size(inputs, targets)
        with exclusive(identities := self._identities()):
            layout = self._current()
            if layout.identities == identities:
                if self.watcher is not None:
                    self.watcher(layout)
                return self._laid_out(layout, inputs, targets, size, blocks or Blocks(size))
        return self.run(inputs, targets, blocks)

    def _laid_out(self, layout: Layout, inputs: Any, targets: Any, size: int, blocks: Blocks) -> Pass:
        """With the channels of pictures last; with the layers' own layout if the model's code cannot do with that."""
        if not self._turning(layout):
            return self._run(layout, inputs, targets, size, blocks)
        before = Before(layout)
        try:
            return self._run(layout, inputs, targets, size, blocks)
        except EvenhandError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            self._turns = False
            self._served.clear()
            before.restore()
        return self._run(layout, inputs, targets, size, blocks)

    def _turning(self, layout: Layout) -> bool:
        return self._turns and layout.turned is not layout.served

    def _kernels(self, layout: Layout) -> Served:
        return layout.turned if self._turns else layout.served

    def _run(self, layout: Layout, inputs: Any, targets: Any, size: int, blocks: Blocks) -> Pass:
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            trainable = layout.trainable
            if not trainable:
                raise UsageError("the model has no trainable parameter; call requires_grad_(True) on what is to learn")
            if size == 0:
                nothing = torch.zeros(0, dtype=torch.float64, device=next(iter(trainable.values())).device)
                return Pass(nothing, nothing.clone(), lambda weights: {name: zero(p) for name, p in trainable.items()})
            before = versions(inputs)
            self._newest = number = self._newest + 1
            raw = self._differentiate(layout, inputs, targets, size, blocks.size)
            if versions(inputs) != before:
                raise UnsupportedModelError(
                    "forward changes its inputs in place, and rows that are computed again would see changed ones; "
                    "write x = x * 0.5 rather than x *= 0.5 (or x.mul_(0.5)) for what comes from the batch"
                )
            newest = lambda: self._newest == number  # noqa: E731
            return Finished(layout, self._loss_fn, raw, inputs, targets, newest, blocks).result()

    def _differentiate(self, layout: Layout, inputs: Any, targets: Any, size: int, records: int) -> Raw:
        chain = self._chain
        if chain is not None and self._chains and chain.suits(inputs, targets):
            try:
                return self._by_kernels(layout, chain, inputs, targets, size, records)
            except Unchained:
                self._chains = False
        return self._by_kernels(layout, None, inputs, targets, size, records)

    def _by_kernels(
        self, layout: Layout, chain: Chain | None, inputs: Any, targets: Any, size: int, records: int
    ) -> Raw:
        """Differentiate by a tape, or without one by a chain.

        Only the first ``records`` rows are compared with autograd: copies that fill a batch cannot show an order.
        """
        key = (chain is not None, self._model.training, tuple(layout.trainable))
        known = key in self._served
        habits = self._served[key] if known else Habits()
        if habits is not None:
            before = None if known else RandomState(self._model)
            verified: bool | None = True
            if not known:
                self._since = 1
                verified = self._comparison(layout, chain, habits).agree(inputs, targets, records)
                if verified is False and self._turning(layout):
                    self._turns, habits = False, Habits()
                    verified = self._comparison(layout, chain, habits).agree(inputs, targets, records)
            elif self._due():
                right = self._comparison(layout, chain, habits).still_agree(inputs, targets, records)
                if right is None:
                    self._served[key] = None
                    return self._fallback.run(inputs, targets)
                if not right:
                    raise UnsupportedModelError(_ORDER)
            if habits.learning:
                habits = replace(habits, learning=False) if verified else Habits(learning=False)
            served = self._kernels(layout) if verified else []
            kept = self._taped(layout, served, chain, inputs, targets, size, self._rooms, habits)
            self._demand_use(layout)
            if verified is not None:
                self._served[key] = None if kept is None else habits
            if kept is not None:
                return kept
            if before is not None:
                before.restore()
        return self._fallback.run(inputs, targets)

    def _comparison(self, layout: Layout, chain: Chain | None, habits: Habits) -> Comparison:
        few = partial(self._few, layout, chain, habits)
        return Comparison(self._model, self._loss_fn, layout, few, writes=chain is None or bool(layout.buffers))

    def _due(self) -> bool:
        """Whether kernels are compared with autograd again: at batches 2, 4, 8 ... and every 4096th."""
        self._since += 1
        return self._since & (self._since - 1) == 0 or self._since % 4096 == 0

    def _few(
        self, layout: Layout, chain: Chain | None, habits: Habits, inputs: Any, targets: Any, size: int
    ) -> Book | None:
        return self._taped(layout, self._kernels(layout), chain, inputs, targets, size, [], habits)

    def _taped(
        self,
        layout: Layout,
        served: Served,
        chain: Chain | None,
        inputs: Any,
        targets: Any,
        size: int,
        rooms: list[Room],
        habits: Habits,
    ) -> Book | None:
        """Norms and sums by kernels, or None if a parameter was also used in a way that is not served."""
        if chain is not None and served:
            loss, calls = chain.run(self._loss_fn, inputs, targets, size)
            self._satisfied = layout
            return DenseBook.of(loss, calls, layout.names) or self._booked(loss, calls, layout, rooms)
        rows, rest = size * self._views, layout.trainable
        answers: Sequence[Tensor | None] = ()
        with Tape(rows, habits, served) as tape:
            loss = losses(self._loss_fn, call(self._model, inputs), targets, size)
            wanted = tape.forward_done()
            if loss.requires_grad:
                direct = None
                if habits.learning or habits.ways:
                    direct = uses(loss, rest, rows, None if habits.learning else habits.ways)
                    habits.ways.update(use.key for use in direct.found)
                    rest = {name: p for name, p in rest.items() if id(p) not in direct.covered}
                asked = [*rest.values(), *(direct.edges if direct else ()), *wanted]
                answers = gradients(loss, asked)
                tape.backward_done(answers[len(asked) - len(wanted) :])
                if direct is not None:
                    tape.calls += direct.calls(answers[len(rest) : len(asked) - len(wanted)])
                if self._views > 1:
                    tape.calls = [replace(call, views=self._views) for call in tape.calls]
        past = [name for name, gradient in zip(rest, answers, strict=False) if gradient is not None]
        if self._satisfied is not layout:
            names = layout.names
            self._used.update(past, [names[id(p)] for c in tape.calls for p in c.site.parameters.values()])
        if past or tape.bypassed:
            return None
        return self._booked(loss, tape.calls, layout, rooms)

    def _booked(self, loss: Tensor, calls: list[Call], layout: Layout, rooms: list[Room]) -> Bookkeeping:
        if len(rooms) < len(calls):
            rooms.extend([Room(self._lean) for _ in range(len(calls) - len(rooms))])
        for room in rooms:
            room.expected = self.expected
        with plain():
            return Bookkeeping(loss.detach().double(), calls, layout.names, rooms)

    def _demand_use(self, layout: Layout) -> None:
        if self._satisfied is layout:
            return
        missing = sorted(layout.trainable.keys() - self._used)
        if missing:
            raise UnsupportedModelError(
                f"the loss does not depend on the trainable parameter {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + "; freeze what is not trained with requires_grad_(False)"
            )
        self._satisfied = layout
