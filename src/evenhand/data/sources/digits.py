"""The embedded default: scikit-learn's 8x8 handwritten digits, with class 8 of the training half made a minority."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenhand.data.dataset import Data, wrap
from evenhand.data.fingerprint import of_source

MINORITY, KEPT = 8, 40
LENGTH = 3.0


def digits() -> tuple[Data, Data]:
    """Return training and held-out data; groups are the classes, so the report shows which class is served worse.

    A fixed 75/25 split, then class 8 of the TRAINING part thinned to 40 records. Every image is centred and scaled to
    length 3 by itself: no record's value depends on another, so the preprocessing costs no privacy.

    Examples:
      >>> train, test = digits()
      >>> len(train), len(test), train.facts.groups[8]
      (1265, 450, 'class 8')
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    centred = bunch.data - bunch.data.mean(axis=1, keepdims=True)
    pixels = (LENGTH * centred / np.linalg.norm(centred, axis=1, keepdims=True)).astype(np.float32)
    label = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(label.size)
    held_out = order[: label.size // 4 + 1]
    training = order[label.size // 4 + 1 :]
    surplus = training[label[training] == MINORITY][KEPT:]
    training = np.setdiff1d(training, surplus)
    names = [f"class {digit}" for digit in range(10)]
    return (
        _part(pixels[training], label[training], names),
        _part(pixels[held_out], label[held_out], names),
    )


def _part(pixels: np.ndarray, label: np.ndarray, names: list[str]) -> Data:
    data = wrap(pixels, label, labels=range(10), groups=[names[digit] for digit in label], group_names=names)
    return replace(data, origin=of_source("digits"))
