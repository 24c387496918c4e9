"""Records that are exact copies of others: each counts as a record of its own, so who is copied is protected less."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from evenhand.data.dataset import Data
from evenhand.terminal import say

FIRST, CHUNK = 64, 4096
SECONDS = 1.0
"""Data that take longer to read are not looked through."""
SHARE, TIMES = 0.01, 4.0
"""Copies are named from this share of the records on, and above this many times what chance explains."""
ROWS, COLUMNS = 2048, 256


def copies(data: Data, seconds: float = SECONDS) -> int | None:
    """Count the records whose inputs equal an earlier record's; None where they take too long to read.

    The count depends on private records: it is for the trainer's eyes and must not get into a file that is shared.

    Examples:
      >>> from evenhand.data import wrap
      >>> copies(wrap(torch.tensor([[1.0], [2.0], [1.0]]), [0, 1, 1]))
      1
    """
    began, found, start, size = time.perf_counter(), [], 0, FIRST
    while start < len(data):
        if time.perf_counter() - began > seconds:
            return None
        found.append(_digests(data, torch.arange(start, min(start + size, len(data)))))
        start, size = start + size, min(2 * size, CHUNK)
    return len(data) - len(np.unique(np.concatenate(found)))


def warning(data: Data) -> str | None:
    """Tell the trainer of more copies than chance explains, and what they mean; None if there are not.

    Few columns make honest twins: in a table of age and sex almost every record has one. How many to expect is judged
    by how often two records agree in each column, as if half of the columns told nothing new.
    """
    count = copies(data)
    if count is None or count < max(2.0, SHARE * len(data)) or count <= TIMES * _expected(data):
        return None
    return (
        f"{count} of the {len(data)} training records have exactly the inputs of an earlier one, more than chance "
        "explains. If they are copies (oversampling, joined files), each counts as a record of its own: the promise to "
        "one record does not cover who is in k of them, whose epsilon is up to k times as large. Take copies out and "
        "weigh groups through the method instead. This line is for you and stands in no file."
    )


def tell(data: Data) -> None:
    """Print the warning to the trainer's terminal, if there is one."""
    found = warning(data)
    if found is not None:
        say(f"evenhand: {found}")


def _columns(data: Data, rows: torch.Tensor) -> list[NDArray[np.uint8]]:
    """Every input tensor as one row of bytes per record."""
    leaves = [leaf.detach().cpu().contiguous() for leaf in tree_leaves(data.fetch(rows)[0]) if leaf.numel()]
    return [leaf.view(len(rows), -1).view(torch.uint8).numpy() for leaf in leaves]


def _digests(data: Data, rows: torch.Tensor) -> NDArray[np.int64]:
    """A 64-bit sum of the bytes of each record, with fixed odd weights: equal for equal records."""
    total = np.zeros(len(rows), dtype=np.int64)
    generator = np.random.default_rng(0)
    for part in _columns(data, rows):
        padded = np.zeros((len(rows), -(-part.shape[1] // 8) * 8), dtype=np.uint8)
        padded[:, : part.shape[1]] = part
        words = padded.view(np.int64)
        weights = generator.integers(-(2**62), 2**62, words.shape[1], dtype=np.int64) * 2 + 1
        words = words ^ (words >> 29)
        total += words @ weights
    return total


def _expected(data: Data) -> float:
    """Twins among honest records, judged generously: pairs times the square root of the product over columns."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(data), generator=generator)[:ROWS].sort().values
    agree = 0.0
    for leaf in tree_leaves(data.fetch(rows)[0]):
        flat = leaf.detach().cpu().reshape(len(rows), -1)
        chosen = torch.randperm(flat.shape[1], generator=generator)[:COLUMNS]
        for column in flat[:, chosen].numpy().T:
            counts = np.unique(column, return_counts=True)[1]
            agree += math.log(float((counts / len(rows)) @ (counts / len(rows))))
    return float(len(data)) ** 2 / 2 * math.exp(agree / 2)
