"""The dataset ledger: every run on the same data, on this machine, so that tuning ten times counts as ten runs.

It lives outside the run folders, in ``EVENHAND_STATE`` (default: the user's state folder), is readable by its owner
only, and never decreases. A run is entered with its whole plan before its first charge.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from evenhand import durable, untrusted
from evenhand.accounting import accountant
from evenhand.accounting.gaussian_profile import Relation
from evenhand.accounting.plan import UNITS, Plan, Stage
from evenhand.data import record_checks
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import assignment, fingerprint, identity, survey
from evenhand.data.persons import refuse_beyond_cap
from evenhand.errors import EvenhandError, PlanMismatchError, StorageError, UsageError
from evenhand.runs import dataset_entries
from evenhand.runs.dataset_entries import Entry
from evenhand.runs.folder import Folder, as_json, write_durably, write_json
from evenhand.runs.ledger import Reading
from evenhand.runs.statement_warnings import insecure
from evenhand.types import Event

SHOWN = 64
"""Up to so many owner classes each have their own total; with more there is one that covers the dearest of them."""
ANYONE = "any owner"
_JOINED = "joined.json"
WHOLE, PERSON = UNITS["record"], UNITS["person"]
"""The units of a run that protects all of a record, and all records of a person."""


@dataclass(frozen=True)
class DatasetLedger:
    """All runs on one dataset, which is identified by a secret name (see ``data.fingerprint``).

    ``owners`` is a secret name of who owns which record. Owner classes of two runs are the same only where it is the
    same; otherwise every record counts with the class that was charged most, so that nobody is counted too low.
    ``tuned`` is noted with the count: settings were chosen by trials scored on these records.

    Examples:
      >>> import os, tempfile, evenhand as eh
      >>> os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
      >>> plan = eh.plan("dpsgd", eh.Privacy(1, 1e-5), data=eh.data.wrap([[0.0]] * 99, [0, 1, 1] * 33).facts)
      >>> once, twice = (DatasetLedger("secret").enter(plan) for _ in range(2))
      >>> once["runs"], twice["runs"], twice["epsilons"]["all"] > 1.2 * once["epsilons"]["all"]
      (1, 2, True)
    """

    secret: str
    owners: str | None = None
    tuned: bool = False

    @classmethod
    def of(cls, data: Data, *, tuned: bool = False) -> DatasetLedger:
        """Return the ledger of these data; ``tuned`` says, as ``data.tuned`` does, that trials chose the settings.

        Examples:
          >>> import evenhand as eh
          >>> train, test = eh.data.digits()
          >>> DatasetLedger.of(train).folder == DatasetLedger.of(test).folder
          True
        """
        return cls(fingerprint(data), assignment(data), tuned or data.tuned).current

    @property
    def folder(self) -> Path:
        """Return the folder of its entries; the name is hashed once more, so that a listing tells nothing."""
        return state_folder() / "datasets" / hashlib.sha256(f"evenhand dataset {self.secret}".encode()).hexdigest()[:32]

    def knows(self, runs: Sequence[tuple[str, Reading]]) -> list[bool]:
        """Return whether this copy of each run is counted here; if so, note how far it is now, durable on return.

        Copies and restored backups of a run folder have equal names and other later rows. One that goes on from where
        another went on before has none of the heads that were noted last, and must be counted once more.
        """
        with self._locked():
            known = [any(head in _rows(reading) for head in self._noted(run)["heads"]) for run, reading in runs]
            self._write([run for run, counted in zip(runs, known, strict=True) if counted])
        return known

    def note(self, runs: Sequence[tuple[str, Reading]]) -> None:
        """Note how far these copies of runs are, once they are counted; durable on return."""
        with self._locked():
            self._write(runs)

    def join(self, other: DatasetLedger) -> None:
        """Count the runs of another ledger here, since their records are shared; later ones are counted here as well.

        Durable on return. A crash on the way can only count runs twice.

        Examples:
          >>> import os, tempfile, evenhand as eh
          >>> os.environ["EVENHAND_STATE"] = tempfile.mkdtemp()
          >>> plan = eh.plan("dpsgd", eh.Privacy(1, 1e-5), data=eh.data.wrap([[0.0]] * 99, [0, 1, 1] * 33).facts)
          >>> for secret in ("one", "other"):
          ...     _ = DatasetLedger(secret).enter(plan)
          >>> DatasetLedger("one").join(DatasetLedger("other"))
          >>> DatasetLedger("other").enter(plan)["runs"]
          3
        """
        with other._locked(), self._locked():
            there = dataset_entries.read(other.folder)
            first = dataset_entries.read(self.folder).number + there.lost  # numbers left out count as lost runs
            for place, entry in enumerate(there.found, first):
                copied = replace(entry, seeded=entry.seeded or entry.run in there.open_to_all)
                durable.write(self.folder / f"{place:06d}.json", as_json(copied.to_json()))
            durable.make_folder(self._heads, private=True)
            for file in sorted(other._heads.glob("*.json")):
                durable.write(self._heads / file.name, untrusted.read_bytes(file))
            durable.write(other.folder / _JOINED, as_json({"joined": self.secret}), durable.PRIVATE)

    @property
    def current(self) -> DatasetLedger:
        """Return the ledger that this one was joined to, itself if it was not."""
        file = self.folder / _JOINED
        if not file.exists():
            return self
        return replace(self, secret=untrusted.read_json(file, {"joined": str})["joined"]).current

    def has(self, run: str) -> bool:
        """Return whether a run, or a copy of it, was ever counted here."""
        return bool(self._noted(run)["heads"])

    def _noted(self, run: str) -> dict[str, Any]:
        return dataset_entries.heads(self._heads / f"{run}.json")

    def _write(self, runs: Sequence[tuple[str, Reading]]) -> None:
        """Write one head for each copy that went on: this copy's head replaces the one that it continued."""
        durable.make_folder(self._heads, private=True)
        for run, reading in runs:
            noted, rows = self._noted(run), _rows(reading)
            heads = [*(head for head in noted["heads"] if head not in rows), reading.head]
            about = {"heads": heads, "seeded": noted["seeded"] or insecure(reading)}
            durable.write(self._heads / f"{run}.json", as_json(about))

    @property
    def _heads(self) -> Path:
        return self.folder / "heads"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            durable.make_folder(self.folder.parent, private=True, parents=True)
            durable.make_folder(self.folder, private=True)
            with durable.lock(self.folder / ".lock").acquire(timeout=30):
                durable.clean(self.folder, self._heads)
                yield
        except Timeout:
            raise EvenhandError(
                f"Another process has been writing to the dataset ledger in {state_folder()} for half a minute: try "
                "again; nothing was spent."
            ) from None
        except OSError as error:
            raise StorageError(
                f"The dataset ledger in {state_folder()} cannot be written ({error.strerror}), so runs on the same "
                "data could not be added up. Set EVENHAND_STATE to a folder of yours, or pass compose=False.",
                code=error.errno,
            ) from None

    def enter(
        self, plan: Plan, *, run: str | None = None, left: Plan | None = None, seeded: bool = False
    ) -> dict[str, Any]:
        """Record that a run is about to start; return how many runs there are now, and what they spend together.

        On return the entry is on disk. ``uncounted`` is how many runs are in no total: those without an established
        epsilon, such as plain SGD, earlier ones with a public noise seed (``seeded``), and those that protect only a
        part of a record where this run protects all of it; deleted entries count here too, as far as their numbers
        show. Where this run protects persons, runs that protect single records or other persons are in no total; where
        it protects records, all runs are counted for replacing one if some are by person: a person stays when one of
        their records goes; runs with a cap of records a person are in no total then. Of a run whose budgets changed,
        the steps before are counted with the plan they began under, if an entry of the same ``run`` has it. ``left`` is
        the plan of a run that this one was forked from: it counts in full, and is entered too if it is not here. No run
        is forgotten, whatever its owners were called.
        """
        return self.enter_all([Entry(plan, self.owners, seeded, run)], left=left)

    def enter_all(self, new: Sequence[Entry], *, left: Plan | None = None) -> dict[str, Any]:
        """Record that several runs are about to start together; return one count and total that covers all of them.

        Their plans have one delta, one unit and the same owners. Everything else is said at ``enter``.
        """
        current = self.current
        if current != self:
            return current.enter_all(new, left=left)
        with self._locked():
            before = dataset_entries.read(self.folder)
            here, first = {entry.key for entry in before.found}, new[0]
            unknown = (
                [Entry(left, self._persons_only if left.unit == PERSON else None, first.seeded, first.run)]
                if left is not None and (first.run, left.digest) not in here
                else []
            )
            for place, entry in enumerate([*unknown, *new], before.number):
                durable.write(self.folder / f"{place:06d}.json", as_json(entry.to_json()))
            entries = [*before.found, *unknown]
        known, plan = {entry.key for entry in entries}, first.plan
        states = [(entry, False) for entry in entries] + [(entry, True) for entry in new]
        counted = [
            (entry.new(known), starts or (self.owners is not None and entry.owners == self.owners))
            for entry, starts in states
            if entry.plan.certified
            and (starts or self._protects(entry, plan))
            and (starts or not (entry.seeded or entry.run in before.open_to_all))
        ]
        runs = before.lost + len(states)
        names = plan.facts.owner_names if len(plan.facts.owners) <= SHOWN else (ANYONE,)
        mixed = plan.unit != PERSON and any(one.unit == PERSON for one, _ in counted)
        epsilons = {name: _total(counted, name, plan.delta, "replace_one" if mixed else "add_remove") for name in names}
        noted = {"tuned": True} if self.tuned else {}
        return {"runs": runs, "uncounted": runs - len(counted), "epsilons": epsilons, **noted}

    @property
    def _persons_only(self) -> str | None:
        """Return the name of the persons without that of their owners: which class a person had is then not known."""
        partition = _partition(self.owners)
        return None if partition is None else f"{partition}/"

    def _protects(self, entry: Entry, plan: Plan) -> bool:
        """Return whether the promise of an earlier run is about whom this plan protects, or about more."""
        if plan.unit != PERSON:
            return entry.plan.unit in (WHOLE, PERSON, plan.unit) and not entry.plan.facts.person_cap
        return entry.plan.unit == PERSON and _partition(entry.owners) == _partition(self.owners)


