"""What several networks share: a last layer that starts at zero, and what to say when the inputs do not fit."""

from __future__ import annotations

from torch import nn

from evenhand.errors import UsageError

Shape = tuple[int, ...]


def head(features: int, classes: int) -> nn.Linear:
    """A last layer that starts at zero: no budget goes into unlearning a random guess."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def pictures(shape: Shape, model: str, least: int) -> tuple[int, int, int]:
    """Channels, height and width, or an error if these are no pictures or too small ones."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"The {model} needs pictures shaped (channels, height, width) of at least {least} x {least} pixels, and "
            f"these inputs have shape {shape}: use --model mlp."
        )
    channels, height, width = shape
    return channels, height, width


def slid(sides: Shape, kernel: int, stride: int = 1, padding: int = 0) -> Shape:
    """Height and width after a convolution or a pooling.

    Examples:
      >>> slid(slid((28, 28), 8, 2, 3), 2)
      (13, 13)
    """
    return tuple((side + 2 * padding - kernel) // stride + 1 for side in sides)
