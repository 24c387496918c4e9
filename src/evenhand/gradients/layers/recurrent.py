"""``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells: one piece for each layer and direction.

Dropout between layers is autograd's. Packed sequences, sequences without a batch, projections and autocast are left to
the module itself, that is to the fallback.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.errors import UsageError
from evenhand.gradients.layers.base import Piece, Serve, Share, Shares, register_composite
from evenhand.gradients.layers.recurrent_cells import GRU, LSTM, Cell, Plain, Weights
from evenhand.gradients.memory import ScratchBuffers

_PASS: ContextVar[Any] = ContextVar("_PASS", default=None)
"""Something that is the same object for all calls of a pass, while a piece is asked to run."""


class Rooms:
    """A room for each call of a piece within a pass, taken back when another pass begins.

    An engine has pieces of its own and lets only its newest pass be used, so what a room held is no longer wanted then.
    """

    def __init__(self) -> None:
        self._rooms: list[ScratchBuffers] = []
        self._used = 0
        self._pass: Callable[[], Any] = lambda: None
        self.number = 0

    def another(self) -> ScratchBuffers:
        """Return buffers that no other call of this pass has; outside a pass new ones."""
        current = _PASS.get()
        if current is None:
            return ScratchBuffers(lean=False)
        if self._pass() is not current:
            self._pass, self._used = weakref.ref(current), 0
            self.number += 1
        if self._used == len(self._rooms):
            self._rooms.append(ScratchBuffers(lean=False))
        self._used += 1
        return self._rooms[self._used - 1]

    def demand(self, stamps: Tensor) -> None:
        """Raise if another pass has begun since the one whose numbers these are, even one that did not end."""
        if bool((stamps != self.number).any()):
            raise UsageError(
                "the memory of this pass was taken by another batch that began since; ask for the weighted sum before "
                "the next run"
            )


@dataclass(frozen=True)
class Direction:
    """One layer in one direction, over all times. ``suffix`` is how the names of its parameters end."""

    cell: Cell
    suffix: str
    reverse: bool
    rooms: Rooms = field(default_factory=Rooms)

    def names(self, bias: bool) -> tuple[str, ...]:
        """Return the names of its parameters."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return tuple(kind + self.suffix for kind in (kinds if bias else kinds[:2]))

    def forward(self, module: Any, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run from (B, T, in) and initial states, none for zeros, to (B, T, H) and the final states."""
        x, *states = inputs
        ran = self.cell.run(self._weights(module), self._turned(x.transpose(0, 1)), tuple(states), self.rooms.another())
        # A copy, so that the caller may do with it what they like.
        out = self._turned(ran.out).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return (out, *ran.final), ran.saved

    def backward(
        self,
        module: Any,
        inputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        needed: tuple[bool, ...],
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Go back through all times."""
        grad, *final = (g.detach() for g in grads)
        # ``data``, because going back writes to it, and may be asked to do so twice (for a pass that is then dropped).
        memory = tuple(t.data for t in saved)
        with torch.no_grad():
            back = self.cell.back(
                self._weights(module), memory, self._turned(grad.transpose(0, 1)), tuple(final), needed[0]
            )
        x = None if back.x is None else self._turned(back.x).transpose(0, 1)
        stamps = torch.full((len(grads[0]), 1), self.rooms.number, device=grads[0].device)
        return (x, *back.states[: len(inputs) - 1]), (*back.tensors, stamps)

    def share(self, module: Any, tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers) -> Share:
        """Return the cell's share, valid until another pass takes the memory."""
        *cell_tensors, stamps = tensors
        share = self.cell.share(self.names(module.bias), tuple(cell_tensors), trainable, room)
        return Shares([share], demand=partial(self.rooms.demand, stamps))

    def join(self, module: Any, calls: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Join several calls as one with more times."""
        return tuple(torch.cat(column, dim=1) for column in zip(*calls, strict=True))

    def _weights(self, module: Any) -> Weights:
        parameters = [getattr(module, name) for name in self.names(module.bias)]
        return Weights(*parameters)

    def _turned(self, x: Tensor) -> Tensor:
        return x.flip(0) if self.reverse else x


def _arguments(input: Any, hx: Any = None) -> tuple[Any, tuple[Any, ...]]:
    return input, () if hx is None else hx if isinstance(hx, tuple) else (hx,)


def _own(module: nn.Module, names: list[str]) -> bool:
    """Return whether the module has these parameters, all different and of one precision that kernels have."""
    parameters = [p for p in module._parameters.values() if p is not None]
    dtypes = {p.dtype for p in parameters}
    return (
        [name for name, p in module._parameters.items() if p is not None] == names
        and len({id(p) for p in parameters}) == len(names)
        and len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float64}
    )


def _first(module: nn.Module) -> Tensor:
    return next(iter(module.parameters()))


def _fit(weight: Tensor, x: Any, states: tuple[Any, ...], count: int, shape: tuple[int, ...]) -> bool:
    """Return whether inputs and states (none, or ``count`` of this shape) are what the pieces take, as they are."""
    return (
        len(states) in (0, count)
        and all(isinstance(t, Tensor) and t.dtype == weight.dtype and t.device == weight.device for t in (x, *states))
        and all(state.shape == shape for state in states)
        and not torch.is_autocast_enabled(weight.device.type)
    )


@contextmanager
def _pass(serve: Serve) -> Iterator[None]:
    before = _PASS.set(serve)
    try:
        yield
    finally:
        _PASS.reset(before)


@register_composite(nn.LSTM)
@register_composite(nn.GRU)
@register_composite(nn.RNN)
class Recurrent:
    """Every configuration without projections, on batches of padded sequences."""

    def serves(self, module: nn.RNNBase) -> bool:
        """Return whether the module has its own distinct parameters."""
        return module.proj_size == 0 and _own(module, [n for _, names in self.pieces(module).values() for n in names])

    def pieces(self, module: nn.RNNBase) -> Mapping[str, tuple[Piece[Any], tuple[str, ...]]]:
        """Return one for each layer and direction."""
        cells: dict[str, Cell] = {"LSTM": LSTM(), "GRU": GRU()}
        cell = cells.get(module.mode, Plain(relu=module.mode == "RNN_RELU"))
        pieces: dict[str, tuple[Piece[Any], tuple[str, ...]]] = {}
        for layer in range(module.num_layers):
            for reverse in (False, True) if module.bidirectional else (False,):
                piece = Direction(cell, f"_l{layer}_reverse" if reverse else f"_l{layer}", reverse)
                pieces[piece.suffix] = piece, piece.names(module.bias)
        return pieces

    def forward(self, module: nn.RNNBase, serve: Serve, size: int, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes."""
        x, states = _arguments(*args, **kwargs)
        shape = (module.num_layers * (2 if module.bidirectional else 1), size, module.hidden_size)
        if not _fit(_first(module), x, states, 2 if module.mode == "LSTM" else 1, shape) or x.dim() != 3:
            return NotImplemented
        x = x if module.batch_first else x.transpose(0, 1)
        if x.shape[0] != size or x.shape[1] == 0 or x.shape[2] != module.input_size:
            return NotImplemented
        with _pass(serve):
            out, finals = self._layers(module, serve, x, states)
        return out if module.batch_first else out.transpose(0, 1), finals if module.mode == "LSTM" else finals[0]

    def _layers(
        self, module: nn.RNNBase, serve: Serve, x: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        finals: list[list[Tensor]] = []
        for layer in range(module.num_layers):
            if layer and module.dropout and module.training:
                x = functional.dropout(x, module.dropout)
            outs = []
            for ending in ("", "_reverse") if module.bidirectional else ("",):
                out, *final = serve(f"_l{layer}{ending}", x, *(state[len(finals)] for state in states))
                outs.append(out)
                finals.append(final)
            x = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
        return x, tuple(torch.stack(column) for column in zip(*finals, strict=True))


@register_composite(nn.LSTMCell)
@register_composite(nn.GRUCell)
@register_composite(nn.RNNCell)
class OneStep:
    """The cells: a sequence of one time. Calls are joined to one before anything is measured."""

    def serves(self, module: nn.RNNCellBase) -> bool:
        """Return whether the module has its own distinct parameters."""
        return _own(module, list(self.pieces(module)[""][1]))

    def pieces(self, module: nn.RNNCellBase) -> Mapping[str, tuple[Piece[Any], tuple[str, ...]]]:
        """Return one for the whole cell."""
        cells: dict[type[nn.Module], Cell] = {nn.LSTMCell: LSTM(), nn.GRUCell: GRU()}
        cell = cells.get(type(module), Plain(relu=getattr(module, "nonlinearity", "") == "relu"))
        piece = Direction(cell, "", reverse=False)
        return {"": (piece, piece.names(module.bias))}

    def forward(self, module: nn.RNNCellBase, serve: Serve, size: int, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes."""
        x, states = _arguments(*args, **kwargs)
        count = 2 if isinstance(module, nn.LSTMCell) else 1
        if not _fit(_first(module), x, states, count, (size, module.hidden_size)):
            return NotImplemented
        if x.shape != (size, module.input_size):
            return NotImplemented
        with _pass(serve):
            _, *final = serve("", x.unsqueeze(1), *states)
        return tuple(final) if count == 2 else final[0]
