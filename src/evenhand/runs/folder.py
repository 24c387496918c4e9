"""The run folder: what is in it and how it is written, so that a crash leaves old files or new ones, never halves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from evenhand import durable, untrusted
from evenhand._versions import software
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError, VerificationError
from evenhand.methods.priors import Prior
from evenhand.reporting.held_out import small_cells
from evenhand.runs import ledger as ledgers
from evenhand.runs import released_weights, statement_files
from evenhand.runs import statement as statements
from evenhand.runs import statement_files as owner_table
from evenhand.runs.audits import record
from evenhand.runs.ledger import Ledger
from evenhand.runs.run_files import LEDGER, SIGNATURE, as_json, put_in_place, sha256, write_durably, write_json

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Folder", "as_json", "head_in", "sha256", "statement_bytes", "write_durably", "write_json"]

_MOST_EVALUATIONS = 20_000
"""Lines of a metrics file; a run writes one per evaluation."""
_README = """# A run of evenhand

May be shared: model.safetensors, model-last.safetensors, plan.json, ledger.jsonl, statement.json, statement.md,
composition.json, preprocessing.json, signature.json, audit.json, metrics.jsonl, model-card.md, report.html,
owners.csv, decision.json. Not if statement.md says that the model is not private.
The metrics describe the evaluation data, which the privacy statement does not cover.

Must not be shared: everything in private/ (optimizer state, training losses). config.toml names your files,
env.json your software.

Check it: evenhand verify . (needs neither torch nor the data).
"""
_WITHDRAWN = f"""# A withdrawn run of evenhand

Budgets were lowered, and another run folder goes on from an earlier checkpoint of this one. Nothing that was computed
here after that checkpoint may be released: delete it. Nothing more can be trained here; resume the other folder.

May be shared: {", ".join(statement_files.FROM_FACTS)}.

Must not be shared: {", ".join(statement_files.FROM_NOISE)}, everything in private/.
config.toml names your files, env.json your software.

