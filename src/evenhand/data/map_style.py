"""Reads map-style datasets: one record at a time or several, collated into batches whose rows are the records.

What is asked of every batch, whoever reads and collates it: one row per record, in their order, and rows that do not
depend on which other records are fetched, in their shape neither. Rows padded to the longest record of a batch would
let one long record change the gradients of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import Dataset, default_collate

from evenhand.data.record_seeds import Guarded
from evenhand.errors import DataError
from evenhand.model_io import Shared, plain

Rows: TypeAlias = tuple[Any, Any]
"""Inputs and targets of some records."""
Collate: TypeAlias = Callable[[list[Any]], Any]
COMPARED = 8
"""Records that are read alone and together before anything is spent."""
RAGGED = (
    "records have different shapes. Pad every record to one declared length, for example "
    "collate_fn=eh.data.Pad(128, {'input_ids': 0, 'attention_mask': 0}), PrivateTrainer(max_length=128), or "
    "padding='max_length' of a tokenizer: rows padded to the longest of a batch depend on it, so that one record could "
    "change the gradients of others"
)
_TARGETS = {"label": "labels", "label_ids": "labels"}
"""Collate functions of transformers call the target so, whatever its column was called."""


def from_dataset(dataset: Any, key: str | None, collate_fn: Collate | None, shared: Mapping[str, Any]) -> Guarded:
    """Return how records of a map-style dataset are read; ``key`` names the target where they are dicts.

    ``__getitems__`` reads several at once, unless it draws random numbers: then each record is read alone, with a seed
    of its own.
    """
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} cannot be read as data: pass (X, y), a DataFrame with targets, or a "
            "map-style torch Dataset that yields (input, target)."
        )
    if len(dataset) == 0:
        raise DataError("There are no records: the dataset has length 0.")

    def collated(items: list[Any]) -> Rows:
        if collate_fn is None:
            return stacked([pair(item, key) for item in items])
        return split(collate_fn(items), key)

    batched = getattr(dataset, "__getitems__", None)
    together = None if not callable(batched) else (lambda numbers: collated(_as_many(batched(numbers), len(numbers))))
    return checked(dataset.__getitem__, collated, together, len(dataset), shared, compared=collate_fn is not None)


def checked(
    record: Callable[[int], Any],
    collate: Callable[[list[Any]], Rows],
    together: Callable[[list[int]], Rows] | None,
    count: int,
    shared: Mapping[str, Any],
    *,
    compared: bool,
) -> Guarded:
    """Return a fetch whose batches have one row per record and always the same shapes.

    The first few records are read alone and, if they can be read together or are ``compared`` anyway, together. Where
    their rows differ, they are always read alone, or refused if they are ``compared``.

    Raises:
      DataError: they are not, or rows are missing, or records have different shapes.
    """
    known: list[Any] = []

    def whole(batch: Rows, size: int) -> Rows:
        inputs, targets = plain(batch[0]), plain(batch[1])
        if shared:
            inputs = _with_shared(inputs, shared)
        _check_rows((inputs, targets), size, known)
        return inputs, targets

    def nothing() -> Rows:
        return empty

    fetch = Guarded(
        record,
        lambda items: whole(collate(items), len(items)),
        nothing,
        None if together is None else (lambda numbers: whole(together(numbers), len(numbers))),
    )
    few = list(range(min(COMPARED, count)))
    first = fetch(torch.tensor(few if compared or together is not None else few[:1]))
    empty = _no_rows(first[0]), _no_rows(first[1])
    if fetch.draws or (together is None and not compared):
        return fetch  # records that differ from one reading to the next are told by their fingerprint
    if all(_same(fetch(torch.tensor([number])), first, number) for number in few[: _rows(first)]):
        return fetch
    if not compared:
        return checked(record, collate, None, count, shared, compared=False)
    raise DataError(
        "Reading records together gives other rows than reading each alone: collate_fn or the dataset drops, reorders "
        "or mixes records, or draws from a generator of its own. Let every record's row depend on that record only, in "
        "the order they were asked for; random transforms go into augment=."
    )


def pair(item: Any, key: str | None) -> Rows:
    """Return input and target of one record; ``key`` names the target of a dict.

    Examples:
      >>> pair({"x": 1, "y": 0}, "y"), pair((1, 0), None)
      (({'x': 1}, 0), (1, 0))
    """
    if key is not None and isinstance(item, Mapping) and key in item:
        return {name: value for name, value in item.items() if name != key}, item[key]
    if key is not None or not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            "The dataset must yield pairs (input, target), or dicts whose target is named: wrap(dataset, 'labels'). "
            "This one yields something else."
        )
    return item[0], item[1]


def stacked(pairs: list[Rows]) -> Rows:
    """Return records as one batch, by torch's default; raise if they have different shapes.

    Examples:
      >>> stacked([({"x": torch.ones(2)}, 0), ({"x": torch.ones(2)}, 1)])[1]
      tensor([0, 1])
    """
    try:
        inputs, targets = default_collate(pairs)
    except (RuntimeError, TypeError, ValueError, KeyError):
        inputs = None
    if inputs is None:
        raise DataError(f"The records do not fit into one batch: they hold something else than numbers, or {RAGGED}.")
    return inputs, targets


def split(batch: Any, key: str | None, known: Tensor | None = None) -> Rows:
    """Return inputs and targets of a batch that a collate function made; ``key`` names the target of a Mapping.

    A collate function may leave out targets that are ``known`` anyway.

    Examples:
      >>> split({"input_ids": torch.ones(2, 3), "labels": torch.zeros(2)}, "label")[1]
      tensor([0., 0.])
    """
    if isinstance(batch, Mapping):
        name = key if key in batch or "labels" not in batch else _TARGETS.get(key or "", key)
        if known is not None and name not in batch:
            return dict(batch), known
        if name is None or name not in batch:
            shown = ", ".join(map(repr, batch))
            raise DataError(
                f"collate_fn returned a dict with {shown} and no target: name the one that is the target, for example "
                "wrap(dataset, label='labels')."
            )
        return {other: value for other, value in batch.items() if other != name}, batch[name]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError("collate_fn must return (inputs, targets), or a dict in which label= names the target.")
    return batch[0], batch[1]


def _as_many(items: Any, count: int) -> list[Any]:
    several: list[Any] = list(items)
    if len(several) != count:
        raise DataError(
            f"__getitems__ returned {len(several)} records for {count}: it must return one for each number."
        )
    return several


def _with_shared(inputs: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(inputs, dict):
        raise DataError("shared= names arguments of the model, so the other inputs need names too: yield dicts.")
    twice = sorted(inputs.keys() & shared.keys())
    if twice:
        raise DataError(f"{twice[0]!r} is an input of every record and in shared= too: leave one of them out.")
    return {**inputs, **{name: Shared(value) for name, value in shared.items()}}


def _check_rows(batch: Rows, size: int, known: list[Any]) -> None:
    """Raise unless every tensor has ``size`` rows, and rows have the shapes of the first batch, put into ``known``."""
    leaves, structure = tree_flatten(batch)
    names = _names(batch)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Shared):
            continue
        if not isinstance(leaf, Tensor):
            raise DataError(
                f"{name} is a {type(leaf).__name__}, not a tensor: leave text and other columns out, or make numbers "
                "of them; what all records share goes into shared={...}."
            )
        if not leaf.dim() or leaf.shape[0] != size:
            got = leaf.shape[0] if leaf.dim() else "no"
            raise DataError(
                f"{name} has {got} row(s) for {size} record(s): every tensor needs one row per record, in their order. "
                "What all records share (position ids, a mask) goes into shared={'name': tensor}, not into the batch."
            )
    layout = structure, [None if isinstance(leaf, Shared) else leaf.shape[1:] for leaf in leaves]
    if not known:
        known.append(layout)
    elif layout != known[0]:
        raise DataError(f"A batch cannot be used, since {RAGGED}.")


def _names(batch: Rows) -> list[str]:
    """Return a name for every tensor of a batch, as its owner would call it."""
    inputs, targets = batch
    if isinstance(inputs, dict):
        names = [f"The input {name!r}" for name, value in inputs.items() for _ in tree_leaves(value)]
    else:
        names = ["The input"] * len(tree_leaves(inputs))
    return names + ["The target"] * len(tree_leaves(targets))


def _no_rows(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _no_rows(value) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(_no_rows(value) for value in part)
    return part if isinstance(part, Shared) else part[:0]


def _rows(batch: Rows) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _same(alone: Rows, every: Rows, row: int) -> bool:
    """Return whether a record that was read alone is equal to this row of a batch."""
    pairs = [
        (one[0], many[row])
        for one, many in zip(tree_leaves(alone), tree_leaves(every), strict=True)
        if isinstance(one, Tensor)
    ]
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)
