"""That a run stays on its records, and that the dataset ledger counts it: also after its folder was copied or moved.

A run folder holds a secret hash of its records and a random name. The dataset ledger remembers, by that name, the head
of the run's ledger when it was last seen. A copy that goes on has other rows from there on, so that it is noticed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from evenhand import untrusted
from evenhand.accounting.plan import Plan
from evenhand.data import duplicate_rows
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import identity
from evenhand.data.row_digests import survey
from evenhand.datasets import DatasetLedger, at_least
from evenhand.errors import PlanMismatchError
from evenhand.runs import Folder, write_durably, write_json


def hold(folder: Folder, data: Data) -> str:
    """The run's random name. Before the first charge it notes which records these are; later others are refused.

    Raises:
      PlanMismatchError: other records, another order, or other owners than the run was started with: what was charged
        for one record would be counted for another.
    """
    records = identity(data)
    if not folder.records_file.exists():
        write_json(folder.records_file, {"records": records, "run": secrets.token_hex(16)})
        write_durably(folder.rows_file, survey(data).to_bytes())
    held = untrusted.read_json(folder.records_file, {"records": str, "run": str}, largest=untrusted.SMALL)
    if held["records"] != records:
        raise PlanMismatchError(
            "These are not the records that this run was started on, or their order or their owners changed, or a "
            "library reads them in another way by now: what was charged could count for the wrong records. Pass the "
            "data it was started with; nothing was spent. If you know that they are the same, delete "
            "private/records.json in the run folder: the run then counts once more."
        )
    return str(held["run"])


@dataclass
class Counting:
    """What a run in training does so that it is counted: ``begin`` before rows are drawn, ``follow`` before a release.

    With ``compose`` False nothing is counted, and the statement says so.
    """

    folder: Folder
    plan: Plan
    compose: bool
    _seen: Data | None = field(default=None, init=False)
    _counted: tuple[str, DatasetLedger] | None = field(default=None, init=False)

    def begin(self, data: Data) -> None:
        """Refuse other records than before, then see that the run is counted."""
        if self._seen is data:
            return
        run, before = hold(self.folder, data), self.folder.composition()
        if not self.folder.ledger().reserved:
            duplicate_rows.tell(data)
        if before is None and not self.compose:
            before = {"runs": None}
            write_json(self.folder.composition_file, before)
        if before is None or before["runs"] is not None:
            self._counted = run, DatasetLedger.of(data, tuned=bool((before or {}).get("tuned")))
            self.follow()
        self._seen = data

    def follow(self) -> None:
        """Enter the run if it is new, unknown here, or a copy of it went on since it was last seen."""
        if self._counted is None:
            return
        (run, ledger), reading, before = self._counted, self.folder.ledger(), self.folder.composition()
        if before is None or not ledger.knows(run, reading):
            write_json(self.folder.composition_file, at_least(ledger.enter(self.plan, run=run), before))
        ledger.note(run, reading)
