"""Options that every named source has: fewer records, a class made rare, owners, noisy labels.

Who owns a record and whose label is changed follow from public seeds, the record's number and its own class: from no
other record. Of a number of records to keep, one record more or less moves at most one other in or out. All of it is
for research; real owners come with the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import _validate
from evenhand.data.dataset import Data
from evenhand.data.owners_and_groups import labels, owned
from evenhand.data.record_seeds import Quiet
from evenhand.errors import UsageError

SETS = {"digits": "0-4/5-9"}
"""Short names of sets of classes."""
RANDOM = "random class"


@dataclass(frozen=True)
class Shape:
    """Options that all sources share.

    Attributes:
      records: keep so many training records, drawn by a public seed, in their order.
      rare: a class of which only the first training records stay; the held-out part stays whole.
      rare_share: what share of the remaining training records that class makes up.
      owners: "class" (every class is an owner), "random class" ("owner 1" holds a class drawn by ``owner_seed``, and so
        on), sets of classes as in "0-4/5-9" ("digits" for short), or a table of names with a list of classes each.
      owner_shares: instead of ``owners``, a table of names with the share of records that each is given at random.
      owner_overlap: share of records that are given to one of the other owners, at random.
      owner_seed: public seed of all that is random about owners.
      owner_drop: a table of owners with the share of their training records dropped at random (paper 001, table 3).
      label_noise: the share of training labels changed to another class; a number, or a table by owner.

    Examples:
      >>> Shape(owners="digits").owners
      'digits'
    """

    records: int | None = None
    rare: str | int | None = None
    rare_share: float = 0.01
    owners: str | Mapping[str, Any] | None = None
    owner_shares: Mapping[str, Any] | None = None
    owner_overlap: float = 0.0
    owner_seed: int = 0
    owner_drop: Mapping[str, Any] = field(default_factory=dict)
    label_noise: float | Mapping[str, Any] = 0.0

    def __post_init__(self) -> None:
        _validate.number(self.owner_overlap, "owner_overlap", low=0, high=1, open_low=False)
        _validate.whole(self.owner_seed, "owner_seed", low=0)
        _validate.number(self.rare_share, "rare_share", low=0, high=1)
        if self.owners is not None and self.owner_shares is not None:
            raise UsageError("Give owners (by class) or owner_shares (at random): with both a record has two owners.")

    def __call__(self, train: Data, test: Data | None) -> tuple[Data, Data | None]:
        """Return the data with these options applied.

        Held-out records get owners too, so that recall can be reported per owner.
        """
        remaining = None if self.rare is None else _remaining(train, str(self.rare), self.rare_share)
        if self.owners is not None or self.owner_shares is not None:
            train = owned(train, self._owners(train, 1))
            test = test if test is None else owned(test, self._owners(test, 2))
        if self.label_noise:
            train = _noisy(train, self.label_noise)
        if self.owner_drop:
            stay = _undropped(train, self.owner_drop, self.owner_seed)
            remaining = stay if remaining is None else remaining[torch.isin(remaining, stay)]
        if remaining is not None:
            train = train.take(remaining)
        if self.records is not None:  # last: what a record is given follows from its number among all of them
            train = train.take(_drawn(len(train), _validate.whole(self.records, "records")))
        return train, test

    def _owners(self, data: Data, part: int) -> list[str]:
        draw = np.random.default_rng([self.owner_seed, part, 31])
        if self.owner_shares is not None:
            names, shares = _shares(self.owner_shares)
            codes = draw.choice(len(names), size=len(data), p=shares)
        else:
            of_class, names = self._classes(data.facts.labels)
            codes = np.array([of_class[label] for label in labels(data)])
        if self.owner_overlap and len(names) > 1:
            codes = (codes + _moves(len(data), len(names), self.owner_overlap, [self.owner_seed, part, 34])) % len(
                names
            )
        return [names[code] for code in codes.tolist()]

    def _classes(self, known: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        """Return the index of every class's owner, and the names of the owners."""
        if self.owners == "class":
            return {label: place for place, label in enumerate(known)}, list(known)
        if self.owners == RANDOM:
            order = np.random.default_rng([self.owner_seed, 0, 31]).permutation(len(known)).tolist()
            return {known[at]: place for place, at in enumerate(order)}, [f"owner {i + 1}" for i in range(len(known))]
        sets = _sets(self.owners, known)
        of_class = {label: place for place, classes in enumerate(sets.values()) for label in classes}
        if sorted(of_class) != sorted(known) or sum(map(len, sets.values())) != len(known):
            raise UsageError("owners must give every class of the data to one owner: none left out, none twice.")
        return of_class, list(sets)


