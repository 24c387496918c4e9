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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.gradients.model_layout import Call, ServedComposite, ServedLayer

_INNER: dict[type[nn.Module], Callable[[Any], int]] = {
    nn.Linear: lambda module: 1,
    nn.LayerNorm: lambda module: len(module.normalized_shape),
    nn.Embedding: lambda module: 0,
}
"""Layers that do the same at every place: how many dimensions, the last ones, make a place."""


@dataclass
class LearnedUse:
    """``batch``: where a layer's input has the records; None for a layer that sees something else.

    ``ways``: how parameters are used without a layer, see ``raw_parameters.py``.
    """

    learning: bool = True
    batch: dict[nn.Module, int | None] = field(default_factory=dict)
    ways: set[tuple[str, ...]] = field(default_factory=set)

    def place(self, module: nn.Module, x: Tensor, size: int) -> tuple[int | None, bool]:
        """Return the batch axis of ``x``, and whether it is as it was. Only layers with places may have it second.

        >>> habits, layer = LearnedUse(), nn.Linear(2, 2)
        >>> habits.place(layer, torch.ones(5, 3, 2), 3)
        (1, True)
        >>> habits.place(layer, torch.ones(3, 5, 2), 3)
        (0, False)
        >>> habits.learning = False
        >>> habits.place(layer, torch.ones(7, 7, 2), 7)
        (1, True)
        """
        if self.learning:
            axis = next((dim for dim in range(_places(module, x)) if x.shape[dim] == size), None)
            return axis, self.batch.setdefault(module, axis) == axis
        known = self.batch.get(module, 0)
        return known, known is None or (x.dim() > known and x.shape[known] == size)


def _places(module: nn.Module, x: Tensor) -> int:
    """Return how many of the leading dimensions may be the batch."""
    inner = _INNER.get(type(module))
    return min(1, x.dim()) if inner is None else max(min(1, x.dim()), min(2, x.dim() - inner(module)))


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
        self.size, self._habits, self._served = size, habits, served
        self.calls: list[Call] = []
        self.bypassed = False
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
        return self

    def __exit__(self, *exc: object) -> None:
        """Put everything back."""
        for site in self._served:
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
                x = x.transpose(0, batch) if batch else x
                if site.kernel.accepts(site.module, x):
                    torch._C._set_grad_enabled(False)  # it was on, or there would be no batch
                    try:
                        computed = site.kernel.forward(site.module, x)
                    finally:
                        torch._C._set_grad_enabled(True)
                    out = enter_graph(self, site, computed, self.anchor, x)
                    return out.transpose(0, batch) if batch else out
                self.bypassed = True
            plain: Tensor = original(site.module, *args)
            return plain

        return forward

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
        batch, usual = self._habits.place(site.module, x, self.size)
        if not usual:
            self.bypassed = True
        return batch if usual else None
