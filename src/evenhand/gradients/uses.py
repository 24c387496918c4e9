"""Where a forward uses parameters: inside the module that a kernel serves, or past it.

A `TorchFunctionMode` sees every operation with its arguments, also those in keywords and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from evenhand.gradients.locking import exclusive
from evenhand.gradients.records import call
from evenhand.gradients.serving import Site, sites
from evenhand.gradients.structure import Modules, trainable_of


@dataclass
class Uses:
    """``past``: by parameter name, the operation that used it outside its served module. ``rows``: by module name, the
    first dimension of an input that is not the batch.
    """

    size: int
    past: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def problem(self, module: str, own: Iterable[str]) -> str:
        """What keeps the kernel of a module from being used, in words; nothing if all is well."""
        for name in own:
            operation = self.past.get(f"{module}.{name}" if module else name)
            if operation:
                return f"{name} is used past the kernel, by {operation}"
        if module in self.rows:
            return f"is called with {self.rows[module]} rows for {self.size} records"
        return ""


def watch(model: nn.Module, modules: Modules, inputs: Any, size: int) -> Uses:
    """One plain forward, watched. The model's random state and buffers are the caller's to keep.

    >>> class Raw(nn.Module):
    ...     def __init__(self): super().__init__(); self.l = nn.Linear(2, 2)
    ...     def forward(self, x): return nn.functional.linear(x, weight=self.l.weight)
    >>> from evenhand.gradients.structure import modules_of
    >>> model = Raw(); watch(model, modules_of(model), torch.ones(3, 2), 3).past
    {'l.weight': 'torch.nn.functional.linear'}
    """
    uses = Uses(size)
    mode = _Watching({id(p): name for name, p in trainable_of(modules).items()}, uses)
    names = {id(module): name for name, module in modules}
    served = sites(modules)
    with exclusive(frozenset(names)), torch.enable_grad():
        try:
            for site in served:
                name = names[id(site.module)] if isinstance(site, Site) else None
                site.module.__dict__["forward"] = mode.inside(site.module, name)
            with mode:
                call(model, inputs)
        finally:
            for site in served:
                site.module.__dict__.pop("forward", None)
    return uses


class _Watching(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str], uses: Uses):
        super().__init__()
        self._names, self._uses = names, uses
        self._running: list[set[int]] = []

    def inside(self, module: nn.Module, name: str | None) -> Callable[..., Any]:
        """The module's forward; while it runs, its parameters are used as its kernel would."""
        original, own = type(module).forward, {id(p) for p in module.parameters()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            rows = len(first) if first is not None and first.dim() else 0
            if name is not None and rows != self._uses.size:
                self._uses.rows[name] = rows
            self._running.append(own)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._running.pop()

        return forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)} & set(self._names)
        used -= set().union(*self._running)
        if used and any(isinstance(leaf, Tensor) and _flows(leaf) for leaf in tree_leaves(result)):
            for key in used:
                self._uses.past.setdefault(self._names[key], resolve_name(func) or getattr(func, "__name__", "?"))
        return result


def _flows(result: Tensor) -> bool:
    """Whether a gradient flows back from here; a parameter itself, or something detached, was only looked at."""
    return result.requires_grad and not isinstance(result, nn.Parameter)
