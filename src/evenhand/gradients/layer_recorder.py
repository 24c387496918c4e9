"""Record one forward and one backward: what every served layer saw, and where its input has the batch.

While it records, the forward of every served module is replaced on the instance and restored afterwards. The
replacement computes the layer without autograd for its weights: a parameter that still receives an autograd gradient
was used some other way too, and the engine then does not trust the recording.

If the batch size equals the sequence length, the batch axis cannot be told from the shape; so the axis that was seen
on the first, verified batch is remembered.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients.layers.resemblance import alike
from evenhand.gradients.memory import out_of_memory
from evenhand.gradients.model_layout import Call, ServedComposite, ServedLayer
from evenhand.gradients.unserved.module_fallback import Apart, run_apart


@dataclass
class LearnedUse:
    """``batch``: where a layer's input has the records; None for a layer that sees something else.

    ``ways``: how parameters are used without a layer, see ``raw_parameters.py``. ``apart``: by name the modules that
    are run again for their parameters, see ``module_fallback.py``. ``unlike``: modules that are not like the layer that
    they resemble. ``folds``: layers with places may have records and times folded together in their first dimension.
    ``few`` records are compared with autograd. ``weights`` are those that were made of parameters while comparing.
    """

    learning: bool = True
    batch: dict[nn.Module, int | None] = field(default_factory=dict)
    ways: set[tuple[str, ...]] = field(default_factory=set)
    apart: dict[str, Apart] = field(default_factory=dict)
    unlike: set[nn.Module] = field(default_factory=set)
    folds: bool = False
    few: int = 4
    weights: dict[tuple[str, ...], tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)

    def uses(self, site: ServedLayer | ServedComposite) -> bool:
        """Return whether the kernel of a layer is used."""
        return site.module not in self.unlike and not any(apart.contains(site) for apart in self.apart.values())

    def unsteady(
        self, weights: Mapping[tuple[str, ...], tuple[tuple[int, ...], Tensor]], *, comparing: bool
    ) -> set[tuple[str, ...]]:
        """Return the ways whose weights are others than with other records, though their parameters are the same.

        A constant of the graph may come from the batch; then a record alone has another weight. The batch after a
        comparison is the last that is looked at, until the next comparison.

        >>> habits, weight = LearnedUse(), torch.ones(2)
        >>> habits.unsteady({("w",): ((0,), weight)}, comparing=True)
        set()
        >>> habits.unsteady({("w",): ((0,), weight + 1)}, comparing=False)
        {('w',)}
        """
        before = [(key, *self.weights[key], *now) for key, now in weights.items() if key in self.weights]
        self.weights.clear()
        if comparing:
            self.weights.update(weights)
        return {key for key, old, was, new, now in before if old == new and not torch.equal(was, now)}

    def place(self, site: ServedLayer, x: Tensor, size: int) -> tuple[int | None, bool]:
        """Return the batch axis of ``x``, and whether it is as it was. Only layers with places may have it second.

        >>> from evenhand.gradients.model_layout import sites
        >>> habits, (site,) = LearnedUse(), sites([("", nn.Linear(2, 2))])
        >>> habits.place(site, torch.ones(5, 3, 2), 3)
        (1, True)
        >>> habits.place(site, torch.ones(3, 5, 2), 3)
        (0, False)
        >>> habits.learning = False
        >>> habits.place(site, torch.ones(7, 7, 2), 7)
        (1, True)
        """
        module, inner = site.module, site.inner
        if self.learning:
            axis = next((dim for dim in range(_places(inner, x)) if x.shape[dim] == size), None)
            if axis is None and self.folds and _folded(inner, x, size):
                axis = FOLDED
            return axis, self.batch.setdefault(module, axis) == axis
        known = self.batch.get(module, 0)
        if known == FOLDED:
            return known, _folded(inner, x, size)
        return known, known is None or (x.dim() > known and x.shape[known] == size)


FOLDED = -1
"""Stands for a batch axis that is folded together with time: the rows of a record are next to each other."""


def _folded(inner: int | None, x: Tensor, size: int) -> bool:
    """Return whether the first dimension may be records and times."""
    return inner is not None and x.dim() == inner + 1 and len(x) > 0 and len(x) % size == 0


def _places(inner: int | None, x: Tensor) -> int:
    """Return how many of the leading dimensions may be the batch."""
    return min(1, x.dim()) if inner is None else max(min(1, x.dim()), min(2, x.dim() - inner))


class _Layer(torch.autograd.Function):
    """A layer whose weights are constants for autograd; ``anchor`` requires grad and keeps the graph alive.

    ``computed`` is what the kernel's forward gave, without autograd: here it only enters the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: LayerRecorder,
        site: ServedLayer,
        computed: tuple[Tensor, tuple[Tensor, ...]],
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor:
        out, saved = computed
        # The parameters are saved only so that autograd notices if they are changed in place before backward.
        ctx.save_for_backward(x, *saved, *site.all_parameters)
        ctx.recorder, ctx.site, ctx.count = recorder, site, len(saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        x, *rest = ctx.saved_tensors
        saved, site = tuple(rest[: ctx.count]), ctx.site
        dx: Tensor | None = None
        left: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[4]:
            both = getattr(site.kernel, "backward", None)
            if both is None:
                dx = site.kernel.input_gradient(site.module, x, saved, grad)
            else:
                dx, left = both(site.module, x, saved, grad)
        ctx.recorder.record(Call.of(site, (x, *saved, *left, grad)))
        return None, None, None, None, dx


class _Piece(torch.autograd.Function):
    """A piece of a composite module; its weights are constants for autograd. It has several inputs and outputs."""

    @staticmethod
    def forward(
        ctx: Any, recorder: LayerRecorder, site: ServedLayer, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, saved = site.kernel.forward(site.module, *inputs)
        ctx.save_for_backward(*inputs, *saved, *site.all_parameters)
        ctx.recorder, ctx.site, ctx.counts = recorder, site, (len(inputs), len(inputs) + len(saved))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, last = ctx.counts
        tensors, site = ctx.saved_tensors, ctx.site
        inputs, saved = tuple(tensors[:first]), tuple(tensors[first:last])
        gradients, share_tensors = site.kernel.backward(site.module, inputs, saved, grads, ctx.needs_input_grad[3:])
        ctx.recorder.record(Call.of(site, share_tensors))
        return None, None, None, *gradients


class LayerRecorder:
    """Records the calls of the served layers of one batch of ``size`` records, in the thread that made it."""

    def __init__(self, size: int, habits: LearnedUse, served: Sequence[ServedLayer | ServedComposite]):
        self.size, self._habits = size, habits
        self._served = [site for site in served if habits.uses(site)] if habits.unlike or habits.apart else served
        self.calls: list[Call] = []
        self.bypassed = False
        self.refused: set[nn.Module] = set()
        self._forward_done = False
        self._thread = threading.get_ident()

    @cached_property
    def anchor(self) -> Tensor:
        """Return the tensor that keeps the graph of custom functions alive."""
        return torch.zeros((), requires_grad=True)

    def __enter__(self) -> LayerRecorder:
        """Replace the forward of the served modules."""
        for site in self._served:
            site.module.__dict__["forward"] = (
                self._replacement(site) if isinstance(site, ServedLayer) else self._composed(site)
            )
        for apart in self._habits.apart.values():
            apart.module.__dict__["forward"] = self._separate(apart)
        return self

    def __exit__(self, *exc: object) -> None:
        """Put everything back."""
        for site in (*self._served, *self._habits.apart.values()):
            site.module.__dict__.pop("forward", None)

    def forward_done(self) -> list[Tensor]:
        """Record gradients from now on; return what autograd is to be asked for."""
        self._forward_done = True
        return [self.anchor] if "anchor" in self.__dict__ else []

    def record(self, call: Call) -> None:
        """Note a call; a gradient that the model itself asks for during its forward is not the one we are after."""
        if not self._forward_done:
            self.bypassed = True
        elif call.site.parameters:
            self.calls.append(call)

    def _replacement(self, site: ServedLayer) -> Callable[..., Tensor]:
        original = type(site.module).forward
        enter_graph: Callable[..., Tensor] = _Layer.apply

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs:
                args = inspect.signature(original).bind(site.module, *args, **kwargs).args[1:]
            x = args[0]
            batch = self._batch(site, x) if len(args) == 1 else None
            if batch is not None:
                x = x.unflatten(0, (self.size, -1)) if batch == FOLDED else x.transpose(0, batch) if batch else x
                computed: tuple[Tensor, tuple[Tensor, ...]] | None = None
                torch._C._set_grad_enabled(False)  # it was on, or there would be no batch
                try:
                    if site.kernel.accepts(site.module, x):
                        computed = site.kernel.forward(site.module, x)
                except RuntimeError as error:
                    if not site.trial or out_of_memory(error):
                        raise
                finally:
                    torch._C._set_grad_enabled(True)
                if computed is not None:
                    out = enter_graph(self, site, computed, self.anchor, x)
                    out = out.flatten(0, 1) if batch == FOLDED else out.transpose(0, batch) if batch else out
                    if site.trial and self._habits.learning:
                        self._compare(site, out, args)
                    return out
                self.bypassed = True
                if site.trial:
                    self.refused.add(site.module)
            plain: Tensor = original(site.module, *args)
            return plain

        return forward

    def _compare(self, site: ServedLayer, output: Tensor, args: tuple[Any, ...]) -> None:
        """Compare the output of a kernel on trial with that of the layer itself."""
        with torch.no_grad():
            expected = type(site.module).forward(site.module, *args)
        if not alike(output, expected):
            self.bypassed = True
            self.refused.add(site.module)

    def _composed(self, composed: ServedComposite) -> Callable[..., Any]:
        original = type(composed.module).forward
        apply: Callable[..., tuple[Tensor, ...]] = _Piece.apply

        def serve(name: str, *inputs: Tensor) -> tuple[Tensor, ...]:
            return apply(self, composed.sites[name], self.anchor, *inputs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._here():
                result = composed.composite.forward(composed.module, serve, self.size, *args, **kwargs)
                if result is not NotImplemented:
                    return result
                self.bypassed = True
            return original(composed.module, *args, **kwargs)

        return forward

    def _separate(self, apart: Apart) -> Callable[..., Any]:
        def note(site: ServedLayer, tensors: tuple[Tensor, ...]) -> None:
            self.record(Call.of(site, tensors))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._here():
                result, done = run_apart(apart, self.size, self._habits.learning, self.anchor, note, args, kwargs)
                if not done:
                    self.bypassed = True
                    self.refused.add(apart.module)
                return result
            return type(apart.module).forward(apart.module, *args, **kwargs)

        return forward

    def _here(self) -> bool:
        """Return whether the recording thread calls and wants gradients, outside any functorch transform."""
        if threading.get_ident() != self._thread:
            return False
        if torch._C._are_functorch_transforms_active():
            self.bypassed = True
            return False
        return torch.is_grad_enabled()

    def _batch(self, site: ServedLayer, x: Tensor) -> int | None:
        """Return the batch axis of a layer's input; None if the layer is to be left to autograd."""
        if not self._here():
            return None
        batch, usual = self._habits.place(site, x, self.size)
        if not usual:
            self.bypassed = True
        return batch if usual else None
