"""Claim 3: at the paper's learning rate, DPSGD-F without memory loses less accuracy on Adult than DP-SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import plain
import torch
from numpy.typing import NDArray

from evenhand.accounting import calibration
from evenhand.data import sources

TITLE = "Adult, epsilon 3, the paper's rate: DPSGD-F without memory is more accurate than DP-SGD"
FIGURES, EPSILON, DELTA, BATCH, EPOCHS, RATE, BOUND = "sexes_adult", 3.0, 1e-6, 256, 20, 0.0188, 1.0
SHARE, MOST = 0.01, 5.0
"""What the noisy counts take of every step's privacy, and how many base bounds a group's bound is at most."""


def published(table: Mapping[str, Any]) -> plain.Outcome:
    """Return the figure of the page."""
    cells = {(cell["arm"], cell["promise"], cell["rate"]): cell for cell in table["cells"]}
    sizes = np.atleast_2d(np.array(table["sizes"], float))
    right = [
        np.array(cells[arm, "epsilon 3", RATE]["right"], float).sum(1) / sizes.sum(1)
        for arm in ("DPSGD-F, without memory", "DP-SGD")
    ]
    return plain.outcome((100 * (right[0] - right[1])).tolist(), float(sizes.sum(1).mean()) / table["records"])


def bounded_by_group(group: NDArray[np.int64], sigma: float) -> plain.Rule:
    """Return the rule of Xu et al. 2021, its noisy ratios clamped as docs/methods/dpsgd_f.md says.

    ``sigma`` is the multiplier of counts and gradient together; the counts take a share of its inverse square.
    """
    counts_std, noise = sigma / math.sqrt(SHARE), sigma / math.sqrt(1 - SHARE)
    groups = int(group.max()) + 1

    def rule(
        norms: plain.Floats, losses: plain.Floats, drawn: NDArray[np.int64], random: np.random.Generator
    ) -> tuple[plain.Floats, float]:
        mine = group[drawn]
        above = np.bincount(mine[norms > BOUND], minlength=groups) + counts_std * random.standard_normal(groups)
        below = np.bincount(mine[norms <= BOUND], minlength=groups) + counts_std * random.standard_normal(groups)
        sizes = np.maximum(above + below, 1.0)
        above = np.clip(above, 0.0, sizes)
        usual = max(float(above.sum()), 1.0) / BATCH
        bounds = np.clip(BOUND * (1 + (above / sizes) / usual), BOUND, MOST * BOUND)
        return np.minimum(1.0, bounds[mine] / norms), noise * float(bounds.max())

    return rule


def replicated(table: Mapping[str, Any], replicas: int) -> plain.Outcome:
    """Return the figure by the loop of this folder."""
    parts = [part for part in sources.load("adult") if part is not None]
    both = [part.fetch(torch.arange(len(part))) for part in parts]
    inputs = torch.cat([rows for rows, _ in both]).double().numpy()
    labels = torch.cat([labels for _, labels in both]).numpy().astype(np.int64)
    group = torch.cat([part.group for part in parts]).numpy().astype(np.int64)
    apart = []
    for seed in range(replicas):
        train, test = plain.divided(group, np.random.default_rng([seed, 3]))
        steps, chance = math.ceil(EPOCHS * len(train) / BATCH), BATCH / len(train)
        sigma = calibration.calibrate([(chance, 1.0, steps)], EPSILON, DELTA)
        how = plain.Descent(BATCH, steps, RATE, momentum=0.0, falling=False, decay=0.0)
        accuracies = []
        for rule in (bounded_by_group(group[train], sigma), plain.clip(BOUND, sigma * BOUND)):
            chances = np.full(len(train), chance)
            weights = plain.train(inputs[train], labels[train], 2, chances, rule, how, seed)
            right = (inputs[test] @ weights[:, :-1].T + weights[:, -1]).argmax(1) == labels[test]
            accuracies.append(float(right.mean()))
        apart.append(100 * (accuracies[0] - accuracies[1]))
    return plain.outcome(apart, len(test) / len(train))
