"""The doctor: which kernel serves which module, what is refused and why, whether records are independent, and the cost.

Made-up records of the right shape are enough. With those, everything that is printed is public. Where a forward uses
parameters is seen by a `TorchFunctionMode`: every operation with its arguments, also those in keywords and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.batch_utils import LossFn, as_plain, batch_size, buffers_restored, call
from evenhand.gradients.doctor import timing
from evenhand.gradients.doctor.fixes import Change, changes
from evenhand.gradients.doctor.independence_probe import RECORDS, probe
from evenhand.gradients.doctor.refusals import refuse
from evenhand.gradients.engine import Engine, Way
from evenhand.gradients.layers import base
from evenhand.gradients.model_layout import Modules, ServedLayer, modules_of, sites, trainable_of
from evenhand.gradients.pass_context import exclusive, preserved


@dataclass
class Uses:
    """``past``: by parameter name, the operation that used it outside its served module. ``rows``: by module name, the
    first dimension of an input that is not the batch.
    """

    size: int
    past: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def problem(self, module: str, names: Iterable[str]) -> str:
        """Say what keeps the kernel of a module from being used; an empty text if nothing does."""
        for name in names:
            operation = self.past.get(f"{module}.{name}" if module else name)
            if operation:
                return f"{name} is used past the kernel, by {operation}"
        if module in self.rows:
            return f"is called with {self.rows[module]} rows for {self.size} records"
        return ""


def watch(model: nn.Module, modules: Modules, inputs: Any, size: int) -> Uses:
    """Run one plain forward and watch it. The caller preserves the model's random state and buffers.

    >>> class Raw(nn.Module):
    ...     def __init__(self): super().__init__(); self.l = nn.Linear(2, 2)
    ...     def forward(self, x): return nn.functional.linear(x, weight=self.l.weight)
    >>> from evenhand.gradients.model_layout import modules_of
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
                name = names[id(site.module)] if isinstance(site, ServedLayer) else None
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
        """Run the module's forward; while it runs, its parameters are used as its kernel would."""
        original, identities = type(module).forward, {id(p) for p in module.parameters()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            rows = len(first) if first is not None and first.dim() else 0
            if name is not None and rows != self._uses.size:
                self._uses.rows[name] = rows
            self._running.append(identities)
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
    """Return whether a gradient flows back from here; a parameter itself, or something detached, was only looked at."""
    return result.requires_grad and not isinstance(result, nn.Parameter)


@dataclass(frozen=True)
class Part:
    """A module with parameters of its own, or one that is refused.

    ``kernel`` is what serves it ("" if nothing does). ``problem`` says why the kernels cannot be used for it, or why it
    is refused; ``note`` what else there is to know.
    """

    name: str
    kind: str
    parameters: int
    kernel: str
    problem: str
    note: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`.

    ``refused`` and ``probe`` say why the model cannot be trained privately (nothing if it can). ``way`` is how the
    engine differentiates the model, ``slowdown`` the time of a private step as a multiple of a plain one (None if it
    was not measured), ``fixable`` what `evenhand.gradients.fix` would replace.
    """

    parts: tuple[Part, ...]
    refused: tuple[str, ...]
    probe: str
    way: Way | None
    slowdown: float | None
    batch: int
    fixable: tuple[Change, ...]

    @property
    def trainable(self) -> bool:
        """Return whether evenhand trains this model privately."""
        return not self.refused and not self.probe

    def __str__(self) -> str:
        return "\n".join([*_table(self.parts, self.refused), "", *_verdict(self)])


def examine(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, timed: bool = True) -> Diagnosis:
    """Look at a model as training would use it, in its present mode; the model is left as it was.

    Arguments are those of `per_sample`. Records may be made up: only their shapes matter, and the probe then tells
    nothing about people. ``timed=False`` leaves out the measurement of the cost.

    >>> loss = nn.CrossEntropyLoss(reduction="none")
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> found = examine(model, loss, torch.randn(16, 4), torch.arange(16) % 3)
    >>> found.trainable, found.refused[0][:26], found.fixable[0].after
    (False, "'1' (BatchNorm1d) normalis", 'GroupNorm(1, 8)')
    """
    inputs = as_plain(inputs)
    modules, size = modules_of(model), batch_size(inputs, targets)
    reasons = {name: reason for name, module in modules if (reason := _refusal(name, module))}
    fixable = changes(model)
    if reasons:
        return Diagnosis(_parts(modules, None, reasons), tuple(reasons.values()), "", None, None, size, fixable)
    with preserved(model), buffers_restored(model):
        uses = watch(model, modules, inputs, size)
    parts = _parts(modules, uses, reasons)
    try:
        probe(model, loss_fn, inputs, targets)
    except UnsupportedModelError as refusal:
        return Diagnosis(parts, (), str(refusal), None, None, size, fixable)
    engine = Engine(model, loss_fn)
    with preserved(model), buffers_restored(model):
        engine.run(inputs, targets)
        slowdown = timing.measure(model, loss_fn, inputs, targets, rounds=3)[1].ratio if timed else None
    way, apart = engine.way(), engine.apart()
    if way.startswith("kernels"):
        parts = tuple(_working(part, apart, engine.unlike()) for part in parts)
    return Diagnosis(parts, (), "", way, slowdown, size, fixable)


DIRECT = "followed directly"
"""Says what serves parameters that meet the batch without a layer, see ``raw_parameters.py``."""


def _working(part: Part, apart: Mapping[str, str], unlike: Sequence[str]) -> Part:
    """Return the part as a model of kernels runs it: what is in the way of a kernel matters only if it costs time."""
    if part.name in unlike:
        part = replace(part, kernel="", problem="resembles a known layer but computes something else")
    inside = [name for name in apart if part.name == name or part.name.startswith(name + ".")]
    if part.problem and inside:
        where = "" if inside[0] == part.name else f" of {inside[0]}"
        return replace(part, kernel=f"run again{where} ({apart[inside[0]]})")
    return replace(part, kernel=part.kernel or DIRECT, problem="")


def _refusal(name: str, module: nn.Module) -> str:
    try:
        refuse([(name, module)])
    except UnsupportedModelError as refusal:
        return str(refusal)
    return ""


def _parts(modules: Modules, uses: Uses | None, reasons: dict[str, str]) -> tuple[Part, ...]:
    served = {id(site.module): site for site in sites([m for m in modules if m[0] not in reasons])}
    owners: dict[int, str] = {}
    parts = []
    for name, module in modules:
        parameters = {n: p for n, p in module.named_parameters(recurse=False) if not is_lazy(p)}
        if not parameters and name not in reasons:
            continue
        trainable, site = any(p.requires_grad for p in parameters.values()), served.get(id(module))
        kernel = "" if site is None else type(site.kernel if isinstance(site, ServedLayer) else site.composite).__name__
        problem = reasons.get(name, "")
        if not problem and trainable:
            problem = _unserved(module) if site is None else uses.problem(name, parameters) if uses else ""
        shared = [f"{n} is also {owners[id(p)]}" for n, p in parameters.items() if id(p) in owners]
        owners |= {id(p): f"{name}.{n}" if name else n for n, p in parameters.items() if id(p) not in owners}
        frozen = [] if trainable or problem or not parameters else ["frozen: no gradient, no noise"]
        note = "; ".join(frozen + shared)
        parts.append(
            Part(name, type(module).__name__, sum(p.numel() for p in parameters.values()), kernel, problem, note)
        )
    return tuple(parts)


def _unserved(module: nn.Module) -> str:
    """Say why no kernel serves a module with trainable parameters of its own."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if base.touched(module):
        return "hooks are registered on it"
    known = (*base._KERNELS, *base._COMPOSITES)
    if type(module) in known:
        return "the kernel does not serve this configuration"
    parent = next((kind.__name__ for kind in known if isinstance(module, kind)), "")
    if parent:
        return f"a subclass of {parent} may compute something else; register_kernel can serve it"
    return "its own forward uses parameters directly" if module._modules else "no kernel for this type"


def _table(parts: Sequence[Part], refused: Sequence[str]) -> list[str]:
    rows = [("module", "type", "parameters", "served by", "")]
    for part in parts:
        by = part.kernel if part.kernel else "-"
        problem = "refused, see below" if part.problem in refused else part.problem
        said = "; ".join(text for text in (problem, part.note) if text)
        rows.append((part.name or "(the model)", part.kind, f"{part.parameters:,}", by, said))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    pads: list[Callable[[str, int], str]] = [str.ljust, str.ljust, str.rjust, str.ljust]
    lines = []
    for row in rows:
        cells = [pad(text, width) for pad, text, width in zip(pads, row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return lines


def _verdict(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.trainable:
        why = [f"  - {reason}" for reason in (*diagnosis.refused, diagnosis.probe) if reason]
        mend = [f"  {change}" for change in diagnosis.fixable]
        advice = ["", "evenhand.gradients.fix(model) replaces:", *mend] if mend else []
        return ["NOT trainable privately:", *why, *advice]
    culprits = [part for part in diagnosis.parts if part.problem]
    lines = ["Trainable privately, by kernels: one forward and one backward."]
    if diagnosis.way == "kernels, some modules record by record":
        names = [f"  - {part.name or 'the model'} ({part.kind}): {part.problem}" for part in culprits]
        lines = ["Trainable privately, by kernels but for these modules, which are run again for each record:", *names]
    elif diagnosis.way != "kernels":
        names = [f"  - {part.name or 'the model'} ({part.kind}): {part.problem}" for part in culprits]
        hidden = ["  - the kernels disagree with plain autograd: records are reordered, or time comes first"]
        lines = [f"Trainable privately, {diagnosis.way}: as exact, but slow. Because:", *(names or hidden)]
    count = min(diagnosis.batch, RECORDS)
    lines.append(
        f"Independence: {count} records alone and in company gave the same gradients. This can refute, not prove."
    )
    if diagnosis.slowdown is not None:
        threads = torch.get_num_threads()
        lines.append(
            f"Cost: a private step took {diagnosis.slowdown:.2f} times as long as plain SGD "
            f"(batch {diagnosis.batch}, {threads} thread{'s' if threads > 1 else ''}, measured just now)."
        )
    return lines
