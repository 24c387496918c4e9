"""Say what the steps charged so far have spent, per owner, and what the whole plan spends."""

from __future__ import annotations

from collections.abc import Iterable

from evenhand.accounting.plan import Plan
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger


class Spent:
    """The epsilon of the steps that the ledger has charged, computed once for every charge.

    Guarantee:
      Never below what the released values of this run have spent: a step is charged before its rows are drawn, and the
      prior that a plan names counts from the start, whether or not it was released. None where no epsilon holds: no
      privacy, no proof, or a run that was blocked.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan, self._ledger = plan, ledger
        self._known: tuple[int, tuple[float | None, ...]] = (-1, ())

    def by_owner(self) -> dict[str, float | None]:
        """Return epsilon so far by the name of the owner class."""
        if self._ledger.is_blocked:
            return dict.fromkeys(self._plan.facts.owner_names)
        charged = self._ledger.reserved
        if self._known[0] != charged:
            self._known = charged, self._plan.spent_by_owner(charged)
        return dict(zip(self._plan.facts.owner_names, self._known[1], strict=True))

    def planned(self) -> dict[str, float | None]:
        """Return the epsilon of the whole plan by the name of the owner class."""
        epsilons = (None,) * len(self._plan.epsilons) if self._ledger.is_blocked else self._plan.epsilons
        return dict(zip(self._plan.facts.owner_names, epsilons, strict=True))


def largest(epsilons: Iterable[float | None]) -> float | None:
    """Return the largest epsilon that is known; None if there is none.

    Examples:
      >>> largest([1.0, 3.0]), largest([None])
      (3.0, None)
    """
    return max((epsilon for epsilon in epsilons if epsilon is not None), default=None)


def how_to_go_on(plan: Plan, ledger: Ledger, folder: Folder) -> str:
    """Return what is charged, and what to type to go on, for a run in several processes that stopped."""
    return (
        f"{ledger.reserved} of {plan.steps} steps are charged and stay charged. Go on, with any number of processes: "
        f"evenhand resume {folder.path}"
    )
