"""Smooth clipping over an adaptive bound (SoftAdaClip): weight C tanh(n / C) / n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenhand.methods import references
from evenhand.methods.registry import register
from evenhand.methods.rules.adaptive_clip import AdaptiveClip

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = 1e-30


@register
@dataclass(frozen=True)
class SoftAdaClip(AdaptiveClip):
    """Bend gradients towards C_t instead of cutting them: a gradient of norm n adds ``C_t tanh(n / C_t)``.

    C_t follows a quantile of the norms, as in AdaptiveClip. Of two large gradients the larger one still adds more. The
    paper's text was not at hand in full: this is its abstract's tanh of the norm, over the adaptive bound.

    Formal guarantees:
      Unit one record, add/remove: ``C_t tanh(n / C_t) < C_t``. C_t as in AdaptiveClip.

    Examples:
      >>> import torch
      >>> SoftAdaClip().unscaled(torch.tensor([0.0, 1.0, 4.0]), torch.tensor(2.0))
      tensor([1.0000, 0.9242, 0.4820])
    """

    name = "soft_ada_clip"
    reference = references.SOLEYMANI.text

    def unscaled(self, norm: Tensor, bound: Tensor) -> Tensor:
        """Return C tanh(n / C) / n, which is 1 for a zero gradient."""
        length = (norm / bound).clamp(min=_SMALLEST)
        return length.tanh() / length
