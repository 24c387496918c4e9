"""The surroundings of a pass: exclusive use of the modules, full precision, and the random generators.

Passes replace forwards and swap parameters on the modules they run, so there is one at a time per module. Norms and
sums are taken in full precision, also where the user's forward runs under autocast.

Models draw with torch, and that is all that a pass looks after: the generators of numpy and Python would cost it a
hundred microseconds. A model, loss or augmentation that does draw from those is noticed when it first does
(`seeded.elsewhere`); that pass counts for nothing, is run again, and from then on every generator is looked after
(`every`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from evenhand import generators

_lock = threading.Lock()
_condition = threading.Condition(_lock)
_held: dict[int, list[frozenset[int]]] = {}
_waiting = 0


class exclusive:  # noqa: N801 - used like a function; a class is quicker than a generator
    """Wait until no other thread is in a pass over any of these modules (by ``id``), and keep others out meanwhile.

    Stronger than a lock per model: two models may share a layer. The same thread may enter again. Plain calls of the
    model are not kept out: they are safe beside a pass by kernels, but not beside one that swaps parameters (fallback).

    >>> import torch
    >>> with exclusive(frozenset([id(torch.nn.Linear(1, 1))])): "alone"
    'alone'
    """

    def __init__(self, mine: frozenset[int]):
        self._mine, self._thread = mine, threading.get_ident()

    def _free(self) -> bool:
        others = (stack for thread, stack in _held.items() if thread != self._thread)
        return all(self._mine.isdisjoint(modules) for stack in others for modules in stack)

    def __enter__(self) -> None:
        global _waiting
        with _lock:
            if len(_held) > (self._thread in _held):
                _waiting += 1
                _condition.wait_for(self._free)
                _waiting -= 1
            stack = _held.get(self._thread)
            if stack is None:
                _held[self._thread] = [self._mine]
            else:
                stack.append(self._mine)

    def __exit__(self, *exc: object) -> None:
        with _lock:
            stack = _held[self._thread]
            stack.pop()
            if not stack:
                del _held[self._thread]
            if _waiting:
                _condition.notify_all()


_TYPES = ("cpu", "cuda")


def lowered() -> bool:
    """Return whether autocast is on, so that products come out in fewer digits.

    >>> with torch.autocast("cpu", torch.bfloat16): lowered()
    True
    """
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def full() -> AbstractContextManager[None]:
    """Return a context without autocast: a sum rounded to bf16 could change by more than one record's bound.

    >>> with torch.autocast("cpu", torch.bfloat16), full(): (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    return _off() if lowered() else nullcontext()


class plain:  # noqa: N801 - used like a function; a class is quicker than a generator
    """Inside, there is neither autograd nor autocast.

    >>> with torch.autocast("cpu", torch.bfloat16), plain(): torch.is_grad_enabled(), lowered()
    (False, False)
    """

    def __enter__(self) -> None:
        self._grad, self._autocast = torch.is_grad_enabled(), full() if lowered() else None
        torch._C._set_grad_enabled(False)
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._autocast is not None:
            self._autocast.__exit__(*exc)


def highest() -> AbstractContextManager[None]:
    """Return a context in which float32 products keep all digits, whatever torch's setting is.

    >>> torch.set_float32_matmul_precision("medium")
    >>> with highest(): torch.get_float32_matmul_precision()
    'highest'
    >>> torch.get_float32_matmul_precision(); torch.set_float32_matmul_precision("highest")
    'medium'
    """
    return nullcontext() if torch.get_float32_matmul_precision() == "highest" else _highest()


@contextmanager
def _highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _off() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in _TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def now() -> Callable[[], AbstractContextManager[None]]:
    """Return the precision of this moment, to be entered again when something is computed a second time.

    >>> with torch.autocast("cpu", torch.bfloat16): then = now()
    >>> with then(): lowered()
    True
    """
    on = {kind: torch.get_autocast_dtype(kind) for kind in _TYPES if torch.is_autocast_enabled(kind)}

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in on.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield

    return again


_CUDA = torch.version.cuda is not None or torch.version.hip is not None
"""Without it there is nothing to ask for, which is quicker than asking."""
_every = False


def every() -> None:
    """Look after the generators of numpy and Python too, from here on, in this process."""
    global _every
    _every = True


class RandomState:
    """The state of the CPU generator and of the generators of the model's devices; after `every`, of all of them.

    >>> state = RandomState(nn.Linear(1, 1)); first = torch.rand(1); state.restore(); bool(first == torch.rand(1))
    True
    """

    def __init__(self, model: nn.Module):
        devices: set[torch.device] = set()
        if _CUDA and torch.cuda.is_available():
            devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._all = generators.Snapshot() if _every else None
        self._cpu = torch.default_generator.get_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Go back to the remembered state."""
        if self._all is not None:
            self._all.restore()
        torch.default_generator.set_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


class preserved:  # noqa: N801 - used like a function; a class is quicker than a generator
    """Inside, anything may be drawn: on exit the generators continue as if nothing had been.

    >>> with preserved(nn.Linear(1, 1)): inside = torch.rand(1)
    >>> bool(inside == torch.rand(1))
    True
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def __enter__(self) -> Any:
        self._state = RandomState(self._model)

    def __exit__(self, *exc: object) -> None:
        self._state.restore()


class seeded(preserved):  # noqa: N801
    """Inside, random layers and augmentation draw from this seed; afterwards the generators go on as before.

    A bound on one record needs these draws to be secret: with known ones, a record more shifts those of all others.
    See docs/proofs/random_draws.md. A number as seed is public, for tests.

    >>> with seeded(nn.Linear(1, 1), 3): first = torch.rand(1)
    >>> with seeded(nn.Linear(1, 1), 3): bool(first == torch.rand(1))
    True
    """

    def __init__(self, model: nn.Module, seed: bytes | int):
        super().__init__(model)
        self._seed = seed

    def __enter__(self) -> seeded:
        super().__enter__()
        self._mark = generators.mark()
        if _every:
            generators.seed(self._seed)
            return self
        generators.seed_torch(self._seed)
        if _CUDA and torch.cuda.is_available():
            torch.cuda.manual_seed_all(generators.number(self._seed))
        return self

    def elsewhere(self) -> bool:
        """Return whether something was drawn from a generator of numpy or Python that this seed did not set.

        >>> with seeded(nn.Linear(1, 1), 3) as draws: drawn = torch.rand(1), draws.elsewhere()
        >>> drawn[1]
        False
        """
        return not _every and generators.mark() != self._mark


def _constant(value: Callable[[tuple[Any, ...], dict[str, Any]], float]) -> Callable[..., Any]:
    def replaced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drawn = func(*args, **kwargs)
        return drawn.fill_(value(args, kwargs))

    return replaced


def _argument(position: int, name: str, default: float) -> Callable[[tuple[Any, ...], dict[str, Any]], float]:
    return lambda args, kwargs: float(args[position] if len(args) > position else kwargs.get(name, default))


def _uniform_mean(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return (_argument(1, "from", 0.0)(args, kwargs) + _argument(2, "to", 1.0)(args, kwargs)) / 2


def _undropped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].clone()


_MEANS: dict[str, Callable[..., Any]] = {
    "aten::bernoulli_.float": _constant(_argument(1, "p", 0.5)),
    "aten::bernoulli.p": _constant(_argument(1, "p", 0.5)),
    "aten::bernoulli": _itself,
    "aten::native_dropout": _undropped,
    "aten::uniform_": _constant(_uniform_mean),
    "aten::normal_": _constant(_argument(1, "mean", 0.0)),
    "aten::exponential_": _constant(lambda args, kwargs: 1.0),
    "aten::rand": _constant(lambda args, kwargs: 0.5),
    "aten::rand_like": _constant(lambda args, kwargs: 0.5),
    "aten::randn": _constant(lambda args, kwargs: 0.0),
    "aten::randn_like": _constant(lambda args, kwargs: 0.0),
}


class _Means(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mean = _MEANS.get(func.name())
        return mean(func, args, kwargs or {}) if mean else func(*args, **(kwargs or {}))


def watched() -> bool:
    """Return whether somebody wants to see every operation: a transform of torch.func, or a mode other than ours.

    >>> watched()
    False
    >>> with means(): watched()
    False
    >>> with torch.device("cpu"): watched()
    True
    """
    modes = torch._C._len_torch_dispatch_stack()
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_function_stack()
        or modes > 1
        or (modes and not isinstance(torch._C._get_dispatch_stack_at(0), _Means))
    )


def means() -> AbstractContextManager[Any]:
    """Return a context in which draws are replaced by their means, so that dropout passes its input on unchanged.

    Comparing a record alone with the same record among others then says nothing about the draws. Random operators that
    are not in the table above keep drawing.

    >>> with means(): nn.functional.dropout(torch.ones(3), 0.5, training=True)
    tensor([1., 1., 1.])
    """
    mode: AbstractContextManager[Any] = _Means()  # type: ignore[no-untyped-call]
    return mode
