"""``nn.MultiheadAttention``: projections by kernels, softmax and dropout by autograd, exactly as torch computes them.

The layers of ``nn.Transformer`` need nothing of their own: they are made of this module and of layers with kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from evenhand.gradients.layers.base import Serve, Share, Shares, register_composite, register_kernel, touched
from evenhand.gradients.layers.linear import LinearKernel, Outer
from evenhand.gradients.memory import Corner, ScratchBuffers

register_kernel(NonDynamicallyQuantizableLinear)(LinearKernel)

PACKED = frozenset({"in_proj_weight"})
SEPARATE = frozenset({"q_proj_weight", "k_proj_weight", "v_proj_weight"})


class _InProjection:
    """Queries, keys and values from one input, from two (keys and values share theirs) or from three."""

    def forward(self, module: nn.MultiheadAttention, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the projections as torch does; one matrix product where that is possible."""
        if len(inputs) == 1 and module.in_proj_weight is not None:
            return functional.linear(inputs[0], module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1), ()
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        rows = zip(_threefold(inputs), _weights(module), biases, strict=True)
        return tuple(functional.linear(x, weight, bias) for x, weight, bias in rows), ()

    def backward(
        self,
        module: nn.MultiheadAttention,
        inputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        needed: tuple[bool, ...],
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Return ``grad @ weight``, added up over the projections of an input; at once where they have one input."""
        if len(inputs) == 1 and module.in_proj_weight is not None:
            joint = torch.cat(grads, dim=-1)
            dx = joint @ module.in_proj_weight.to(joint.dtype) if needed[0] else None
            return (dx,), (joint, inputs[0].detach())
        gradients: list[Tensor | None] = [None] * len(inputs)
        for i, (grad, weight) in enumerate(zip(grads, _weights(module), strict=True)):
            place = min(i, len(inputs) - 1)
            if needed[place]:
                flat, known = grad.reshape(-1, grad.shape[-1]), gradients[place]
                weight = weight.to(grad.dtype)
                gradients[place] = flat @ weight if known is None else known.addmm_(flat, weight)
        shaped = [None if f is None else f.view(x.shape) for f, x in zip(gradients, inputs, strict=True)]
        return tuple(shaped), (*grads, *(x.detach() for x in inputs))

    def share(
        self,
        module: nn.MultiheadAttention,
        tensors: tuple[Tensor, ...],
        trainable: frozenset[str],
        room: ScratchBuffers,
    ) -> Shares:
        """Return a sum of outer products, or one for each projection."""
        if len(tensors) == 2:
            whole = Outer(tensors[1], tensors[0], frozenset(n.split("_")[2] for n in trainable), room)
            return Shares([whole], _named_as_packed)
        parts: dict[str, Share] = {}
        for name, grad, x in zip("qkv", tensors[:3], _threefold(tensors[3:]), strict=True):
            kinds = frozenset(n.split("_")[2] for n in trainable if n[0] in ("i", name))
            if kinds:
                parts[name] = Outer(x, grad, kinds, Corner(room, name))
        return Shares(list(parts.values()), partial(_assembled, tuple(parts), trainable))


def _named_as_packed(parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Return the gradients of three projections of one input by the names of the packed parameters."""
    return {f"in_proj_{name}": value for part in parts for name, value in part.items()}


def _assembled(
    projections: tuple[str, ...], trainable: frozenset[str], parts: Sequence[dict[str, Tensor]], dim: int
) -> dict[str, Tensor]:
    """Put what the projections own of a packed parameter one below the other; others have one owner."""
    owners, gradients = dict(zip(projections, parts, strict=True)), {}
    for name in trainable:
        whose, _, local = name.split("_")
        packed = whose == "in"
        gradients[name] = torch.cat([part[local] for part in parts], dim=dim) if packed else owners[whose][local]
    return gradients


def _threefold(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*inputs, *inputs[-1:] * (3 - len(inputs)))


def _weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    packed: Tensor | None = module._parameters["in_proj_weight"]
    return (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if packed is None else packed.chunk(3)


@register_composite(nn.MultiheadAttention)
class AttentionComposite:
    """Self- and cross-attention with one set of weights or three, any masks, batch first or second."""

    def serves(self, module: nn.MultiheadAttention) -> bool:
        """Return true unless there are extra keys that are parameters (``add_bias_kv``)."""
        names = {name for name, parameter in module._parameters.items() if parameter is not None}
        out = module.out_proj
        return (
            names - {"in_proj_bias"} in (PACKED, SEPARATE)
            and type(out) is NonDynamicallyQuantizableLinear
            and out._parameters.keys() == {"weight", "bias"}
            and not touched(out)
        )

    def pieces(self, module: nn.MultiheadAttention) -> Mapping[str, tuple[_InProjection, tuple[str, ...]]]:
        """Return all parameters but those of the output layer, which has a kernel of its own."""
        return {"in": (_InProjection(), tuple(n for n, p in module._parameters.items() if p is not None))}

    def forward(
        self,
        module: nn.MultiheadAttention,
        serve: Serve,
        size: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Return output and, if asked for, attention weights; what torch would refuse is left to torch."""
        given: tuple[Tensor, ...] = (query, key, value)
        given = (query,) if query is key and key is value else (query, key) if key is value else given
        batch = 0 if module.batch_first else 1
        if any(x.is_nested or x.dim() != 3 or x.shape[batch] != size for x in given):
            return NotImplemented
        given = given if module.batch_first else tuple(x.transpose(0, 1) for x in given)
        shape = (size, module.num_heads, given[0].shape[1], given[-1].shape[1])
        causal = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        if (is_causal and attn_mask is None) or not _fit(attn_mask, key_padding_mask, shape):
            return NotImplemented
        mask = None if causal else _merged(attn_mask, key_padding_mask, shape, query.dtype)
        q, k, v = (x.view(*x.shape[:2], module.num_heads, -1).transpose(1, 2) for x in serve("in", *given))
        if module.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
            mask = mask if mask is None else functional.pad(mask, (0, 1))
        dropout, weights = module.dropout if module.training else 0.0, None
        if need_weights:
            mixed, weights = _by_hand(q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        out = module.out_proj(mixed.transpose(1, 2).flatten(2))
        return out if module.batch_first else out.transpose(0, 1), weights


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _fit(mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int]) -> bool:
    """Return whether torch would take the masks."""
    size, heads, targets, sources = shape
    shapes = ((targets, sources), (size * heads, targets, sources))
    return all(m is None or m.dtype == torch.bool or m.is_floating_point() for m in (mask, padding)) and (
        (mask is None or mask.shape in shapes) and (padding is None or padding.shape == (size, sources))
    )


def _merged(
    mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """Return what is added to the scores, broadcast against (batch, heads, targets, sources)."""
    size, heads, targets, sources = shape
    merged = None
    if mask is not None:
        merged = _added(mask, dtype).view(
            -1 if mask.dim() == 2 else size, heads if mask.dim() == 3 else 1, targets, sources
        )
    if padding is not None:
        wide = _added(padding, dtype).view(size, 1, 1, sources).expand(-1, heads, -1, -1)
        merged = wide if merged is None else merged + wide
    return merged


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of what not to look at as one to be added."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask
