"""Gradients of each record for the parameters of one module that no kernel serves, while the rest stays on kernels.

In the forward the module runs as it is, with constants in place of these parameters; what goes in and the gradients of
what comes out are noted. From those the module alone is run again, for one record at a time by ``vmap``, or in a loop
where its operators do not allow that.

Guarantee: a parameter is used through its module or autograd gives the bypass away, as for kernels. A module that draws
random numbers or writes into its buffers, whose second run would be another one, is not served.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evenhand.errors import UsageError
from evenhand.gradients.layers.base import combined, shadowed
from evenhand.gradients.memory import ScratchBuffers, out_of_memory
from evenhand.gradients.model_layout import Layout, ServedComposite, ServedLayer, modules_of
from evenhand.gradients.pass_context import lowered
from evenhand.gradients.row_norms import RowNorms, chunks, working_dtype

CHUNK = 1 << 22
"""Elements of gradients that are instantiated at a time."""
Values: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Apart:
    """A module, and those of its parameters (by their names in the model) for which it is run again.

    ``folded`` is what the first call of a kind learned: how many rows of each tensor belong to a record (0: it is
    shared by all records). ``loops`` says that vmap cannot run the module.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    folded: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    loops: list[bool] = field(default_factory=list)

    def learned(self, leaves: Sequence[Any], size: int, learning: bool) -> list[bool]:
        """Return which of the leaves have rows of every record; those that had them at first must have them now."""
        rows = tuple(_rows(leaf, size) for leaf in leaves)
        key = tuple(leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves)
        usual = self.folded.setdefault(key, rows) if learning else self.folded.get(key, ())
        if len(usual) != len(rows) or any(known and not now for known, now in zip(usual, rows, strict=True)):
            return [False] * len(rows)
        return [known > 0 for known in usual]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters in the model."""
        return tuple(self.parameters)

    def contains(self, site: ServedLayer | ServedComposite) -> bool:
        """Return whether a layer inside has one of the parameters, so that its kernel would count it twice."""
        mine = {id(p) for p in self.parameters.values()}
        return any(id(p) in mine for p in trained(site)) and any(m is site.module for m in self.module.modules())

    def places(self) -> list[tuple[dict[str, Any], str, str]]:
        """Return where the module keeps its parameters and buffers: the table, the name there and the full name."""
        found = []
        for prefix, module in modules_of(self.module):
            for table in (module._parameters, module._buffers):
                found += [(table, name, f"{prefix}.{name}" if prefix else name) for name in table]
        return found

    @contextmanager
    def with_values(self, values: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Iterator[None]:
        """Put other tensors in place of the module's own, and everything else in another precision if asked."""
        keys = {id(p): name for name, p in self.parameters.items()}
        before = [(table, name, table[name]) for table, name, _ in self.places() if table[name] is not None]
        try:
            for table, name, tensor in before:
                key = keys.get(id(tensor))
                if key is not None:
                    table[name] = values[key]
                elif dtype is not None and tensor.is_floating_point():
                    table[name] = tensor.detach().to(dtype)
            yield
        finally:
            for table, name, tensor in before:
                table[name] = tensor


def further_apart(
    layout: Layout, apart: Mapping[str, Apart], past: Sequence[str], refused: set[nn.Module], unlike: set[nn.Module]
) -> dict[str, Apart] | None:
    """Return the modules to be run again after an attempt in which ``past`` parameters went past all kernels.

    A parameter first belongs to the module that has it; if that does not do, or is among the ``refused``, to the one
    around it. The ``unlike`` have no kernel after all. None if nothing is left but the whole model.

    >>> from evenhand.gradients.model_layout import Layout
    >>> layout = Layout.read(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.PReLU())))
    >>> first = further_apart(layout, {}, ["1.0.weight"], set(), set()); list(first)
    ['1.0']
    >>> second = further_apart(layout, first, ["1.0.weight"], set(), set()); list(second)
    ['1']
    >>> further_apart(layout, second, ["1.0.weight"], set(), set()) is None
    True
    """
    modules = dict(layout.modules)
    served = {id(site.module) for site in layout.served if site.module not in unlike}
    where = {name: module for module, one in apart.items() for name in one.names}
    again = {name for module, one in apart.items() if one.module in refused for name in one.names}
    if not past and not again:
        return None
    for name in (*past, *again):
        above = where[name] if name in where else _owner(layout, layout.trainable[name]) + "."
        while True:
            above = above.rpartition(".")[0]
            module = modules.get(above)
            if not above or module is None:
                return None
            if id(module) not in served and not shadowed(module):
                break
        where[name] = above
    names: dict[str, list[str]] = {}
    for name, above in where.items():
        names.setdefault(above, []).append(name)
    return {above: _whole(layout, modules[above], some) for above, some in names.items()}


