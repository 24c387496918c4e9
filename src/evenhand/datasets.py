"""The dataset ledger: every run on the same data, on this machine, so that tuning ten times counts as ten runs.

It lives outside the run folders, in ``EVENHAND_STATE`` (default: the user's state folder), is readable by its owner
only, and never decreases. A run is entered with its whole plan before its first charge.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from evenhand.errors import EvenhandError
from evenhand.plans import Plan
from evenhand.privacy import accountants
from evenhand.runs import write_json

SHOWN = 64
"""Up to so many owner classes each have their own total; with more there is one that covers the dearest of them."""
ANYONE = "any owner"


@dataclass(frozen=True)
class DatasetLedger:
    """All runs on one dataset, told by a secret name (see ``data.fingerprint``).

    Examples:
      >>> import os, tempfile, evenhand as eh
      >>> os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
      >>> plan = eh.plan("dpsgd", eh.Privacy(1, 1e-5), data=eh.data.wrap([[0.0]] * 99, [0, 1, 1] * 33).facts)
      >>> once, twice = (DatasetLedger("secret").enter(plan) for _ in range(2))
      >>> once["runs"], twice["runs"], twice["epsilons"]["all"] > 1.2 * once["epsilons"]["all"]
      (1, 2, True)
    """

    secret: str

    @property
    def folder(self) -> Path:
        """Where its entries are: the name is hashed once more, so that a listing tells nothing."""
        return state_folder() / "datasets" / hashlib.sha256(f"evenhand dataset {self.secret}".encode()).hexdigest()[:32]

    def enter(self, plan: Plan) -> dict[str, Any]:
        """Record that a run is about to start; returns how many there are now, and what they spend together.

        ``uncounted`` is how many of them have no established epsilon, such as plain SGD: they are in no total. Of a run
        whose budgets changed, the steps before are counted with the plan they began under, if that is here.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(str(self.folder / ".lock"), timeout=30):
                files = sorted(self.folder.glob("*.json"))
                number = int(files[-1].stem) + 1 if files else 0
                write_json(self.folder / f"{number:06d}.json", plan.to_json())
                plans = [Plan.from_json(json.loads(file.read_bytes())) for file in files] + [plan]
        except OSError as error:
            raise EvenhandError(
                f"The dataset ledger in {state_folder()} cannot be written ({error.strerror}), so runs on the same "
                "data could not be added up. Set EVENHAND_STATE to a folder of yours, or pass compose=False."
            ) from None
        known = {entry.digest for entry in plans if len(plans) > 1}
        plans = [entry.from_here() if entry.earlier and entry.earlier[-1].plan in known else entry for entry in plans]
        counted = [entry for entry in plans if entry.certified]
        names = plan.facts.owner_names if len(plan.facts.owners) <= SHOWN else (ANYONE,)
        epsilons = {name: _total(counted, name, plan.delta) for name in names}
        return {"runs": len(plans), "uncounted": len(plans) - len(counted), "epsilons": epsilons}


def _total(plans: list[Plan], name: str, delta: float) -> float:
    """Runs that do not know this owner class count with the class that they charged most."""
    return accountants.epsilon([event for plan in plans for event in plan.events(_index(plan, name))], delta)


def _index(plan: Plan, name: str) -> int:
    """The class of this name, or the dearest: classes of a plan differ in one number, so it covers every other one."""
    names = plan.facts.owner_names
    if name in names and name != ANYONE:
        return names.index(name)
    spent: Mapping[int, float] = {index: epsilon or 0.0 for index, epsilon in enumerate(plan.epsilons)}
    return max(spent, key=lambda index: spent[index])


def state_folder() -> Path:
    """Where things are kept that outlive a run: EVENHAND_STATE, or the user's state folder."""
    given = os.environ.get("EVENHAND_STATE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "evenhand"
