"""The models that the engine is measured on: built from torch's own layers, without dropout, as a user would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model, how made-up records for it look, and the batch sizes that are measured by default.

    ``tokens`` is the size of the vocabulary; with 0 a record is an array of floats. ``bar`` is how long our step may
    take with one thread, in steps of SGD, for a batch of 256 or of the only size that is measured.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    bar: float
    tokens: int = 0
    batches: tuple[int, ...] = (64, 256, 1024)

    @property
    def bar_batch(self) -> int:
        """The batch size that the bar is for."""
        return 256 if 256 in self.batches else self.batches[0]

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of ``batch`` records."""
        inputs = torch.randint(self.tokens, (batch, *self.shape)) if self.tokens else torch.randn(batch, *self.shape)
        return inputs, torch.randint(self.classes, (batch,))


def mnist_cnn() -> nn.Module:
    """The small network of the DP-SGD papers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    """The tanh network of Papernot et al. (2021): six 3x3 convolutions, two linear layers."""
    layers: list[nn.Module] = []
    width = 3
    for wide in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(width, wide, 3, padding=1), nn.Tanh()]
            width = wide
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.Tanh(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    """The size of a network for census data."""
    return nn.Sequential(nn.Linear(104, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


def logistic_regression() -> nn.Module:
    """One layer: what is not a matrix product weighs most here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a way around them."""

    def __init__(self, width: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, wide, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(16, wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(16, wide)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.around: nn.Module = nn.Identity()
        if stride > 1 or width != wide:
            self.around = nn.Sequential(nn.Conv2d(width, wide, 1, stride, bias=False), nn.GroupNorm(16, wide))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(inner + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 with GroupNorm and the 3x3 stem for 32x32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(width, wide, stride), ResidualBlock(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class CharLSTM(nn.Module):
    """Embedding, LSTM, and a linear layer on the last of 20 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 18)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Transformer(nn.Module):
    """Embedded tokens and positions, torch's encoder layers, the mean over time."""

    def __init__(self, embedding: nn.Module, length: int, width: int, layers: list[nn.Module], classes: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        places = torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        return self.head(self.layers(x + self.position(places)).mean(1))


class Patches(nn.Module):
    """A picture as a row of embedded 4x4 patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.conv(pictures).flatten(2).transpose(1, 2)


def encoder(width: int, heads: int, inner: int, norm_first: bool) -> nn.Module:
    """torch's own layer."""
    return nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, batch_first=True, norm_first=norm_first)


def transformer() -> nn.Module:
    """Two layers of width 128 on 64 tokens."""
    return Transformer(nn.Embedding(1000, 128), 64, 128, [encoder(128, 4, 256, False) for _ in range(2)], 4)


def vit_tiny() -> nn.Module:
    """ViT-tiny (width 192, 3 heads) on 4x4 patches of 32x32 pixels: 6 layers instead of 12, mean instead of a token."""
    layers = [encoder(192, 3, 768, True) for _ in range(6)]
    return Transformer(Patches(192), 64, 192, [*layers, nn.LayerNorm(192)], 10)


CASES: dict[str, Case] = {
    "MNIST CNN": Case(mnist_cnn, (1, 28, 28), 10, 1.10),
    "CIFAR tanh CNN": Case(cifar_cnn, (3, 32, 32), 10, 1.15),
    "ResNet-18 GroupNorm": Case(resnet18, (3, 32, 32), 10, 1.20, batches=(64,)),
    "MLP 104-256-256-2": Case(mlp, (104,), 2, 1.25),
    "logistic regression": Case(logistic_regression, (1, 28, 28), 10, 1.40),
    "char-LSTM": Case(CharLSTM, (20,), 18, 1.30, tokens=80),
    "transformer": Case(transformer, (64,), 4, 1.20, tokens=1000),
    "ViT-tiny (6 layers)": Case(vit_tiny, (3, 32, 32), 10, 1.25, batches=(64,)),
}
