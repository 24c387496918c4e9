"""``load``: a finished run, with its model ready to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evenhand.config import PYTHON, of_run
from evenhand.errors import UsageError
from evenhand.results import Run
from evenhand.runs import Folder

if TYPE_CHECKING:
    from torch import nn


def load(path: str | Path, *, model: nn.Module | None = None) -> Run:
    """Read a run folder. Weights come from safetensors only: loading never executes code.

    Args:
      path: the run folder.
      model: the architecture, when the run was started from Python; built-in ones are found in the folder.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> made = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, out=tempfile.mkdtemp())
      >>> again = eh.load(made.path, model=torch.nn.Linear(64, 10))
      >>> bool((again.model.weight == made.model.weight).all())
      True
    """
    from safetensors.torch import load_model

    folder = Folder.existing(path)
    if not folder.model_file.exists():
        raise UsageError(
            f"{path} has no model yet: the run was not finished. Continue it with `evenhand resume {path}`."
        )
    if model is None:
        config = of_run(folder.path)
        if config.model == PYTHON:
            return Run(folder)
        model = config.build_model(folder.plan().facts)
    try:
        load_model(model, str(folder.model_file))
    except RuntimeError:
        raise UsageError(
            "The model passed does not have the parameters of the saved one: pass the same architecture."
        ) from None
    return Run(folder, model)
