"""Claim 1: at epsilon 3, moving the answers of plain DP-SGD by noisy counts raises the rare class of the digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import plain

from evenhand.accounting import calibration

TITLE = "Digits with class 8 cut to 40, epsilon 3: moving the answers by tau 2 raises class 8"
FIGURES, EPSILON, DELTA, BATCH, EPOCHS, TAU, KEPT = "prior_split", 3.0, 1e-5, 128, 15, 2.0, 40


def published(table: Mapping[str, Any]) -> plain.Outcome:
    """Return the figure of the page."""
    promise = _promise(table)
    place = promise["shares"].index(promise["default"])
    raised = np.array(promise["class 8"][place]) - np.array(promise["class 8 as trained"][place])
    return plain.outcome(raised.tolist(), table["held_out"] / table["records"])


def replicated(table: Mapping[str, Any], replicas: int) -> plain.Outcome:
    """Return the figure by the loop of this folder; rate and noise of the counts are those of the page's setting."""
    promise = _promise(table)
    counts_noise = promise["noise"][promise["shares"].index(promise["default"])]
    inputs, labels = plain.digits()
    raised = []
    for seed in range(replicas):
        random = np.random.default_rng([seed, 1])
        train, test = plain.divided(labels, random)
        few = random.permutation(train[labels[train] == 8])[:KEPT]
        train = np.concatenate([train[labels[train] != 8], few])
        steps, chance = math.ceil(EPOCHS * len(train) / BATCH), BATCH / len(train)
        sigma = calibration.calibrate([(chance, 1.0, steps)], EPSILON, DELTA, fixed=[(1.0, counts_noise, 1)])
        counts = np.bincount(labels[train], minlength=10) + counts_noise * random.standard_normal(10)
        floored = np.maximum(counts, 2 * counts_noise)
        weights = plain.train(
            inputs[train],
            labels[train],
            10,
            np.full(len(train), chance),
            plain.clip(0.1, 0.1 * sigma),
            plain.Descent(BATCH, steps, promise["rate"]),
            seed,
        )
        held = test[labels[test] == 8]
        logits = inputs[held] @ weights[:, :-1].T + weights[:, -1]
        moved = logits - TAU * np.log(floored / floored.sum())
        raised.append(100 * float((moved.argmax(1) == 8).mean() - (logits.argmax(1) == 8).mean()))
    return plain.outcome(raised, len(test) / len(train))


def _promise(table: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(promise for promise in table["promises"] if promise["epsilon"] == EPSILON)
    return found
