"""How gradients go back from a weight to the parameters that it is made of: standardised, or of a given length.

Such a weight is made output channel by output channel (first dimension) of one parameter of its own size, and of
parameters with one number per channel. For a channel with K numbers the way back then is a multiple of the identity,
but on the plane of the weight itself and of equal numbers. Three vectors pulled back through autograd's graph give all
of it: both of the plane, and a random one. What the random one leaves over says whether the way back has this form at
all; a weight that is made in another way (by a mask, over several channels) has not.

Norms of records' gradients then need two numbers per record and channel beside those of an ordinary weight. The map
that was found is used for norms and sums alike, so what is added up is what was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

LEAST = 8
"""Numbers of a channel from which on a way back has a form that can be told from others."""
ROUNDING = 256
"""Units of rounding that a vector which was pulled back may be away from the form, in parts of its length."""
FLAT = 1e-3
"""Length of a channel without its mean, as a part of its length, below which it has no direction of its own."""
Pull = Callable[[Tensor], Mapping[str, Tensor]]
"""From a gradient of the weight to the gradients of the parameters, by name."""


@dataclass(frozen=True)
class WeightMap:
    """From a gradient of a weight with O channels of K numbers to those of its parameters; numbers are float64.

    ``name`` is the parameter of the weight's size. A channel's gradient g has two ``products``: with ``1 / sqrt(K)``
    everywhere and with its ``direction`` (O, K). It goes back to ``scale * g`` and both of these with the factors
    ``mixing @ products``, shape (O, 2, 2). ``inner`` are the inner products of both. ``gains`` (O, 2) times the
    products give the parameters with one number per channel.
    """

    name: str
    scale: Tensor
    direction: Tensor
    mixing: Tensor
    inner: Tensor
    gains: Mapping[str, Tensor]

    @property
    def largest(self) -> Tensor:
        """Return per channel the largest factor of anything that is computed on the way."""
        parts = [self.scale.abs(), torch.linalg.matrix_norm(self.mixing), *[g.norm(dim=1) for g in self.gains.values()]]
        return torch.stack(parts).amax(0)

    def squares(self, products: Tensor, scaled: Tensor) -> Tensor:
        """Return what the squared norm has beyond ``|scale * g|^2``.

        It comes from the products (B, O, 2) of the records' g, and from those of ``scale * g`` as that was rounded.
        """
        added = self._mixed(products)
        whole = (self.inner @ added.unsqueeze(3)).squeeze(3) + 2 * scaled
        squares = (added * whole).sum((1, 2))
        for gain in self.gains.values():
            squares = squares + (products * gain).sum(2).square().sum(1)
        return squares

    def complete(self, scaled: Tensor, products: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return gradients of all parameters from ``scale * g`` (n, O, K), which is overwritten, and the products."""
        added = self._mixed(products).to(scaled.dtype).unsqueeze(3)
        scaled.add_(added[:, :, 0] * self.direction.shape[1] ** -0.5)
        scaled.addcmul_(added[:, :, 1], self.direction.to(scaled.dtype))
        gradients = {name: (products * gain).sum(2).to(scaled.dtype) for name, gain in self.gains.items()}
        gradients[self.name] = scaled
        return {name: gradients[name].reshape(-1, *shape) for name, shape in shapes.items()}

    def _mixed(self, products: Tensor) -> Tensor:
        return (self.mixing @ products.unsqueeze(3)).squeeze(3)


