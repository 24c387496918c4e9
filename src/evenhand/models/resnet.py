"""ResNet-18 (He et al. 2016) with GroupNorm, since BatchNorm mixes records, and a 3 x 3 stem for small pictures."""

from __future__ import annotations

from torch import Tensor, nn

from evenhand.models.layers import Shape, head, pictures

GROUPS = 16


class Block(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a way around them."""

    def __init__(self, width: int, wide: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, wide, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, wide),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or width != wide:
            self.around = nn.Sequential(nn.Conv2d(width, wide, 1, stride, bias=False), nn.GroupNorm(GROUPS, wide))
        self.relu = nn.ReLU()

    def forward(self, maps: Tensor) -> Tensor:
        """Both ways, added."""
        added: Tensor = self.relu(self.inner(maps) + self.around(maps))
        return added


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """Eight blocks of 64 to 512 channels, the mean over all places, and one linear layer."""
    channels = pictures(shape, "resnet18", 8)[0]
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU()]
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, wide, stride), Block(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(width, classes))
