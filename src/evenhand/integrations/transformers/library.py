"""The library transformers, imported when it is first needed, and what a model of it is."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from evenhand.errors import UsageError

MISSING = "transformers is not installed: pip install 'evenhand[transformers]'. Nothing was spent."


def library() -> Any:
    """Return the module ``transformers``; raise with the extra to install if it is not there."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UsageError(MISSING) from None


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside an adapter of PEFT, else the model itself.

    Examples:
      >>> layer = nn.Linear(1, 1)
      >>> base_of(layer) is layer
      True
    """
    inner: Any = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def setting(model: nn.Module, name: str, default: Any = None) -> Any:
    """Return a setting of the model's config, ``default`` where it has none.

    Examples:
      >>> setting(nn.Linear(1, 1), "num_labels", 2)
      2
    """
    return getattr(getattr(base_of(model), "config", None), name, default)