def weight_map(edge: GradientEdge, weight: Tensor, parameters: Mapping[str, Tensor]) -> WeightMap | None:
    """Return the map behind a weight, or None if its way back has another form.

    >>> theta = torch.nn.Parameter(torch.randn(4, 9))
    >>> def found(weight):
    ...     return weight_map(GradientEdge(weight.grad_fn, 0), weight.detach(), {"theta": theta})
    >>> found(theta - theta.mean(1, keepdim=True)).scale.round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0]
    >>> found(theta - theta.mean(0)) is None, found(theta * torch.rand(4, 9)) is None
    (True, True)
    """
    count, each = len(weight), weight[0].numel()
    whole = [name for name, p in parameters.items() if p.shape[:1] == (count,) and p.numel() == count * each]
    gains = {name for name, p in parameters.items() if p.shape[:1] == (count,) and p.numel() == count}
    if each < LEAST or len(whole) != 1 or len(gains) != len(parameters) - 1:
        return None
    (name,) = whole
    leaves = list(parameters.values())

    def pull(gradient: Tensor) -> dict[str, Tensor]:
        pulled = torch.autograd.grad(
            [edge], leaves, [gradient.view_as(weight)], retain_graph=True, materialize_grads=True
        )
        return {key: part.reshape(count, -1) for key, part in zip(parameters, pulled, strict=True)}

    direction = _direction(weight.reshape(count, each))
    return None if direction is None else _fitted(name, direction, pull)


def _direction(flat: Tensor) -> Tensor | None:
    """Return each channel without its mean, of length one, or zero if it is zero; None if one is almost its mean."""
    centred = flat - flat.mean(1, keepdim=True)
    centred -= centred.mean(1, keepdim=True)
    lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    usual = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    if bool(((lengths <= FLAT * usual) & (usual > 0)).any()):
        return None
    return centred.div_(torch.where(lengths > 0, lengths, 1.0))


def _fitted(name: str, direction: Tensor, pull: Pull) -> WeightMap | None:
    """Return the map that gives what was pulled back, if there is one."""
    each = direction.shape[1]
    level = 1 / math.sqrt(each)
    tolerance = ROUNDING * torch.finfo(direction.dtype).eps

    def products(flat: Tensor) -> Tensor:
        return torch.stack([flat.sum(1) * level, torch.linalg.vecdot(flat, direction)], dim=1)

    def without(flat: Tensor, along: Tensor) -> Tensor:
        flat = flat - along[:, :1] * level
        return flat.addcmul_(direction, along[:, 1:], value=-1)

    random = _random(direction)
    pulled = [pull(torch.full_like(direction, level)), pull(direction), pull(random)]
    plane = torch.stack([products(part[name]) for part in pulled[:2]], dim=2)
    along = products(random)
    third, rest = without(random, along), pulled[2][name]
    rest = without(rest, (plane @ along.unsqueeze(2)).squeeze(2))
    scale = torch.linalg.vecdot(rest, third) / torch.linalg.vecdot(third, third)
    sizes = torch.linalg.matrix_norm(plane) + scale.abs()
    left = [without(pulled[i][name], plane[:, :, i]) for i in range(2)]
    left += [rest.addcmul_(third, scale.unsqueeze(1), value=-1).div_(math.sqrt(each))]
    gains = {}
    for key in pulled[0].keys() - {name}:
        gain = torch.cat([pulled[0][key], pulled[1][key]], dim=1)
        gains[key] = gain.double()
        error = (pulled[2][key].squeeze(1) - torch.linalg.vecdot(gain, along)) / math.sqrt(each)
        if not bool((error.abs() <= tolerance * (sizes + gain.norm(dim=1))).all()):
            return None
    if not all(bool((torch.linalg.vector_norm(part, dim=1) <= tolerance * sizes).all()) for part in left):
        return None
    mixing = plane - scale.view(-1, 1, 1) * torch.eye(2, dtype=plane.dtype, device=plane.device)
    return WeightMap(name, scale.double(), direction, mixing.double(), _inner(direction), gains)


def _inner(direction: Tensor) -> Tensor:
    """Return the inner products of a direction and of equal numbers of length one, shape (O, 2, 2), in float64."""
    wide = direction.double()
    cross, own = wide.sum(1) * direction.shape[1] ** -0.5, torch.linalg.vecdot(wide, wide)
    return torch.stack([torch.ones_like(own), cross, cross, own], dim=1).view(-1, 2, 2)


def _random(like: Tensor) -> Tensor:
    """Return normal numbers, the same ones whenever they are asked for: a run must give the same results again."""
    count = like.numel()
    return _numbers(1 << (count - 1).bit_length(), like.dtype, like.device)[:count].view_as(like)


@functools.lru_cache(maxsize=64)
def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(device, dtype)
