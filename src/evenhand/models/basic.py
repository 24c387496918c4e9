"""Linear model and multi-layer perceptron, sized from public facts only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from torch import nn

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.types import Facts

HIDDEN = 128


def linear(features: int, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), _head(features, classes))


def mlp(features: int, classes: int) -> nn.Module:
    """One hidden layer with tanh: bounded activations bear clipping better than ReLU (Papernot et al. 2021)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, HIDDEN), nn.Tanh(), _head(HIDDEN, classes))


def _head(features: int, classes: int) -> nn.Linear:
    """A last layer that starts at zero: no budget goes into unlearning a random guess."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


_MODELS: dict[str, Callable[[int, int], nn.Module]] = {"linear": linear, "mlp": mlp}


def names() -> tuple[str, ...]:
    """Names that ``--model`` takes."""
    return tuple(_MODELS)


def build(name: str, facts: Facts) -> nn.Module:
    """The model called ``name`` for data with these facts.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(9, (("all", 9),), labels=("0", "1"), inputs="(64,) float32")
      >>> sum(parameter.numel() for parameter in build("linear", facts).parameters())
      130
    """
    shape = re.match(r"\(([\d, ]*)\)", facts.inputs)
    if shape is None or len(facts.labels) < 2:
        raise UsageError(
            "A built-in model needs numeric inputs of one shape and at least two classes: these data have not."
        )
    features = math.prod(int(size) for size in re.findall(r"\d+", shape.group(1)))
    return _MODELS[_validate.known(name, _MODELS, "model")](features, len(facts.labels))