def _whole(layout: Layout, module: nn.Module, names: Sequence[str]) -> Apart:
    """Return a module run again for these parameters and for all others of layers inside that share one with them."""
    apart = Apart(module, {name: layout.trainable[name] for name in names})
    shared = {id(p) for site in layout.served if apart.contains(site) for p in trained(site)}
    more = {name: p for name, p in layout.trainable.items() if id(p) in shared and name not in apart.parameters}
    return _whole(layout, module, [*names, *more]) if more else apart


def trained(site: ServedLayer | ServedComposite) -> list[nn.Parameter]:
    """Return the trainable parameters of what is served."""
    pieces = [site] if isinstance(site, ServedLayer) else list(site.sites.values())
    return [p for piece in pieces for p in piece.parameters.values()]


def _owner(layout: Layout, parameter: nn.Parameter) -> str:
    return next(name for name, m in layout.modules if any(p is parameter for p in m._parameters.values()))


@dataclass(frozen=True)
class _Rerun:
    """One call of a module: how its arguments and results are put together, and which tensors all records share.

    ``places`` says for each leaf of the arguments which recorded tensor it is; ``given`` are the leaves themselves,
    with None where a recorded tensor goes.
    """

    apart: Apart
    spec: TreeSpec
    given: tuple[Any, ...]
    places: tuple[int, ...]
    wanted: tuple[int, ...]
    swaps = True

    @property
    def module(self) -> nn.Module:
        """Return the module that is run again."""
        return self.apart.module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters for which it is run."""
        return self.apart.parameters

    def share(self, module: nn.Module, tensors: tuple[Tensor, ...], trainable: Any, room: ScratchBuffers) -> Held:
        """Return the records' gradients, held if they fit the memory."""
        return Held(self, tensors, room)

    def outputs(self, values: Values, rows: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        """Run the module for one record."""
        filled = list(self.given)
        if dtype is not None:
            filled = [_cast(leaf, dtype) for leaf in filled]
        for place, row in zip(self.places, rows, strict=True):
            filled[place] = row
        args, kwargs = tree_unflatten(filled, self.spec)
        with self.apart.with_values(values, dtype):
            leaves = tree_flatten(type(self.apart.module).forward(self.apart.module, *args, **kwargs))[0]
        return tuple(leaves[place] for place in self.wanted)

    def gradients(self, tensors: Sequence[Tensor]) -> Values:
        """Return the gradients of some records, given their rows of the recorded tensors."""
        values = {name: p.detach() for name, p in self.apart.parameters.items()}
        narrow, wide = next(iter(values.values())).dtype, tensors[-1].dtype
        if narrow == wide:
            return self._differentiated(values, tensors, None)
        try:
            return self._differentiated({name: value.to(wide) for name, value in values.items()}, tensors, wide)
        except RuntimeError:  # code that insists on the precision of its parameters
            own = self._differentiated(values, [_cast(t, narrow) for t in tensors], None)
            return {name: rows.to(wide) for name, rows in own.items()}

    def _differentiated(self, values: Values, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Values:
        count = len(self.places)

        def one(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Values:
            pull = vjp(lambda some: self.outputs(some, inputs, dtype), values)[1]
            own: Values = pull(tuple(grads))[0]
            return own

        rows = [t.contiguous() for t in tensors]  # torch's GroupNorm crashes with some other orders
        both = rows[:count], rows[count:]
        if not self.apart.loops:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    gradients: Values = vmap(one, randomness="error")(*both)
                return gradients
            except Exception:  # data-dependent control flow and some operators
                self.apart.loops.append(True)
        with torch.enable_grad():
            each = [self._alone(values, [t[i] for t in both[0]], [t[i] for t in both[1]], dtype)
                    for i in range(len(tensors[0]))]  # fmt: skip
        return {name: torch.stack([record[name] for record in each]) for name in values}

    def _alone(self, values: Values, rows: list[Tensor], grads: list[Tensor], dtype: torch.dtype | None) -> Values:
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        outputs = self.outputs(leaves, rows, dtype)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not pairs:
            return {name: torch.zeros_like(value) for name, value in values.items()}
        some, theirs = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(some, list(leaves.values()), theirs, allow_unused=True)
        return {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(values.items(), gradients, strict=True)
        }


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class AloneError(Exception):
    """The module cannot be run for one record, which its forward did not show."""

    def __init__(self, module: nn.Module):
        super().__init__("a module cannot be run by itself for one record")
        self.module = module


class Rerun(Protocol):
    """Computes gradients of whole records again, by the very same operations on the same rows."""

    @property
    def module(self) -> nn.Module:
        """Return the module that an error names."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters, which must not change until the weighted sum."""

    def gradients(self, tensors: Sequence[Tensor]) -> Values:
        """Return the gradients of some records, given their rows of the recorded tensors."""


class Held:
    """Gradients of whole records: each is measured as it is added, chunk by chunk of fixed rows.

    Chunks that do not fit the memory are computed again for the sum, by the very same operations.
    """

    terms = joint = 1

    def __init__(self, rerun: Rerun, tensors: tuple[Tensor, ...], room: ScratchBuffers):
        self._rerun, self._tensors = rerun, tensors
        parameters = rerun.parameters
        self._versions = [(p, p._version) for p in parameters.values()]
        each, size = sum(p.numel() for p in parameters.values()), len(tensors[0])
        self._keep = room.keeps(size, each, tensors[-1])
        self._parts = chunks(room.expected or size, each, CHUNK)[:1]
        step = max(1, self._parts[0].stop) if self._parts else max(1, size)
        self._parts = [slice(start, min(start + step, size)) for start in range(0, size, step)]
        self._held: dict[int, Values] = {}

    def _part(self, number: int) -> Values:
        held = self._held.get(number)
        if held is None:
            if any(p._version != version for p, version in self._versions):
                raise UsageError("parameters were changed after the pass; ask for the weighted sum before the update")
            if not self._keep:
                self._held.clear()
            try:
                held = self._rerun.gradients([t[self._parts[number]] for t in self._tensors])
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                raise AloneError(self._rerun.module) from error
            self._held[number] = held = {name: rows.to(working_dtype(rows.dtype)) for name, rows in held.items()}
        return held

    def lengths(self, gauge: RowNorms) -> list[Tensor]:
        """Measure the gradients of a chunk at a time."""
        measure = gauge if self._keep else gauge.passing
        columns = [[measure(rows) for rows in self._part(i).values()] for i in range(len(self._parts))]
        if not self._keep:
            self._held.clear()
        return [torch.cat(column) for column in zip(*columns, strict=True)]

    def reach(self, gauge: RowNorms) -> None:
        """Return None: what is summed is what was measured."""
        return None

    def weighted_sum(self, weights: Tensor, rows: slice) -> Values:
        """Add up the rows chunk by chunk; more than one chunk in float64."""
        total: Values = {}
        for number, part in enumerate(self._parts):
            start, stop = max(part.start, rows.start), min(part.stop, rows.stop)
            if start >= stop:
                continue
            inside = slice(start - part.start, stop - part.start)
            factors = weights[start - rows.start : stop - rows.start]
            whole = start == rows.start and stop == rows.stop
            for name, gradients in self._part(number).items():
                if whole:
                    total[name] = combined(factors, gradients[inside])
                else:
                    added = combined(factors.double(), gradients[inside].double())
                    total[name] = total[name] + added if name in total else added
        return total

    def instantiate(self) -> Values:
        """Return the gradients of all records."""
        parts = [self._part(number) for number in range(len(self._parts))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def measured(self, rows: Tensor) -> Values:
        """Return the gradients of these records, in ascending order, each from the chunk in which it was measured."""
        inside = [rows[(part.start <= rows) & (rows < part.stop)] - part.start for part in self._parts]
        parts = [{name: g[some] for name, g in self._part(i).items()} for i, some in enumerate(inside) if len(some)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


Note: TypeAlias = Callable[[ServedLayer, tuple[Tensor, ...]], None]


class _Seen(torch.autograd.Function):
    """Copies of a module's results, which may be written in place; the backward notes gradients beside the inputs."""

    @staticmethod
    def forward(ctx: Any, note: Note, site: ServedLayer, count: int, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.note, ctx.site, ctx.count = note, site, count
        ctx.save_for_backward(*tensors[:count])
        return tuple(tensor.clone() for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(ctx.site, (*ctx.saved_tensors, *grads))
        return *[None] * (4 + ctx.count), *grads


def run_apart(
    apart: Apart, size: int, learning: bool, anchor: Tensor, note: Note, args: Any, kwargs: Any
) -> tuple[Any, bool]:
    """Run the module with its parameters as constants and note the call; return the result, and whether that was done.

    If not, the module cannot be run again by itself, and what was recorded of this batch must not be used.
    """
    module, before = apart.module, _state(apart)
    constants = {name: p.detach() for name, p in apart.parameters.items()}
    with apart.with_values(constants):
        result = type(module).forward(module, *args, **kwargs)
    if lowered() or any(not torch.equal(a, b) for a, b in zip(before, _state(apart), strict=True)):
        return result, False
    given, spec = tree_flatten((args, kwargs))
    leaves, out_spec = tree_flatten(result)
    known = apart.learned([*given, *leaves], size, learning)
    inputs = [i for i in range(len(given)) if known[i]]
    wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    shared = [leaf for i, leaf in enumerate(given) if not known[i]]
    if not inputs or not wanted or not all(map(_plain, shared)) or not all(known[len(given) + i] for i in wanted):
        return result, False
    places = tuple(None if known[i] else leaf for i, leaf in enumerate(given))
    rerun = _Rerun(apart, spec, places, tuple(inputs), tuple(wanted))
    everything = tuple(apart.parameters.values())
    site = ServedLayer(module, rerun, apart.parameters, everything, working_dtype(everything[0].dtype), piece=True)

    def by_record(site: ServedLayer, tensors: tuple[Tensor, ...]) -> None:
        note(site, tuple(t.reshape(size, -1, *t.shape[1:]) for t in tensors))

    enter_graph: Callable[..., tuple[Tensor, ...]] = _Seen.apply
    tensors = [given[i] for i in inputs], [leaves[i] for i in wanted]
    passed = enter_graph(by_record, site, len(inputs), anchor, *tensors[0], *tensors[1])
    for i, out in zip(wanted, passed, strict=True):
        leaves[i] = out
    return tree_unflatten(leaves, out_spec), True


def _plain(leaf: Any) -> bool:
    """Return whether an argument that all records share means the same to every run: no cache, nothing trained."""
    if isinstance(leaf, Tensor):
        return not leaf.requires_grad
    return leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device)


def _rows(leaf: Any, size: int) -> int:
    """Return how many rows of a tensor belong to a record; 0 if it is none, or shared."""
    return int(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size)


def _state(apart: Apart) -> list[Tensor]:
    """Return what differs afterwards if the module draws random numbers or writes into its buffers."""
    buffers = [table[name] for table, name, _ in apart.places() if table[name] is not None]
    states = [torch.default_generator.get_state(), torch.tensor([t._version for t in buffers])]
    devices = {p.device for p in apart.parameters.values() if p.is_cuda}
    return states + [torch.cuda.get_rng_state(device) for device in devices]
