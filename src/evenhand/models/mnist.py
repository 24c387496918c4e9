"""The convolutional networks that two of the papers train on MNIST."""

from __future__ import annotations

import math

from torch import nn

from evenhand.models.layers import Shape, head, pictures, slid


def mnist_cnn_f(shape: Shape, classes: int) -> nn.Module:
    """Two convolutions and two linear layers: DPSGD-F (Xu et al. 2021), and the balanced MNIST of Global-Adapt-V2.

    The sizes are those that the second paper gives: 20 and 50 channels, 5 x 5, 500 hidden units, ReLU. The first gives
    none.
    """
    channels, *sides = pictures(shape, "mnist_cnn_f", 16)
    for _ in range(2):
        sides = [side // 2 for side in slid(tuple(sides), 5)]
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * math.prod(sides), 500),
        nn.ReLU(),
        head(500, classes),
    )


def mnist_cnn_v2(shape: Shape, classes: int) -> nn.Module:
    """Two convolutions and one linear layer: the unbalanced MNIST of Global-Adapt-V2 (Chilukoti et al. 2023).

    16 and 32 channels, 3 x 3, each with instance normalisation, SELU and a maximum over 2 x 2. That the convolutions
    keep the size of the picture, and that the normalisation has no parameters, is our choice.
    """
    channels, *sides = pictures(shape, "mnist_cnn_v2", 8)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.SELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.InstanceNorm2d(32),
        nn.SELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        head(32 * math.prod(side // 4 for side in sides), classes),
    )
