"""``wrap``: arrays, DataFrames or a torch Dataset, with groups, owners and the facts declared public."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from evenhand.data.record_seeds import Guarded, Quiet, guarded
from evenhand.errors import DataError, ForeignLoaderError
from evenhand.types import Facts

if TYPE_CHECKING:
    from evenhand.data.tables import Declaration

UNDECLARED = 100
"""More labels or groups than this must be declared: so many are hardly public knowledge."""


@dataclass(frozen=True)
class Data:
    """Rows that can be fetched by number, with one group and one owner class per row.

    ``facts`` is what may be printed. ``fetch(rows)`` gives (inputs, targets) for exactly these rows, in this order,
    also for none; whatever it draws comes from a seed for each record, see ``drawing``. ``declared`` says how inputs
    were encoded from a table; a run keeps it for new records. ``origin`` is the fingerprint of the records that these
    were made from, or computes it, so that runs on either add up; it is a secret. ``tuned`` says that settings were
    chosen by trials scored on some of these records; a statement repeats it. Rows with the same number in ``together``
    are on the same side of every split, see ``kept_together``.
    """

    facts: Facts
    group: Tensor
    owner: Tensor
    fetch: Callable[[Tensor], tuple[Any, Any]]
    declared: Declaration | None = None
    origin: str | Callable[[], str] | None = field(default=None, repr=False)
    tuned: bool = False
    together: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fetch", guarded(self.fetch))

    def __len__(self) -> int:
        return self.facts.records

    def group_names(self) -> list[str]:
        """Return the group name of every row, for reports on held-out data."""
        return [self.facts.groups[index] for index in self.group.tolist()]

    def take(self, rows: Tensor) -> Data:
        """Return the data with only these rows, in this order; owner classes without a row are dropped.

        The budgets of runs on a part and of runs on the whole add up.
        """
        counts = torch.bincount(self.owner[rows], minlength=len(self.facts.owners))
        present = counts.nonzero().squeeze(1)
        code = torch.zeros_like(counts).index_put((present,), torch.arange(len(present)))
        owners = tuple((self.facts.owner_names[index], int(counts[index])) for index in present.tolist())
        facts = replace(self.facts, records=len(rows), owners=owners)
        return replace(
            self,
            facts=facts,
            group=self.group[rows],
            owner=code[self.owner[rows]],
            fetch=Quiet(lambda r: self.fetch(rows[r])),
            origin=self.origin or self._whole,
            together=None if self.together is None else self.together[rows],
        )

    def _whole(self) -> str:
        """Compute the fingerprint of these data only where a run needs it, since it fetches hundreds of records."""
        from evenhand.data.fingerprint import fingerprint

        return fingerprint(self)

    def on(self, device: torch.device) -> Data:
        """Return these data with a fetch that puts the rows on another device."""
        if device.type == "cpu":
            return self
        moved = Quiet(lambda rows: tree_map_only(Tensor, lambda leaf: leaf.to(device), self.fetch(rows)))
        return replace(self, fetch=moved)


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
) -> Data:
    """Make any map-style data usable: ``wrap(X, y)``, ``wrap(dataset)`` or ``wrap(frame, label="ill", ...)``.

    Args:
      data: array, tensor or DataFrame (with ``targets``), a pair (X, y), or a torch Dataset of (input, target);
        an input may be a tensor, a tuple (the model's arguments) or a dict (its keyword arguments).
      targets: one target per row when ``data`` holds inputs only: a class (whole numbers or names), a real number
        (floats), one column of 0 and 1 per label where a record may have several, or tokens (other whole numbers in
        several columns); or, for a Dataset that yields dicts, the key of the target.
      groups: one name per row: who is reported, and what group rules see.
      owners: one name per row: the budget class of the record. Default: one class called "all".
      labels: the label values, declared public; with several labels per record, the names of the columns. Default:
        those in the data, which the plan then prints as a fact.
      group_names: the group names, declared public. Default: those in the data, printed likewise.
      label: the column of a DataFrame (pandas or polars) to predict; then ``groups`` and ``owners`` name columns too.
      numbers: public bounds by column, ``{"age": (0, 120)}``; only declared columns are features.
      categories: public values by column, ``{"sex": ["f", "m"]}``.
      missing_tokens: cells of a DataFrame that mean "no value".
      ordered: the labels have an order, from the lowest to the highest: errors are then measured in ranks too.
      keep_together: one name per row (or a column of a DataFrame), such as the person: records with the same name are
        all trained on or all held out. It changes splits only: the promise is still about one record.

    Examples:
      >>> import numpy as np
      >>> data = wrap(np.zeros((4, 2)), [0, 1, 0, 1], groups=["a", "a", "b", "b"])
      >>> data.facts.records, data.facts.groups
      (4, ('a', 'b'))
    """
    if isinstance(data, Data):
        if any(given is not None for given in (targets, groups, owners, keep_together)):
            raise DataError("These data are wrapped already: pass groups, owners and so on to the first wrap.")
        return data
    refuse_foreign(data)
    if label is not None:
        from evenhand.data.frames import wrap_frame

        declared: dict[str, Any] = {"numbers": numbers, "categories": categories, "missing_tokens": missing_tokens}
        declared["keep_together"] = _one_column(keep_together, "keep_together")
        return wrap_frame(data, label, labels=labels, groups=groups, owners=_one_column(owners), **declared)
    if numbers is not None or categories is not None:
        raise DataError("numbers= and categories= are about a DataFrame: name the column to predict, label='ill'.")
    if targets is None and isinstance(data, tuple | list) and len(data) == 2:
        data, targets = data
    if targets is None or isinstance(targets, str):
        count, fetch, names, shape = _from_dataset(data, targets)
        names = names if labels is None else tuple(map(str, labels))
    else:
        count, fetch, names, shape = _from_arrays(data, targets, labels)
    group, group_list = coded(groups, group_names, count, "groups")
    owner, owner_list = coded(owners, None, count, "owners")
    sizes = torch.bincount(owner, minlength=len(owner_list)).tolist()
    read_off = {"labels": bool(names) and labels is None, "groups": groups is not None and group_names is None}
    facts = Facts(
        records=count,
        owners=tuple(zip(owner_list, sizes, strict=True)),
        groups=group_list,
        labels=names,
        inputs=shape,
        derived=tuple(name for name, undeclared in read_off.items() if undeclared),
        ordered=ordered and bool(names),
    )
    together = None if keep_together is None else kept_together(keep_together, count)
    return Data(facts=facts, group=group, owner=owner, fetch=fetch, together=together)


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
        raise DataError(f"There are {count} records but {len(column)} names to keep together: pass one per record.")
    missing = sum(value is None or value != value or value == "" for value in column)
    if missing:
        raise DataError(
            f"{missing} record(s) have no name to be kept together by: give every record one, for example its number."
        )
    digests = [hashlib.blake2b(str(value).encode("utf-8", "replace"), digest_size=8).digest() for value in column]
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64))


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
            "An IterableDataset has no rows to sample from: give a map-style Dataset with a length."
        )


def _from_arrays(inputs: Any, targets: Any, labels: Sequence[Any] | None) -> tuple[int, Any, tuple[str, ...], str]:
    features = _tensor(inputs, "inputs")
    if features.dtype in (torch.float64, torch.float16, torch.bfloat16):
        features = features.float()
    codes, names = _targets(targets, labels)
    if features.ndim == 0 or features.shape[0] == 0:
        raise DataError("There are no records: pass at least one row.")
    if features.shape[0] != codes.shape[0]:
        raise DataError(f"There are {features.shape[0]} inputs but {codes.shape[0]} targets: pass one target per row.")

    def fetch(rows: Tensor) -> tuple[Tensor, Tensor]:
        return features[rows], codes[rows]

    kind = str(features.dtype).removeprefix("torch.")
    return features.shape[0], Quiet(fetch), names, f"{tuple(features.shape[1:])} {kind}"


def _from_dataset(dataset: Any, key: str | None) -> tuple[int, Any, tuple[str, ...], str]:
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} cannot be read as data: pass (X, y), a DataFrame with targets, or a "
            "map-style torch Dataset that yields (input, target)."
        )
    if len(dataset) == 0:
        raise DataError("There are no records: the dataset has length 0.")

    def nothing() -> tuple[Any, Any]:
        return empty[0], empty[1]

    fetch = Guarded(lambda index: _pair(dataset[index], key), _collated, nothing)
    empty = tuple(_empty(part) for part in fetch(torch.arange(1)))
    return len(dataset), fetch, (), f"items of {type(dataset).__name__}"


def _pair(item: Any, key: str | None) -> tuple[Any, Any]:
    if key is not None and isinstance(item, dict) and key in item:
        return {name: value for name, value in item.items() if name != key}, item[key]
    if key is not None or not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            "The dataset must yield pairs (input, target), or dicts whose target is named: wrap(dataset, 'labels'). "
            "This one yields something else."
        )
    return item[0], item[1]


def _collated(pairs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    inputs, targets = default_collate(pairs)
    return (tuple(inputs) if isinstance(inputs, list) else inputs), targets


def _empty(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _empty(value) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(_empty(value) for value in part)
    return part[:0]


def _tensor(values: Any, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"The {name} contain something that is not a number (or rows of different length): give a "
            "rectangular numeric array; encode text columns first."
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def _targets(targets: Any, labels: Sequence[Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return class codes 0..K-1 and the class names; floats stay as they are (regression), without names.

    Several columns of 0 and 1 are labels, of which a record may have any; other whole numbers in columns are tokens.
    """
    values = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else np.asarray(targets)
    if values.ndim == 2 and values.dtype.kind in "fiub" and values.shape[1] > 1:
        if labels is not None or bool(np.isin(values, (0, 1)).all()):
            return _several(values, labels)
        if values.dtype.kind != "f":
            return torch.from_numpy(values.astype(np.int64)), ()
    if values.dtype.kind == "f":
        if labels is not None:
            raise DataError(
                "Targets are real numbers but labels were declared: pass whole numbers or names as targets."
            )
        return torch.from_numpy(values.astype(np.float32)), ()
    if values.ndim != 1:
        raise DataError("Targets must be one column (one class per record), or one column of 0 and 1 per label.")
    codes, names = coded(values.tolist(), labels, values.shape[0], "targets")
    return codes, names


def _several(values: Any, labels: Sequence[Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return one column of 0.0 and 1.0 per label, and the names of the labels."""
    names = tuple(map(str, range(values.shape[1]) if labels is None else labels))
    if len(names) != values.shape[1] or len(set(names)) != len(names):
        raise DataError(
            f"There are {values.shape[1]} columns of targets and {len(names)} labels: declare one name per column, all "
            "different."
        )
    if not bool(np.isin(values, (0, 1)).all()):
        raise DataError("Some targets are neither 0 nor 1: with several labels per record, 1 says that it has one.")
    return torch.from_numpy(values.astype(np.float32)), names


def coded(
    values: Iterable[Any] | None, declared: Sequence[Any] | None, count: int, what: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the codes 0..K-1 of one name per record, and the names, in the declared order or sorted."""
    if values is None:
        return torch.zeros(count, dtype=torch.long), ("all",)
    column = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
    if len(column) != count:
        raise DataError(f"There are {count} records but {len(column)} {what}: pass one per record.")
    if any(value is None or value != value for value in column):
        raise DataError(f"Some {what} are missing: give every record one, for example the name 'unknown'.")
    names = tuple(sorted(set(column), key=_order) if declared is None else declared)
    if declared is None and what != "owners" and len(names) > UNDECLARED:
        raise DataError(
            f"There are more than {UNDECLARED} different {what}, and their values would be printed as public facts: "
            "declare them with labels= or group_names=, or pass real numbers (floats) as targets for regression."
        )
    index = {str(name): position for position, name in enumerate(names)}
    try:
        codes = [index[str(value)] for value in column]
    except KeyError:
        raise DataError(
            f"Some {what} are not among the declared ones: declare all of them, or correct the data."
        ) from None
    return torch.tensor(codes, dtype=torch.long), tuple(map(str, names))


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
