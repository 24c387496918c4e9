"""The tanh networks of Papernot et al. (2021), "Tempered sigmoid activations for deep learning with DP"."""

from __future__ import annotations

import math

from torch import nn

from evenhand.models.layers import Shape, head, pictures, slid

LARGE = 32


def tanh_cnn(shape: Shape, classes: int) -> nn.Module:
    """The network for MNIST, or for colour pictures of at least 32 x 32 the one for CIFAR."""
    channels, *sides = pictures(shape, "tanh_cnn", 16)
    network = _cifar if channels > 1 and min(sides) >= LARGE else _mnist
    return network(channels, sides, classes)


def _mnist(channels: int, sides: list[int], classes: int) -> nn.Module:
    """Two convolutions and one hidden layer: 26,010 parameters for MNIST."""
    reached = slid(slid(slid(slid(tuple(sides), 8, 2, 3), 2), 4, 2), 2)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, 2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * math.prod(reached), 32),
        nn.Tanh(),
        head(32, classes),
    )


def _cifar(channels: int, sides: list[int], classes: int) -> nn.Module:
    """Six convolutions and one hidden layer."""
    layers: list[nn.Module] = []
    width = channels
    for wide in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(width, wide, 3, padding=1), nn.Tanh()]
            width = wide
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Flatten(), nn.Linear(width * math.prod(side // 8 for side in sides), 128), nn.Tanh()]
    return nn.Sequential(*layers, *hidden, head(128, classes))
