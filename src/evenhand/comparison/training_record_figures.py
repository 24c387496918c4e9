"""Figures for research only, of the TRAINING records: per group, and per owner. None of it is private.

Written into the run's ``private`` folder, and only when a non-private method was asked for in the comparison.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand.runs.folder import Folder, write_json
from evenhand.types import Level

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenhand.accounting.plan import Plan
    from evenhand.data.dataset import Data

RECORDS, CHUNK = 5000, 250
"""Training records that are looked at, evenly spaced, and how many at once."""
OWNERS = 12
"""Up to so many owner classes are compared with each other."""


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


def write(folder: Folder, model: nn.Module, data: Data, plan: Plan) -> None:
    """Measure the model by group, and by owner if there are a few, into the private folder; durable on return."""
    widest = max(plan.levels, key=lambda level: level.bound)
    level = Level(widest.noise, widest.bound) if plan.certified else None
    write_json(file(folder), by_group(model, data, level, plan.expected_batch))
    if plan.certified and 1 < len(plan.facts.owners) <= OWNERS:
        write_json(folder.private / "training_owners.json", by_owner(model, data, plan))


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
    from evenhand.model_io import on_device
    from evenhand.training.evaluate import kind_of, outputs, shares_right
    from evenhand.training.fit import default_loss

    device = next(model.parameters()).device
    rows = torch.linspace(0, len(data) - 1, min(RECORDS, len(data))).round().long()
    engine, norms, right = Engine(model.eval(), default_loss(data, model)), [], []
    for some in torch.split(rows, CHUNK):
        inputs, targets = (on_device(part, device) for part in data.fetch(some))
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


def by_owner(model: nn.Module, data: Data, plan: Plan) -> dict[str, dict[str, float]]:
    """Return what 001 explains the cost of strict budgets by: who pulls how much, and in which directions.

    "pull" is N_k q_k C_k of each owner: how much clipped gradient a step expects of it at most. "length" is the length
    of an owner's expected sum of clipped gradients in a step, "angle" the angle in degrees between those of two owners
    ("a | b"): a loss of owner a falls for sure only while the sum of the others does not outweigh it along its
    direction.

    Examples:
      >>> import torch, evenhand as eh
      >>> pixels, labels = eh.data.digits()[0].fetch(torch.arange(60))
      >>> data = eh.data.wrap(pixels, labels, labels=range(10), owners=["a", "b"] * 30)
      >>> plan = eh.plan("idp_sample", eh.Budgets({"a": 1, "b": 4}, 1e-3), data=data.facts, epochs=1, batch_size=10)
      >>> figures = by_owner(torch.nn.Linear(64, 10), data, plan)
      >>> list(figures["angle"]), round(sum(figures["pull"].values()), 3)
      (['a | b'], 10.0)
    """
    import torch

    from evenhand.gradients.engine import Engine
    from evenhand.model_io import on_device
    from evenhand.training.fit import default_loss

    device, bound = next(model.parameters()).device, max(level.bound for level in plan.levels)
    rows = torch.linspace(0, len(data) - 1, min(RECORDS, len(data))).round().long()
    engine = Engine(model.eval(), default_loss(data, model))
    bounds, rates = (torch.tensor(column, dtype=torch.float64) for column in (plan.scales, plan.rates))
    sums: dict[int, Tensor] = {}
    for some in torch.split(rows, CHUNK):
        inputs, targets = (on_device(part, device) for part in data.fetch(some))
        result, owner = engine.run(inputs, targets), data.owner[some].long()
        norm = result.norm.double().cpu()
        weights = (bound * bounds[owner] / norm).clamp(max=1.0).where(norm.isfinite(), 0.0) * rates[owner]
        for index in range(len(plan.scales)):
            parts = result.weighted_sum((weights * (owner == index)).to(device))
            total = torch.cat([part.detach().double().cpu().reshape(-1) for part in parts.values()])
            sums[index] = sums.get(index, 0.0) + total * len(data) / len(rows)
    names, lengths = plan.facts.owner_names, {index: float(total.norm()) for index, total in sums.items()}
    owners = zip(plan.facts.owners, plan.rates, plan.scales, strict=True)
    return {
        "pull": {name: count * rate * scale * bound for (name, count), rate, scale in owners},
        "length": {names[index]: length for index, length in lengths.items()},
        "angle": {
            f"{names[a]} | {names[b]}": math.degrees(
                math.acos(max(-1.0, min(1.0, float(sums[a] @ sums[b]) / (lengths[a] * lengths[b]))))
            )
            for a, b in combinations(sums, 2)
            if lengths[a] > 0 and lengths[b] > 0
        },
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
