"""Linear model, multi-layer perceptron and a small convolutional network, sized from public facts only."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.models import own
from evenhand.types import Facts

HIDDEN = 128
Shape = tuple[int, ...]


def linear(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), _head(math.prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer with tanh: bounded activations bear clipping better than ReLU (Papernot et al. 2021)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.Tanh(), _head(HIDDEN, classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Two convolutions and one hidden layer, with tanh (Papernot et al. 2021), for pictures of at least 8 x 8."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise UsageError(
            "The cnn needs pictures shaped (channels, height, width) of at least 8 x 8 pixels: use --model mlp."
        )
    side = [size // 4 for size in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * math.prod(side), 32),
        nn.Tanh(),
        _head(32, classes),
    )


def _head(features: int, classes: int) -> nn.Linear:
    """A last layer that starts at zero: no budget goes into unlearning a random guess."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {"linear": linear, "mlp": mlp, "cnn": cnn}


def names() -> tuple[str, ...]:
    """Names that ``--model`` takes."""
    return tuple(_MODELS)


def build(name: str, facts: Facts) -> nn.Module:
    """The model called ``name``, or made by ``file.py:factory``, for data with these facts.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(9, (("all", 9),), labels=("0", "1"), inputs="(64,) float32")
      >>> sum(parameter.numel() for parameter in build("linear", facts).parameters())
      130
    """
    if own.is_own(name):
        return own.load(name, facts)
    made = _MODELS[_validate.known(name, _MODELS, "model")]
    shape = own.declared_shape(facts)
    if shape is None or len(facts.labels) < 2:
        raise UsageError(
            "A built-in model needs numeric inputs of one shape and at least two classes: these data have not."
        )
    return made(shape, len(facts.labels))
