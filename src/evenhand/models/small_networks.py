"""Linear model, multi-layer perceptron and a small convolutional network, for data of any shape."""

from __future__ import annotations

import math

from torch import nn

from evenhand.models.layers import Shape, head, pictures, slid

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
