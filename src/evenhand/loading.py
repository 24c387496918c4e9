"""``load``: a finished run, with its model ready to use; ``predict``: its answers for new records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand.config import PYTHON, of_run
from evenhand.density import METHODS
from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.results import Run
from evenhand.runs.folder import Folder

if TYPE_CHECKING:
    from torch import nn

    from evenhand.data import Declaration, Table


def load(path: str | Path, *, model: nn.Module | str | None = None) -> Run:
    """Read a run folder. Weights come from safetensors only: loading them never executes code.

    Args:
      path: the run folder.
      model: the architecture (a module, or ``file.py:factory``), unless it is a built-in one, which is found by its
        name in the folder. No file of code is executed because a folder names it, since folders are shared.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> made = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, out=tempfile.mkdtemp())
      >>> again = eh.load(made.path, model=torch.nn.Linear(64, 10))
      >>> bool((again.model.weight == made.model.weight).all())
      True
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Folder.existing(path)
    if not folder.model_file.exists():
        raise UsageError(
            f"{path} has no model yet: the run was not finished. Continue it with `evenhand resume {path}`."
        )
    if not folder.model_file.is_file():  # reading a pipe would never end
        raise UsageError(f"{folder.model_file} is not a file: it was not loaded.")
    if model is None and folder.plan().method in METHODS:
        model = _density(folder)
    if model is None or isinstance(model, str):
        config = of_run(folder.path, code={"model": model})
        if config.model == PYTHON:
            return Run(folder)
        model = config.build_model(folder.plan().facts)
    try:
        with untrusted.opened(folder.model_file, largest=None):
            load_model(model, str(folder.model_file))
    except (SafetensorError, VerificationError):
        raise UsageError(f"{folder.model_file} is damaged: it was not loaded.") from None
    except RuntimeError:
        raise UsageError(
            "The model passed does not have the parameters of the saved one: pass the same architecture."
        ) from None
    return Run(folder, model)


def _density(folder: Folder) -> nn.Module:
    """A density is made of released values: its own tensors say how."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from evenhand.density.rebuilding import rebuilt

    try:
        with untrusted.opened(folder.model_file, largest=None):
            return rebuilt(load_file(str(folder.model_file)))
    except (SafetensorError, VerificationError):
        raise UsageError(f"{folder.model_file} is damaged: it was not loaded.") from None


@dataclass(frozen=True)
class Predictions:
    """One row per new record, in order: the most likely label, and the probability of every label."""

    labels: tuple[str, ...]
    predicted: list[str]
    probabilities: list[list[float]]


def preprocessing(path: str | Path) -> Declaration:
    """How the run's inputs were encoded: declared bounds, categories and labels, from its preprocessing.json."""
    from evenhand.data import Declaration

    file = Folder.existing(path).path / "preprocessing.json"
    if not file.exists():
        raise UsageError(
            f"{path} has no preprocessing.json: it was not trained on a declared file. Use eh.load(run).model instead."
        )
    try:
        return Declaration.from_json(untrusted.read_json(file))
    except EvenhandError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise VerificationError("preprocessing.json cannot be read: it was damaged or edited.") from None


def predict(
    path: str | Path, table: Table | Any, *, model: nn.Module | str | None = None, features: str | None = None
) -> Predictions:
    """The run's answers for new records, encoded exactly as the training records were.

    Args:
      path: the run folder.
      table: a Table, or a DataFrame with the columns of the training file; a label is not needed.
      model: see ``load``.
      features: the file (``file.py:factory``) of a frozen network whose features the run was trained on.
    """
    import torch

    from evenhand.data import Table, from_frame
    from evenhand.models.features import extract

    known = preprocessing(path)
    inputs = known.inputs(table if isinstance(table, Table) else from_frame(table))
    found = of_run(Path(path), code={"features": features})
    if found.features is not None:
        inputs = extract(found.features_named, inputs)
    trained = load(path, model=model).model.eval()
    device = next(trained.parameters()).device
    with torch.no_grad():
        parts = [trained(rows.to(device)).double().softmax(-1).cpu() for rows in torch.split(inputs, 1024)]
    scores = torch.cat(parts)
    if scores.ndim != 2 or scores.shape[1] != len(known.labels):
        raise UsageError("The model does not give one output per label: pass the architecture that was trained.")
    return Predictions(
        labels=tuple(known.labels),
        predicted=[known.labels[place] for place in scores.argmax(1).tolist()],
        probabilities=scores.tolist(),
    )
