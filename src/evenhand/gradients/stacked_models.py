"""Run many small models of one form at once: chains of linear layers and elementwise activations, parameters stacked.

Everything is float64: the gradients of R models are a few batched products, and no rounding comes near what is charged
for float32 (docs/proofs/float_sums.md), whatever rows stand beside a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.fast.dense_chain import slope as slope_of

LARGEST = 300_000
"""Parameters of a model that is stacked at most: a larger one keeps the processor busy by itself."""
_ELEMENTWISE = (
    *(nn.Identity, nn.Tanh, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus),
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Linear:
    """A linear layer by the names of its parameters; ``bias`` is None if it has none."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Chain:
    """The layers of a model in the order in which they run: linear ones, and modules that act on each number alone.

    ``names`` are the parameters in the order of ``model.named_parameters()``.
    """

    layers: tuple[Linear | nn.Module, ...]
    names: tuple[str, ...]

    @property
    def width(self) -> int:
        """Return how many numbers the layers hold for one record."""
        return sum(layer.inputs + layer.outputs for layer in self.layers if isinstance(layer, Linear))


def chain_of(model: nn.Module, shape: Sequence[int]) -> Chain:
    """Return the chain that a model is, for inputs of this shape a record.

    Raises:
      UnsupportedModelError: it is something else, so that it must be run by itself; the message says why.

    Examples:
      >>> chain = chain_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (2, 2))
      >>> [type(layer).__name__ for layer in chain.layers], chain.names[-1]
      (['Linear', 'Tanh', 'Linear'], '3.bias')
      >>> chain_of(nn.Conv2d(1, 2, 3), (1, 8, 8))
      Traceback (most recent call last):
      ...
      evenhand.errors.UnsupportedModelError: a model with a layer Conv2d is no chain of linear layers and activations
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    count = sum(parameter.numel() for parameter in parameters.values())
    if count > LARGEST:
        raise UnsupportedModelError(f"a model of {count:,} parameters keeps a processor busy alone (limit {LARGEST:,})")
    if len({id(parameter) for parameter in parameters.values()}) < len(parameters):
        raise UnsupportedModelError("layers of the model share parameters")
    if not all(p.requires_grad and p.dtype == torch.float32 and p.is_cpu for p in parameters.values()):
        raise UnsupportedModelError("the model has parameters that are frozen, not float32 or not on the CPU")
    layers: list[Linear | nn.Module] = []
    width, flat = math.prod(shape), len(shape) == 1
    for name, module in _modules(model, ""):
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) is nn.Linear and flat and module.in_features == width:
            bias = None if module.bias is None else f"{name}bias"
            layers.append(Linear(f"{name}weight", bias, module.in_features, module.out_features))
            width = module.out_features
        elif type(module) is nn.Linear:
            raise UnsupportedModelError("a linear layer of the model does not take a record as one flat row")
        elif getattr(module, "inplace", False):
            raise UnsupportedModelError("an activation of the model writes over its input (inplace=True)")
        elif type(module) in _ELEMENTWISE:
            layers.append(module)
        else:
            kind = type(module).__name__
            raise UnsupportedModelError(f"a model with a layer {kind} is no chain of linear layers and activations")
    if not any(isinstance(layer, Linear) for layer in layers):
        raise UnsupportedModelError("the model has no linear layer")
    return Chain(tuple(layers), tuple(parameters))


def _modules(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that run, one after the other, with the beginning of their parameters' names."""
    if any(getattr(model, hooks) for hooks in _HOOKS):
        raise UnsupportedModelError("the model has hooks")
    if type(model) is not nn.Sequential:
        yield name, model
        return
    for key, part in model.named_children():
        yield from _modules(part, f"{name}{key}.")


