"""Linear layers whose weight is (in, out), such as the ``Conv1D`` of GPT-2 in transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from evenhand.gradients.layers.base import Share, Shares
from evenhand.gradients.layers.linear import LinearKernel, linear, times
from evenhand.gradients.layers.resemblance import register_looks
from evenhand.gradients.memory import ScratchBuffers


def _looks(module: nn.Module) -> bool:
    """Return whether the layer has a matrix and a row of as many numbers as the matrix has columns.

    >>> _looks(nn.Linear(2, 3)), _looks(nn.Linear(2, 2))
    (False, True)
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if len(module._parameters) != 2 or weight is None or bias is None:
        return False
    return weight.dim() == 2 and bias.shape == weight.shape[1:]


@register_looks(_looks)
class TransposedLinearKernel(LinearKernel):
    """``x @ weight + bias`` for inputs (B, ..., in): a linear layer but for the shape of its weight."""

    def forward(self, module: nn.Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the layer's output."""
        return linear(x, module.weight.t(), module.bias), ()

    def input_gradient(self, module: nn.Linear, x: Tensor, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Return ``grad @ weight.T``."""
        return times(grad, module.weight.t().to(grad.dtype))

    def share(  # type: ignore[override]
        self,
        module: nn.Linear,
        x: Tensor,
        saved: tuple[Tensor, ...],
        grad: Tensor,
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Share:
        """Return the share of a linear layer, its weight turned."""
        return Shares([super().share(module, x, saved, grad, trainable, room)], _turned)


def _turned(parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Turn the weight; a sum (``dim`` 0) also in memory, since noise is added to it number by number."""
    weights = {name: value.mT for name, value in parts[0].items() if name == "weight"}
    return parts[0] | (weights if dim else {name: value.contiguous() for name, value in weights.items()})
