"""Noisy sums on disk: each is in the run's private part before anything is made of it, so that a crash loses none.

A run that died goes on with those that are there, at no further charge: what is computed from released sums is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from evenhand.accounting.plan import Plan
from evenhand.errors import BudgetExhausted, UsageError
from evenhand.methods.density_methods import DENSITIES
from evenhand.runs.folder import Folder, write_durably

_NOISY = "noisy"


@dataclass(frozen=True)
class Sums:
    """The noisy sums of one run folder, by the number of their release."""

    folder: Folder

    def write(self, position: int, noisy: Tensor, beside: Mapping[str, Tensor]) -> None:
        """Put a release on disk, with public values that belong to it; durable on return."""
        from safetensors.torch import save

        write_durably(self._file(position), save({_NOISY: noisy.contiguous(), **beside}))

    def read(self, position: int) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return a release and what belongs to it, None if it is not on disk."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = self._file(position)
        if not file.exists():
            return None
        try:
            found = load(file.read_bytes())
            return found.pop(_NOISY), found
        except (SafetensorError, KeyError):
            raise UsageError(f"private/{file.name} is damaged or was exchanged: this density cannot go on.") from None

    def refuse_lost(self, plan: Plan, charged: int) -> None:
        """Raise where a release was charged whose noisy sum is not on disk: it can never be made again."""
        lost = next((step for step in range(charged) if not self._file(step).exists()), None)
        if lost is not None:
            names = DENSITIES[plan.method].releases
            raise BudgetExhausted(
                f"This density died after its release {lost + 1} of {plan.steps} ({names[lost - plan.steps]}) was "
                "charged and before the noisy sum was on disk: the sum is lost, what it cost stays spent, and the "
                "folder cannot be finished. Train again with another --out; both budgets add up."
            )

    def forget(self) -> None:
        """Remove the sums, once the model that was made of them is out."""
        for file in self.folder.private.glob("release-*.safetensors"):
            file.unlink()

    def _file(self, position: int) -> Path:
        return self.folder.private / f"release-{position}.safetensors"
