"""The engine: one forward and one backward, exact for every model it accepts.

A pass reads from top to bottom in `Engine.run`: whether the model may be run, which way (`_verdict`, which compares
kernels with autograd when that is due), forward and backward (`_record`), norms (`RecordedGradients`), and the pass
that gives sums (`RescuedPass`). From there to a kernel are at most three calls. The ways are:

- a speed path (``fast_paths.py``), where the model has one;
- kernels: layers with a kernel are served during the backward (``layer_recorder.py``, ``norms_and_sums.py``), and a
  module whose parameters get past all kernels is run again for each record (``module_fallback.py``);
- record by record (``record_by_record.py``), for the whole model, where that does not do either.

Rows that float32 cannot carry are computed again in float64. A row that is not finite even then contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from evenhand.errors import EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients.batch_utils import LossFn, arguments, as_plain, batch_size, fitted, hollow, losses, versions
from evenhand.gradients.fast_paths import FastPath, UnsuitedError, fast
from evenhand.gradients.layer_recorder import LayerRecorder, LearnedUse
from evenhand.gradients.learned_models import Habits, Key, in_float64, recall, remember
from evenhand.gradients.memory import ScratchBuffers, out_of_memory
from evenhand.gradients.model_layout import Call, Layout, ModelSnapshot, Served, ServedLayer, modules_of
from evenhand.gradients.norms_and_sums import Raw, RecordedGradients, RescuedPass, zero
from evenhand.gradients.pass_context import RandomState, exclusive, lowered, plain
from evenhand.gradients.record_blocks import Blocks, PerRecordGradients
from evenhand.gradients.record_by_record import Fallback
from evenhand.gradients.self_check import Comparison, Taped
from evenhand.gradients.unserved.module_fallback import AloneError, further_apart
from evenhand.gradients.unserved.raw_parameters import uses
from evenhand.gradients.views import Viewed
from evenhand.types import Pass

Way: TypeAlias = Literal[
    "kernels", "kernels, some modules record by record", "record by record (vmap)", "record by record (loop)"
]
OTHERWISE = 5
"""Records that are compared if kernels were wrong on the usual number."""
_NOTHING_TRAINED = "the model has no trainable parameter; call requires_grad_(True) on what is to learn"
_IN_PLACE = (
    "forward changes its inputs in place, and rows that are computed again would see changed ones; write x = x * 0.5 "
    "rather than x *= 0.5 (or x.mul_(0.5)) for what comes from the batch"
)
_ORDER = (
    "gradients by kernels were right at first and are wrong for this batch: the model treats records in an order or a "
    "way that depends on the batch. Steps since the last comparison may not have been bounded, so what they trained "
    "must not be released; keep records in their order in the model"
)


def per_sample(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Pass:
    """Return per-record losses, gradient norms and, for weights chosen afterwards, the weighted gradient sum.

    ``inputs`` is a tensor, a tuple or list (arguments) or a Mapping (keyword arguments); the first dimension of every
    tensor is the batch, unless it is `Shared`. ``loss_fn(outputs, targets)`` gives one loss per record; a loss of
    torch's is given the logits of what the model returns. What is learned about a model and a loss is remembered while
    both live and the model stays as it is. For many steps keep an `Engine`, which is quicker still.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> result = per_sample(model, lambda out, y: out[:, 0] * y, torch.ones(3, 2), torch.tensor([0.0, 1.0, 2.0]))
    >>> [round(n, 4) for n in result.norm.tolist()]
    [0.0, 1.4142, 2.8284]
    >>> result.weighted_sum(torch.tensor([1.0, 1.0, 0.5]))
    {'weight': tensor([[2., 2.]])}
    """
    engine = Engine(model, loss_fn)
    engine.recall()
    try:
        result = engine.run(inputs, targets)
    except UnsupportedModelError as error:
        if str(error) != _ORDER:
            raise
        engine = Engine(model, loss_fn)  # looks at the model anew, as if nothing were known of it
        result = engine.run(inputs, targets)
    engine.remember()
    return result


class Engine:
    """Per-record norms and weighted sums of one model and loss, batch after batch.

    What is known about the model is found on the first batch and remembered: which layers are served by kernels, and
    whether everything else needs the exact and slow way. Guards stay on for every batch. A trainable parameter that no
    batch has used so far is an error on the first batch it is missing from; one that an earlier batch used may be
    absent from a later batch, where its gradient is zero.

    Guarantee: norms and sums are those of the records' own gradients, to rounding; a model for which that cannot be had
    raises `UnsupportedModelError`. The model keeps no trace of the pass: no attribute, gradient, hook or changed mode.
    A ``watcher`` is shown the model's layout before every pass. ``expected`` is how many records a pass is expected to
    have: what is kept in memory is decided by it, see `ScratchBuffers`.

    >>> engine = Engine(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> engine.run(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])).norm.shape
    torch.Size([4])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, *, lean: bool = False):
        self._model, self._loss_fn, self._lean = model, loss_fn, lean
        self._views = model.views if isinstance(model, Viewed) else 1
        self._fallback = Fallback(model, loss_fn)
        self._layout: Layout | None = None
        self._path: FastPath | None = None
        self._habits: Habits = {}
        """Learned while kernels were verified; None where the model is differentiated record by record."""
        self._few: dict[Key, int] = {}
        self._used: set[str] = set()
        self._satisfied: Layout | None = None
        self._rooms: list[ScratchBuffers] = []
        self._newest = 0
        self._since = 0
        self._path_works = self._channels_last_works = True
        self._past: list[str] = []
        self._refused: set[nn.Module] = set()
        self.watcher: Callable[[Layout], None] | None = None
        self.expected: int | None = None

    def run(self, inputs: Any, targets: Any, blocks: Blocks | None = None) -> Pass:
        """Run one forward and one backward; return a pass whose ``loss`` and ``norm`` are float64 columns.

        Sums have the parameters' dtype, float64 where ``blocks`` say that the batch is too large for that. Rows beyond
        those of ``blocks`` only fill the batch: they belong to no record and enter no sum.

        An empty batch is an ordinary one: no rows, and sums of zero. The next run takes back the memory of this one,
        whose ``weighted_sum`` then raises.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("gradients cannot be taken under torch.inference_mode(); leave that context first")
        inputs = as_plain(inputs)
        size = batch_size(inputs, targets)
        blocks = blocks or Blocks(size)
        grad = nullcontext() if torch.is_grad_enabled() else torch.enable_grad()
        with exclusive(identities := self._identities()), grad:
            layout = self._current()
            if layout.identities == identities:
                if self.watcher is not None:
                    self.watcher(layout)
                if not layout.trainable:
                    raise UsageError(_NOTHING_TRAINED)
                if size == 0:
                    return _empty(layout)
                inputs = fitted(self._model, inputs)  # in here, where no other pass has put other parameters in place
                written = versions(inputs)
                while True:
                    self._newest = number = self._newest + 1  # takes back the memory of the pass before
                    before = ModelSnapshot(layout) if self._goes_channels_last(layout) else None
                    try:
                        path = self._path if self._path_works else None
                        path = path if path is not None and path.suits(inputs, targets) else None
                        key = (path is not None, self._model.training, tuple(layout.trainable))
                        habits, verified, state = None, None, None
                        if not hollow(inputs):  # else kernels have no rows to see
                            habits, verified, state = self._verdict(key, layout, path, inputs, targets, blocks.size)
                        raw: Raw | None = None
                        if habits is not None:
                            served = self._kernels(layout) if verified else []
                            recorded = self._record(layout, path, served, habits, inputs, targets, size)
                            if recorded is not None:
                                loss, calls = recorded
                                raw = path.measure(loss, calls) if path is not None and served else None
                                if raw is None:
                                    with plain(), self._alone():
                                        rooms = self._memory(self._rooms, len(calls))
                                        raw = RecordedGradients(loss, calls, layout.names, rooms)
                            self._demand_use(layout)
                            if raw is None and state is not None and verified and self._few.get(key) is None:
                                self._few[key] = OTHERWISE  # a size of the model may have looked like that of the batch
                                state.restore()
                                continue
                            if verified is not None:
                                self._habits[key] = None if raw is None else habits
                            if raw is None and state is not None:
                                state.restore()
                        if raw is None:
                            raw = self._fallback.run(inputs, targets)
                        if versions(inputs) != written:
                            raise UnsupportedModelError(_IN_PLACE)
                        newest = partial(self._is_newest, number)
                        return RescuedPass(layout, self._loss_fn, raw, inputs, targets, newest, blocks).result()
                    except EvenhandError:
                        raise
                    except UnsuitedError:
                        self._path_works = False
                    except Exception as error:  # the model's code may want the channels of pictures first
                        if before is None or out_of_memory(error):
                            raise
                        self._channels_last_works = False
                        self._habits.clear()
                        before.restore()
        return self.run(inputs, targets, blocks)  # the model got other modules while this waited

    def _verdict(
        self, key: Key, layout: Layout, path: FastPath | None, inputs: Any, targets: Any, records: int
    ) -> tuple[LearnedUse | None, bool | None, RandomState | None]:
        """Compare kernels with autograd where that is due; return what they learned, and whether they may be used.

        Nothing learned (None) means: record by record. The verdict is None where a comparison can tell nothing. On a
        first batch the third is the random state from before it. Kernels that are wrong with the channels of pictures
        last are tried with the layers' own order. Only the first ``records`` rows are compared: copies that fill a
        batch cannot show an order.
        """
        if key not in self._habits:
            state, self._since = RandomState(self._model), 1
            habits = LearnedUse(few=self._few.get(key, LearnedUse.few))
            verified = self._comparison(layout, path, habits).agree(inputs, targets, records)
            while verified is False and path is None and (more := self._tried_next(layout, habits)) is not None:
                habits = more
                verified = self._comparison(layout, path, habits).agree(inputs, targets, records)
            if verified is False and self._goes_channels_last(layout):
                self._channels_last_works, habits = False, replace(habits, batch={}, ways=set())
                verified = self._comparison(layout, path, habits).agree(inputs, targets, records)
            return replace(habits, learning=False) if verified else LearnedUse(learning=False), verified, state
        known = self._habits[key]
        if known is not None and self._due():
            right = self._comparison(layout, path, known).still_agree(inputs, targets, records)
            if right is False:
                raise UnsupportedModelError(_ORDER)
            if right is None:
                self._habits[key] = known = None
        return known, True, None

    def _record(
        self,
        layout: Layout,
        path: FastPath | None,
        served: Served,
        habits: LearnedUse,
        inputs: Any,
        targets: Any,
        size: int,
        *,
        comparing: bool = False,
    ) -> tuple[Tensor, list[Call]] | None:
        """Run forward and backward; return one loss per record and what every layer saw.

        None if a parameter was used past its kernel, or made a weight that depends on the records. Raises
        `UnsuitedError` if a speed path turns out not to be one.
        """
        if path is not None and served:
            recorded = path.differentiate(self._loss_fn, inputs, targets, size)
            self._satisfied = layout
            return recorded
        rows, rest = size * self._views, layout.trainable
        answers: Sequence[Tensor | None] = ()
        unsteady: Sequence[nn.Parameter] = ()
        with LayerRecorder(rows, habits, served) as recorder:
            args, kwargs = arguments(inputs, shared=self._views > 1)
            loss = losses(self._loss_fn, self._model(*args, **kwargs), targets, size)
            wanted = recorder.forward_done()
            if loss.requires_grad:
                direct = None
                if habits.learning or habits.ways:
                    direct = uses(loss, rest, rows, None if habits.learning else habits.ways)
                    habits.ways.update(use.key for use in direct.uses)
                    odd = habits.unsteady(direct.weights, comparing=comparing)
                    unsteady = [p for use in direct.uses if use.key in odd for p in use.site.all_parameters]
                    rest = {name: p for name, p in rest.items() if id(p) not in direct.covered}
                asked = (*rest.values(), *(direct.edges if direct else ()), *wanted)
                answers = (
                    Variable._execution_engine.run_backward(  # torch.autograd.grad without its checks of arguments
                        *((loss,), (torch.ones_like(loss),), False, False, asked),
                        allow_unreachable=True,
                        accumulate_grad=False,
                    )
                )
                if direct is not None:
                    recorder.calls += direct.calls(answers[len(rest) : len(asked) - len(wanted)])
                if self._views > 1:
                    recorder.calls = [replace(call, views=self._views) for call in recorder.calls]
        past = [name for name, gradient in zip(rest, answers, strict=False) if gradient is not None]
        past += [layout.names[id(p)] for p in unsteady]
        self._past, self._refused = past, recorder.refused
        if self._satisfied is not layout:
            names = layout.names
            self._used.update(past, [names[id(p)] for c in recorder.calls for p in c.site.parameters.values()])
        return None if past or recorder.bypassed else (loss, recorder.calls)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Note a module that cannot be run again for one record; what was to be assigned inside then is not."""
        try:
            yield
        except AloneError as error:
            self._refused = {error.module}

    def _tried_next(self, layout: Layout, habits: LearnedUse) -> LearnedUse | None:
        """Return what to try after an attempt that was wrong or went past the kernels; None if nothing is left.

        Modules whose parameters went past them are run again for these. Kernels that are wrong may have taken another
        dimension for the records, which then is tried with another number of them, and none folded together with time.
        """
        trials = {site.module for site in layout.served if isinstance(site, ServedLayer) and site.trial}
        if failed := self._refused & trials - habits.unlike:
            return LearnedUse(apart=habits.apart, unlike=habits.unlike | failed, folds=habits.folds, few=habits.few)
        apart = further_apart(layout, habits.apart, self._past, self._refused, habits.unlike)
        if apart is not None:
            return LearnedUse(apart=apart, unlike=habits.unlike, folds=habits.folds, few=habits.few)
        if habits.folds and not self._past:
            return LearnedUse(unlike=habits.unlike, folds=False, few=OTHERWISE)
        if trials - habits.unlike:
            return LearnedUse(unlike=trials, folds=habits.folds, few=habits.few)
        if habits.few < OTHERWISE and not self._past:
            return LearnedUse(unlike=habits.unlike, folds=habits.folds, few=OTHERWISE)
        return None

    def _memory(self, rooms: list[ScratchBuffers], count: int) -> list[ScratchBuffers]:
        """Return the ``rooms``, at least ``count`` of them: one for each call of a layer. The next pass takes them."""
        if len(rooms) < count:
            rooms.extend([ScratchBuffers(self._lean) for _ in range(count - len(rooms))])
        for room in rooms:
            room.expected = self.expected
        return rooms

    def _due(self) -> bool:
        """Return whether kernels are compared with autograd again: at batches 2, 4, 8 ... and every 4096th."""
        self._since += 1
        return self._since & (self._since - 1) == 0 or self._since % 4096 == 0

    def _comparison(self, layout: Layout, path: FastPath | None, habits: LearnedUse) -> Comparison:
        """Return a comparison of kernels with autograd. It runs a few records by kernels, in memory of their own."""
        served = self._kernels(layout)

        def run_few(inputs: Any, targets: Any, size: int) -> PerRecordGradients | None:
            recorded = self._record(layout, path, served, habits, inputs, targets, size, comparing=True)
            if recorded is None:
                return None
            quick = path.measure(*recorded) if path is not None and served else None
            if quick is None:
                with plain(), self._alone():
                    quick = RecordedGradients(*recorded, layout.names, self._memory([], len(recorded[1])))
            return quick

        writes = path is None or bool(layout.buffers)
        precise = partial(self._in_float64, layout, habits) if path is None else lambda: None
        return Comparison(self._model, self._loss_fn, layout, run_few, precise, writes, habits.few)

    def _in_float64(self, layout: Layout, habits: LearnedUse) -> Taped | None:
        """Return what runs a few records by the same kernels in float64, on a copy of the model; None without one."""
        copied = None if lowered() else in_float64(layout, habits)
        if copied is None:
            return None
        other, known = copied
        engine = Engine(other.model, self._loss_fn, lean=True)
        engine._channels_last_works = self._channels_last_works

        def run_few(inputs: Any, targets: Any, size: int) -> PerRecordGradients | None:
            with suppress(RuntimeError, AloneError):  # code that insists on float32
                recorded = engine._record(other, None, engine._kernels(other), known, inputs, targets, size)
                if recorded is not None:
                    with plain():
                        return RecordedGradients(*recorded, other.names, self._memory([], len(recorded[1])))
            return None

        return run_few

    def _demand_use(self, layout: Layout) -> None:
        """Raise if a trainable parameter was used by no batch so far."""
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

    def _goes_channels_last(self, layout: Layout) -> bool:
        """Return whether this model would be run with the channels of pictures last."""
        return self._channels_last_works and layout.channels_last is not layout.served

    def _kernels(self, layout: Layout) -> Served:
        return layout.channels_last if self._channels_last_works else layout.served

    def _is_newest(self, number: int) -> bool:
        """Return whether this pass may still be used: no other has taken its memory."""
        return self._newest == number

    def layout(self) -> Layout:
        """Return the model as it is now; the same object while modules, parameters, modes and hooks stay the same."""
        with exclusive(self._identities()):
            return self._current()

    def way(self) -> Way:
        """Return how batches were run so far."""
        if all(self._habits.values()):
            return "kernels, some modules record by record" if self.apart() else "kernels"
        return "record by record (vmap)" if self._fallback.vectorises else "record by record (loop)"

    def apart(self) -> dict[str, str]:
        """Return the modules that are differentiated by running them again, and how: by vmap or in a loop."""
        every = [habits.apart for habits in self._habits.values() if habits is not None]
        return {name: "loop" if one.loops else "vmap" for apart in every for name, one in apart.items()}

    def unlike(self) -> tuple[str, ...]:
        """Return the modules that were tried with the kernel of a layer that they resemble, and are not like it."""
        every = {module for habits in self._habits.values() if habits is not None for module in habits.unlike}
        return tuple(name for name, module in modules_of(self._model) if module in every)

    def recall(self) -> None:
        """Take over what an earlier engine remembered about the model and the loss, if the model is still the same."""
        with exclusive(self._identities()):
            known = recall(self._model, self._loss_fn, self._current())
        if known is not None:
            self._habits, self._since, (self._path_works, self._channels_last_works, self._few, loop) = known
            self._few, self._fallback.vectorises = dict(self._few), loop

    def remember(self) -> None:
        """Leave what was learned to the next engine of this model and loss."""
        if self._layout is not None:
            flags = (self._path_works, self._channels_last_works, self._few, self._fallback.vectorises)
            remember(self._model, self._loss_fn, self._layout, self._habits, self._since, flags)

    def forget(self) -> None:
        """Give back the memory that is kept from batch to batch."""
        self._rooms.clear()
        self._layout = None
        self._newest += 1

    def _identities(self) -> frozenset[int]:
        """Return the identities of all modules, as last seen."""
        if self._layout is None:
            return frozenset(id(module) for _, module in modules_of(self._model))
        return self._layout.identities

    def _current(self) -> Layout:
        """Read the model again if it changed; what was learned about another layout is forgotten."""
        before, now = self._layout, self._layout.current() if self._layout else Layout.read(self._model)
        if now is not before:
            self._layout, self._path = now, fast().path_for(now)
            self._habits.clear()
            self._few.clear()
        return now


def _empty(layout: Layout) -> Pass:
    """Return the pass over a batch without records."""
    trainable = layout.trainable
    nothing = torch.zeros(0, dtype=torch.float64, device=next(iter(trainable.values())).device)
    return Pass(nothing, nothing.clone(), lambda weights: {name: zero(p) for name, p in trainable.items()})
