"""Records of public data for the studies at matched rates: all of them together, split anew for every replica."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from serving_data import records as computed
from torch import Tensor

import evenhand as eh
from evenhand.data import sources

if TYPE_CHECKING:
    from matched_study import Study

FEATURES = {
    "cifar10-subset": "efficientnet_lite0",
    "cifar10": "efficientnet_lite0",
    "ham10000-200x150": "efficientnet_lite0",
    "mnist": "scattering",
}
"""What pictures become before the linear model; other sources keep their own columns."""
PROJECTED, PROJECTS = 512, ("mnist",)
"""Columns that scattering features of these sources are projected to, by a public random matrix."""


@dataclass(frozen=True)
class Split:
    """Training and held-out records; ``part`` is the group of each held-out record."""

    train: eh.data.Data
    test: eh.data.Data
    part: NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """All records of a source: features, labels, the group of each, and the person where splits go by person."""

    inputs: Tensor
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    groups: NDArray[np.int64]
    group_names: tuple[str, ...]
    people: NDArray[np.int64] | None

    def split(self, study: Study, seed: int, trial: bool) -> Split:
        """Return a fifth of every group held out, or for a trial a fifth of what the same seed would train on.

        With ``dealt`` owners, the classes are dealt to the owners anew by every seed, and groups are owners.
        """
        random = np.random.default_rng(seed)
        groups, names = self.groups, self.group_names
        if study.dealt:
            groups = _deal(len(names), random)[groups]
            names = tuple(f"owner {place}" for place in range(len(names)))
        train, test = self._divided(np.arange(len(groups)), groups, random, study.even)
        if study.rare is not None:
            label, kept = study.rare
            few = random.permutation(np.flatnonzero(self.labels[train] == label))[:kept]
            train = np.sort(np.concatenate([train[self.labels[train] != label], train[few]]))
        if trial:
            train, test = self._divided(train, groups, random, study.even)
        return Split(
            self._wrapped(train, groups, names, study), self._wrapped(test, groups, names, study), groups[test]
        )

    def strictest(self, seed: int) -> int:
        """Return which class a seed deals to owner 0."""
        return int(np.flatnonzero(_deal(len(self.group_names), np.random.default_rng(seed)) == 0)[0])

    def _wrapped(
        self, rows: NDArray[np.int64], groups: NDArray[np.int64], names: tuple[str, ...], study: Study
    ) -> eh.data.Data:
        named = [names[group] for group in groups[rows]]
        return eh.data.wrap(
            self.inputs[torch.from_numpy(rows)],
            torch.from_numpy(self.labels[rows]),
            labels=list(range(len(self.names))),
            groups=named,
            group_names=names,
            owners=named if study.owned else None,
        )

    def _divided(
        self, rows: NDArray[np.int64], groups: NDArray[np.int64], random: np.random.Generator, even: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return these rows without, and with, a fifth of every group (of all people, where there are people).

        With ``even`` every group is cut to the size of the smallest, so that budgets and not sizes differ.
        """
        if self.people is not None:
            distinct = np.unique(self.people[rows])
            away = np.isin(self.people[rows], random.permutation(distinct)[: len(distinct) // 5])
            return rows[~away], rows[away]
        members = [random.permutation(rows[groups[rows] == group]) for group in range(int(groups.max()) + 1)]
        least = min(map(len, members)) if even else math.inf
        members = [rows[: int(min(least, len(rows)))] for rows in members]
        cuts = [len(rows) // 5 for rows in members]
        test = np.sort(np.concatenate([rows[:cut] for rows, cut in zip(members, cuts, strict=True)]))
        train = np.sort(np.concatenate([rows[cut:] for rows, cut in zip(members, cuts, strict=True)]))
        return train, test


def _deal(count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the owner of each class."""
    return random.permutation(count)


def pool(source: str, data_dir: Path | None, folder: Path) -> Pool:
    """Return all records of a source; features are computed once and kept in the work folder."""
    if source in FEATURES:
        found = computed(source, FEATURES[source], data_dir, folder)
        inputs = found.data.fetch(torch.arange(len(found.labels)))[0]
        if source in PROJECTS:
            inputs = projected(inputs)
        names = tuple(found.data.facts.groups)
        return Pool(inputs, found.labels, names, found.labels, names, found.people)
    parts = [part for part in sources.load(source, data_dir=data_dir) if part is not None]
    if source == "digits":
        return _digits()
    both = [part.fetch(torch.arange(len(part))) for part in parts]
    labels = torch.cat([labels for _, labels in both]).numpy().astype(np.int64)
    names = tuple(str(label) for label in parts[0].facts.labels)
    groups = torch.cat([part.group for part in parts]).numpy().astype(np.int64)
    inputs = torch.cat([inputs for inputs, _ in both]).flatten(1).float()
    return Pool(inputs, labels, names, groups, tuple(parts[0].facts.groups), None)


def _digits() -> Pool:
    """Return all 1,797 digits, none of them made rare, with the pixels that the demo uses."""
    from sklearn.datasets import load_digits

    from evenhand.data.sources.digits import LENGTH

    bunch = load_digits()
    centred = bunch.data - bunch.data.mean(axis=1, keepdims=True)
    pixels = (LENGTH * centred / np.linalg.norm(centred, axis=1, keepdims=True)).astype(np.float32)
    names = tuple(map(str, range(10)))
    labels = bunch.target.astype(np.int64)
    return Pool(torch.from_numpy(pixels), labels, names, labels, names, None)


def projected(inputs: Tensor) -> Tensor:
    """Return features times a public random matrix, each row standardised: it looks at no other record."""
    matrix = torch.randn(inputs.shape[1], PROJECTED, generator=torch.Generator().manual_seed(0))
    parts = [part @ matrix / math.sqrt(PROJECTED) for part in inputs.split(8192)]
    rows = torch.cat(parts)
    return rows / rows.norm(dim=1, keepdim=True) * math.sqrt(PROJECTED)
