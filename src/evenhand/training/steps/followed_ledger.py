"""The ledger as a process sees it that follows another one: what is charged there, and nothing of its own to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenhand.runs.ledger import Ledger


class FollowedLedger(Ledger):
    """A ledger that says what process 0 has charged. It writes nothing: every row is written there first.

    ``reserved`` is set to what process 0 says, once it is on disk there.

    Examples:
      >>> ledger = FollowedLedger({"reserved": 3, "steps": 10, "segment": 1, "block": 64})
      >>> ledger.blocked(3, "records")
      >>> ledger.reserved, ledger.is_blocked, ledger.closed
      (3, True, False)
    """

    def __init__(self, state: Mapping[str, int]) -> None:
        self.reserved, self.steps = state["reserved"], state["steps"]
        self.segment, self.block = state["segment"], state["block"]
        self._head, self._blocked, self._over = "", False, False
        self.files, self.counts, self.counts_lost = {}, None, False

    @staticmethod
    def state_of(ledger: Ledger) -> dict[str, int]:
        """Return what the others are told of the ledger that process 0 writes."""
        return {name: getattr(ledger, name) for name in ("reserved", "steps", "segment", "block")}

    @property
    def closed(self) -> bool:
        """Return whether this process has left the run."""
        return self._over

    def sync(self) -> None:
        """Do nothing: process 0 writes."""

    def close(self) -> None:
        """Leave the run."""
        self._over = True

    def _append(self, row: Mapping[str, Any], before: bytes = b"") -> None:
        """Write nothing: process 0 does."""
