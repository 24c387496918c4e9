"""Objects that are saved with every checkpoint of a run, beside model and optimizer."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """An object that is saved and restored with model and optimizer: a learning-rate schedule, an average."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors and plain values only."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from a state."""