def _partition(owners: str | None) -> str | None:
    """Return the part of a secret name of owners that tells which records are one person's."""
    return None if owners is None else owners.partition("/")[0]


def keep_larger_counts(counted: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the counts with every figure raised to that of ``before``, counted by a ledger that may know more runs."""
    if before is None or before["runs"] is None:
        return counted
    epsilons = {name: max(total, before["epsilons"].get(name, 0.0)) for name, total in counted["epsilons"].items()}
    larger = {name: max(counted[name], before[name]) for name in ("runs", "uncounted")}
    return {**counted, **larger, "epsilons": epsilons}


def _rows(reading: Reading) -> set[str]:
    return {*reading.hashes, *(row["head"] for row in reading.forks)}


def _total(runs: list[tuple[Plan, bool]], name: str, delta: float, relation: Relation = "add_remove") -> float:
    """Return the epsilon of a record of this class over all runs: as this class, or as the dearest.

    Equal plans are composed as one with so many more steps: the order of steps does not matter. Every plan is counted
    with its own cap of a person's records.
    """
    times = Counter((plan.digest, same) for plan, same in runs)
    counts: Counter[tuple[float, float, int]] = Counter()
    for plan, same in {(plan.digest, same): (plan, same) for plan, same in runs}.values():
        for rate, noise, count in _events(plan, name if same else ANYONE):
            counts[rate, noise, plan.cap] += count * times[plan.digest, same]
    events = [(rate, noise, count) for (rate, noise, _), count in counts.items()]
    return accountant.epsilon(events, delta, relation=relation, cap=[cap for _, _, cap in counts] or 1)


def _events(plan: Plan, name: str) -> list[Event]:
    names = plan.facts.owner_names
    if name in names and name != ANYONE:
        return plan.events_of_each(names.index(name))
    return [event for stage in plan.exposures() for event in _dearest(stage)]


def _dearest(stage: Stage) -> list[Event]:
    """Return events that cover every owner class: the highest rate and the highest bound, as losses grow with both."""
    drawn = [(rate, scale) for rate, scale in zip(stage.rates, stage.scales, strict=True) if rate > 0]
    return stage.events(max(rate for rate, _ in drawn), max(scale for _, scale in drawn)) if drawn else []


def state_folder() -> Path:
    """Return the folder for what outlives a run: EVENHAND_STATE, or the user's state folder."""
    given = os.environ.get("EVENHAND_STATE")
    if given and not Path(given).is_absolute():
        raise UsageError("EVENHAND_STATE must be an absolute path: a relative one would be another ledger elsewhere.")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "evenhand"


def check_records(folder: Folder, data: Data) -> str:
    """Return the run's random name; before the first charge note which records it is on, later refuse any others.

    The note is on disk on return.

    Raises:
      PlanMismatchError: other records, another order, or other owners than the run was started with: what was charged
        for one record would be counted for another.
    """
    if data.facts.person_cap:
        refuse_beyond_cap(data)
    records = identity(data)
    if not folder.records_file.exists():
        write_json(folder.records_file, {"records": records, "run": secrets.token_hex(16)})
        write_durably(folder.rows_file, survey(data).to_bytes())
    note = untrusted.read_json(folder.records_file, {"records": str, "run": str}, largest=untrusted.SMALL)
    if note["records"] != records:
        raise PlanMismatchError(
            "These are not the records that this run was started on, or their order or their owners changed, or a "
            "library reads them in another way by now: what was charged could count for the wrong records. Pass the "
            "data it was started with; nothing was spent. If you know that they are the same, delete "
            "private/records.json in the run folder: the run then counts once more."
        )
    return str(note["run"])


@dataclass
class Counting:
    """See that a run in training is counted: ``begin`` before rows are drawn, ``follow`` before a release.

    With ``compose`` False nothing is counted, and the statement says so.
    """

    folder: Folder
    plan: Plan
    compose: bool
    _seen: Data | None = field(default=None, init=False)
    _counted: tuple[str, DatasetLedger] | None = field(default=None, init=False)

    def begin(self, data: Data) -> None:
        """Refuse other records than before, then enter the run in the dataset ledger; durable on return."""
        if self._seen is data:
            return
        run, before = check_records(self.folder, data), self.folder.composition()
        if not self.folder.ledger().reserved:
            record_checks.tell(data)
        if before is None and not self.compose:
            before = {"runs": None}
            write_json(self.folder.composition_file, before)
        if before is None or before["runs"] is not None:
            self._counted = run, DatasetLedger.of(data, tuned=bool((before or {}).get("tuned")))
            self.follow()
        self._seen = data

    def follow(self) -> None:
        """Enter the run if it is new or unknown here, or if another copy of it went on; durable on return."""
        follow_together([self])


def follow_together(runs: Sequence[Counting]) -> None:
    """Enter those of the runs that are new or unknown here, or of which another copy went on; durable on return."""
    ledgers: dict[DatasetLedger, list[tuple[Counting, str, Reading]]] = {}
    for one in runs:
        if one._counted is not None:
            name, ledger = one._counted
            ledgers.setdefault(ledger, []).append((one, name, one.folder.ledger()))
    for ledger, members in ledgers.items():
        known = ledger.knows([(name, reading) for _, name, reading in members])
        for (one, name, reading), counted in zip(members, known, strict=True):
            before = one.folder.composition()
            if before is None or not counted:
                counts = ledger.enter(one.plan, run=name)
                write_json(one.folder.composition_file, keep_larger_counts(counts, before))
                ledger.note([(name, reading)])


def begin_together(runs: Sequence[tuple[Counting, Data]]) -> None:
    """Begin new runs that start together: what each says of the runs on its data covers all of them; durable on return.

    Copies among the records are told once, for the first of the data.
    """
    record_checks.tell(runs[0][1])
    cohorts: dict[tuple[DatasetLedger, float, str, tuple[str, ...]], list[tuple[Counting, str]]] = {}
    for counting, data in runs:
        name, counting._seen = check_records(counting.folder, data), data
        if not counting.compose:
            write_json(counting.folder.composition_file, {"runs": None})
            continue
        ledger, plan = DatasetLedger.of(data), counting.plan
        counting._counted = name, ledger
        cohorts.setdefault((ledger, plan.delta, plan.unit, plan.facts.owner_names), []).append((counting, name))
    for (ledger, *_), members in cohorts.items():
        counts = ledger.enter_all([Entry(one.plan, ledger.owners, False, name) for one, name in members])
        for one, _ in members:
            write_json(one.folder.composition_file, counts)
        ledger.note([(name, one.folder.ledger()) for one, name in members])
