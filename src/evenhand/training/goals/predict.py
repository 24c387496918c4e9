"""Predict new records of a declared file with a run's model and decision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand.errors import DataError, EvenhandError, UsageError, VerificationError
from evenhand.runs.folder import Folder
from evenhand.training.config import of_run

if TYPE_CHECKING:
    from torch import nn

    from evenhand.data import Declaration, Table
    from evenhand.training.evaluate import Predictions


def preprocessing(path: str | Path) -> Declaration:
    """Return how the run's inputs were encoded: declared bounds, categories and labels, from its preprocessing.json."""
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
    path: str | Path,
    table: Table | Any,
    *,
    model: nn.Module | str | None = None,
    features: str | None = None,
    groups: Sequence[str] | None = None,
) -> Predictions:
    """Return the answers of a run for new records, encoded exactly as the training records were.

    The run's decision moves the outputs. Where it depends on the group, the declared column of groups is read.

    Args:
      path: the run folder.
      table: a Table, or a DataFrame with the columns of the training file; a label is not needed.
      model: see ``load``.
      features: the file (``file.py:factory``) of a frozen network whose features the run was trained on.
      groups: the group of each record, in place of the column.
    """
    import torch

    from evenhand.data import Table, from_frame
    from evenhand.data.columns import text
    from evenhand.models.features import extract
    from evenhand.training.evaluate import name_scores, outputs
    from evenhand.training.goals.decision import read
    from evenhand.training.run import load

    known = preprocessing(path)
    rows = table if isinstance(table, Table) else from_frame(table)
    try:
        inputs, decision = known.inputs(rows), read(Path(path))
    except DataError as error:
        raise DataError(
            f"{error} (The run keeps the declarations that it was trained with: mend the records, not the TOML.)"
        ) from None
    if decision is not None and decision.by_group and groups is None and known.groups is not None:
        groups = [text(cell) for cell in rows.cells(known.groups)]
    config = of_run(Path(path), code={"features": features})
    if config.features is not None:
        inputs = extract(config.features_named, inputs)
    trained = load(path, model=model).model.eval()
    device = next(trained.parameters()).device
    with torch.no_grad():
        parts = [outputs(trained, rows.to(device)).double().cpu() for rows in torch.split(inputs, 1024)]
    return name_scores(torch.cat(parts), known, trained, decision, groups)
