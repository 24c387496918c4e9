"""Linear model, multi-layer perceptron and a small convolutional network, for data of any shape."""

from __future__ import annotations

import math

from torch import nn

from evenhand.models.layers import Shape, head, pictures

HIDDEN = 128


def linear(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), head(math.prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer with tanh: bounded activations bear clipping better than ReLU (Papernot et al. 2021)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), head(HIDDEN, classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Two convolutions and one hidden layer, with tanh (Papernot et al. 2021), for pictures of at least 8 x 8."""
    channels, *sides = pictures(shape, "cnn", 8)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * math.prod(side // 4 for side in sides), 32),
        nn.Tanh(),
        head(32, classes),
    )