@dataclass(frozen=True)
class StackedPass:
    """Losses and gradient norms of R models on B rows each, as (R, B), and the means to sum the gradients.

    A row whose loss or norm is not finite adds nothing to a sum, whatever its weight; ``finite``: there is none such.
    """

    loss: Tensor
    norm: Tensor
    finite: bool
    _chain: Chain
    _inputs: list[Tensor]
    _slopes: list[Tensor]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return for each model the sum of its rows' gradients by weights (R, B): one row of all parameters, float64.

        Parameters follow each other in the order of ``Chain.names``. The caller owns the result.
        """
        inputs, slopes = self._inputs, self._slopes
        if not self.finite:
            usable = (torch.isfinite(self.loss) & torch.isfinite(self.norm)).unsqueeze(-1)
            inputs, slopes = ([torch.where(usable, part, 0.0) for part in parts] for parts in (inputs, slopes))
        sums: dict[str, Tensor] = {}
        linear = [layer for layer in self._chain.layers if isinstance(layer, Linear)]
        for layer, seen, slope in zip(linear, inputs, slopes, strict=True):
            weighted = slope * weights.unsqueeze(-1)
            sums[layer.weight] = _product(weighted.transpose(1, 2), seen)
            if layer.bias is not None:
                sums[layer.bias] = weighted.sum(1)
        return torch.cat([sums[name].flatten(1) for name in self._chain.names], dim=1)


def _slopes(last: Tensor, pieces: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the losses by the output of every linear layer, (R, B, outputs) each.

    Args:
      last: their gradient by the end of the last piece.
      pieces: for every linear layer its output and what the activations behind it make of that.
      weights: those of the linear layers.
    """
    slopes, slope = list[Tensor](), last
    for weight, (output, end) in zip(reversed(weights), reversed(pieces), strict=True):
        slope = slope if end is output else torch.autograd.grad(end, output, slope)[0]
        slopes.append(slope)
        if len(slopes) < len(pieces):
            slope = _product(slope, weight)
    return slopes[::-1]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix products of two stacks of float64 matrices on the CPU; the caller owns the result.

    NumPy's BLAS takes half of the processor time of ``torch.bmm`` for stacks of small matrices.
    """
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


def _column_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the same products; in memory the numbers of one column, of all rows of all matrices, lie side by side.

    Cross-entropy of a few classes is ten times quicker that way round.
    """
    columns = np.empty((right.shape[2], *left.shape[:2]))
    np.matmul(left.detach().numpy(), right.detach().numpy(), out=columns.transpose(1, 2, 0))
    return torch.from_numpy(columns).permute(1, 2, 0)


def row_squares(rows: Tensor) -> Tensor:
    """Return the squared length of every row (the last dimension). The caller owns it."""
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).square_()
    return squares


def run_stacked(
    chain: Chain,
    parameters: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Any, Any], Tensor],
    squares: Tensor | None = None,
) -> StackedPass:
    """Run R models forward and backward, each on rows of its own, and return losses and norms of every row.

    Args:
      chain: the form of the models.
      parameters: by name, the models along the first dimension.
      inputs: (R, B, numbers of a record), float64.
      targets: (R, B) or (R, B, outputs).
      loss: one value per row; it must treat rows alone, as all losses by name do.
      squares: ``row_squares`` of the inputs, (R, B), where the caller has them from earlier steps.

    Examples:
      >>> model = nn.Linear(2, 2)
      >>> stacked = {name: value.detach().unsqueeze(0) for name, value in model.named_parameters()}
      >>> rows, labels = torch.ones(1, 3, 2, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.long)
      >>> result = run_stacked(chain_of(model, (2,)), stacked, rows, labels, nn.CrossEntropyLoss(reduction="none"))
      >>> result.norm.shape, result.weighted_sum(torch.ones(1, 3, dtype=torch.float64)).shape
      (torch.Size([1, 3]), torch.Size([1, 6]))
    """
    models, rows = inputs.shape[:2]
    linear = [layer for layer in chain.layers if isinstance(layer, Linear)]
    weights = [parameters[layer.weight].detach().double() for layer in linear]
    value, seen, pieces = inputs, list[Tensor](), list[tuple[Tensor, Tensor]]()
    with torch.enable_grad():
        for layer in chain.layers:
            if not isinstance(layer, Linear):
                value = layer(value)
                if pieces:
                    pieces[-1] = pieces[-1][0], value
                continue
            seen.append(value.detach())
            multiplied = _column_product if layer is chain.layers[-1] else _product
            value = multiplied(seen[-1], weights[len(pieces)].transpose(1, 2))
            if layer.bias is not None:
                value += parameters[layer.bias].detach().double().unsqueeze(1)
            pieces.append((value.requires_grad_(), value))
        ends, wanted = value.detach().flatten(0, 1), targets.flatten(0, 1)
        found = slope_of(loss, ends, wanted, models * rows, ())
        if found is None:
            raise UnsupportedModelError("the loss does not depend on what the model says alone, or writes over it")
        losses, last = found
        slopes = _slopes(last.view(models, rows, -1), pieces, weights)
    with torch.no_grad():
        square = torch.zeros(models, rows, dtype=torch.float64)
        known = [squares if chain.layers[0] is linear[0] else None, *[None] * (len(linear) - 1)]
        for layer, before, slope, lengths in zip(linear, seen, slopes, known, strict=True):
            lengths = row_squares(before) if lengths is None else lengths
            square += row_squares(slope).mul_(lengths if layer.bias is None else lengths + 1.0)
        losses, norm = losses.detach().reshape(models, rows), square.sqrt_()
        finite = math.isfinite(float(losses.sum() + norm.sum()))
    return StackedPass(losses, norm, finite, chain, seen, slopes)
