"""Between the steps and the ledger: how many steps are charged at once, and what they used, run by run."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from evenhand.privacy.ledger import BLOCK, Commit, Ledger

TIMED = 3
BLOCK_SECONDS = 0.3
"""Reserved blocks cover about this much work: an interrupt waits for the block, a crash loses at most this."""


class Recorder:
    """Charges blocks of steps ahead, and writes down what equal steps used as one row."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._times: list[float] = []
        self._commits: list[Commit] = []

    def charge(self, remaining: int) -> None:
        """Put the next block on disk: one step at first, then one power of two for the whole segment.

        A block that followed the pace closely would tell in a shareable file how long single batches took.
        """
        block = 1
        if len(self._times) == TIMED:
            block = 2 ** max(0, round(math.log2(BLOCK_SECONDS / max(statistics.median(self._times), 1e-6))))
        self.ledger.reserve(max(1, min(BLOCK, block, remaining)))

    def add(self, commit: Commit, seconds: float) -> None:
        """Note what a step used and how long it took."""
        self._times = [*self._times, seconds][:TIMED]
        last = self._commits[-1] if self._commits else None
        if last is not None and replace(commit, first=last.first, count=last.count) == last:
            self._commits[-1] = replace(last, count=last.count + 1)
        else:
            self._commits.append(commit)

    def flush(self) -> None:
        """Hand what was noted to the ledger."""
        if self._commits:
            self.ledger.commit(self._commits)
            self._commits = []
