"""A user's own model: ``file.py:factory``. The file is executed, so it comes from the user, never from a run folder."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.types import Facts


def is_own(model: str) -> bool:
    """Whether ``--model`` names a file.

    Examples:
      >>> is_own("nets.py:small"), is_own("mlp")
      (True, False)
    """
    return ".py" in model or ":" in model


def parts(model: str) -> tuple[Path, str]:
    """File and factory of ``file.py:factory``."""
    file, colon, factory = model.rpartition(":")
    if not colon or not file.endswith(".py") or not factory.isidentifier():
        raise UsageError("--model takes a built-in name or file.py:factory, for example --model nets.py:small.")
    return Path(file), factory


def load(model: str, facts: Facts) -> nn.Module:
    """Execute the file and call its factory with the public facts, or with nothing if it takes nothing."""
    path, name = parts(model)
    factory = getattr(_module(path), name, None)
    if not callable(factory):
        raise UsageError(f"{path.name} has no function {name!r}: write `def {name}(facts): return torch.nn....`")
    try:
        made = factory(facts) if _takes_facts(factory) else factory()
    except Exception as error:
        raise UsageError(f"{path.name}:{name} failed with {_described(error)}. Nothing was spent.") from error
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
            outputs = model(torch.zeros(2, *shape, dtype=getattr(torch, facts.inputs.split()[-1])))
    except Exception as error:
        raise UsageError(f"{what} cannot take inputs of shape {shape}: {_described(error)}") from error
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


def _module(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"There is no model file {path}.")
    spec = importlib.util.spec_from_file_location(f"evenhand_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path.name} cannot be imported: {_described(error)}. Nothing was spent.") from error
    return module


def _takes_facts(factory: Any) -> bool:
    """Whether one argument is required, or the first one is called ``facts``."""
    arguments = list(inspect.signature(factory).parameters.values())
    first = arguments[0] if arguments else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and (
        first.name == "facts" or (first.kind in positional and first.default is inspect.Parameter.empty)
    )


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
