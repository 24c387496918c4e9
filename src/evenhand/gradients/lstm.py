"""One step of an LSTM between its matrix products: compiled (``recurrent.c``) where that can be had, else by torch.

Gates are output, input, forget, new, side by side for each record. The compiled step is compared with the other one
when it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import torch
from torch import Tensor

from evenhand.compiled import load, team

_SHARED = 1 << 14
"""From so many gates on several threads work on a step."""
# Chosen once: finding the variant of an operator takes longer than running it on one step.
_sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input


class Steps(Protocol):
    """Steps forward and back, everything in place."""

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Gates (B, 4H) become slopes: of the state by the output gate, of the cell by the others.

        ``cell`` goes on by one time; the new state, its slope by the cell and the forget gate are written.
        """

    def back(self, slopes: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Slopes become gradients of the gates; the gradient of the cell goes to the time before."""


class Plain:
    """By torch, in any precision and on any device."""

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """As announced."""
        o, i, f, entry = gates.chunk(4, dim=1)
        gates[:, : 3 * cell.shape[1]].sigmoid_()
        new, before = entry.tanh(), cell.clone()
        torch.mul(i, new, out=entry)
        torch.addcmul(entry, f, before, out=cell)
        tanh = cell.tanh()
        torch.mul(o, tanh, out=state)
        torch.addcmul(o, state, tanh, value=-1, out=through)
        forget.copy_(f)
        torch.addcmul(i, entry, new, value=-1, out=entry)
        for factor, gate in ((tanh, o), (new, i), (before, f)):
            _sigmoid_slope(factor, gate, grad_input=gate)

    def back(self, slopes: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """As announced."""
        cell.addcmul_(state, through)
        slopes[:, : cell.shape[1]].mul_(state)
        slopes.view(len(slopes), 4, -1)[:, 1:].mul_(cell.unsqueeze(1))
        cell.mul_(forget)


class Compiled:
    """In one walk over the gates; float32 on the CPU, every tensor row after row but for the state."""

    def __init__(self, library: ctypes.CDLL):
        whole, address = ctypes.c_int64, ctypes.c_void_p
        self._forward, self._back = library.evenhand_lstm_forward, library.evenhand_lstm_back
        for function in (self._forward, self._back):
            function.argtypes = (
                *(address, address, address, whole, address, address, whole, whole),
                *(address, ctypes.c_uint),
            )
            function.restype = None

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """As announced."""
        self._forward(*_arguments(gates, cell, state, through, forget))

    def back(self, slopes: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """As announced."""
        self._back(*_arguments(slopes, cell, state, through, forget))


def _arguments(gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> tuple[int | None, ...]:
    (rows, width), threads = cell.shape, torch.get_num_threads()
    crew = team() if threads > 1 and gates.numel() >= _SHARED else None
    places = gates.data_ptr(), cell.data_ptr(), state.data_ptr(), state.stride(0)
    return *places, through.data_ptr(), forget.data_ptr(), rows, width, crew, threads


def steps(like: Tensor) -> Steps:
    """The quickest steps for tensors like this one.

    >>> type(steps(torch.ones(1, dtype=torch.float64))).__name__
    'Plain'
    """
    found = compiled() if like.dtype == torch.float32 and like.is_cpu else None
    return Plain() if found is None else found


@functools.cache
def compiled() -> Compiled | None:
    """The compiled steps, or None if they are not there or do not compute what they should."""
    found = load("_recurrent.so", Compiled)
    return found if found is not None and right(found) else None


def right(found: Compiled) -> bool:
    """Whether the compiled steps do in float32 what torch does in float64."""
    with torch.device("cpu"):  # whatever the user's default is
        return all(_right_for(found, rows, width) for rows, width in ((1, 1), (3, 17), (70, 40)))


def _right_for(found: Compiled, rows: int, width: int) -> bool:
    made = torch.arange(1, rows * width * 8 + 1).double().square_().mul_(0.7).cos_().mul_(3)
    gates, cell, *rest = torch.split(made.float(), [4 * rows * width, *[rows * width] * 4])
    gates = gates.view(rows, -1) * torch.linspace(0.001, 30.0, rows * 4 * width, dtype=torch.float32).view(rows, -1)
    shown = [gates, cell.view(rows, -1), *(column.reshape(rows, -1).clone() for column in rest[:3])]
    wide = torch.ones(rows, width + 3, dtype=torch.float32)  # states lie side by side with inputs
    wide[:, 2:-1], exact = shown[2], [tensor.double() for tensor in shown]
    shown[2] = wide[:, 2:-1]
    for way in ("forward", "back"):
        getattr(found, way)(*shown)
        getattr(Plain(), way)(*exact)
        if not all(map(_near, shown, exact)):
            return False
    return bool((wide[:, [0, 1, -1]] == 1).all())


def _near(found: Tensor, exact: Tensor) -> bool:
    return torch.allclose(found.double(), exact, rtol=1e-5, atol=2e-6)
