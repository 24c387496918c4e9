"""How a model does on held-out records, overall and per group. Evaluation data are not protected by the statement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenhand.data.wrapping import Data
from evenhand.errors import DataError
from evenhand.reporting.frames import GroupFrame, accuracy_by_group

CHUNK = 1024


def predict(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Predicted and true class of every row, in order; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    was_training, parts = model.training, []
    model.eval()
    try:
        with torch.no_grad():
            for rows in torch.split(torch.arange(len(data)), CHUNK):
                inputs, targets = data.fetch(rows)
                parts.append((outputs(model, moved(inputs, device)).argmax(-1).cpu(), targets.cpu()))
    finally:
        model.train(was_training)
    predicted, true = (torch.cat(column) for column in zip(*parts, strict=True))
    if true.is_floating_point():
        raise DataError(
            "Accuracy needs classes as targets; these are real numbers. Train without test= for regression."
        )
    return predicted, true


def outputs(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def moved(value: Any, device: torch.device) -> Any:
    """The same structure on another device."""
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(moved(part, device) for part in value)
    return value.to(device)


def evaluate(model: nn.Module, data: Data) -> GroupFrame:
    """Accuracy overall and per group with 95 % intervals."""
    predicted, true = predict(model, data)
    return accuracy_by_group(true.tolist(), predicted.tolist(), data.group_names())


def row(model: nn.Module, data: Data, step: int, epoch: float) -> dict[str, Any]:
    """One line of metrics.jsonl: the values of ``evaluate`` by counting alone, cheap enough for every epoch."""
    predicted, true = predict(model, data)
    right = (predicted == true).to(torch.float64)
    width = len(data.facts.groups)
    counts = torch.bincount(data.group, minlength=width)
    hits = torch.bincount(data.group, weights=right, minlength=width)
    present = [index for index in range(width) if counts[index]]
    names = data.facts.groups
    return {
        "step": step,
        "epoch": round(epoch, 4),
        "accuracy": right.mean().item(),
        "records": len(data),
        "groups": {names[index]: (hits[index] / counts[index]).item() for index in present},
        "group_records": {names[index]: int(counts[index]) for index in present},
    }
