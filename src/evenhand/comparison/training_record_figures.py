"""Figures for research only: accuracy and gradient norms on the TRAINING records, per group. None of it is private.

Written into the run's ``private`` folder, and only when a non-private method was asked for in the comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand.runs.folder import Folder, write_json
from evenhand.types import Level

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenhand.data.dataset import Data

RECORDS, CHUNK = 5000, 250
"""Training records that are looked at, evenly spaced, and how many at once."""


def file(folder: Folder) -> Path:
    """Return the path of a run's values."""
    return folder.private / "training_groups.json"


def read(folder: Folder) -> dict[str, dict[str, float]]:
    """Return group -> {"accuracy", "norm", "clipped"}; empty if it was never measured."""
    number = (int, float, type(None))
    figures: dict[str, dict[str, float]] = {}
    if file(folder).exists():
        figures = untrusted.read_json(file(folder), {str: {str: number}})
    return figures


def write(folder: Folder, model: nn.Module, data: Data, level: Level | None, batch: float) -> None:
    """Measure the model by group and write the values into the private folder; durable on return."""
    write_json(file(folder), by_group(model, data, level, batch))


def by_group(model: nn.Module, data: Data, level: Level | None, batch: float) -> dict[str, dict[str, float]]:
    """Return accuracy, mean gradient norm and, with a clip bound, what clipping and noise do to each group.

    The mean gradient of group k in a batch is off by at most ``bias + noise`` (Xu et al. 2021, equation 1): ``bias`` is
    the mean of ``max(0, norm - C)`` over the group's records, ``noise`` the standard deviation of the noise in each
    coordinate over the group's expected records in a batch; ``clipped`` is the share of norms above C.

    Args:
      model: the trained model.
      data: the training records, of which at most ``RECORDS`` are looked at.
      level: noise multiplier and clip bound; None without clipping.
      batch: expected records of a step.

    Examples:
      >>> import torch, evenhand as eh
      >>> figures = by_group(torch.nn.Linear(64, 10), eh.data.digits()[0], Level(noise=1.0, bound=1.0), 128)
      >>> sorted(figures["class 8"])
      ['accuracy', 'bias', 'clipped', 'noise', 'norm']
    """
    import torch

    from evenhand.gradients.engine import Engine
    from evenhand.training.evaluate import kind_of, move_to_device, outputs, shares_right
    from evenhand.training.fit import default_loss

    device = next(model.parameters()).device
    rows = torch.linspace(0, len(data) - 1, min(RECORDS, len(data))).round().long()
    engine, norms, right = Engine(model.eval(), default_loss(data, model)), [], []
    for some in torch.split(rows, CHUNK):
        inputs, targets = (move_to_device(part, device) for part in data.fetch(some))
        norms.append(engine.run(inputs, targets).norm.cpu())
        with torch.no_grad():
            scores = outputs(model, inputs)
        right.append(shares_right(scores, targets, kind_of(data.facts, targets), model).cpu())
    norm, hit, group = torch.cat(norms), torch.cat(right), data.group[rows]
    return {
        name: _values(norm[group == index], hit[group == index], level, batch * (data.group == index).double().mean())
        for index, name in enumerate(data.facts.groups)
        if (group == index).any()
    }


def _values(norm: Tensor, hit: Tensor, level: Level | None, expected: Tensor) -> dict[str, Any]:
    finite = norm[norm.isfinite()]
    known = hit[hit.isfinite()]
    figures = {
        "accuracy": known.mean().item() if len(known) else None,
        "norm": finite.mean().item() if len(finite) else 0.0,
    }
    if level is None:
        return figures
    return {
        **figures,
        "clipped": (norm > level.bound).double().mean().item(),
        "bias": (finite - level.bound).clamp(min=0).mean().item() if len(finite) else 0.0,
        "noise": level.noise * level.bound / expected.item(),
    }
