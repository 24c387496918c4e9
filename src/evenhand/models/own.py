"""A user's own model: ``file.py:factory``. The file is executed, so it comes from the user, never from a run folder."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand import usercode
from evenhand.errors import UsageError
from evenhand.types import Facts
from evenhand.usercode import described


def parts(model: str) -> tuple[Path, str]:
    """File and factory of ``file.py:factory``."""
    return usercode.parts(model, "--model", "nets.py:small")


def load(model: str, facts: Facts) -> nn.Module:
    """Execute the file and call its factory with the public facts, or with nothing if it takes nothing."""
    path, name = parts(model)
    factory = getattr(usercode.executed(path, "model"), name, None)
    if not callable(factory):
        raise UsageError(f"{path.name} has no function {name!r}: write `def {name}(facts): return torch.nn....`")
    try:
        made = factory(facts) if _takes_facts(factory) else factory()
    except Exception as error:
        raise UsageError(f"{path.name}:{name} failed with {described(error)}. Nothing was spent.") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"{path.name}:{name} returned {type(made).__name__}: it must return a torch.nn.Module.")
    _try(made, facts, f"{path.name}:{name}")
    return made


def _try(model: nn.Module, facts: Facts, what: str) -> None:
    """Two records of zeros of the declared shape: inputs must fit, and every label must have its output."""
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
    if facts.labels and isinstance(outputs, Tensor) and outputs.shape != (2, len(facts.labels)):
        raise UsageError(
            f"{what} gives outputs of shape {tuple(outputs.shape[1:])} a record, but there are {len(facts.labels)} "
            "labels: give one output per label."
        )


def declared_shape(facts: Facts) -> tuple[int, ...] | None:
    """The shape of one record's input, if all have the same.

    Examples:
      >>> declared_shape(Facts(9, (("all", 9),), inputs="(1, 8, 8) float32"))
      (1, 8, 8)
    """
    found = re.match(r"\(([\d, ]*)\) \w+$", facts.inputs)
    return None if found is None else tuple(int(size) for size in re.findall(r"\d+", found.group(1)))


def declared_type(facts: Facts) -> torch.dtype:
    """The type of the inputs, if they have one shape.

    Examples:
      >>> declared_type(Facts(9, (("all", 9),), inputs="(20,) int64"))
      torch.int64
    """
    kind: torch.dtype = getattr(torch, facts.inputs.split()[-1])
    return kind


def _takes_facts(factory: Any) -> bool:
    """Whether one argument is required, or the first one is called ``facts``."""
    arguments = list(inspect.signature(factory).parameters.values())
    first = arguments[0] if arguments else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and (
        first.name == "facts" or (first.kind in positional and first.default is inspect.Parameter.empty)
    )
