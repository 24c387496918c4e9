"""Charge steps in blocks before they run, and record what they used afterwards."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from evenhand.runs.ledger import BLOCK, Ledger
from evenhand.types import Commit

TIMED = 7
BLOCK_SECONDS = 0.3
"""Reserved blocks cover about this much work: an interrupt waits for the block, a crash loses at most this."""
LOST = 10
"""A crash loses at most one part in so many of the plan's steps; a block is at most half of that, or one step."""


class Recorder:
    """Charge blocks of steps before they run, and record what equal steps used as one row."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._times: list[float] = []
        self._commits: list[Commit] = []
        self._counts: list[int] = []
        self._used: tuple[Any, ...] = ()

    def charge(self, remaining: int, least: int = 0) -> None:
        """Charge the next block, durable on return: one step at first, then one power of two for the whole segment.

        A block has at least ``least`` steps where that is no more than a crash may lose.

        A block that followed the pace closely would tell in a shareable file how long single batches took. Three of the
        first seven steps also compare the engine with autograd, so that their median is a usual step.
        """
        block, most = 1, max(1, self.ledger.steps // (2 * LOST))
        if len(self._times) == TIMED:
            block = 2 ** max(0, round(math.log2(BLOCK_SECONDS / max(statistics.median(self._times), 1e-6))))
        block = max(block, least)
        self.ledger.reserve(max(1, min(BLOCK, block, 2 ** int(math.log2(most)), remaining)))

    def add(self, commit: Commit, seconds: float) -> None:
        """Note what a step used and how long it took; in memory until ``flush``."""
        if len(self._times) < TIMED:
            self._times.append(seconds)
        used = commit.sensitivity, commit.std, commit.queries
        if used == self._used and self._commits:
            self._counts[-1] += commit.count
        else:
            self._used = used
            self._commits.append(commit)
            self._counts.append(commit.count)

    def flush(self) -> None:
        """Write what was noted to the ledger as ``commit`` rows; not synced."""
        if self._commits:
            noted = zip(self._commits, self._counts, strict=True)
            self.ledger.commit([replace(commit, count=count) for commit, count in noted])
            self._commits, self._counts = [], []
