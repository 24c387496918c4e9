"""Measure a model on held-out records, overall and per group. The statement does not protect these records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.data.dataset import Data
from evenhand.errors import DataError, UsageError
from evenhand.reporting.group_metrics import GroupFrame, Measures, accuracy_by_group, measure

CHUNK = 1024
OWNERS = 1000
"""Up to so many owner classes are evaluated one by one; of more hardly any has enough held-out records to tell."""


def predict(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return predicted and true class of every row, in order. The model's mode is put back afterwards."""
    scores, true = compute_scores(model, data)
    return scores.argmax(-1), true


def compute_scores(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return the model's outputs and the true class of every row, in order. Its mode is put back afterwards."""
    device = next(model.parameters()).device
    was_training, parts = model.training, []
    model.eval()
    try:
        with torch.no_grad():
            for rows in torch.split(torch.arange(len(data)), CHUNK):
                inputs, targets = data.fetch(rows)
                parts.append((outputs(model, move_to_device(inputs, device)).cpu(), targets.cpu()))
    finally:
        model.train(was_training)
    scores, true = (torch.cat(column) for column in zip(*parts, strict=True))
    if true.is_floating_point():
        raise DataError(
            "Accuracy needs classes as targets; these are real numbers. Train without test= for regression."
        )
    return scores, true


def outputs(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model for a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def move_to_device(value: Any, device: torch.device) -> Any:
    """Return tensors on another device, in the same structure of dicts and tuples."""
    if isinstance(value, dict):
        return {key: move_to_device(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(move_to_device(part, device) for part in value)
    return value.to(device)


def evaluate(model: nn.Module, data: Data) -> GroupFrame:
    """Return accuracy overall and per group with 95 % intervals."""
    predicted, true = predict(model, data)
    return accuracy_by_group(true.tolist(), predicted.tolist(), data.group_names())


def measures(model: nn.Module, data: Data) -> Measures:
    """Return every metric on held-out data, overall, per group and per owner. Outputs are taken as logits.

    Examples:
      >>> import torch, evenhand as eh
      >>> metrics = measures(torch.nn.Linear(64, 10), eh.data.digits()[1])
      >>> sorted(metrics.by_group["accuracy"])[8], 0 <= metrics.across["accuracy_difference"] <= 1
      ('class 8', True)
    """
    scores, true = compute_scores(model, data)
    names = data.facts.owner_names
    owners = [names[index] for index in data.owner.tolist()] if 1 < len(names) <= OWNERS else None
    return measure(
        true.numpy(),
        scores.argmax(-1).numpy(),
        groups=data.group_names(),
        owners=owners,
        probabilities=scores.double().softmax(-1).numpy(),
    )


def row(model: nn.Module, data: Data, step: int, epoch: float) -> dict[str, Any]:
    """Return one line of metrics.jsonl: most values of ``measures``, cheap enough for every epoch.

    An undefined value is None, since plain JSON has no NaN.
    """
    scores, true = compute_scores(model, data)
    likely = scores.double().log_softmax(-1)
    predicted = scores.argmax(-1)
    right = (predicted == true).to(torch.float64)
    losses = torch.nn.functional.nll_loss(likely, true, reduction="none")
    facts = data.facts
    shares, records = _means(data.group, right, facts.groups)
    line = {
        "step": step,
        "epoch": round(epoch, 4),
        "accuracy": right.mean().item(),
        "balanced_accuracy": _balanced(true, right),
        "mcc": _mcc(true, predicted),
        "roc_auc": _roc_auc(true, likely),
        "log_loss": losses.mean().item(),
        "records": len(data),
        "groups": shares,
        "group_records": records,
        "group_log_loss": {name: _finite(value) for name, value in _means(data.group, losses, facts.groups)[0].items()},
    }
    if 1 < len(facts.owners) <= OWNERS:
        line["owners"], line["owner_records"] = _means(data.owner, right, facts.owner_names)
    return {key: _finite(value) if isinstance(value, float) else value for key, value in line.items()}


def _means(code: Tensor, values: Tensor, names: tuple[str, ...]) -> tuple[dict[str, float], dict[str, int]]:
    """Return mean and number of records by name, for the names that occur."""
    counts = torch.bincount(code, minlength=len(names)).tolist()
    sums = torch.bincount(code, weights=values, minlength=len(names)).tolist()
    present = [index for index in range(len(names)) if counts[index]]
    return (
        {names[index]: sums[index] / counts[index] for index in present},
        {names[index]: counts[index] for index in present},
    )


def _balanced(true: Tensor, right: Tensor) -> float:
    """Return the mean recall over the classes that occur."""
    counts = torch.bincount(true)
    recalls = torch.bincount(true, weights=right)[counts > 0] / counts[counts > 0]
    return recalls.mean().item()


def _mcc(true: Tensor, predicted: Tensor) -> float:
    """Return Matthews correlation coefficient; zero if either column is constant, as in scikit-learn."""
    width = int(max(true.max(), predicted.max())) + 1
    table = torch.bincount(true * width + predicted, minlength=width * width).view(width, width).double()
    rows, columns, total = table.sum(1), table.sum(0), table.sum()
    covariance = table.trace() * total - rows @ columns
    scale = (total**2 - rows @ rows) * (total**2 - columns @ columns)
    return 0.0 if scale <= 0 else (covariance / scale.sqrt()).item()


def _roc_auc(true: Tensor, scores: Tensor) -> float:
    """Return ``group_metrics.roc_auc`` computed by ranks (Mann-Whitney, ties halved): a hundred times faster."""
    present = torch.unique(true)
    if len(present) < 2 or not torch.isfinite(scores).all():
        return math.nan
    wanted = torch.tensor([1]) if scores.shape[1] == 2 else present
    areas: list[float] = []
    for label in wanted.tolist():
        _, place, counts = torch.unique(scores[:, label], return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts.double() - 1) / 2)[place]
        mine = true == label
        hits, misses = int(mine.sum()), int((~mine).sum())
        areas.append((ranks[mine].sum().item() - hits * (hits + 1) / 2) / (hits * misses))
    return sum(areas) / len(areas)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Predictions:
    """One row per new record, in order: the most likely label, and the probability of every label."""

    labels: tuple[str, ...]
    predicted: list[str]
    probabilities: list[list[float]]


def predict_arrays(model: nn.Module, inputs: Any, labels: Sequence[str]) -> Predictions:
    """Return the predictions of a model for inputs as it takes them; outputs are called 0, 1, ... without labels."""
    rows = inputs if isinstance(inputs, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(_numeric(inputs)))
    first = next(model.parameters())
    rows = rows.to(first.dtype) if rows.is_floating_point() else rows
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [model(part.to(first.device)).double().softmax(-1).cpu() for part in torch.split(rows, 1024)]
    except RuntimeError as error:
        raise UsageError(
            f"The model cannot take inputs of shape {tuple(rows.shape[1:])} a record ({type(error).__name__}): pass "
            "the columns that it was trained on, in their order."
        ) from None
    finally:
        model.train(was_training)
    scores = torch.cat(parts)
    names = tuple(labels) or tuple(str(place) for place in range(scores.shape[-1]))
    if scores.ndim != 2 or scores.shape[1] != len(names):
        raise UsageError("The model does not give one output per label: use run.model and your own threshold.")
    return Predictions(names, [names[place] for place in scores.argmax(1).tolist()], scores.tolist())


def _numeric(inputs: Any) -> Any:
    """Return inputs as an array of numbers; whole numbers become floats, which linear layers take."""
    array = np.asarray(inputs)
    if array.dtype.kind not in "fiub" or array.ndim < 2:
        raise UsageError("Pass one row of numbers per record: a rectangular array, or the columns that were declared.")
    return array.astype(np.float32) if array.dtype.kind in "fb" else array
