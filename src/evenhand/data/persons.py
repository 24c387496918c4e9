"""Persons with several records each: then the unit of the promise, of the draw and of the bound is the person.

Data by person have one row per person. A step draws persons, and of each of them one record, under a secret word of
(key, step, person), or up to ``most`` records of one group, whose losses are averaged. So a person has one gradient and
one vector for every query, whatever number of records is theirs: all that holds for a record holds for a person.
Outside of training a person's row is their first record. Proof: docs/proofs/persons.md.

The second way is ``capped``: rows are records, at most so many of each person, drawn one by one, and the accountant is
asked about all of a person's records together. Proof: docs/proofs/capped_persons.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from evenhand import _validate
from evenhand.data.record_seeds import Quiet
from evenhand.errors import DataError

if TYPE_CHECKING:
    from evenhand.data.dataset import Data

_GOLDEN, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of the mixing function splitmix64."""


@dataclass(frozen=True)
class Persons:
    """Whose record is whose: those of person p are ``order[starts[p]:starts[p + 1]]``, numbers of rows of ``records``.

    All of it is secret but the number of persons. A step uses at most ``most`` records of a person.
    """

    records: Data
    order: Tensor
    starts: Tensor
    most: int = 1

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def first(self) -> Tensor:
        """Return the first record of every person."""
        return self.order[self.starts[:-1]]

    def choose(self, persons: Tensor, words: NDArray[np.uint64]) -> Tensor:
        """Return the number of one record of each of these persons, chosen by a word of 64 bits each.

        Examples:
          >>> from evenhand.data import wrap
          >>> data = wrap(torch.zeros(3, 1), [0, 1, 1], persons=["Ann", "Bo", "Ann"])
          >>> sizes = (data.persons.starts[1:] - data.persons.starts[:-1]).tolist()
          >>> ann = torch.tensor([sizes.index(2)])
          >>> [data.persons.choose(ann, np.array([word], dtype=np.uint64)).item() for word in (0, 2**63, 2**64 - 1)]
          [0, 2, 2]
        """
        begin = self.starts[persons]
        counts = (self.starts[persons + 1] - begin).numpy().astype(np.uint64)
        places = ((words >> np.uint64(32)) * counts) >> np.uint64(32)
        return self.order[begin + torch.from_numpy(places.astype(np.int64))]

    def choose_several(
        self, persons: Tensor, words: Callable[[NDArray[np.int64]], NDArray[np.uint64]]
    ) -> tuple[Tensor, Tensor]:
        """Return the numbers of the records chosen of these persons, person after person, and how many of each.

        The record with the smallest of the person's words is chosen, and of the others with its group those with the
        smallest words, at most ``most`` in all: a person has one group in a step. ``words`` gives one for each record.

        Examples:
          >>> from evenhand.data import wrap
          >>> data = wrap(torch.zeros(4, 1), [0, 1, 1, 0], groups="abab", persons=[0, 0, 0, 0], records_per_person=2)
          >>> data.persons.choose_several(torch.tensor([0]), lambda records: 100 - records.astype(np.uint64))
          (tensor([3, 1]), tensor([2]))
        """
        begin = self.starts[persons]
        sizes = self.starts[persons + 1] - begin
        ends = sizes.cumsum(0)
        person = torch.repeat_interleave(sizes)
        first = (ends - sizes)[person]
        records = self.order[torch.arange(len(person)) - first + begin[person]]
        by_word = torch.from_numpy(np.lexsort((words(records.numpy()), person.numpy())))
        records = records[by_word]
        group = self.records.group[records]
        alike = group == group[first]
        before = alike.cumsum(0) - 1
        chosen = alike & (before - before[first] < self.most)
        return records[chosen], torch.bincount(person[chosen], minlength=len(persons))

    @property
    def slots(self) -> Data:
        """Return the data with rows as steps see them: of every person the first records, in places."""
        data = _of(self)
        if self.most == 1:
            return data

        def fetch(rows: Tensor) -> tuple[Any, Any]:
            begin = self.starts[rows]
            counts = (self.starts[rows + 1] - begin).clamp(max=self.most)
            person = torch.repeat_interleave(counts)
            places = torch.arange(len(person)) - (counts.cumsum(0) - counts)[person] + begin[person]
            return slotted(*self.records.fetch(self.order[places]), counts, self.most)

        return replace(data, fetch=Quiet(fetch))

    def take(self, persons: Tensor) -> Data:
        """Return the data of these persons alone, by person, in this order."""
        rows = [self.order[self.starts[person] : self.starts[person + 1]] for person in persons.tolist()]
        ends = torch.tensor([0, *(len(part) for part in rows)]).cumsum(0)
        return _of(
            replace(self, records=self.records.take(torch.cat(rows)), order=torch.arange(int(ends[-1])), starts=ends)
        )

    def on(self, device: torch.device) -> Persons:
        """Return the persons with records whose fetch puts them on another device."""
        return replace(self, records=self.records.on(device))


