"""Features of a data set's records, computed once, and how they are split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import evenhand as eh
from evenhand.data import sources
from evenhand.models import features

if TYPE_CHECKING:
    from serving_studies import Study


@dataclass(frozen=True)
class Records:
    """Features and labels of all records; ``official`` tells which are for training, ``people`` who they belong to.

    Where the data set has several records of a person, splits are drawn by person and ``official`` is not used.
    """

    data: eh.data.Data
    labels: NDArray[np.int64]
    official: NDArray[np.bool_]
    people: NDArray[np.int64] | None

    def split(self, study: Study, seed: int, trial: bool) -> tuple[eh.data.Data, eh.data.Data]:
        """Return training and held-out records of a replica, or, for a trial, two parts of its training records."""
        random = np.random.default_rng(seed)
        train, test = self._halves(random)
        if study.rare is not None:
            label, kept = study.rare
            few = random.permutation(np.flatnonzero(self.labels[train] == label))[:kept]
            train = np.sort(np.concatenate([train[self.labels[train] != label], train[few]]))
        if trial:
            train, test = self._divided(train, study.part, random)
        return self.data.take(torch.from_numpy(train)), self.data.take(torch.from_numpy(test))

    def _halves(self, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.people is None:
            return np.flatnonzero(self.official), np.flatnonzero(~self.official)
        return self._divided(np.arange(len(self.labels)), 5, random)

    def _divided(
        self, rows: NDArray[np.int64], part: int, random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return these rows without, and with, one in ``part`` of the people."""
        who = rows if self.people is None else self.people[rows]
        distinct = np.unique(who)
        away = np.isin(who, random.permutation(distinct)[: len(distinct) // part])
        return rows[~away], rows[away]


def records(source: str, feature: str, data_dir: Path | None, folder: Path) -> Records:
    """Return the records of a data set with features, from the work folder if they were computed before."""
    file = folder / f"{source}-{feature}.npz"
    if not file.exists():
        _compute(source, feature, data_dir, file)
    with np.load(file) as stored:
        labels, names, people = stored["labels"], [str(name) for name in stored["names"]], stored["people"]
        inputs: Tensor = torch.from_numpy(stored["features"])
        official = stored["official"]
    data = eh.data.wrap(
        inputs,
        torch.from_numpy(labels),
        labels=list(range(len(names))),
        groups=[names[label] for label in labels],
        group_names=names,
    )
    return Records(data, labels, official, people if len(people) else None)


PROJECTED = 512
"""Columns that features called ``... projected`` are taken to, by a public random matrix that keeps lengths."""


def _project(source: str, feature: str, data_dir: Path | None, file: Path) -> None:
    records(source, feature, data_dir, file.parent)
    with np.load(file.parent / f"{source}-{feature}.npz") as stored:
        columns = {name: stored[name] for name in stored}
    inputs = torch.from_numpy(columns["features"])
    matrix = torch.randn(inputs.shape[1], PROJECTED, generator=torch.Generator().manual_seed(0)) / math.sqrt(PROJECTED)
    columns["features"] = torch.cat([part @ matrix for part in inputs.split(8192)]).numpy()
    np.savez(file, **columns)


def _compute(source: str, feature: str, data_dir: Path | None, file: Path) -> None:
    if feature.endswith(" projected"):
        return _project(source, feature.removesuffix(" projected"), data_dir, file)
    parts = [part for part in sources.load(source, data_dir=data_dir) if part is not None]
    both = [part.fetch(torch.arange(len(part))) for part in parts]
    computed = [inputs if feature == "none" else features.extract(feature, inputs) for inputs, _ in both]
    inputs = torch.cat(computed).flatten(1)
    together = [part.together for part in parts]
    people = [] if together[0] is None else torch.cat([column for column in together if column is not None]).tolist()
    np.savez(
        file,
        features=inputs.numpy(),
        labels=torch.cat([labels for _, labels in both]).numpy(),
        official=np.arange(len(inputs)) < len(parts[0]),
        names=np.array([str(label) for label in parts[0].facts.labels]),
        people=np.array(people, dtype=np.int64),
    )