Check it: evenhand verify . (needs neither torch nor the data).
"""

_NUMBER = (int, float)
_SHARES: untrusted.Shape = {str: (int, float, type(None))}
_COUNTED: untrusted.Shape = {"runs": int, "uncounted": int, "epsilons": {str: _NUMBER}}
_EVALUATION: untrusted.Shape = {"step": int, "accuracy": (int, float, type(None)), "groups": _SHARES}


@dataclass(frozen=True)
class Folder:
    """Paths of one run's files, and how they are read and written. What is read is checked, never trusted."""

    path: Path
    HASHED: ClassVar = ("composition.json", "preprocessing.json", "metrics.jsonl", "decision.json", record.FILE)
    """Public files that a statement rests on, beside plan, ledger and model."""

    @property
    def plan_file(self) -> Path:
        """Return the path of the frozen plan."""
        return self.path / "plan.json"

    @property
    def ledger_file(self) -> Path:
        """Return the path of the ledger: what was spent."""
        return self.path / LEDGER

    @property
    def statement_file(self) -> Path:
        """Return the path of the statement as data."""
        return self.path / "statement.json"

    @property
    def signature_file(self) -> Path:
        """Return the path of the signature over the folder."""
        return self.path / SIGNATURE

    @property
    def metrics_file(self) -> Path:
        """Return the path of the released metrics on held-out data, one evaluation a line."""
        return self.path / "metrics.jsonl"

    @property
    def model_file(self) -> Path:
        """Return the path of the released weights."""
        return self.path / "model.safetensors"

    @property
    def last_model_file(self) -> Path:
        """Return the path of the last iterate, beside a released average."""
        return self.path / "model-last.safetensors"

    @property
    def composition_file(self) -> Path:
        """Return the path of the count of runs on the same data, and what they spend together."""
        return self.path / "composition.json"

    @property
    def private(self) -> Path:
        """Return the folder that must not be shared; only its owner may enter it."""
        return self.path / "private"

    @property
    def checkpoint_file(self) -> Path:
        """Return the path of the checkpoint that a resume takes."""
        return self.private / "checkpoint.pt"

    @property
    def kept(self) -> Path:
        """Return the folder of earlier checkpoints, for budgets that are lowered."""
        return self.private / "kept"

    @property
    def withdrawn_file(self) -> Path:
        """Return the path of the note that this run was left for a fork: its ledger's head after that row."""
        return self.private / "withdrawn.json"

    @property
    def records_file(self) -> Path:
        """Return the path of a secret hash of the run's records, and the run's random name."""
        return self.private / "records.json"

    @property
    def rows_file(self) -> Path:
        """Return the path of secret digests of the training rows, which tell training records among test data."""
        return self.private / "rows.npz"

    @property
    def training_metrics_file(self) -> Path:
        """Return the path of metrics on training records, where they were asked for: not private."""
        return self.private / "metrics.jsonl"

    @property
    def full_metrics_file(self) -> Path:
        """Return the path of held-out metrics with the figures of small groups; it exists if some are not shared."""
        return self.private / "held-out.jsonl"

    def markers(self) -> list[Path]:
        """Return one small file per checkpoint, with the ledger's head that it was written after."""
        files = (self.checkpoint_file.with_suffix(".json"), *sorted(self.kept.glob("*.json")))
        return [file for file in files if file.exists()]

    @classmethod
    def create(cls, path: Path, plan: Plan) -> Folder:
        """Make the folder for a new run and write its plan; durable on return.

        A folder whose ledger has charged anything is a run already and is refused.
        """
        folder = cls(path)
        planned = as_json(plan.to_json())
        if len(planned) > untrusted.PARSED:
            raise UsageError(
                f"The plan of these {len(plan.facts.owners)} owner classes takes {len(planned)} bytes, and at most "
                f"{untrusted.PARSED} are read again: give owners with equal budgets one name. Nothing was spent."
            )
        try:
            begun = folder.begun
        except OSError as error:
            raise UsageError(
                f"The run folder {path} cannot be written ({error.strerror}). Choose another --out."
            ) from None
        if begun:
            folder._forget_unspent()
        elif any(os.path.exists(file) for file in (folder.checkpoint_file, folder.model_file, folder.statement_file)):
            raise UsageError(
                f"{path} holds a model or checkpoint whose ledger is missing, so what it spent is not known. "
                "Choose another --out."
            )
        elif ledgers.lacks_first_row(folder.ledger_file):
            folder.ledger_file.unlink()
        try:
            durable.make_folder(path, parents=True)
            durable.make_folder(folder.private, private=True)
            write_durably(path / "README.md", _README.encode())
            write_durably(folder.plan_file, planned)
            write_json(path / "env.json", software())
        except OSError as error:
            raise UsageError(
                f"The run folder {path} cannot be written ({error.strerror}). Choose another --out."
            ) from None
        return folder

    @property
    def begun(self) -> bool:
        """Return whether there is a ledger with a whole first row; without one nothing was charged."""
        return self.ledger_file.exists() and not ledgers.lacks_first_row(self.ledger_file)

    def _forget_unspent(self) -> None:
        """Remove a run that ended before its first charge; refuse to overwrite one that spent, or failed its audit."""
        lock = ledgers.acquire_lock(self.ledger_file)
        try:
            reading = self.ledger()
            if reading.reserved:
                raise UsageError(
                    f"{self.path} holds a run already: continue it with `evenhand resume {self.path}`, "
                    "or choose another --out."
                )
            if any(row["cause"] == "audit" for row in reading.blocked):
                raise UsageError(
                    f"{self.path} holds a run that is blocked: an audit certified more epsilon than was promised. "
                    "Mend the cause, then choose another --out."
                )
            files = (self.ledger_file, self.composition_file, self.records_file, self.rows_file)
            for file in (*files, *self.private.glob("checkpoint.*")):
                file.unlink(missing_ok=True)
        finally:
            lock.release()

    def anchors(self) -> list[str]:
        """Return the ledger heads that this folder's files were written after; of a damaged file no true head."""
        files = (self.statement_file, self.withdrawn_file, *self.markers())
        return [head_in(file) for file in files if file.exists()]

    @classmethod
    def existing(cls, path: str | Path) -> Folder:
        """Return the folder of a run that was started before; raise UsageError if it has no plan."""
        folder = cls(Path(path))
        if not os.path.exists(folder.plan_file):  # False, too, for a name that no disk takes
            raise UsageError(f"{path} is not a run folder: it has no plan.json. Pass the folder given to --out.")
        return folder

    def plan(self) -> Plan:
        """Return the run's plan, read from a file that is checked and not trusted."""
        try:
            return _plan(untrusted.read_bytes(self.plan_file, largest=untrusted.PARSED))
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise VerificationError("plan.json cannot be read: it was damaged or edited.") from None

    def ledger(self) -> ledgers.Reading:
        """Return the ledger, read and checked from its first byte to its last."""
        return ledgers.read(self.ledger_file)

    def prior(self) -> Prior | None:
        """Return the prior from the noisy counts that the run released; None if it released none."""
        row = self.ledger().prior if self.begun else None
        if row is None:
            return None
        return Prior(row.counts, row.std, row.kind, self.plan().facts.records if row.kind == "each label" else 0)

    def finished(self) -> bool:
        """Return whether nothing is left to do: all steps are charged, then model and statement were written."""
        if not self.begun:
            return False
        reading = self.ledger()
        return (
            bool(reading.released)
            and reading.reserved >= reading.steps
            and self.model_file.exists()
            and self.statement_file.exists()
            and head_in(self.statement_file) == reading.charged_head
        )

    def metrics(self, *, training_records: bool = False, full: bool = False) -> list[dict[str, Any]]:
        """Return the evaluations so far, in order, without a line that a crash cut short.

        With ``training_records`` return those on training records, which are not private; with ``full`` those on
        held-out records with the figures of groups that are too small to be shared.
        """
        lines = list(_evaluations(self.training_metrics_file if training_records else self.metrics_file))
        if not full or training_records:
            return lines
        whole = {line["step"]: line for line in _evaluations(self.full_metrics_file)}
        return [whole.get(line["step"], line) for line in lines]

    def drop_metrics(self, position: int) -> None:
        """Remove evaluations after more steps than ``position``: a crash took those weights. Durable on return."""
        for file in (self.metrics_file, self.training_metrics_file, self.full_metrics_file):
            lines = list(_evaluations(file))
            earlier_lines = [line for line in lines if line["step"] <= position]
            if len(earlier_lines) < len(lines):
                write_durably(file, "".join(json.dumps(line) + "\n" for line in earlier_lines).encode())

    def add_metrics(self, line: Mapping[str, Any], least: int, *, training_records: bool = False) -> dict[str, Any]:
        """Add one evaluation, durable on return, and return it as it may be shared.

        Figures of groups with fewer held-out records than ``least`` go into ``full_metrics_file`` only.
        """
        if training_records:
            _add(self.training_metrics_file, line)
            return dict(line)
        shared = small_cells.shareable(line, least)
        if small_cells.LEFT_OUT in shared:
            _add(self.full_metrics_file, line)
        _add(self.metrics_file, shared)
        return shared

    def statement(self) -> dict[str, Any]:
        """Return the statement for what the ledger charges now, built from the folder's files."""
        reading, model = self.ledger(), untrusted.digest(self.model_file)
        return statements.build(
            self.plan(),
            reading,
            model=model,
            software=software(),
            groups=self._stated(reading).get("groups", {}),
            composition=self.composition(),
            files=self.hashes(),
            audit=record.read(self.path, self.plan().digest),
        )

    def hashes(self) -> dict[str, str]:
        """Return the hashes of the public files that a statement rests on, by name."""
        digests = {name: untrusted.digest(self.path / name) for name in self.HASHED}
        return {name: digest for name, digest in digests.items() if digest is not None}

    def composition(self) -> dict[str, Any] | None:
        """Return the count of runs on the same data, checked; None if there is none yet."""
        counts: dict[str, Any] | None = None
        if self.composition_file.exists():
            counts = untrusted.read_json(self.composition_file, {"runs": (int, type(None))})
            if counts["runs"] is not None and not untrusted.fits(counts, _COUNTED):
                raise VerificationError("composition.json cannot be read: it was damaged or edited.")
        return counts

    def group_column(self) -> str | None:
        """Return the column whose values are the groups, from preprocessing.json; None if none is declared."""
        file = self.path / "preprocessing.json"
        column = untrusted.read_json(file).get("groups") if file.exists() else None
        return column if isinstance(column, str) else None

    def last_evaluation(self, *, training_records: bool = False, full: bool = False) -> dict[str, Any]:
        """Return the last evaluation if it is one of the released model, or of a run that has released none yet.

        Lines of an earlier version do not say which weights they measured, and are taken to be of that model.
        ``full``: see ``metrics``.
        """
        lines = self.metrics(training_records=training_records, full=full)
        current = untrusted.digest(self.path / statement_files.DECISION)
        if current is not None:  # after `adjust` there are lines of other decisions on the same weights
            lines = [line for line in lines if line.get("decision", current) == current]
        last: dict[str, Any] = next(reversed(lines), {})
        measured = last.get("weights")
        if measured is None or not self.model_file.exists():
            return last
        return last if measured == released_weights.digest_of_file(self.model_file) else {}

    def _stated(self, reading: ledgers.Reading) -> dict[str, Any]:
        """Return the evaluation that a statement gives; none of a withdrawn run, whose figures must not be shared."""
        return self.last_evaluation() if reading.withdrawn is None else {}

    def write_statement(self) -> dict[str, Any]:
        """Build the statement and write it as data and in words, for several owners also as a table.

        The files are durable on return. ``statement.json`` comes last: a run that has it is finished.
        """
        statement = self.statement()
        if len(statement["owners"]) > 1:
            table = owner_table.as_csv(statement["owners"], self._stated(self.ledger()))
            write_durably(self.path / owner_table.FILE, table.encode("utf-8", "replace"))
        write_durably(self.path / "statement.md", statements.markdown(statement).encode())
        write_durably(self.statement_file, statement_bytes(statement))  # the last one: a run that has it is finished
        return statement

    def declare_stopped(self) -> None:
        """Record the trainer's word that this run ended early for reasons that did not depend on the data.

        The word is trusted, not checked. The statement then counts the charged steps alone, and names the declaration.
        Ledger and statement are durable on return.
        """
        reading = self.ledger()
        if reading.reserved >= reading.steps:
            raise UsageError(
                f"All {reading.steps} steps of the plan are charged: there is no early stop to declare. The statement "
                "counts them all."
            )
        ledgers.Ledger.declare_stopped(self.ledger_file)
        self.write_statement()

    def say_withdrawn(self) -> None:
        """Write, after the ledger's row, that this run was left for a fork and what of it must not be shared."""
        write_json(self.withdrawn_file, {"ledger_head": self.ledger().head})
        write_durably(self.path / "README.md", _WITHDRAWN.encode())
        self.write_statement()


