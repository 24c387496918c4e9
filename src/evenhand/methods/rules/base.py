"""The interface of a rule: scalars in, one weight per record out, and how far one record can move the weighted sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from evenhand.types import Facts, Guarantee, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


class Rule(ABC):
    """Common part of sample rules and batch rules. Subclass one of those two, never this."""

    kind: ClassVar[str] = "rule"
    name: ClassVar[str]
    reference: ClassVar[str] = ""
    guarantee: ClassVar[Guarantee] = "not established"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the side queries whose answers this rule reads."""
        return ()

    @abstractmethod
    def sensitivity(self, state: State) -> Tensor:
        """Return the largest change of the weighted sum by one record, per owner class, as ``state.bound``."""

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """Return the memory before the first step, from public facts only."""
        return {}

    def advance(self, state: State) -> Mapping[str, Any]:
        """Return the memory for the next step, from this step's noisy answers only."""
        return state.memory


class SampleRule(Rule):
    """A rule whose weight depends on its own row only.

    Formal guarantees:
      The step calls ``weight`` on each row alone (under vmap) and projects ``0 <= weight * norm <= sensitivity`` of the
      row's owner class, so adding or removing one record moves the weighted sum by at most that sensitivity whatever
      ``weight`` returns: by construction.
    """

    guarantee: ClassVar[Guarantee] = "by construction"

    @abstractmethod
    def weight(self, row: Stats, state: State) -> Tensor:
        """Return the weight of one record. Use torch.where and arithmetic only: no ``if``, no ``.item()``."""


class BatchRule(Rule):
    """A rule whose weights depend on the whole batch: needs docs/proofs/<name>.md and the sensitivity search."""

    @abstractmethod
    def weights(self, stats: Stats, state: State) -> Tensor:
        """Return one weight per row of ``stats``."""
