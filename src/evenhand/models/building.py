"""Models by name, sized from public facts only."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from evenhand import _validate
from evenhand.errors import UsageError
from evenhand.models import own
from evenhand.models.basic import cnn, linear, mlp
from evenhand.models.char_lstm import char_lstm
from evenhand.models.layers import Shape
from evenhand.models.mnist import mnist_cnn_f, mnist_cnn_v2
from evenhand.models.resnet import resnet18
from evenhand.models.shufflenet import shufflenet
from evenhand.models.tanh_cnn import tanh_cnn
from evenhand.types import Facts
from evenhand.usercode import is_own

_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": linear,
    "logistic": linear,
    "mlp": mlp,
    "cnn": cnn,
    "tanh_cnn": tanh_cnn,
    "mnist_cnn_f": mnist_cnn_f,
    "mnist_cnn_v2": mnist_cnn_v2,
    "resnet18": resnet18,
    "shufflenet": shufflenet,
    "char_lstm": char_lstm,
}
_TOKENS = ("char_lstm",)
"""Models whose inputs are whole numbers that name something."""


def names() -> tuple[str, ...]:
    """Names that ``--model`` takes."""
    return tuple(_MODELS)


def build(name: str, facts: Facts) -> nn.Module:
    """The model called ``name``, or made by ``file.py:factory``, for data with these facts.

    The last layer of a built-in model starts at zero; the others start as torch makes them.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(9, (("all", 9),), labels=("0", "1"), inputs="(64,) float32")
      >>> sum(parameter.numel() for parameter in build("linear", facts).parameters())
      130
    """
    if is_own(name):
        return own.load(name, facts)
    made = _MODELS[_validate.known(name, _MODELS, "model")]
    shape = own.declared_shape(facts)
    if shape is None or len(facts.labels) < 2:
        raise UsageError(
            "A built-in model needs numeric inputs of one shape and at least two classes: these data have not."
        )
    model = made(shape, len(facts.labels))
    whole = not own.declared_type(facts).is_floating_point
    if whole != (name in _TOKENS):
        raise UsageError(_wrong_type(name, whole))
    return model


def _wrong_type(name: str, whole: bool) -> str:
    if whole:
        return (
            f"The {name} computes with its inputs, and these are whole numbers: give floats, or use --model char_lstm."
        )
    return f"The {name} looks its inputs up in a table, and these are floats: give whole numbers, 0 to 255."
