"""Linear model, multi-layer perceptron and a small convolutional network, for data of any shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError

HIDDEN = 128


def linear(shape: Shape, classes: int) -> nn.Module:
    """Return multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), head(math.prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Return one hidden layer with tanh: bounded activations suffer less from clipping (Papernot et al. 2021)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), head(HIDDEN, classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Return two convolutions and one hidden layer, with tanh (Papernot et al. 2021), for pictures from 8 x 8."""
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
    """Return two convolutions and two linear layers: DPSGD-F (Xu et al. 2021), balanced MNIST of Global-Adapt-V2.

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
    """Return two convolutions and one linear layer: unbalanced MNIST of Global-Adapt-V2 (Chilukoti et al. 2023).

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
    """Return the network for MNIST, or for colour pictures of at least 32 x 32 the one for CIFAR."""
    channels, *sides = pictures(shape, "tanh_cnn", 16)
    network = _cifar if channels > 1 and min(sides) >= LARGE else _mnist
    return network(channels, sides, classes)


def _mnist(channels: int, sides: list[int], classes: int) -> nn.Module:
    """Return two convolutions and one hidden layer: 26,010 parameters for MNIST."""
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
    """Return six convolutions and one hidden layer."""
    layers: list[nn.Module] = []
    width = channels
    for wide in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(width, wide, 3, padding=1), nn.Tanh()]
            width = wide
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Flatten(), nn.Linear(width * math.prod(side // 8 for side in sides), 128), nn.Tanh()]
    return nn.Sequential(*layers, *hidden, head(128, classes))


Shape = tuple[int, ...]


def head(features: int, classes: int) -> nn.Linear:
    """Return a last layer that starts at zero: no budget is spent to unlearn a random guess."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def pictures(shape: Shape, model: str, least: int) -> tuple[int, int, int]:
    """Return channels, height and width; raise UsageError if these are no pictures or too small ones."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"The {model} needs pictures shaped (channels, height, width) of at least {least} x {least} pixels, and "
            f"these inputs have shape {shape}: use --model mlp."
        )
    channels, height, width = shape
    return channels, height, width


def slid(sides: Shape, kernel: int, stride: int = 1, padding: int = 0) -> Shape:
    """Return height and width after a convolution or a pooling.

    Examples:
      >>> slid(slid((28, 28), 8, 2, 3), 2)
      (13, 13)
    """
    return tuple((side + 2 * padding - kernel) // stride + 1 for side in sides)


RESNET_GROUPS = 16


class Block(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a way around them."""

    def __init__(self, width: int, wide: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, wide, 3, stride, padding=1, bias=False),
            nn.GroupNorm(RESNET_GROUPS, wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.GroupNorm(RESNET_GROUPS, wide),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or width != wide:
            self.around = nn.Sequential(
                nn.Conv2d(width, wide, 1, stride, bias=False), nn.GroupNorm(RESNET_GROUPS, wide)
            )
        self.relu = nn.ReLU()

    def forward(self, maps: Tensor) -> Tensor:
        """Return the ReLU of the convolutions' output plus the shortcut's."""
        added: Tensor = self.relu(self.inner(maps) + self.around(maps))
        return added


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """Return eight blocks of 64 to 512 channels, the mean over all places, and one linear layer."""
    channels = pictures(shape, "resnet18", 8)[0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.GroupNorm(RESNET_GROUPS, 64),
        nn.ReLU(),
    ]
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, wide, stride), Block(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(width, classes))


SHUFFLENET_GROUPS = 4


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
        """Interleave the channels of both halves."""
        left, right = maps.chunk(2, dim=1) if self.split else (maps, maps)
        return torch.stack([self.around(left), self.inner(right)], dim=2).flatten(1, 2)


def shufflenet(shape: Shape, classes: int) -> nn.Module:
    """Return a convolution, four units, the mean over all places, and one linear layer."""
    channels = pictures(shape, "shufflenet", 8)[0]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.GroupNorm(SHUFFLENET_GROUPS, 16),
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
    """Return a convolution of one pixel, over all channels."""
    return nn.Conv2d(width, wide, 1, bias=False), nn.GroupNorm(SHUFFLENET_GROUPS, wide), nn.SELU()


def _spread(width: int, stride: int) -> tuple[nn.Module, ...]:
    """Return a convolution of 3 x 3 pixels, for each channel alone."""
    return nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False), nn.GroupNorm(
        SHUFFLENET_GROUPS, width
    )


VOCABULARY = 256
"""One row per byte; what the data never use is never read, so it costs nothing."""
PADDING = 0
EMBEDDED = 64
LSTM_HIDDEN = 128


class CharLSTM(nn.Module):
    """An LSTM that reads the characters of each record in order and returns class scores after the last.

    Token 0 is padding, wherever it stands: padded positions change nothing.

    Examples:
      >>> import torch
      >>> model = CharLSTM(3)
      >>> short, long = torch.tensor([[7, 9]]), torch.tensor([[0, 7, 9, 0, 0]])
      >>> _ = torch.nn.init.normal_(model.head.weight)
      >>> bool(torch.allclose(model(short), model(long), atol=1e-6))
      True
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED, padding_idx=PADDING)
        self.lstm = nn.LSTM(EMBEDDED, LSTM_HIDDEN, batch_first=True)
        self.head = head(LSTM_HIDDEN, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the classes, for tokens (B, T)."""
        empty = (tokens == PADDING).long()
        tokens = tokens.gather(1, empty.argsort(dim=1, stable=True)).long()
        last = ((1 - empty).sum(1) - 1).clamp(min=0)
        states = self.lstm(self.embedding(tokens))[0]
        scores: Tensor = self.head(states.gather(1, last.view(-1, 1, 1).expand(-1, 1, LSTM_HIDDEN)).squeeze(1))
        return scores


def char_lstm(shape: Shape, classes: int) -> nn.Module:
    """Return a CharLSTM for records that are one row of tokens, 0 to 255."""
    if len(shape) != 1 or shape[0] < 1:
        raise UsageError(
            f"The char_lstm needs one row of tokens per record, and these inputs have shape {shape}: give whole "
            "numbers from 1 to 255, one column per character, and 0 where there is none."
        )
    return CharLSTM(classes)