@lru_cache(maxsize=8)
def _plan(data: bytes) -> Plan:
    """Return the plan in the bytes of a plan.json; replicas, and a run that is read several times, have equal ones."""
    return Plan.from_json(untrusted.parse_json(data, "plan.json"))


def statement_bytes(statement: Mapping[str, Any]) -> bytes:
    """Return the bytes of a statement's file. Every statement is written this one way, so that a changed byte shows."""
    return as_written(statement_files.packed(statement))


def as_written(form: Mapping[str, Any]) -> bytes:
    """Return the bytes of a statement in either form; earlier versions listed any number of owners one by one."""
    return as_json(form) if isinstance(form["owners"], list) else statement_files.lines(form)


def head_in(file: Path) -> str:
    """Return the ledger head that a statement or checkpoint was written after; no true head for a damaged file."""
    try:
        return str(untrusted.read_json(file, {"ledger_head": str})["ledger_head"])
    except VerificationError:
        return f"{file.name} is damaged"


def _add(file: Path, line: Mapping[str, Any]) -> None:
    """Add one line to a metrics file, durable on return; the ledger records the file if it is shareable."""
    before = untrusted.read_bytes(file) if file.exists() else b""
    write_durably(file, before + json.dumps(line).encode() + b"\n")


def _evaluations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the evaluations of a metrics file; a line that a crash cut short is left out, a flood of lines refused."""
    if path.exists():
        for number, line in enumerate(untrusted.lines(path)):
            if number == _MOST_EVALUATIONS:
                raise VerificationError(f"{path.name} cannot be read: it has more than {number} lines.")
            try:
                yield untrusted.parse_json(line, path.name, _EVALUATION)
            except VerificationError:
                continue


def publish(model: nn.Module, file: Path, ledger: Ledger) -> None:
    """Write a model's weights to a file of the run folder; durable on return.

    The order is: the file in private/, the ledger's rows ``release`` and ``file``, then the file's name.
    """
    from safetensors.torch import save

    tensors, left_out = released_weights.stored_tensors(model)
    data = save(tensors, left_out or None)
    put_in_place(file, ledger, lambda out: out.write(data), ledger.release)
