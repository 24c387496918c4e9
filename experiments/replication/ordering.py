"""Claim 2: at a slow rate, INO-SGD (Scale, tail 1) raises the strictest owner of the digits over IDP-SGD (Scale)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import plain
from numpy.typing import NDArray

from evenhand.accounting import calibration

TITLE = "Digits, ten owners with budgets 0.5 to 5, rate 1: ordering (Scale, tail 1) raises the strictest owner"
FIGURES, DELTA, BATCH, EPOCHS, RATE, BOUND = "ino_map_digits", 1e-4, 128, 15, 1.0, 0.1
PROMISE = "budgets 0.5 to 5"


def published(table: Mapping[str, Any]) -> plain.Outcome:
    """Return the figure of the page."""
    cells = {(cell["arm"], cell["promise"], cell["rate"]): cell for cell in table["cells"]}
    sizes = np.atleast_2d(np.array(table["sizes"], float))
    shares = [
        np.array(cells[arm, PROMISE, RATE]["right"], float) / sizes for arm in ("INO (Scale), tail 1", "IDP (Scale)")
    ]
    ratio = float(sizes.sum(1).mean()) / table["records"]
    return plain.outcome((100 * (shares[0] - shares[1])[:, 0]).tolist(), ratio)


def ordered(bounds: plain.Floats, std: float, tail: float) -> plain.Rule:
    """Return the rule that clips record i to ``bounds[i]``; the ``tail`` of clip mass with low losses counts less.

    Mass is counted from the lowest loss; at mass y < tail importance is y / tail (the Beta tail with a = b = 1), and a
    record's weight is the mean importance over its own stretch of mass. Without a tail it is IDP-SGD (Scale).
    """

    def rule(
        norms: plain.Floats, losses: plain.Floats, drawn: NDArray[np.int64], random: np.random.Generator
    ) -> tuple[plain.Floats, float]:
        mass = bounds[drawn]
        weights = np.minimum(1.0, mass / norms)
        if tail:
            order = np.argsort(losses, kind="stable")
            ends = np.cumsum(mass[order])
            weights[order] *= (_area(ends, tail) - _area(ends - mass[order], tail)) / mass[order]
        return weights, std

    return rule


def _area(mass: plain.Floats, tail: float) -> plain.Floats:
    """Return the integral of min(1, y / tail) from 0 to ``mass``."""
    area: plain.Floats = np.minimum(mass, tail) ** 2 / (2 * tail) + np.maximum(mass - tail, 0.0)
    return area


def replicated(table: Mapping[str, Any], replicas: int) -> plain.Outcome:
    """Return the figure by the loop of this folder: budgets, bounds and noise of the Scale form are computed here."""
    inputs, labels = plain.digits()
    budgets = 0.5 * 10.0 ** (np.arange(10) / 9)
    least = np.bincount(labels).min()
    apart = []
    for seed in range(replicas):
        random = np.random.default_rng([seed, 2])
        owner = random.permutation(10)[labels]
        rows = np.concatenate([random.permutation(np.flatnonzero(owner == one))[:least] for one in range(10)])
        places = plain.divided(owner[rows], random)
        train, test = rows[places[0]], rows[places[1]]
        steps, chance = math.ceil(EPOCHS * len(train) / BATCH), BATCH / len(train)
        sigmas = _sigmas(chance, steps, tuple(budgets))
        shares = np.bincount(owner[train], minlength=10) / len(train)
        sigma = 1 / float((shares / sigmas).sum())
        bounds = (BOUND * sigma / sigmas)[owner[train]]
        recalls = []
        for tail in (chance * float(bounds.sum()), 0.0):
            rule = ordered(bounds, sigma * BOUND, tail)
            how = plain.Descent(BATCH, steps, RATE)
            chances = np.full(len(train), chance)
            weights = plain.train(inputs[train], labels[train], 10, chances, rule, how, seed)
            held = test[owner[test] == 0]
            right = (inputs[held] @ weights[:, :-1].T + weights[:, -1]).argmax(1) == labels[held]
            recalls.append(float(right.mean()))
        apart.append(100 * (recalls[0] - recalls[1]))
    return plain.outcome(apart, len(test) / len(train))


@cache
def _sigmas(chance: float, steps: int, budgets: tuple[float, ...]) -> plain.Floats:
    return np.array([calibration.calibrate([(chance, 1.0, steps)], epsilon, DELTA) for epsilon in budgets])
