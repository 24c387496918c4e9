"""A layer as torch's own operation on detached weights: quicker than a custom autograd function around a kernel.

Autograd then computes the gradient of the layer's input itself, and none of its weights. The gradient of the output is
asked for as that of an edge of the graph, and held against what the operation was really given: autograd hands out the
gradient of a result that it needs itself before the hooks of that tensor have run, and of others after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from evenhand.gradients.precision import lowered
from evenhand.gradients.serving import Site

Passed: TypeAlias = dict[int, tuple[Tensor, int]]
"""By the place of a call: the gradient that its operation was given, and how often that had been written."""


@dataclass(frozen=True, slots=True)
class Native:
    """One call of a layer, between its forward and its backward."""

    site: Site
    x: Tensor
    edge: GradientEdge
    versions: list[int]

    def tensors(self, passed: tuple[Tensor, int] | None, answer: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Input and output gradient, if nothing was written since the layer saw it; None if there is no gradient.

        ``passed`` is what the operation was given and its version then, ``answer`` what autograd says.
        """
        grad, version = passed or (answer, None)
        if grad is None:
            return None
        if _versions(self.site, self.x) != self.versions or (version is not None and grad._version != version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                "input, a parameter or a gradient of a layer; write y = x * 2 rather than x *= 2 for what it has seen"
            )
        return self.x, grad


def _versions(site: Site, x: Tensor) -> list[int]:
    return [x._version, *[p._version for p in site.held]]


def suits(x: Tensor) -> bool:
    """Whether nothing is going on that wants to see what a layer saves for its backward, or saves it in fewer digits.

    Only vectors: the output of a layer that folds times is a view, and an edit in place would lead around its edge.

    >>> suits(torch.ones(2, 3)), suits(torch.ones(2, 4, 3))
    (True, False)
    """
    return x.dim() == 2 and not lowered() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def run(site: Site, x: Tensor, place: int, passed: Passed) -> tuple[Tensor, Native]:
    """The layer's output. When its backward runs, what that was given is in ``passed`` under ``place``.

    The graph must not hold on to itself, so its hook holds a dict.
    """
    versions = _versions(site, x)
    out: Tensor = site.kernel.native(site.module, x)
    node: Any = out.grad_fn
    node.register_prehook(partial(_keep, passed, place))
    return out, Native(site, x, GradientEdge(node, 0), versions)


def _keep(passed: Passed, place: int, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        passed[place] = gradients[0], gradients[0]._version
