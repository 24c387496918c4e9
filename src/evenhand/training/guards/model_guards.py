"""Check at every step what could make a model leak: changed modes, buffers written from data, updates from elsewhere.

These checks are cheap; the thorough one is the probe of ``gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import _validate, generators
from evenhand.errors import (
    BatchReuseError,
    CoupledError,
    DataError,
    EvenhandError,
    UnsupportedModelError,
    UsageError,
)
from evenhand.gradients import Layout, MicroBatches, pass_context, probe
from evenhand.gradients.batch_utils import batch_size, spoilt_rows, take, without_values
from evenhand.gradients.doctor.python_state import Picture, Snapshot, changes
from evenhand.gradients.doctor.record_coupling import Company
from evenhand.gradients.memory import KeepFreedMemory
from evenhand.gradients.microbatches import Early
from evenhand.gradients.pass_context import full, seeded
from evenhand.gradients.record_blocks import Blocks
from evenhand.gradients.views import Viewed, mean_loss, mean_of_persons
from evenhand.mechanism.random_streams import Stream
from evenhand.training.augment import Views
from evenhand.training.guards.state_guard import StateGuard
from evenhand.types import Pass

Marks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Compute:
    """How gradients are computed: speed and memory. Privacy does not depend on it: no number of the plan does (law 3).

    Args:
      micro_batch: records that go through the model at once; when memory runs out it is halved, whatever it is.
      lean: prefer forms that need little memory, at some cost in time.
      precision: "bf16" runs the model under torch's autocast; norms, sums and noise keep their full precision.

    Examples:
      >>> Compute(micro_batch=64, lean=True).precision
      'float32'
    """

    micro_batch: int | None = None
    lean: bool = False
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            _validate.whole(self.micro_batch, "micro_batch")
        _validate.known(self.precision, ("float32", "bf16"), "precision")

    def casting(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the model runs."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


class SecretDraws:
    """Secret seeds for the passes of one process; ``part`` is its number where several divide a batch.

    As long as no pass draws anything, no generator is seeded.
    """

    def __init__(self, model: nn.Module, stream: Stream, part: int) -> None:
        self._model, self._stream, self._part = model, stream, part
        self._draws_randomly = torch.cuda.is_available()

    def run(self, step: int, one_pass: Callable[[], Pass]) -> Pass:
        """Run a pass and return it. One that drew from public generators is dropped and run again."""
        if not self._draws_randomly:
            before = torch.default_generator.get_state(), generators.mark()
            result = one_pass()
            if generators.mark() == before[1] and torch.equal(torch.default_generator.get_state(), before[0]):
                return result
            torch.default_generator.set_state(before[0])
            self._draws_randomly = True
        secret = self._stream.seed(step, self._part)
        with seeded(self._model, secret) as draws:
            result = one_pass()
        if not draws.elsewhere():
            return result
        pass_context.every()
        with seeded(self._model, secret):
            return one_pass()


class Watch:
    """A guard around a model and its gradient engine: checks before, during and after every pass.

    ``company`` runs records among different other records. If ``thorough``, the next step compares the contents of
    large state, not only its address and version. Rows with several ``slots`` are persons with that many records.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        labels: int,
        *,
        compute: Compute | None = None,
        views: Views | None = None,
        slots: int = 1,
    ) -> None:
        views = views if views is None else replace(views, slots=slots)
        self._compute, self._views, self._labels, self._slots = compute or Compute(), views, labels, slots
        self._model, self._loss = adapt_to_views(model, loss, views, slots)
        self._batches = MicroBatches(self._model, self._loss, lean=self._compute.lean, limit=self._compute.micro_batch)
        self._engine = self._batches.engine
        self._engine.watcher = self._look
        self._rows: tuple[Any, Any] | None = None
        self._probed: Layout | None = None
        self._before: list[tuple[Layout, Marks]] = []
        self.company = Company(self._model, self._loss, views)
        self.thorough = True
        self._states, self._foreign = StateGuard(self._compute.lean), False
        self._start: Snapshot | None = None
        self._picture: Picture | None = None
        self._spoilt = ""
        self._freed_memory = KeepFreedMemory(self)

    def probe(self, rows: tuple[Any, Any]) -> None:
        """Probe the model thoroughly in its present mode, also with the last declared label."""
        self._rows = rows
        inputs, targets = rows
        if self._views is not None:
            self._views.check(inputs)
            inputs = self._views(inputs)
        probe(self._model, self._loss, inputs, targets)
        classes = targets if self._slots == 1 else targets[0]
        if self._labels and not classes.is_floating_point():
            last = torch.full_like(classes, self._labels - 1)
            probe(self._model, self._loss, inputs, last if self._slots == 1 else (last, targets[1]))
        self._probed = self._engine.layout()

    @property
    def probed(self) -> bool:
        """Return whether the model was probed with the modes, hooks and modules that it has now."""
        return self._probed is not None and self._engine.layout() is self._probed

    def run(self, inputs: Any, targets: Any, early: Early | None = None, blocks: Blocks | None = None) -> Pass:
        """Run one pass and return it; a model whose modes, hooks or modules changed is probed again first.

        ``early`` computes the weights of some rows before all are known, see `MicroBatches`. ``blocks`` say which
        records are summed together. A record with an input that is not finite has a norm that is not, so that it adds
        nothing, whatever the model makes of it.
        """
        if self._rows is None:
            raise BatchReuseError("Iterate over private.batches(data) first.")
        self._before = []
        not_finite = spoilt_rows(inputs)
        try:
            inputs = inputs if self._views is None else self._views(inputs)
            with self._compute.casting(self._model):
                result = self._batches.run(inputs, targets, early, blocks)
        except (torch.OutOfMemoryError, EvenhandError):
            raise
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise without_values(error) from None
        for layout, before in self._before:
            if layout.state() != before:
                self._spoilt = self._spoilt or find_written(layout, before, self._moving)
        self.refuse_spoilt()
        if not_finite is not None:
            norm = result.norm.masked_fill(not_finite.to(result.norm.device), torch.nan)
            result = replace(result, norm=norm, finite=False)
        if self._compute.precision == "float32":
            return result
        return replace(
            result,
            weighted_sum=partial(self._summed, result.weighted_sum),
            spend=None if result.spend is None else partial(self._summed, result.spend),
        )

    def _look(self, layout: Layout) -> None:
        """Check the model's state; the engine calls this before every pass."""
        if layout is not self._probed and self._rows is not None:
            with full():
                self.probe(self._rows)
        if not self._before:
            self._between(layout)
            self._before.append((layout, layout.state()))
            self._start = self.company.snapshot() if self.company.moving else None
        elif self._start is not None:
            self._start.restore()  # a batch in parts is one pass to what passes move

    def _between(self, layout: Layout) -> None:
        """Compare the state with what the last private step left; raise if something fixed was written."""
        if not self._states.begun:
            self._states.moving = self._moving
            self._states.begin(layout)
            return
        change = self._states.changed(layout, thorough=self.thorough)
        self._foreign = self._foreign or bool(change.trained)
        if change.fixed:
            message = describe_foreign_write(change.fixed[0], change.late)
            raise CoupledError(message, "state") if change.late else UnsupportedModelError(message)
        if self.thorough and self._picture is not None:
            paths = changes(self._picture, self.company.picture())
            self._foreign = self._foreign or any(not self.company.settled(path) for path in paths)

    @property
    def _moving(self) -> frozenset[str]:
        """Return the names of buffers that every pass changes in the same way, whatever the records."""
        return frozenset(path.removeprefix("model.") for path in self.company.moving)

    def _summed(self, add_up: Callable[[Tensor], dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
        """Return the weighted sum, computed in the precision of the pass."""
        with self._compute.casting(self._model):
            return add_up(weights)

    @property
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """Return the trained parameters, by name, as the last probe saw them."""
        return {} if self._probed is None else self._probed.trainable

    def close(self) -> None:
        """Free the memory of the passes, and what the process kept of it. Safe to call twice."""
        self._engine.forget()
        self._freed_memory.give_back()

    def refuse_spoilt(self) -> None:
        """Raise if a pass has written a buffer from data: nothing may leave the run then."""
        if self._spoilt:
            raise UnsupportedModelError(
                f"The forward pass wrote {self._spoilt!r} from data, which would be released without noise. "
                "Nothing was released: remove it, or freeze it (for normalisation use GroupNorm or LayerNorm)."
            )

    def updated(self, thorough: bool) -> None:
        """Note the state as the private step left it; ``thorough`` is that of the next step."""
        if self._start is not None and self._rows is not None:
            self._start.restore()
            self.company.advance(*take(self._rows, slice(0, 1)))
        self._states.updated(thorough=thorough)
        self._picture = self.company.picture() if thorough else None
        self.thorough = thorough

    def changed_elsewhere(self) -> bool:
        """Return whether other code wrote trained weights, or settings of model or loss, since this was last asked."""
        foreign, self._foreign = self._foreign, False
        return foreign

    def check_state(self) -> None:
        """Compare all contents before anything leaves the run; raise if something fixed was written."""
        if self._states.begun:
            before, self.thorough = self.thorough, True
            try:
                self._between(self._engine.layout())
            finally:
                self.thorough = before


def adapt_to_views(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], views: Views | None, slots: int = 1
) -> tuple[nn.Module, Callable[[Any, Any], Tensor]]:
    """Return model and loss for a batch with several views of each record; unchanged if there is one view.

    So it is with persons who have several records each, in ``slots`` places.
    """
    if slots > 1:
        count = 1 if views is None else views.count
        return Viewed(model, slots * count), mean_of_persons(loss, slots, count)
    if views is None or views.count == 1:
        return model, loss
    return Viewed(model, views.count), mean_loss(loss, views.count)


def check_rows(inputs: Any, targets: Any, drawn: int) -> None:
    """Raise unless a batch has as many rows as were drawn."""
    if batch_size(inputs, targets) != drawn:
        raise DataError("The batch does not hold one input per sampled record: augment rows in place, never add any.")


def describe_foreign_write(name: str, late: bool) -> str:
    """Return the message that fixed state was written outside of private steps, and what to do about it."""
    after = (
        "Steps have been taken with it, so nothing of this run may be released, and the ledger says so: start a new "
        "run."
        if late
        else "Put the old values back to go on, or start a new run with the new ones."
    )
    return (
        f"{name!r}, a buffer or a frozen parameter of the model, was changed outside of private steps (a look in train "
        "mode moves the statistics of BatchNorm; .data and copy_ write too). It would be used and released without "
        f"noise. {after} Call model.eval() before you look at data, and freeze normalisation with .eval()."
    )


def find_written(layout: Layout, before: Marks, moving: Collection[str] = ()) -> str:
    """Return the name of a buffer or parameter written since ``before``; empty if only ``moving`` ones were."""
    model = layout.model
    names = (name for name, _ in (*model.named_buffers(), *model.named_parameters()))
    pairs = zip(names, before, layout.state(), strict=False)
    changed_names = [name for name, old, new in pairs if old != new]
    return next((name for name in changed_names if name not in moving), "" if changed_names else "a buffer")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer has exactly the trainable parameters and uses one gradient per step."""
    trainable_ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not trainable_ids:
        raise UsageError("The model has no trainable parameter: unfreeze one with requires_grad_(True).")
    if optimizer_ids != trainable_ids:
        raise UsageError(
            "The optimizer does not hold exactly the model's trainable parameters: build it from "
            "[p for p in model.parameters() if p.requires_grad]."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times a step, which is not accounted: use SGD or Adam.")
