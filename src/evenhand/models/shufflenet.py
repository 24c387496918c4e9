"""A small ShuffleNet with GroupNorm and SELU, as Global-Adapt-V2 (Chilukoti et al. 2023) trains it.

The paper gives a convolution with 16 channels, building blocks with 32 and 64, 3 x 3, four groups, SELU, a pooling and
one linear layer. The blocks are those of ShuffleNet v2 (Ma et al. 2018); two of each width is our choice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenhand.models.layers import Shape, head, pictures

GROUPS = 4


class Unit(nn.Module):
    """Half of the channels, or with a stride a smaller picture of all of them, goes around three convolutions."""

    def __init__(self, width: int, wide: int, stride: int) -> None:
        super().__init__()
        self.split = stride == 1
        width, half = width // 2 if self.split else width, wide // 2
        self.around: nn.Module = nn.Identity()
        if not self.split:
            self.around = nn.Sequential(*_spread(width, stride), *_mixed(width, half))
        self.inner = nn.Sequential(*_mixed(width, half), *_spread(half, stride), *_mixed(half, half))

    def forward(self, maps: Tensor) -> Tensor:
        """Both halves, their channels taken in turn."""
        left, right = maps.chunk(2, dim=1) if self.split else (maps, maps)
        return torch.stack([self.around(left), self.inner(right)], dim=2).flatten(1, 2)


def shufflenet(shape: Shape, classes: int) -> nn.Module:
    """Convolution, four units, the mean over all places, and one linear layer."""
    channels = pictures(shape, "shufflenet", 8)[0]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.SELU(),
        nn.MaxPool2d(3, 2, padding=1),
        Unit(16, 32, 2),
        Unit(32, 32, 1),
        Unit(32, 64, 2),
        Unit(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        head(64, classes),
    )


def _mixed(width: int, wide: int) -> tuple[nn.Module, ...]:
    """A convolution of one pixel, over all channels."""
    return nn.Conv2d(width, wide, 1, bias=False), nn.GroupNorm(GROUPS, wide), nn.SELU()


def _spread(width: int, stride: int) -> tuple[nn.Module, ...]:
    """A convolution of 3 x 3 pixels, for each channel alone."""
    return nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False), nn.GroupNorm(GROUPS, width)