def _sets(owners: Any, known: Sequence[str]) -> dict[str, list[str]]:
    """Return the classes of each owner; ``"rest"`` stands for the classes that no other owner has."""
    if isinstance(owners, Mapping):
        sets = {
            name: [classes] if isinstance(classes, str | int) else list(classes) for name, classes in owners.items()
        }
    elif isinstance(owners, str) and owners:
        parts = SETS.get(owners, owners).split("/")
        sets = {part: [label for entry in part.split(",") for label in _range(entry.strip())] for part in parts}
    else:
        raise UsageError('owners takes "class", "random class", sets such as "0-4/5-9", or a table of lists.')
    named = {name: [str(label) for label in classes] for name, classes in sets.items()}
    taken = {label for classes in named.values() for label in classes}
    rest = [label for label in known if label not in taken]
    named = {name: rest if classes == ["rest"] else classes for name, classes in named.items()}
    for label in (label for classes in named.values() for label in classes):
        _validate.known(label, known, "class of these data")
    return named


def _range(entry: str) -> list[str]:
    low, dash, high = entry.partition("-")
    return [str(n) for n in range(int(low), int(high) + 1)] if dash and low.isdigit() and high.isdigit() else [entry]


def _shares(shares: Any) -> tuple[list[str], NDArray[np.float64]]:
    if not isinstance(shares, Mapping) or not shares:
        raise UsageError("owner_shares takes a table of names with a share each, such as {strict = 0.3, open = 0.7}.")
    fractions = np.array([_validate.number(share, "owner_shares", low=0) for share in shares.values()])
    if abs(fractions.sum() - 1) > 1e-6:
        raise UsageError("owner_shares must add up to 1.")
    return list(shares), fractions / fractions.sum()


def cut(rare: Tensor, count: int) -> Tensor:
    """Return the rows that remain if of those in the mask ``rare`` only the first ``count`` stay.

    Examples:
      >>> cut(torch.tensor([True, False, True, True]), 1).tolist()
      [0, 1]
    """
    return (~(rare & (rare.cumsum(0) > count))).nonzero().squeeze(1)


def count_for_share(rare: Tensor, share: float) -> int:
    """Return how many of the rows in a mask may stay to make up at most this share of all that remain.

    Examples:
      >>> count_for_share(torch.arange(1000) < 100, 0.01)
      9
    """
    return math.floor(int((~rare).sum()) * share / (1 - share))


def _remaining(data: Data, name: str, share: float) -> Tensor:
    """Return the rows that remain if the class called ``name`` is cut to this share of them."""
    _validate.known(name, data.facts.labels, "class of these data")
    rare = torch.tensor([label == name for label in labels(data)])
    return cut(rare, count_for_share(rare, share))


def _undropped(data: Data, dropped: Mapping[str, Any], seed: int) -> Tensor:
    """Return the rows that stay when each record of an owner is dropped with that owner's share, by a public coin."""
    if not isinstance(dropped, Mapping):
        raise UsageError("owner_drop takes a table of owners with a share each, such as {open = 0.5}.")
    for name, share in dropped.items():
        _validate.known(name, data.facts.owner_names, "owner")
        _validate.number(share, "owner_drop", low=0, high=1, open_low=False)
    share = np.array([float(dropped.get(name, 0.0)) for name in data.facts.owner_names])[data.owner.numpy()]
    return torch.from_numpy(np.flatnonzero(_coins(len(data), 1, [seed, 35])[:, 0] >= share))


def _drawn(count: int, records: int) -> Tensor:
    if records > count:
        raise UsageError(f"records={records} cannot be used: there are {count} training records.")
    return torch.from_numpy(np.sort(np.argsort(_coins(count, 1, [32])[:, 0])[:records]))


def _coins(count: int, each: int, seed: Sequence[int]) -> NDArray[np.float64]:
    """Draw ``each`` numbers below 1 for every record; they do not change when further records follow."""
    return np.random.default_rng(seed).random((count, each))


def _moves(count: int, kinds: int, share: Any, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return 0 for records that stay as they are, and for a share of them a shift to another of ``kinds`` kinds."""
    coins = _coins(count, 2, seed)
    return np.where(coins[:, 0] < share, 1 + (coins[:, 1] * (kinds - 1)).astype(np.int64), 0)


def _noisy(data: Data, noise: float | Mapping[str, Any]) -> Data:
    """Change a share of the labels to another class, all others equally likely; groups and owners stay."""
    count = len(data.facts.labels)
    if count < 2:
        raise UsageError("label_noise needs named classes: these data have none.")
    by_owner = noise if isinstance(noise, Mapping) else dict.fromkeys(data.facts.owner_names, noise)
    for name, share in by_owner.items():
        _validate.known(name, data.facts.owner_names, "owner")
        _validate.number(share, "label_noise", low=0, high=1, open_low=False)
    share = np.array([float(by_owner.get(name, 0.0)) for name in data.facts.owner_names])[data.owner.numpy()]
    moved = _moves(len(data), count, share, [33])
    code = {label: place for place, label in enumerate(data.facts.labels)}
    true = np.array([code[label] for label in labels(data)])
    codes = torch.from_numpy((true + moved) % count)
    return replace(data, fetch=Quiet(lambda rows: (data.fetch(rows)[0], codes[rows])))
