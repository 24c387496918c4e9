"""One forward with kernels in place, one backward, and what each layer saw.

While the tape records, the forward of every served module is replaced on the instance and restored afterwards. The
replacement computes the layer without autograd for its weights: a parameter that still receives an autograd gradient
was used some other way too, and the engine then does not trust the tape.

A layer is either a custom autograd function, or torch's own operation on detached weights (``native.py``), which is
quicker where its kernel offers it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from evenhand.errors import UsageError
from evenhand.gradients.habits import Habits
from evenhand.gradients.kernels import Share
from evenhand.gradients.native import Native, Passed, run, suits
from evenhand.gradients.rooms import Room
from evenhand.gradients.serving import Composed, Site
from evenhand.gradients.views import rows_of, share_of


@dataclass(frozen=True)
class Call:
    """What one call of a layer left for its share: tensors with the batch in their first dimension."""

    site: Site
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    views: int = 1

    @classmethod
    def of(cls, site: Site, tensors: tuple[Tensor, ...]) -> Call:
        """A call whose tensors are watched from now on.

        They are detached: with its graph an input would hold the node that holds the tape, until the collector comes.
        """
        seen = tuple([t.detach() for t in tensors])
        return cls(site, seen, tuple([t._version for t in seen]))

    def share(self, room: Room, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Share:
        """The records' gradients of this call, for some rows and in another precision if asked."""
        tensors = self.tensors
        if rows is not None:
            rows = rows if self.views == 1 else rows_of(rows, self.views)
            tensors = tuple([t[rows] for t in tensors])
        wanted = dtype or self.site.dtype
        tensors = tuple([t.to(wanted) if t.dtype != wanted and t.is_floating_point() else t for t in tensors])
        return self.site.share(tensors, room) if self.views == 1 else share_of(self.site, tensors, self.views, room)

    def check(self) -> None:
        """Raise if what the layer saw was changed in place since the backward."""
        if tuple([t._version for t in self.tensors]) != self.versions:
            raise UsageError("inputs were changed in place after the pass; ask for the weighted sum before that")


class _Layer(torch.autograd.Function):
    """A layer whose weights are constants for autograd; ``anchor`` requires grad and keeps the graph alive."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, site: Site, anchor: Tensor, x: Tensor) -> Tensor:
        out: Tensor
        out, saved = site.kernel.forward(site.module, x)
        # The parameters are saved only so that autograd notices if they are changed in place before backward.
        ctx.save_for_backward(x, *saved, *site.held)
        ctx.tape, ctx.site, ctx.count = tape, site, len(saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None]:
        x, *rest = ctx.saved_tensors
        saved, site = tuple(rest[: ctx.count]), ctx.site
        dx: Tensor | None = None
        left: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[3]:
            both = getattr(site.kernel, "backward", None)
            if both is None:
                dx = site.kernel.input_gradient(site.module, x, saved, grad)
            else:
                dx, left = both(site.module, x, saved, grad)
        ctx.tape.record(Call.of(site, (x, *saved, *left, grad)))
        return None, None, None, dx


class _Piece(torch.autograd.Function):
    """The same for a piece of a composite module, with several inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, site: Site, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, saved = site.kernel.forward(site.module, *inputs)
        ctx.save_for_backward(*inputs, *saved, *site.held)
        ctx.tape, ctx.site, ctx.counts = tape, site, (len(inputs), len(inputs) + len(saved))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, last = ctx.counts
        tensors, site = ctx.saved_tensors, ctx.site
        inputs, saved = tuple(tensors[:first]), tuple(tensors[first:last])
        gradients, kept = site.kernel.backward(site.module, inputs, saved, grads, ctx.needs_input_grad[3:])
        ctx.tape.record(Call.of(site, kept))
        return None, None, None, *gradients


class Tape:
    """Records the calls of the served layers of one batch of ``size`` records, in the thread that made it."""

    def __init__(self, size: int, habits: Habits, served: Sequence[Site | Composed]):
        self.size, self._habits, self._served = size, habits, served
        self.calls: list[Call] = []
        self.natives: list[Native] = []
        self.passed: Passed = {}
        self.bypassed = False
        self._forward_done = False
        self._thread = threading.get_ident()

    @cached_property
    def anchor(self) -> Tensor:
        """What keeps the graph of custom functions alive."""
        return torch.zeros((), requires_grad=True)

    def __enter__(self) -> Tape:
        """Replace the forward of the served modules."""
        for site in self._served:
            site.module.__dict__["forward"] = (
                self._replacement(site) if isinstance(site, Site) else self._composed(site)
            )
        return self

    def __exit__(self, *exc: object) -> None:
        """Put everything back."""
        for site in self._served:
            site.module.__dict__.pop("forward", None)

    def forward_done(self) -> list[Any]:
        """From now on gradients are the ones we are after. Returns what autograd is to be asked for."""
        self._forward_done = True
        if self.passed:
            self.bypassed = True
        anchors = [self.anchor] if "anchor" in self.__dict__ else []
        return [*anchors, *[native.edge for native in self.natives]]

    def backward_done(self, gradients: Sequence[Tensor | None]) -> None:
        """Note the calls of native layers, given what autograd answered; the graph can go then."""
        first = len(gradients) - len(self.natives)
        for i, native in enumerate(self.natives):
            tensors = native.tensors(self.passed.get(i), gradients[first + i])
            if tensors is not None and native.site.parameters:
                self.calls.append(Call.of(native.site, tensors))
        self.natives.clear()

    def record(self, call: Call) -> None:
        """Note a call; a gradient that the model itself asks for during its forward is not the one we are after."""
        if not self._forward_done:
            self.bypassed = True
        elif call.site.parameters:
            self.calls.append(call)

    def _replacement(self, site: Site) -> Callable[..., Tensor]:
        original = type(site.module).forward
        serve: Callable[..., Tensor] = _Layer.apply
        native = hasattr(site.kernel, "native") and site.kernel.natively(site.module)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs:
                args = inspect.signature(original).bind(site.module, *args, **kwargs).args[1:]
            x = args[0]
            batch = self._batch(site, x) if len(args) == 1 else None
            if batch is not None:
                x = x.transpose(0, batch) if batch else x
                if site.kernel.accepts(site.module, x) or self._bypass():
                    if native and not self._forward_done and suits(x):
                        out = self._natively(site, x)
                    else:
                        out = serve(self, site, self.anchor, x)
                    return out.transpose(0, batch) if batch else out
            plain: Tensor = original(site.module, *args)
            return plain

        return forward

    def _natively(self, site: Site, x: Tensor) -> Tensor:
        out, native = run(site, x, len(self.natives), self.passed)
        self.natives.append(native)
        return out

    def _composed(self, composed: Composed) -> Callable[..., Any]:
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

    def _bypass(self) -> bool:
        self.bypassed = True
        return False

    def _here(self) -> bool:
        """Whether this is a call of the recording thread that wants gradients, outside any functorch transform."""
        if threading.get_ident() != self._thread:
            return False
        if torch._C._are_functorch_transforms_active():
            return self._bypass()
        return torch.is_grad_enabled()

    def _batch(self, site: Site, x: Tensor) -> int | None:
        """Where a layer's input has the batch; None if the layer is to be left to autograd."""
        if not self._here():
            return None
        batch, usual = self._habits.place(site.module, x, self.size)
        return batch if usual or self._bypass() else None