def slotted(inputs: Any, targets: Any, counts: Tensor, slots: int) -> tuple[Any, Any]:
    """Return records as rows of persons with ``slots`` places each, and (targets, shares) as their targets.

    ``counts`` says how many records, which follow each other, are of each person. Places that are left hold a copy of
    the person's first record, whose share of the person's mean is 0. What all records share stays as it is.

    Examples:
      >>> inputs, (targets, shares) = slotted(torch.tensor([5, 6, 7]), torch.tensor([1, 0, 1]), torch.tensor([1, 2]), 2)
      >>> inputs.tolist(), targets.tolist(), shares.tolist()
      ([[5, 5], [6, 7]], [[1, 1], [0, 1]], [[1.0, 0.0], [0.5, 0.5]])
    """
    place, count = torch.arange(slots), counts[:, None]
    used = place < count
    numbers = torch.where(used, place, 0) + (counts.cumsum(0) - counts)[:, None]
    shares = torch.where(used, 1.0 / count.double(), 0.0)

    def placed(leaf: Tensor) -> Tensor:
        if leaf.is_nested:
            raise DataError(
                "Records of different length cannot be averaged over a person: leave out records_per_person, or bring "
                "them to one length (collate_fn=eh.data.Pad(length))."
            )
        return leaf[numbers.to(leaf.device)]

    inputs, targets = tree_map_only(Tensor, placed, (inputs, targets))
    device = next((leaf.device for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)), shares.device)
    return inputs, (targets, shares.to(device))


def by_person(data: Data, persons: Tensor, records_per_person: int = 1) -> Data:
    """Return the data with one row per person; rows of ``data`` with equal numbers in ``persons`` are one person's.

    A step uses at most ``records_per_person`` records of a drawn person.

    Raises:
      DataError: some person's records have different owners.

    Examples:
      >>> from evenhand.data import wrap
      >>> data = by_person(wrap(torch.zeros(5, 2), [0, 1, 0, 1, 0]), torch.tensor([7, 7, 3, 3, 3]))
      >>> len(data), len(data.persons.records), data.facts.unit
      (2, 5, 'person')
    """
    if data.persons is not None:
        raise DataError("These data are by person already: name the persons once.")
    if data.facts.person_cap:
        raise DataError("Of these data each record is drawn by itself, with a cap for each person: name them once.")
    _, first, whose_number = np.unique(persons.numpy(), return_index=True, return_inverse=True)
    inverse = np.argsort(np.argsort(first))[whose_number]  # persons are numbered as they first appear
    order = torch.from_numpy(np.argsort(inverse, kind="stable"))
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(np.bincount(inverse))]))
    named = data.together is not None and torch.equal(data.together, persons)
    by, partition = (data.together_by, data.partition) if named else ("", None)
    records = replace(data, together=persons, together_by=by, partition=partition, origin=data.origin or data.whole)
    most = _validate.whole(records_per_person, "records_per_person")
    whose = Persons(records, order, starts, most)
    refuse_several_owners(data.owner, whose.first, inverse)
    return _of(whose)


def refuse_several_owners(owner: Tensor, first: Tensor, person: NDArray[np.int64]) -> None:
    """Raise if records of one person have different owners.

    Args:
      owner: the owner class of every record.
      first: the number of one record of every person.
      person: whose record every record is.
    """
    torn = len(np.unique(person[(owner != owner[first][person]).numpy()]))
    if torn:
        raise DataError(
            f"{torn} person(s) have records of different owners, so it is not known which budget is theirs: give all "
            "records of a person one owner, for example the strictest."
        )


