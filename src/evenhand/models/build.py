"""Models by name, sized from public facts only."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import _user_code, _validate
from evenhand._user_code import described, is_own
from evenhand.errors import UsageError
from evenhand.models.networks import (
    Shape,
    char_lstm,
    cnn,
    linear,
    mlp,
    mnist_cnn_f,
    mnist_cnn_v2,
    resnet18,
    shufflenet,
    tanh_cnn,
)
from evenhand.types import Facts

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
    """Return the names that ``--model`` takes."""
    return tuple(_MODELS)


def build(name: str, facts: Facts) -> nn.Module:
    """Return the model called ``name``, or made by ``file.py:factory``, for data with these facts.

    There is an output per label, and a single one where the target is a real number. The last layer of a built-in model
    starts at zero; the others start as torch makes them.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(9, (("all", 9),), labels=("0", "1"), inputs="(64,) float32")
      >>> sum(parameter.numel() for parameter in build("linear", facts).parameters())
      130
    """
    if is_own(name):
        return load(name, facts)
    factory = _MODELS[_validate.known(name, _MODELS, "model")]
    shape = declared_shape(facts)
    if shape is None or len(facts.labels) == 1:
        raise UsageError(
            "A built-in model needs numeric inputs of one shape and at least two classes (or a real number as target): "
            "these data have not."
        )
    model = factory(shape, len(facts.labels) or 1)
    whole = not declared_type(facts).is_floating_point
    if whole != (name in _TOKENS):
        raise UsageError(_wrong_type(name, whole))
    return model


def _wrong_type(name: str, whole: bool) -> str:
    if whole:
        return (
            f"The {name} computes with its inputs, and these are whole numbers: give floats, or use --model char_lstm."
        )
    return f"The {name} looks its inputs up in a table, and these are floats: give whole numbers, 0 to 255."


LARGEST = 2**27
"""Numbers in one record."""


def parts(model: str) -> tuple[Path, str]:
    """Return file and factory of ``file.py:factory``."""
    return _user_code.parts(model, "--model", "nets.py:small")


def load(model: str, facts: Facts) -> nn.Module:
    """Execute the file and return the model of its factory, called with the public facts if it takes an argument."""
    path, name = parts(model)
    factory = getattr(_user_code.executed(path, "model"), name, None)
    if not callable(factory):
        raise UsageError(f"{path.name} has no function {name!r}: write `def {name}(facts): return torch.nn....`")
    return from_factory(factory, facts, f"{path.name}:{name}")


def from_factory(factory: Callable[..., Any], facts: Facts, what: str) -> nn.Module:
    """Return the module that a function makes, called with the public facts if it takes an argument; ``what`` names it.

    Examples:
      >>> from evenhand.types import Facts
      >>> facts = Facts(9, (("all", 9),), labels=("0", "1"), inputs="(4,) float32")
      >>> from_factory(lambda: nn.Linear(4, 2), facts, "the model")
      Linear(in_features=4, out_features=2, bias=True)
    """
    try:
        module = factory(facts) if _takes_facts(factory) else factory()
    except Exception as error:
        raise UsageError(f"{what} failed with {described(error)}. Nothing was spent.") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{what} returned {type(module).__name__}: it must return a torch.nn.Module.")
    _try(module, facts, what)
    return module


def _try(model: nn.Module, facts: Facts, what: str) -> None:
    """Run the model on two records of zeros: inputs must have the declared shape, and every label needs an output."""
    shape = declared_shape(facts)
    if shape is None:
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(torch.zeros(2, *shape, dtype=declared_type(facts)))
    except Exception as error:
        raise UsageError(f"{what} cannot take inputs of shape {shape}: {described(error)}") from error
    finally:
        model.train(was_training)
    single = len(facts.labels) == 2 and isinstance(outputs, Tensor) and outputs.numel() == 2
    if facts.labels and isinstance(outputs, Tensor) and outputs.shape != (2, len(facts.labels)) and not single:
        raise UsageError(
            f"{what} gives outputs of shape {tuple(outputs.shape[1:])} a record, but there are {len(facts.labels)} "
            "labels: give one output per label."
        )


def declared_shape(facts: Facts) -> tuple[int, ...] | None:
    """Return the shape of one record's input; None if the records have no common shape.

    Examples:
      >>> declared_shape(Facts(9, (("all", 9),), inputs="(1, 8, 8) float32"))
      (1, 8, 8)
    """
    match = re.match(r"\(((?:\d{1,9}, ?)*(?:\d{1,9})?)\) \w+\Z", facts.inputs)
    shape = None if match is None else tuple(int(size) for size in re.findall(r"\d+", match.group(1)))
    if shape is not None and math.prod(shape) > LARGEST:
        raise UsageError(f"A record of shape {shape} has more than {LARGEST} numbers: no built-in model takes that.")
    return shape


def declared_type(facts: Facts) -> torch.dtype:
    """Return the type of the inputs, if they have one shape.

    Examples:
      >>> declared_type(Facts(9, (("all", 9),), inputs="(20,) int64"))
      torch.int64
    """
    kind = getattr(torch, facts.inputs.split()[-1], None)
    if not isinstance(kind, torch.dtype):
        raise UsageError("The type of the inputs is none that torch has: plan.json was damaged or edited.")
    return kind


def _takes_facts(factory: Any) -> bool:
    """Return whether one argument is required, or the first one is called ``facts``."""
    arguments = list(inspect.signature(factory).parameters.values())
    first = arguments[0] if arguments else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and (
        first.name == "facts" or (first.kind in positional and first.default is inspect.Parameter.empty)
    )
