"""One step of an LSTM between its matrix products, and norms from Gram matrices over time, compiled (``recurrent.c``).

Gates are output, input, forget, new, side by side for each record. What is compiled is compared with what torch does
when it is loaded.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from evenhand._native import NativeLibrary, team
from evenhand.gradients.layers.recurrent_cells import TorchSteps
from evenhand.gradients.layers.recurrent_gradients import Grams, torch_grams

_SHARED = 1 << 14
"""From so many gates on several threads work on a step."""
TIMES = 32
"""So many at most have their Gram matrices from compiled loops."""


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
        self._grams, number = library.evenhand_grams, ctypes.c_double
        self._grams.argtypes = (
            *(address, address, address, address, whole, whole, number, number),
            *(address, address, address, address, ctypes.c_uint),
        )
        self._grams.restype = None

    def grams(self, x: Tensor, grad: Tensor, ones: int, most: float) -> Grams:
        """Measure ``sum_t grad_t (x_t, 1, ..)``: rows of a record at all times may lie anywhere, but without gaps."""
        (rows, times), threads = x.shape[:2], torch.get_num_threads()
        crew = team() if threads > 1 and x.numel() + grad.numel() >= _SHARED else None
        squares, reach = x.new_empty(2, rows, dtype=torch.float64).unbind(0)
        firm = x.new_empty(rows, dtype=torch.bool)
        tables = [(table.data_ptr(), _shape(table)) for table in (x, grad)]
        outputs = squares.data_ptr(), reach.data_ptr(), firm.data_ptr()
        self._grams(*tables[0], *tables[1], rows, times, ones, most, *outputs, crew, threads)
        return squares, reach, firm

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Take one step, see `Steps`."""
        self._forward(*_arguments(gates, cell, state, through, forget))

    def back(self, slopes: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Take one step, see `Steps`."""
        self._back(*_arguments(slopes, cell, state, through, forget))


def _arguments(gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> tuple[int | None, ...]:
    (rows, width), threads = cell.shape, torch.get_num_threads()
    crew = team() if threads > 1 and gates.numel() >= _SHARED else None
    places = gates.data_ptr(), cell.data_ptr(), state.data_ptr(), state.stride(0)
    return *places, through.data_ptr(), forget.data_ptr(), rows, width, crew, threads


def _shape(table: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(table.stride(0), table.stride(1), table.shape[2])


def grams(x: Tensor, grad: Tensor, ones: int, most: float) -> Grams | None:
    """Return norms from compiled loops; None if they cannot be had for these tensors.

    >>> grams(torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64), 0, 1e30) is None
    True
    """
    loops = compiled() if x.shape[1] <= TIMES and all(map(_fits, (x, grad))) else None
    return None if loops is None else loops.grams(x, grad, ones, most)


def _fits(table: Tensor) -> bool:
    return table.dtype == torch.float32 and table.is_cpu and table.stride(2) == 1 and not table.is_neg()


def lstm_steps(like: Tensor) -> Compiled | None:
    """Return the compiled steps for tensors like this one, or None if they cannot be had.

    >>> lstm_steps(torch.ones(1, dtype=torch.float64)) is None
    True
    """
    return compiled() if like.dtype == torch.float32 and like.is_cpu else None


def right(loops: Compiled) -> bool:
    """Return whether the compiled steps do in float32 what torch does in float64."""
    with torch.device("cpu"):  # whatever the user's default is
        return all(_right_for(loops, rows, width) for rows, width in ((1, 1), (3, 17), (70, 40))) and all(
            _grams_right(loops, *shape)
            for shape in ((1, 1, 1, 1), (3, 5, 3, 130), (37, TIMES, 140, 9), (2, 7, 1100, 264))
        )


def _right_for(loops: Compiled, rows: int, width: int) -> bool:
    values = torch.arange(1, rows * width * 8 + 1).double().square_().mul_(0.7).cos_().mul_(3)
    gates, cell, *rest = torch.split(values.float(), [4 * rows * width, *[rows * width] * 4])
    gates = gates.view(rows, -1) * torch.linspace(0.001, 30.0, rows * 4 * width, dtype=torch.float32).view(rows, -1)
    shown = [gates, cell.view(rows, -1), *(column.reshape(rows, -1).clone() for column in rest[:3])]
    wide = torch.ones(rows, width + 3, dtype=torch.float32)  # states lie side by side with inputs
    wide[:, 2:-1], exact = shown[2], [tensor.double() for tensor in shown]
    shown[2] = wide[:, 2:-1]
    for way in ("forward", "back"):
        getattr(loops, way)(*shown)
        getattr(TorchSteps(), way)(*exact)
        if not all(map(_near, shown, exact)):
            return False
    return bool((wide[:, [0, 1, -1]] == 1).all())


def _grams_right(loops: Compiled, rows: int, times: int, width: int, gates: int) -> bool:
    """Compare ordinary records, one that is too large and one that is too small, with other numbers around them."""
    values = torch.arange(1, rows * times * (width + gates + 2) + 1).double().square_().mul_(0.7).cos_().float()
    both = values.view(times, rows, -1).transpose(0, 1)
    x, grad = both[:, :, 1 : width + 1], both[:, :, width + 1 : -1]
    x[0], grad[-1] = x[0] * 1e4, grad[-1] * 1e-5
    for most, ones in ((1e30, 2), (1e6, 0)):
        squares, reach, firm = loops.grams(x, grad, ones, most)
        exact = torch_grams(x.double(), grad.double(), ones, most)
        apart = (squares - exact[0]).abs() <= 3e-7 * exact[1].square()
        if not (bool(apart.all()) and torch.allclose(reach, exact[1], rtol=3e-7) and torch.equal(firm, exact[2])):
            return False
    return True


def _near(computed: Tensor, exact: Tensor) -> bool:
    return torch.allclose(computed.double(), exact, rtol=1e-5, atol=2e-6)


compiled = functools.cache(NativeLibrary("_recurrent.so", Compiled, right).load)
"""Return the compiled steps, or None if they are not there or do not compute what they should."""