def _of(persons: Persons) -> Data:
    """Return the data of these persons, one row for each."""
    records, first = persons.records, persons.first
    owner = records.owner[first]
    sizes = torch.bincount(owner, minlength=len(records.facts.owners)).tolist()
    owners = tuple(zip(records.facts.owner_names, sizes, strict=True))
    return replace(
        records,
        facts=replace(
            records.facts,
            records=len(persons),
            owners=owners,
            unit="person",
            told_apart=records.together_by,
            records_per_person=persons.most,
        ),
        group=records.group[first],
        owner=owner,
        fetch=Quiet(lambda rows: records.fetch(first[rows])),
        together=None if records.together is None else records.together[first],
        persons=persons,
    )


def capped(data: Data, persons: Tensor, cap: int) -> Data:
    """Return the data with at most ``cap`` records of each person; equal numbers in ``persons`` are one person's.

    Guarantee:
      Which records of a person are kept follows from the person's number and from how many records they have, and from
      nothing else: data that differ in one person differ, after it, in at most ``cap`` records, all of that person. The
      same data keep the same records.

    Raises:
      DataError: some person's records have different owners.

    Examples:
      >>> from evenhand.data import wrap
      >>> data = capped(wrap(torch.zeros(5, 2), [0, 1, 0, 1, 0]), torch.tensor([7, 7, 3, 3, 3]), 2)
      >>> len(data), data.facts.persons, data.facts.unit, data.facts.promised
      (4, 2, 'record', 'person')
    """
    if data.persons is not None or data.facts.person_cap:
        raise DataError("These data are by person already: name the persons once.")
    cap, numbers = _validate.whole(cap, "person_cap"), persons.numpy()
    _, first, person = np.unique(numbers, return_index=True, return_inverse=True)
    refuse_several_owners(data.owner, torch.from_numpy(first), person)
    named = data.together is not None and torch.equal(data.together, persons)
    by, partition = (data.together_by, data.partition) if named else ("", None)
    told = replace(data, together=persons, together_by=by, partition=partition)
    rest = told.take(torch.from_numpy(np.flatnonzero(keep(numbers, cap))))
    return replace(rest, facts=replace(rest.facts, told_apart=by, person_cap=cap, persons=len(first)))


def keep(numbers: NDArray[np.int64], cap: int) -> NDArray[np.bool_]:
    """Return which records stay if each person, by number, keeps at most ``cap``: those with the smallest digests.

    A digest is of the person's number and the record's place among the person's own.

    Examples:
      >>> [int(keep(np.array([7, 3, 7, 7]), cap).sum()) for cap in (1, 2, 3)]
      [2, 3, 4]
    """
    order = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(numbers[order]) != 0])
    sizes = np.diff(np.r_[begins, len(numbers)])
    places = np.arange(len(numbers)) - np.repeat(begins, sizes)
    ranked = np.lexsort((_mixed(numbers[order], places), np.repeat(begins, sizes)))
    stays = np.empty(len(numbers), dtype=np.bool_)
    stays[order[ranked]] = places < cap
    return stays


def _mixed(numbers: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a digest of 64 bits of each pair (splitmix64)."""
    word = numbers.astype(np.uint64)
    for part in (np.uint64(0), places.astype(np.uint64)):
        word = (word + part + np.uint64(1)) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _FIRST
        word = (word ^ (word >> np.uint64(27))) * _SECOND
        word = word ^ (word >> np.uint64(31))
    return word


def refuse_beyond_cap(data: Data) -> None:
    """Raise if some person has more records than the cap in the facts, as after rows were taken twice."""
    whose = data.together
    if whose is None or int(torch.unique(whose, return_counts=True)[1].max()) > data.facts.person_cap:
        raise DataError(
            f"Some person has more than {data.facts.person_cap} of these records, which is the cap that privacy is "
            "accounted with: take rows at most once, and wrap the data again. Nothing was spent."
        )
