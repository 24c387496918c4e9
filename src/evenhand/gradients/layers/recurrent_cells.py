"""LSTM, GRU and plain recurrence unrolled by hand: all times forward, and all times backward to the gates.

Everything is time first here. What a step multiplies its incoming gradients by is computed for all times at once, so
that a step backward is one matrix product and a few in-place products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evenhand.gradients.fast_paths import fast
from evenhand.gradients.layers.base import Shares
from evenhand.gradients.layers.recurrent_gradients import Gates
from evenhand.gradients.memory import Corner, ScratchBuffers

# Chosen once: finding the variant of an operator takes longer than running it on one step.
_sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input
_tanh_slope = torch.ops.aten.tanh_backward.grad_input
_relu_slope = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer in one direction."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None

    def joint(self, turn: int) -> tuple[Tensor, Tensor]:
        """Return both weights side by side, transposed, and the biases added; gates turned by ``turn``."""
        weight = torch.cat([self.ih, self.hh], dim=1)
        bias = weight.new_zeros(len(weight))
        if self.bias_ih is not None and self.bias_hh is not None:
            bias = self.bias_ih + self.bias_hh
        return (weight.roll(turn, 0) if turn else weight).t().contiguous(), bias.roll(turn) if turn else bias


@dataclass(frozen=True)
class Ran:
    """All states after each step (T, B, H), the final states, and what the way back needs, memory to work in too."""

    out: Tensor
    final: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]


@dataclass(frozen=True)
class Returned:
    """Gradients of the inputs (None if not asked for) and of the initial states, and what a share needs."""

    x: Tensor | None
    states: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]


class Cell(Protocol):
    """One kind of recurrence."""

    def run(self, weights: Weights, x: Tensor, states: tuple[Tensor, ...], room: ScratchBuffers) -> Ran:
        """Run from inputs (T, B, in) and initial states (B, H), none for zeros. What is saved lies in ``room``."""

    def back(
        self, weights: Weights, saved: tuple[Tensor, ...], grad: Tensor, final: tuple[Tensor, ...], want_x: bool
    ) -> Returned:
        """Go back from the gradients of all states (T, B, H) and of the final ones."""

    def share(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Gates | Shares:
        """Return the share of what `back` kept; ``names``: weight_ih, weight_hh, bias_ih and bias_hh."""


def _joined(x: Tensor, states: tuple[Tensor, ...], width: int, room: ScratchBuffers) -> Tensor:
    """Return inputs and states side by side, (T + 1, B, in + H); of the states the initial one is in place."""
    time, size, inputs = x.shape
    both = room.empty("both", (time + 1, size, inputs + width), x)
    both[:time, :, :inputs] = x
    both[0, :, inputs:] = states[0] if states else 0.0
    return both


def _joint_share(
    names: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    width: int,
    turn: int,
    trainable: frozenset[str],
    room: ScratchBuffers,
) -> Gates:
    both, grad = tensors
    split, end = both.shape[2] - width, both.shape[2]
    columns = dict(zip(names[:2], ((0, split), (split, end)), strict=True))
    columns = {name: place for name, place in columns.items() if name in trainable}
    return Gates(both, grad, columns, [name for name in names[2:] if name in trainable], turn, room)


def _input_gradient(gates: Tensor, weight: Tensor) -> Tensor:
    return (gates.flatten(0, 1) @ weight).view(*gates.shape[:2], -1)


class Steps(Protocol):
    """Steps of an LSTM forward and back, everything in place."""

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Turn gates (B, 4H) into slopes: of the state by the output gate, of the cell by the others.

        ``cell`` goes on by one time; the new state, its slope by the cell and the forget gate are written.
        """

    def back(self, slopes: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Turn slopes into gradients of the gates; move the gradient of the cell to the time before."""


class TorchSteps:
    """Steps by torch, in any precision and on any device."""

    def forward(self, gates: Tensor, cell: Tensor, state: Tensor, through: Tensor, forget: Tensor) -> None:
        """Take one step, see `Steps`."""
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
        """Take one step, see `Steps`."""
        cell.addcmul_(state, through)
        slopes[:, : cell.shape[1]].mul_(state)
        slopes.view(len(slopes), 4, -1)[:, 1:].mul_(cell.unsqueeze(1))
        cell.mul_(forget)


class LSTM:
    """Gates are output, input, forget, new here: torch's order turned by one.

    The first three are sigmoids, and the last three get their gradients from the cell.
    """

    def run(self, weights: Weights, x: Tensor, states: tuple[Tensor, ...], room: ScratchBuffers) -> Ran:
        """Save inputs with states, and slopes: of the state by the output gate, of the cell by the others."""
        (time, size, inputs), width = x.shape, weights.hh.shape[1]
        both = _joined(x, states, width, room)
        slopes = room.empty("slopes", (time, size, 4 * width), x)
        through, forget = (room.empty(name, (time, size, width), x) for name in ("through", "forget"))
        weight, bias = weights.joint(turn=width)
        cell = states[1].clone(memory_format=torch.contiguous_format) if states else x.new_zeros(size, width)
        columns = both.unbind(0), both[1:, :, inputs:].unbind(0), slopes.unbind(0), through.unbind(0), forget.unbind(0)
        step = fast().lstm_steps(x) or TorchSteps()
        for before, after, gates, direct, forget_gate in zip(*columns, strict=False):
            torch.addmm(bias, before, weight, out=gates)
            step.forward(gates, cell, after, direct, forget_gate)
        return Ran(both[1:, :, inputs:], (columns[1][-1].clone(), cell), (both, slopes, through, forget))

    def back(
        self, weights: Weights, saved: tuple[Tensor, ...], grad: Tensor, final: tuple[Tensor, ...], want_x: bool
    ) -> Returned:
        """Keep inputs with states, and the gradients of the gates, which take the place of the slopes."""
        both, slopes, through, forget = saved
        time, _, width = through.shape
        weight = weights.hh.roll(width, 0)
        whole, direct, forget_gates, above = slopes.unbind(0), through.unbind(0), forget.unbind(0), grad.unbind(0)
        dh, dc = (above[-1] + final[0]).contiguous(), final[1].clone(memory_format=torch.contiguous_format)
        step = fast().lstm_steps(dh) or TorchSteps()
        for t in reversed(range(time)):
            if t < time - 1:
                torch.addmm(above[t], whole[t + 1], weight, out=dh)
            step.back(whole[t], dc, dh, direct[t], forget_gates[t])
        dx = _input_gradient(slopes, weights.ih.roll(width, 0)) if want_x else None
        return Returned(dx, (whole[0] @ weight, dc), (both[:time].transpose(0, 1), slopes.transpose(0, 1)))

    def share(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Gates | Shares:
        """Return one product for both weights."""
        return _joint_share(names, tensors, tensors[1].shape[2] // 4, tensors[1].shape[2] // 4, trainable, room)


class GRU:
    """Gates in torch's order: reset, update, new. The state enters the new gate through the reset gate.

    So the gradients of the new gate differ between the two weights. Both lie in one buffer as new (for inputs), reset,
    update, new (for states): three neighbours each, the first three turned by one gate.
    """

    def run(self, weights: Weights, x: Tensor, states: tuple[Tensor, ...], room: ScratchBuffers) -> Ran:
        """Save inputs, states, slopes of the state by the gates, and the update gate."""
        (time, size, _), width = x.shape, weights.hh.shape[1]
        x = room.empty("x", x.shape, x).copy_(x)
        slopes = room.empty("slopes", (time, size, 4 * width), x)
        hidden, carry = (room.empty(name, (n, size, width), x) for name, n in (("hidden", time + 1), ("carry", time)))
        hidden[0] = states[0] if states else 0.0
        early, late = weights.hh[: 2 * width].t().contiguous(), weights.hh[2 * width :].t().contiguous()
        bias, tail = x.new_zeros(3 * width), x.new_zeros(width)
        if weights.bias_ih is not None and weights.bias_hh is not None:
            bias, tail = weights.bias_ih.clone(), weights.bias_hh[2 * width :]
            bias[: 2 * width] += weights.bias_hh[: 2 * width]
        # What the inputs bring to reset, update and new lies where the slopes of this step will.
        torch.addmm(bias, x.flatten(0, 1), weights.ih.t(), out=slopes.flatten(0, 1)[:, width:])
        brought = slopes[:, :, width : 3 * width].unbind(0)
        new, reset, update, inner = (part.unbind(0) for part in torch.split(slopes, width, dim=2))
        h, carries = hidden.unbind(0), carry.unbind(0)
        gates, n, from_h, work = (x.new_empty(size, count * width) for count in (2, 1, 1, 1))
        r, z = torch.split(gates, width, dim=1)
        for t in range(time):
            torch.addmm(brought[t], h[t], early, out=gates).sigmoid_()
            torch.addmm(tail, h[t], late, out=from_h)
            torch.addcmul(inner[t], r, from_h, out=n).tanh_()
            torch.lerp(n, h[t], z, out=h[t + 1])
            _tanh_slope(torch.sub(1.0, z, out=work), n, grad_input=new[t])
            _sigmoid_slope(torch.mul(new[t], from_h, out=work), r, grad_input=reset[t])
            _sigmoid_slope(torch.sub(h[t], n, out=work), z, grad_input=update[t])
            torch.mul(new[t], r, out=inner[t])
            carries[t].copy_(z)
        return Ran(hidden[1:], (h[-1].clone(),), (x, hidden, slopes, carry))

    def back(
        self, weights: Weights, saved: tuple[Tensor, ...], grad: Tensor, final: tuple[Tensor, ...], want_x: bool
    ) -> Returned:
        """Keep inputs, states, and the gradients of the gates as each of the two sees them."""
        x, hidden, slopes, carry = saved
        time, size, width = carry.shape
        whole, for_state = slopes.view(time, size, 4, width).unbind(0), slopes[:, :, width:].unbind(0)
        carries, above = carry.unbind(0), grad.unbind(0)
        dh = above[-1] + final[0]
        spread = dh.unsqueeze(1)
        for t in reversed(range(time)):
            whole[t].mul_(spread)
            dh.mul_(carries[t]).addmm_(for_state[t], weights.hh)
            if t:
                dh.add_(above[t - 1])
        dx = _input_gradient(slopes[:, :, : 3 * width], weights.ih.roll(width, 0)) if want_x else None
        tensors = x, hidden[:time], slopes[:, :, : 3 * width], slopes[:, :, width:]
        return Returned(dx, (dh,), tuple(tensor.transpose(0, 1) for tensor in tensors))

    def share(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Gates | Shares:
        """Return one product for each weight."""
        x, hidden, grad_x, grad_h = tensors
        shares = []
        for entering, grad, parameter_names, turn in (
            (x, grad_x, names[::2], hidden.shape[2]),
            (hidden, grad_h, names[1::2], 0),
        ):
            weight, *bias = parameter_names
            columns = {weight: (0, entering.shape[2])} if weight in trainable else {}
            biases = [name for name in bias if name in trainable]
            if columns or biases:
                shares.append(Gates(entering, grad, columns, biases, turn, Corner(room, weight)))
        return Shares(shares)


@dataclass(frozen=True)
class Plain:
    """``nn.RNN``: one gate, whose value is the state; ``relu`` or tanh."""

    relu: bool

    def run(self, weights: Weights, x: Tensor, states: tuple[Tensor, ...], room: ScratchBuffers) -> Ran:
        """Save inputs with states."""
        (time, size, inputs), width = x.shape, weights.hh.shape[1]
        both = _joined(x, states, width, room)
        weight, bias = weights.joint(turn=0)
        entering, leaving = both.unbind(0), both[1:, :, inputs:].unbind(0)
        for t in range(time):
            torch.addmm(bias, entering[t], weight, out=leaving[t])
            if self.relu:
                leaving[t].relu_()
            else:
                leaving[t].tanh_()
        return Ran(both[1:, :, inputs:], (leaving[-1].clone(),), (both, room.empty("slopes", (time, size, width), x)))

    def back(
        self, weights: Weights, saved: tuple[Tensor, ...], grad: Tensor, final: tuple[Tensor, ...], want_x: bool
    ) -> Returned:
        """Keep inputs with states, and the gradients of the gate."""
        both, slopes = saved
        values, gates, above = both[1:, :, -slopes.shape[2] :].unbind(0), slopes.unbind(0), grad.unbind(0)
        dh = above[-1] + final[0]
        for t in reversed(range(len(slopes))):
            if t < len(slopes) - 1:
                torch.addmm(above[t], gates[t + 1], weights.hh, out=dh)
            if self.relu:
                _relu_slope(dh, values[t], 0, grad_input=gates[t])
            else:
                _tanh_slope(dh, values[t], grad_input=gates[t])
        dx = _input_gradient(slopes, weights.ih) if want_x else None
        return Returned(dx, (gates[0] @ weights.hh,), (both[:-1].transpose(0, 1), slopes.transpose(0, 1)))

    def share(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...], trainable: frozenset[str], room: ScratchBuffers
    ) -> Gates | Shares:
        """Return one product for both weights."""
        return _joint_share(names, tensors, tensors[1].shape[2], 0, trainable, room)
