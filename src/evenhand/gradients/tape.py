"""One forward with kernels in place, one backward, and what each layer saw.

While the tape records, the forward of every served module is replaced on the instance and restored afterwards. The
replacement computes the layer without autograd for its weights: a parameter that still receives an autograd gradient
was used some other way too, and the engine then does not trust the tape.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients.kernels import Kernel, Share, kernel_for, working_dtype
from evenhand.gradients.structure import Modules


@dataclass(frozen=True)
class Site:
    """A served module, its trainable parameters by the module's own names, and the precision of their gradients."""

    module: nn.Module
    kernel: Kernel[Any]
    parameters: dict[str, nn.Parameter]
    dtype: torch.dtype


def sites(modules: Modules) -> list[Site]:
    """The modules with trainable parameters that a kernel serves.

    >>> [type(site.module).__name__ for site in sites([("a", nn.Linear(2, 2)), ("b", nn.Bilinear(1, 1, 1))])]
    ['Linear']
    """
    found = []
    for _, module in modules:
        parameters = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if parameters:
            kernel = kernel_for(module)
            if kernel is not None:
                dtype = working_dtype(next(iter(parameters.values())).dtype)
                found.append(Site(module, kernel, parameters, dtype))
    return found


@dataclass(frozen=True)
class Call:
    """Input, saved tensors and output gradient of one call of a layer, with the batch in their first dimension."""

    site: Site
    x: Tensor
    saved: tuple[Tensor, ...]
    grad: Tensor
    version: int

    def share(self, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Share:
        """The records' gradients of this call, for some rows and in another precision if asked."""
        tensors = [self.x, *self.saved, self.grad]
        if rows is not None:
            tensors = [t[rows] for t in tensors]
        x, *saved, grad = (t.to(dtype or self.site.dtype) if t.is_floating_point() else t for t in tensors)
        return self.site.kernel.share(self.site.module, x, tuple(saved), grad, frozenset(self.site.parameters))

    def check(self) -> None:
        """Raise if the layer's input was changed in place since the backward."""
        if self.x._version != self.version:
            raise UsageError("inputs were changed in place after the pass; ask for the weighted sum before that")


class _Layer(torch.autograd.Function):
    """A layer whose weights are constants for autograd; ``anchor`` requires grad and keeps the graph alive."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, site: Site, anchor: Tensor, x: Tensor) -> Tensor:
        out, saved = site.kernel.forward(site.module, x)
        # The parameters are saved only so that autograd notices if they are changed in place before backward.
        ctx.save_for_backward(x, *saved, *(p for p in site.module._parameters.values() if p is not None))
        ctx.tape, ctx.site, ctx.count = tape, site, len(saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None]:
        x, *rest = ctx.saved_tensors
        saved = tuple(rest[: ctx.count])
        ctx.tape.record(Call(ctx.site, x.detach(), saved, grad, x._version))
        if not ctx.needs_input_grad[3]:
            return None, None, None, None
        return None, None, None, ctx.site.kernel.input_gradient(ctx.site.module, x, saved, grad)


class Tape:
    """Records the calls of the served layers of one batch of ``size`` records, in the thread that made it."""

    def __init__(self, size: int):
        self.size = size
        self.calls: list[Call] = []
        self.bypassed = False
        self.forward_done = False
        self.anchor = torch.zeros((), requires_grad=True)
        self._thread = threading.get_ident()

    @contextmanager
    def recording(self, served: list[Site]) -> Iterator[None]:
        """Replace the forward of the served modules, and put everything back."""
        try:
            for site in served:
                site.module.__dict__["forward"] = self._replacement(site)
            yield
        finally:
            for site in served:
                site.module.__dict__.pop("forward", None)

    def record(self, call: Call) -> None:
        """Note a call; a gradient that the model itself asks for during its forward is not the one we are after."""
        if self.forward_done:
            self.calls.append(call)
        else:
            self.bypassed = True

    def _replacement(self, site: Site) -> Callable[..., Tensor]:
        original = type(site.module).forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs:
                args = inspect.signature(original).bind(site.module, *args, **kwargs).args[1:]
            x = args[0]
            serve: Callable[..., Tensor] = _Layer.apply
            if len(args) == 1 and self._usable(site, x):
                return serve(self, site, self.anchor, x)
            plain: Tensor = original(site.module, *args)
            return plain

        return forward

    def _usable(self, site: Site, x: Tensor) -> bool:
        if threading.get_ident() != self._thread:
            return False
        batched = x.dim() > 0 and x.shape[0] == self.size and site.kernel.accepts(site.module, x)
        if batched and not torch._C._are_functorch_transforms_active():
            return torch.is_grad_enabled()
        self.bypassed = True
        return False
