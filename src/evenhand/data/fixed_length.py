"""Pads sequences to one declared length, so that no record's row depends on how long the others are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenhand import _validate
from evenhand.errors import DataError, UsageError

IGNORED = -100
"""A target that counts for nothing: torch's cross-entropy and our metrics leave it out."""


@dataclass(frozen=True)
class Pad:
    """A collate function that pads every record to ``length`` places, whatever the batch.

    Args:
      length: declared length of every record, a public number.
      values: what fills the places after a record, by column: ``{"input_ids": 0, "attention_mask": 0}``. Other columns
        are stacked as they are.
      cut: leave out what is longer; otherwise a longer record is an error.
      next_of: the column of words whose next one is the target ("labels") of each place, for language models.

    Examples:
      >>> pad = Pad(4, {"input_ids": 0, "attention_mask": 0}, next_of="input_ids")
      >>> batch = pad([{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}])
      >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist()
      ([[5, 6, 7, 0]], [[1, 1, 1, 0]], [[6, 7, -100, -100]])
    """

    length: int
    values: Mapping[str, float]
    cut: bool = False
    next_of: str | None = None

    def __post_init__(self) -> None:
        _validate.whole(self.length, "length")
        if not isinstance(self.values, Mapping) or not self.values:
            raise UsageError("Pad needs what fills each column: Pad(128, {'input_ids': 0, 'attention_mask': 0}).")
        if self.next_of is not None and self.next_of not in self.values:
            raise UsageError(f"next_of={self.next_of!r} is no padded column: give it a value, and name it.")

    def __call__(self, records: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return one row per record, in their order."""
        missing = [name for name in self.values if any(name not in record for record in records)]
        if missing:
            raise DataError(f"There is no column {missing[0]!r} to pad: name columns that every record has.")
        batch = {name: torch.stack([self._row(name, record[name]) for record in records]) for name in records[0]}
        if self.next_of is not None:
            lengths = [min(len(record[self.next_of]), self.length) for record in records]
            batch["labels"] = next_words(batch[self.next_of], torch.tensor(lengths))
        return batch

    def _row(self, name: str, cell: Any) -> Tensor:
        try:
            tensor = torch.as_tensor(cell)
        except (TypeError, ValueError, RuntimeError):
            tensor = None
        if tensor is None:
            raise DataError(f"The column {name!r} holds no numbers: leave it out of inputs=.")
        return self._padded(name, tensor) if name in self.values else tensor

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.long() if not len(tensor) else tensor
        if len(tensor) > self.length and not self.cut:
            raise DataError(
                f"A record's {name!r} is longer than {self.length}, the declared length: declare a larger one, or "
                "Pad(..., cut=True) to leave out what is longer."
            )
        filled = tensor.new_full((self.length, *tensor.shape[1:]), self.values[name])
        filled[: len(tensor)] = tensor[: self.length]
        return filled


def next_words(words: Tensor, lengths: Tensor) -> Tensor:
    """Return the word after each place as its target; none (-100) after a record's last word and where it is padded.

    ``words`` is (record, place), ``lengths`` the number of words of each record.

    Examples:
      >>> next_words(torch.tensor([[5, 6, 0]]), torch.tensor([2])).tolist()
      [[6, -100, -100]]
    """
    places = torch.arange(words.shape[1], device=words.device)
    following = torch.cat([words[:, 1:], words.new_full((len(words), 1), IGNORED)], dim=1)
    return following.masked_fill(places + 1 >= lengths.to(words.device)[:, None], IGNORED)
