"""``wrap``: arrays, DataFrames or a torch Dataset, with groups, owners and the facts declared public."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import Sampler as TorchSampler

from evenhand.data.arrays import coded, from_arrays, nameless, target_codes
from evenhand.data.persons import Persons, by_person, capped
from evenhand.data.record_seeds import Changed, Quiet, guarded
from evenhand.errors import DataError, ForeignLoaderError, UsageError
from evenhand.model_io import on_device
from evenhand.types import Facts

if TYPE_CHECKING:
    from evenhand.data.map_style import Collate
    from evenhand.data.tables import Declaration


@dataclass(frozen=True)
class Data:
    """Rows that can be fetched by number, with one group and one owner class per row.

    ``facts`` is what may be printed. ``fetch(rows)`` gives (inputs, targets) for exactly these rows, in this order,
    also for none; whatever it draws comes from a seed for each record, see ``drawing``. ``declared`` says how inputs
    were encoded from a table; a run keeps it for new records. ``origin`` is the fingerprint of the records that these
    were made from, or computes it, so that runs on either add up; it is a secret. ``tuned`` says that settings were
    chosen by trials scored on some of these records; a statement repeats it. Rows with the same number in ``together``
    are on the same side of every split, see ``kept_together``. ``together_by`` is the
    column that they are from, and ``partition`` hashes who is kept together in the whole data, of which these may be a
    part. ``persons`` are there if a row is a person.
    """

    facts: Facts
    group: Tensor
    owner: Tensor
    fetch: Callable[[Tensor], tuple[Any, Any]]
    declared: Declaration | None = None
    origin: str | Callable[[], str] | None = field(default=None, repr=False)
    tuned: bool = False
    together: Tensor | None = field(default=None, repr=False)
    together_by: str = ""
    partition: Callable[[], str] | None = field(default=None, repr=False)
    persons: Persons | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.persons is None) != (self.facts.unit == "record"):
            raise DataError("Data are by person if and only if they hold persons: use wrap(..., persons=...).")
        if self.facts.person_cap and self.together is None:
            raise DataError("Data with a cap of records a person say whose record each is: use wrap(..., persons=...).")
        if self.together is not None and self.partition is None:
            object.__setattr__(self, "partition", partial(hash_together, self.together))
        object.__setattr__(self, "fetch", guarded(self.fetch))

    def __len__(self) -> int:
        return self.facts.records

    def __getitem__(self, row: object) -> NoReturn:
        """Refuse single rows, which a DataLoader asks for, and say how rows are had."""
        raise ForeignLoaderError(
            "These data are not read row by row, as a DataLoader would. To train, pass them as they are: "
            "eh.fit(model, data) or private.batches(data) draw as accounted. To look at held-out rows: inputs, "
            "targets = data.fetch(torch.arange(len(data)))."
        )

    def group_names(self) -> list[str]:
        """Return the group name of every row, for reports on held-out data."""
        return [self.facts.groups[index] for index in self.group.tolist()]

    def take(self, rows: Tensor) -> Data:
        """Return the data with only these rows, in this order; owner classes without a row are dropped.

        The budgets of runs on a part and of runs on the whole add up.
        """
        if self.persons is not None:
            return self.persons.take(rows)
        counts = torch.bincount(self.owner[rows], minlength=len(self.facts.owners))
        present = counts.nonzero().squeeze(1)
        code = torch.zeros_like(counts).index_put((present,), torch.arange(len(present)))
        owners = tuple((self.facts.owner_names[index], int(counts[index])) for index in present.tolist())
        together = None if self.together is None else self.together[rows]
        persons = len(torch.unique(together)) if self.facts.person_cap and together is not None else 0
        facts = replace(self.facts, records=len(rows), owners=owners, persons=persons)
        return replace(
            self,
            facts=facts,
            group=self.group[rows],
            owner=code[self.owner[rows]],
            fetch=Quiet(lambda r: self.fetch(rows[r])),
            origin=self.origin or self.whole,
            together=together,
        )

    @property
    def by_record(self) -> Data:
        """Return the data with one row per record, which they are measured by: these, or the records of the persons."""
        return self if self.persons is None else self.persons.records

    @property
    def as_drawn(self) -> Data:
        """Return the data with rows in the form in which a step sees them."""
        return self if self.persons is None else self.persons.slots

    def whole(self) -> str:
        """Return the fingerprint of these data only where a run needs it, since it fetches hundreds of records."""
        from evenhand.data.fingerprint import fingerprint

        return fingerprint(self)

    def on(self, device: torch.device) -> Data:
        """Return these data with a fetch that puts the rows on another device."""
        if device.type == "cpu":
            return self
        moved = Changed(self.fetch, lambda batch: on_device(batch, device))
        return replace(self, fetch=moved, persons=None if self.persons is None else self.persons.on(device))


def wrap(
    data: Any,
    targets: Any = None,
    *,
    groups: Iterable[Any] | None = None,
    owners: Iterable[Any] | None = None,
    labels: Sequence[Any] | None = None,
    group_names: Sequence[Any] | None = None,
    label: str | None = None,
    numbers: Mapping[str, Any] | None = None,
    categories: Mapping[str, Any] | None = None,
    missing_tokens: Sequence[str] = ("",),
    ordered: bool = False,
    keep_together: Iterable[Any] | None = None,
    persons: Iterable[Any] | None = None,
    records_per_person: int = 1,
    person_cap: int | None = None,
    inputs: Sequence[str] | None = None,
    collate_fn: Collate | None = None,
    shared: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Data:
    """Make any map-style data usable: ``wrap(X, y)``, ``wrap(dataset)`` or ``wrap(frame, label="ill", ...)``.

    Args:
      data: array, tensor or DataFrame (with ``targets``), a pair (X, y), a torch Dataset of (input, target), or a
        ``datasets.Dataset`` of Hugging Face; an input may be a tensor, a tuple (the model's arguments) or a dict (its
        keyword arguments).
      targets: one target per row when ``data`` holds inputs only: a class (whole numbers or names), a real number
        (floats), one column of 0 and 1 per label where a record may have several, or tokens (other whole numbers in
        several columns); or, for a Dataset that yields dicts, the key of the target.
      groups: one name per row: who is reported, and what group rules see.
      owners: one name per row: the budget class of the record. Default: one class called "all".
      labels: the label values, declared public; with several labels per record, the names of the columns. Default:
        those in the data, which the plan then prints as a fact.
      group_names: the group names, declared public. Default: those in the data, printed likewise.
      label: the column of a DataFrame (pandas or polars) or of a ``datasets.Dataset`` to predict; then ``groups`` and
        ``owners`` name columns too. For other datasets the key of the target in dicts, also those of ``collate_fn``.
      numbers: public bounds by column, ``{"age": (0, 120)}``; only declared columns are features.
      categories: public values by column, ``{"sex": ["f", "m"]}``.
      missing_tokens: cells of a DataFrame that mean "no value".
      ordered: the labels have an order, from the lowest to the highest: errors are then measured in ranks too.
      keep_together: one name per row (or a column of a DataFrame), such as the person: records with the same name are
        all trained on or all held out. It changes splits only: the promise is still about one record.
      persons: one name per row (or a column of a DataFrame): whose record it is. The promise is then about a person
        with all of their records: persons are drawn, and a step uses one record of each.
      records_per_person: how many records of a drawn person a step uses at most; their losses are averaged before the
        gradient is bounded. All have the group of the first one that is chosen.
      person_cap: draw records one by one instead, at most so many of each person: some of those who have more are left
        out once and for all. The promise is about the person all the same.
      inputs: the columns of a ``datasets.Dataset`` that the model sees, handed over by name.
      collate_fn: makes a batch of a list of records, one row for each, in their order and of one shape, see `Pad`.
      shared: public constants among the model's arguments that all records share, such as position ids (1, T).
      tokenizer: who cut texts into the tokens that are the inputs, or its name: it is declared as public, not fitted on
        these records, and plan and statement name it.

    Examples:
      >>> import numpy as np
      >>> data = wrap(np.zeros((4, 2)), [0, 1, 0, 1], groups=["a", "a", "b", "b"])
      >>> data.facts.records, data.facts.groups
      (4, ('a', 'b'))
    """
    if isinstance(data, Data):
        if (
            any(
                given is not None
                for given in (targets, groups, owners, keep_together, collate_fn, shared, inputs, persons)
            )
            or records_per_person != 1
            or person_cap is not None
        ):
            raise DataError("These data are wrapped already: pass groups, owners and so on to the first wrap.")
        return data
    refuse_foreign(data)
    fetch: Callable[[Tensor], tuple[Any, Any]]
    if persons is not None:
        if keep_together is not None:
            raise DataError("Give persons or keep_together: a person's records are kept together by themselves.")
        named: dict[str, Any] = {"labels": labels, "label": label, "numbers": numbers, "categories": categories}
        named |= {"groups": groups, "owners": owners, "group_names": group_names, "ordered": ordered, "inputs": inputs}
        named |= {"collate_fn": collate_fn, "shared": shared, "tokenizer": tokenizer, "missing_tokens": missing_tokens}
        records = wrap(data, targets, **named, keep_together=persons)
        assert records.together is not None
        return by_person_or_capped(records, records.together, records_per_person, person_cap)
    if records_per_person != 1 or person_cap is not None:
        setting = "records_per_person" if person_cap is None else "person_cap"
        raise DataError(f"{setting}= is about persons: say whose record each is, persons=.")
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        from evenhand.data.named_columns import Columns

        columns = Columns(data, _named(label, targets), inputs, collate_fn)
        seen = columns.chosen((groups, owners, keep_together))
        groups, owners, keep_together = (columns.cells(role) for role in (groups, owners, keep_together))
        codes, names = target_codes(columns.column(columns.label), labels) if columns.labelled else (None, ())
        count, fetch, shape = len(data), columns.fetch(seen, codes, shared or {}), columns.described(seen)
    elif inputs is not None:
        raise UsageError("inputs= names columns of a datasets.Dataset, and these data are none: leave it out.")
    elif label is not None and not isinstance(data, Dataset) and collate_fn is None:
        from evenhand.data.frames import wrap_frame

        declared: dict[str, Any] = {"numbers": numbers, "categories": categories, "missing_tokens": missing_tokens}
        declared["keep_together"] = _one_column(keep_together, "keep_together")
        return wrap_frame(data, label, labels=labels, groups=groups, owners=_one_column(owners), **declared)
    else:
        if targets is None and label is None and isinstance(data, tuple | list) and len(data) == 2:
            data, targets = data
        if targets is None or isinstance(targets, str):
            from evenhand.data.map_style import from_dataset

            fetch = from_dataset(data, targets if label is None else label, collate_fn, shared or {})
            count, names, shape = len(data), (), f"items of {type(data).__name__}"
        elif collate_fn is not None or shared is not None:
            raise UsageError("collate_fn= and shared= are about datasets of records: leave them out for arrays.")
        else:
            count, fetch, names, shape = from_arrays(data, targets, labels)
    if numbers is not None or categories is not None:
        raise DataError("numbers= and categories= are about a DataFrame: name the column to predict, label='ill'.")
    names = names if labels is None else tuple(map(str, labels))
    group, group_list = coded(groups, group_names, count, "groups")
    owner, owner_list = coded(owners, None, count, "owners")
    sizes = torch.bincount(owner, minlength=len(owner_list)).tolist()
    read_off = {"labels": bool(names) and labels is None, "groups": groups is not None and group_names is None}
    facts = Facts(
        records=count,
        owners=tuple(zip(owner_list, sizes, strict=True)),
        groups=group_list,
        labels=names,
        inputs=shape if tokenizer is None else f"{shape}; {_tokens(tokenizer)}",
        derived=tuple(name for name, undeclared in read_off.items() if undeclared),
        ordered=ordered and bool(names),
    )
    together = None if keep_together is None else kept_together(keep_together, count)
    return Data(facts=facts, group=group, owner=owner, fetch=fetch, together=together)


def by_person_or_capped(data: Data, persons: Tensor, records_per_person: int, person_cap: int | None) -> Data:
    """Return the data in one of the two ways of training by person: rows are persons, or records with a cap."""
    if person_cap is None:
        return by_person(data, persons, records_per_person)
    if records_per_person != 1:
        raise UsageError(
            "Give records_per_person or person_cap: either persons are drawn, each with some records, or records one "
            "by one, at most so many of a person."
        )
    return capped(data, persons, person_cap)


def kept_together(names: Iterable[Any], count: int) -> Tensor:
    """Return a number for each record, equal for equal names: such records are on one side of every split.

    Numbers are digests, so that names of two files can be compared; they are as secret as the names.

    Examples:
      >>> numbers = kept_together(["Ann", "Bo", "Ann"], 3)
      >>> bool(numbers[0] == numbers[2]), bool(numbers[0] == numbers[1])
      (True, False)
    """
    column = names.tolist() if isinstance(names, Tensor | np.ndarray) else list(names)
    if len(column) != count:
        raise DataError(f"There are {count} records but {len(column)} names of whose they are: pass one per record.")
    missing = sum(nameless(value) or value == "" for value in column)
    if missing:
        raise DataError(
            f"{missing} record(s) have no name that says whose they are (persons, keep_together): give every record "
            "one, for example its number."
        )
    digests = [hashlib.blake2b(str(value).encode("utf-8", "replace"), digest_size=8).digest() for value in column]
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64))


def hash_together(together: Tensor) -> str:
    """Return a hash of which rows have equal numbers, whatever the numbers are.

    Examples:
      >>> one, two, three = (hash_together(torch.tensor(numbers)) for numbers in ([7, 7, 3], [1, 1, 2], [1, 2, 2]))
      >>> one == two, one == three
      (True, False)
    """
    _, first, whose = np.unique(together.cpu().numpy(), return_index=True, return_inverse=True)
    return hashlib.sha256(first[whose].astype(np.int64).tobytes()).hexdigest()


def _named(label: Any, targets: Any) -> str:
    name = targets if label is None else label
    if not isinstance(name, str):
        raise UsageError("Name the column to predict: wrap(dataset, label='label', inputs=['input_ids', ...]).")
    return name


def _tokens(tokenizer: Any) -> str:
    """Return words on a tokenizer, a tokenizer object or a name, for the plan and the statement.

    That it was not fitted on the private records is what its owner declares by naming it.

    Examples:
      >>> _tokens("bert-base-uncased")
      'tokens of bert-base-uncased, declared as a public tokenizer that was not fitted on these records'
    """
    name = tokenizer if isinstance(tokenizer, str) else getattr(tokenizer, "name_or_path", "") or ""
    name = PurePath(name.strip()).name if PurePath(name.strip()).is_absolute() else name.strip()
    if not name or not name.isprintable() or len(name) > 200:
        raise UsageError(
            "Name the tokenizer, so that the statement can: tokenizer='bert-base-uncased', or a tokenizer object that "
            "knows its name (name_or_path)."
        )
    size = getattr(tokenizer, "vocab_size", None)
    counted = f" ({size} words)" if isinstance(size, int) else ""
    return f"tokens of {name}{counted}, declared as a public tokenizer that was not fitted on these records"


def _one_column(name: Any, what: str = "owners") -> str | None:
    if name is not None and not isinstance(name, str):
        raise DataError(f"{what} takes the name of one column here, since label= names one.")
    return name


def refuse_foreign(data: Any) -> None:
    """Refuse what draws rows itself: only our Poisson sampler draws the rows that the accountant counts (law 7)."""
    if isinstance(data, str | Path):
        raise DataError(
            "A path cannot be read as data here: pass eh.data.read(path, declaration), a DataFrame, or (X, y). On the "
            "command line `evenhand init FILE` declares a file and `evenhand train` takes it."
        )
    if isinstance(data, DataLoader):
        raise ForeignLoaderError(
            f"A DataLoader draws rows by its own {type(data.sampler).__name__}, whose batches the accountant does not "
            "describe (shuffling accounted as Poisson claimed 0.49 where 4.57 was true). Pass loader.dataset; the "
            "batch size goes into batch_size=."
        )
    if isinstance(data, TorchSampler):
        raise ForeignLoaderError("Samplers cannot be passed: rows are drawn by Poisson sampling. Pass the dataset.")
    if isinstance(data, IterableDataset):
        raise ForeignLoaderError(
            "An IterableDataset has no rows to sample from, since a draw asks for records by their number: give a "
            "Dataset with __len__ and __getitem__. Of a stream, write the records to a file once: Parquet, which "
            "eh.data.read(path, declaration) maps into memory, or arrays, X = np.load('X.npy', mmap_mode='r')."
        )
