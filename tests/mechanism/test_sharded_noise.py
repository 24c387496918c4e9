"""Noise that several processes add to slices of one gradient is the noise that one process adds to the whole."""

from __future__ import annotations

import pytest
import torch

from evenhand.mechanism.add_noise import release
from evenhand.mechanism.random_streams import Stream

SIZE, STD, SPACING, STEP = 5_000, 1.3, 2.0**-20, 4
TOTAL = torch.sin(torch.arange(SIZE, dtype=torch.float64) ** 1.3)
STREAM = Stream.insecure(3, 0)


def in_slices(edges: list[int], offsets: list[int]) -> torch.Tensor:
    """Each slice noised by itself, at an offset of its own."""
    parts = [
        release(TOTAL[start:stop], STD, SPACING, STREAM, "gradient", STEP, offset, 64.0)
        for start, stop, offset in zip(edges, edges[1:], offsets, strict=False)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("edges", [[0, 2_500, SIZE], [0, 1, 1_023, 1_025, 4_999, SIZE], list(range(0, SIZE + 1, 40))])
def test_slices_are_noised_as_the_whole_is(edges: list[int]) -> None:
    whole = release(TOTAL, STD, SPACING, STREAM, "gradient", STEP, 0, 64.0)
    assert torch.equal(in_slices(edges, edges), whole)


def test_slices_at_wrong_offsets_are_told_from_the_whole() -> None:
    whole = release(TOTAL, STD, SPACING, STREAM, "gradient", STEP, 0, 64.0)
    assert not torch.equal(in_slices([0, 2_500, SIZE], [0, 0]), whole), "noise that is used twice"
    assert not torch.equal(in_slices([0, 2_500, SIZE], [0, 2_501]), whole), "a gap"
