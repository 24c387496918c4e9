"""The doctor: which kernel serves which module, what is refused and why, whether records are independent, and the cost.

Made-up records of the right shape are enough. With those, everything that is printed is public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evenhand.errors import UnsupportedModelError
from evenhand.gradients import kernels, timing
from evenhand.gradients.engine import Engine
from evenhand.gradients.fixes import Change, changes
from evenhand.gradients.probe import RECORDS, probe
from evenhand.gradients.randomness import preserved
from evenhand.gradients.records import LossFn, batch_size, buffers_restored
from evenhand.gradients.refusals import refuse
from evenhand.gradients.serving import Site, sites
from evenhand.gradients.structure import Modules, modules_of
from evenhand.gradients.uses import Uses, watch

Way: TypeAlias = Literal["kernels", "record by record (vmap)", "record by record (loop)"]


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
    """What `examine` found.

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
        """Whether evenhand trains this model privately."""
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
    way = _way(engine)
    if way == "kernels":
        parts = tuple(replace(part, kernel=part.kernel or DIRECT, problem="") for part in parts)
    return Diagnosis(parts, (), "", way, slowdown, size, fixable)


DIRECT = "followed directly"
"""What serves parameters that meet the batch without a layer, see ``direct.py``."""


def _refusal(name: str, module: nn.Module) -> str:
    try:
        refuse([(name, module)])
    except UnsupportedModelError as refusal:
        return str(refusal)
    return ""


def _way(engine: Engine) -> Way:
    if all(engine._served.values()):
        return "kernels"
    return "record by record (vmap)" if engine._fallback._vectorise else "record by record (loop)"


def _parts(modules: Modules, uses: Uses | None, reasons: dict[str, str]) -> tuple[Part, ...]:
    served = {id(site.module): site for site in sites([m for m in modules if m[0] not in reasons])}
    owners: dict[int, str] = {}
    found = []
    for name, module in modules:
        own = {n: p for n, p in module.named_parameters(recurse=False) if not is_lazy(p)}
        if not own and name not in reasons:
            continue
        trainable, site = any(p.requires_grad for p in own.values()), served.get(id(module))
        kernel = "" if site is None else type(site.kernel if isinstance(site, Site) else site.composite).__name__
        problem = reasons.get(name, "")
        if not problem and trainable:
            problem = _unserved(module) if site is None else uses.problem(name, own) if uses else ""
        shared = [f"{n} is also {owners[id(p)]}" for n, p in own.items() if id(p) in owners]
        owners |= {id(p): f"{name}.{n}" if name else n for n, p in own.items() if id(p) not in owners}
        frozen = [] if trainable or problem or not own else ["frozen: no gradient, no noise"]
        note = "; ".join(frozen + shared)
        found.append(Part(name, type(module).__name__, sum(p.numel() for p in own.values()), kernel, problem, note))
    return tuple(found)


def _unserved(module: nn.Module) -> str:
    """Why no kernel serves a module with trainable parameters of its own."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if kernels.touched(module):
        return "hooks are registered on it"
    known = (*kernels._KERNELS, *kernels._COMPOSITES)
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


def _verdict(found: Diagnosis) -> list[str]:
    if not found.trainable:
        why = [f"  - {reason}" for reason in (*found.refused, found.probe) if reason]
        mend = [f"  {change}" for change in found.fixable]
        advice = ["", "evenhand.gradients.fix(model) replaces:", *mend] if mend else []
        return ["NOT trainable privately:", *why, *advice]
    culprits = [part for part in found.parts if part.problem]
    lines = ["Trainable privately, by kernels: one forward and one backward."]
    if found.way != "kernels":
        names = [f"  - {part.name or 'the model'} ({part.kind}): {part.problem}" for part in culprits]
        hidden = ["  - the kernels disagree with plain autograd: records are reordered, or time comes first"]
        lines = [f"Trainable privately, {found.way}: as exact, but slow. Because:", *(names or hidden)]
    count = min(found.batch, RECORDS)
    lines.append(
        f"Independence: {count} records alone and in company gave the same gradients. This can refute, not prove."
    )
    if found.slowdown is not None:
        threads = torch.get_num_threads()
        lines.append(
            f"Cost: a private step took {found.slowdown:.2f} times as long as plain SGD "
            f"(batch {found.batch}, {threads} thread{'s' if threads > 1 else ''}, measured just now)."
        )
    return lines
