"""The run folder: what is in it, how it is written, and how it is checked without torch or the data."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.planning import Plan
from evenhand.privacy import ledger as ledgers
from evenhand.privacy import statement as statements

_PACKAGES = ("evenhand", "torch", "numpy", "scipy", "cryptography", "dp-accounting")
_README = """# A run of evenhand

May be shared: model.safetensors, plan.json, ledger.jsonl, statement.json, statement.md, composition.json,
metrics.jsonl, report.html.
The metrics describe the evaluation data, which the privacy statement does not cover.

Must not be shared: everything in private/ (optimizer state, training losses). config.toml names your files.

Check it: evenhand verify . (needs neither torch nor the data).
"""


@dataclass(frozen=True)
class Folder:
    """Paths and plain files of one run."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """The frozen plan."""
        return self.path / "plan.json"

    @property
    def ledger_file(self) -> Path:
        """What was spent."""
        return self.path / "ledger.jsonl"

    @property
    def statement_file(self) -> Path:
        """The statement as data."""
        return self.path / "statement.json"

    @property
    def metrics_file(self) -> Path:
        """Released metrics on held-out data, one evaluation a line."""
        return self.path / "metrics.jsonl"

    @property
    def model_file(self) -> Path:
        """The released weights."""
        return self.path / "model.safetensors"

    @property
    def composition_file(self) -> Path:
        """How many runs on the same data there were, this one included, and what they spend together."""
        return self.path / "composition.json"

    @property
    def private(self) -> Path:
        """What must not be shared; only the owner may enter."""
        return self.path / "private"

    @classmethod
    def create(cls, path: Path, plan: Plan) -> Folder:
        """Make the folder for a new run. A folder with a ledger is a run already and is refused."""
        folder = cls(path)
        if folder.ledger_file.exists():
            folder._forget_unspent()
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.private.mkdir(mode=0o700, exist_ok=True)
            folder.private.chmod(0o700)
            write_durably(path / "README.md", _README.encode())
            write_json(folder.plan_file, plan.to_json())
            write_json(path / "env.json", software())
        except OSError as error:
            raise UsageError(
                f"The run folder {path} cannot be written ({error.strerror}). Choose another --out."
            ) from None
        return folder

    def _forget_unspent(self) -> None:
        """Clear a run that was refused before its first charge; one that spent anything must not be overwritten."""
        if self.ledger().reserved or self.ledger().torn:
            raise UsageError(
                f"{self.path} holds a run already: continue it with `evenhand resume {self.path}`, "
                "or choose another --out."
            )
        for file in (
            self.ledger_file,
            self.composition_file,
            self.private / "checkpoint.pt",
            self.private / "checkpoint.json",
        ):
            file.unlink(missing_ok=True)

    @classmethod
    def existing(cls, path: str | Path) -> Folder:
        """The folder of a run that was started before."""
        folder = cls(Path(path))
        if not folder.plan_file.exists():
            raise UsageError(f"{path} is not a run folder: it has no plan.json. Pass the folder given to --out.")
        return folder

    def plan(self) -> Plan:
        """The plan of this run."""
        try:
            return Plan.from_json(json.loads(self.plan_file.read_bytes()))
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            raise VerificationError("plan.json cannot be read: it was damaged or edited.") from None

    def ledger(self) -> ledgers.Reading:
        """The ledger, read and checked."""
        return ledgers.read(self.ledger_file)

    def metrics(self) -> list[dict[str, Any]]:
        """Evaluations so far, in order; a line that a crash cut short is left out."""
        return list(_json_lines(self.metrics_file))

    def statement(self) -> dict[str, Any]:
        """The statement for what the ledger charges now."""
        model = sha256(self.model_file) if self.model_file.exists() else None
        last = self.metrics()[-1:] or [{}]
        return statements.build(
            self.plan(),
            self.ledger(),
            model=model,
            software=software(),
            groups=last[0].get("groups", {}),
            composition=json.loads(self.composition_file.read_bytes()) if self.composition_file.exists() else None,
        )

    def write_statement(self) -> dict[str, Any]:
        """Build the statement and write it as data and in words."""
        made = self.statement()
        write_json(self.statement_file, made)
        write_durably(self.path / "statement.md", statements.markdown(made).encode())
        return made


def verify(path: str | Path) -> dict[str, Any]:
    """Check a run folder against itself: chain, plan, noise of every step, budget, statement, model.

    Returns:
      ``{"ok", "epsilon", "delta", "steps", "owners", "problems"}``; epsilon is recomputed from the ledger.
    """
    folder = Folder.existing(path)
    try:
        plan, reading = folder.plan(), folder.ledger()
    except EvenhandError as error:
        return _unreadable(str(error))
    if plan.digest != reading.plan or plan.steps != reading.steps:
        return _unreadable("plan.json is not the plan that the ledger was opened with.")
    problems = _plan_problems(folder, plan) + _noise_problems(plan, reading)
    epsilons = plan.spent_by_owner(reading.reserved)
    for name, epsilon, budget in zip(plan.facts.owner_names, epsilons, plan.budgets, strict=True):
        if epsilon is not None and budget is not None and epsilon > budget * (1 + 1e-9):
            problems.append(f"owner {name!r} was promised epsilon {budget:g} but the ledger charges {epsilon:.6g}.")
    problems += _checkpoint_problems(folder, reading) + _statement_problems(folder, plan, reading)
    worst = None if any(epsilon is None for epsilon in epsilons) else max(e for e in epsilons if e is not None)
    return {
        "ok": not problems,
        "epsilon": worst,
        "delta": plan.delta,
        "steps": reading.reserved,
        "owners": dict(zip(plan.facts.owner_names, epsilons, strict=True)),
        "problems": problems,
    }


def _unreadable(problem: str) -> dict[str, Any]:
    return {"ok": False, "epsilon": None, "delta": None, "steps": 0, "owners": {}, "problems": [problem]}


def _plan_problems(folder: Folder, plan: Plan) -> list[str]:
    """The file must be what was written, and its epsilons must follow from its noise, now as then."""
    problems = [] if folder.plan_file.read_bytes() == as_json(plan.to_json()) else ["plan.json was changed."]
    for recomputed, written in zip(plan.spent_by_owner(), plan.epsilons, strict=True):
        if (recomputed is None) != (written is None) or (recomputed or 0.0) > (written or 0.0) * (1 + 1e-6):
            problems.append("an epsilon written in plan.json is smaller than its noise and steps allow.")
    return problems


def _noise_problems(plan: Plan, reading: ledgers.Reading) -> list[str]:
    """Every committed step must have been reserved, and have used at least the planned noise for every class."""
    if not plan.certified:
        return []
    for commit in reading.commits:
        if commit.first < 0 or commit.first + commit.count > reading.reserved:
            return ["a step was run that the ledger did not reserve."]
        for position in range(commit.first, commit.first + commit.count):
            level = plan.level_at(position)
            gradient = [
                commit.std >= level.noise / scale * value * (1 - 1e-12)
                for value, scale in zip(commit.sensitivity, plan.scales, strict=True)
            ]
            side = [
                std >= noise * value * (1 - 1e-12)
                for noise, (value, std) in zip(level.queries, commit.queries, strict=True)
            ]
            if not all(gradient + side):
                return [f"step {position} used less noise than planned."]
    return []


def _checkpoint_problems(folder: Folder, reading: ledgers.Reading) -> list[str]:
    marker = folder.private / "checkpoint.json"
    if marker.exists() and json.loads(marker.read_text()).get("ledger_head") not in reading.hashes:
        return ["the ledger no longer contains the row that the last checkpoint was written after: it was shortened."]
    return []


def _statement_problems(folder: Folder, plan: Plan, reading: ledgers.Reading) -> list[str]:
    if not folder.statement_file.exists():
        return []
    try:
        written = json.loads(folder.statement_file.read_bytes())
        intact = statements.digest(written) == written.get("digest") and (
            folder.statement_file.read_bytes() == as_json(written)
        )
        problems = [] if intact else ["statement.json was changed."]
    except (ValueError, AttributeError):
        return ["statement.json cannot be read: it was damaged or edited."]
    page = folder.path / "statement.md"
    if not problems and (not page.exists() or page.read_bytes() != statements.markdown(written).encode()):
        problems.append("statement.md does not say what statement.json says.")
    if written.get("plan") != plan.digest:
        problems.append("the statement belongs to another plan.")
    if written.get("ledger_head") not in reading.hashes:
        problems.append("the ledger no longer contains the row that the statement was written after: it was shortened.")
    model = written.get("model_sha256")
    if model is not None and (not folder.model_file.exists() or sha256(folder.model_file) != model):
        problems.append("model.safetensors is not the model that the statement describes.")
    if model is not None and model not in reading.released:
        problems.append("the ledger does not record the release of this model.")
    return problems


def software() -> dict[str, str]:
    """Versions that a statement names."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data so that a crash leaves either the old file or the new one."""
    write_durably(path, as_json(data))


def as_json(data: Mapping[str, Any]) -> bytes:
    """The one way in which a file of this folder is written, so that a changed byte shows."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def write_durably(path: Path, data: bytes) -> None:
    """Write, sync and rename into place."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
