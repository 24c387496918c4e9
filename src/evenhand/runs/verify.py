"""``verify``: check a run folder against itself, with neither torch nor the data.

Every epsilon that it gives is computed from the plan and the ledger; a number in another file is compared with it and
never taken. The chain of hashes is not keyed: who rewrites the whole folder can make it consistent, unless it is
signed (see ``signatures``), or the statement's ledger head was noted elsewhere.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand._versions import software
from evenhand.accounting.plan import Plan
from evenhand.errors import EvenhandError, UsageError, VerificationError
from evenhand.runs import released_weights, signatures, statement_files, statement_warnings
from evenhand.runs import statement as statements
from evenhand.runs.audits import record
from evenhand.runs.folder import Folder, as_json, as_written, head_in
from evenhand.runs.ledger import Ledger, Reading
from evenhand.runs.ledger_rows import read_until
from evenhand.runs.run_files import LEDGER, RECORDED, SIGNATURE, find_unplaced_files, place_recorded_files
from evenhand.types import Commit

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_COMPUTED = ("guarantee", "owners", "accounting", "public_inputs", "plan", "ledger_head", "model_sha256", "files")
_DECLARED: untrusted.Shape = {
    "digest": str,
    "ledger_head": str,
    "model_sha256": (str, type(None)),
    "software": {str: str},
    "groups": {str: (int, float, type(None))},
    "guarantee": {"epsilon": (int, float, type(None))},
    "owners": (list, dict),
    "files": {str: str},
}
"""What is read of a statement before it is built again and compared as a whole."""
_OWNERS: untrusted.Shape = {"owners": [{"epsilon": (int, float, type(None))}]}
_FINER = 2e-5
"""Relative width of the accountant's grid where an epsilon must be proved that lies below the one computed first."""
_PROOFS = 64
"""Owners whose written epsilon is proved anew if it lies below the computed one; no honest file needs more."""
_LOOSER = 1e-3
"""How much larger a written bound may be than the computed one: another version's accountant may have been looser."""
_ROUNDING = 1e-12
_FURTHER = {"mu": 1e-9, "guess_rate_at_1_percent": 1e-9, "profile": 1e-9}
"""Bounds beside epsilon, and what another machine's arithmetic may change of them."""


def verify(path: str | Path, key: str | Path | None = None) -> dict[str, Any]:
    """Check a run folder against itself: chain, plan, noise of every step, budget, statement, every shareable file.

    Args:
      path: the run folder.
      key: a public key file. The folder must be signed with its private key, as it is now.

    Returns:
      ``{"ok", "epsilon", "charged", "delta", "unit", "steps", "planned", "owners", "problems", "notes", "signed_by"}``;
      recomputed from the ledger: ``epsilon`` (and ``owners``, each owner's) is what a statement may promise, that of
      the whole plan unless the trainer declared an early stop independent of the data; ``charged`` is what the
      ``steps`` charged so far cost. Notes are what a reader must know even when all is well: a public seed, foreign
      updates, files that nothing covers. ``signed_by`` is the fingerprint of the key of a valid signature.

    Raises:
      UsageError: there is no run folder, or the key cannot be used. Damaged files are problems, never errors.
    """
    public = None if key is None else signatures.read_public_key(Path(key))
    folder = Folder(Path(path))
    if not any(_there(file) for file in (folder.plan_file, folder.ledger_file)):
        raise UsageError(f"{path} is not a run folder: it has no plan.json. Pass the folder given to --out.")
    findings, checked = _check_folder(folder)
    if checked is None:
        return {**findings, "signed_by": None}
    plan, reading = checked
    signature = signatures.check(folder, reading, public, _unshareable_files(plan, reading))
    problems = [*findings["problems"], *signature.problems]
    notes = [*findings["notes"], *signature.notes]
    return {**findings, "ok": not problems, "problems": problems, "notes": notes, "signed_by": signature.signer}


def sign(path: str | Path, key: str | Path | Ed25519PrivateKey) -> str:
    """Sign a run folder that verifies: write signature.json, durable on return; return the fingerprint of the key.

    The statement is written again first if the ledger went on since. Refused where nothing was released.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, out=tempfile.mkdtemp())
      >>> key = Path(tempfile.mkdtemp()) / "mine"
      >>> mine = signatures.new_key(key)
      >>> sign(run.path, key) == eh.verify(run.path, key=f"{key}.pub")["signed_by"] == mine
      True
    """
    secret = signatures.read_private_key(Path(key)) if isinstance(key, str | Path) else key
    folder = Folder.existing(path)
    reading = folder.ledger()
    if not reading.released:
        raise UsageError(f"{path} has released no model yet, so there is no statement to sign: finish the run first.")
    if not folder.statement_file.exists() or head_in(folder.statement_file) != reading.charged_head:
        folder.write_statement()
    with Ledger.writing(folder.ledger_file) as ledger:
        place_recorded_files(folder.path, ledger)
        findings, checked = _check_folder(folder)
        if checked is None or findings["problems"]:
            raise VerificationError(
                f"This run does not verify, so there is nothing to sign: {findings['problems'][0]} See "
                "`evenhand verify`."
            )
        return signatures.write(folder, checked[1], secret)


def _check_folder(folder: Folder) -> tuple[dict[str, Any], tuple[Plan, Reading] | None]:
    """Check all but the signature; return the findings, and plan and ledger if they are readable and fit each other."""
    try:
        plan, reading = folder.plan(), folder.ledger()
        if plan.digest != reading.plan or plan.steps != reading.steps or _history(plan) != reading.replans:
            return _unreadable("plan.json is not the plan that the ledger was opened with, or that replaced it."), None
        return _compare_with_ledger(folder, plan, reading), (plan, reading)
    except EvenhandError as error:
        return _unreadable(str(error)), None
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # Settings of rules are free: a plan that was made up consistently can hold what no statement can be made of.
        return _unreadable(f"plan.json, ledger and statement cannot be computed with ({type(error).__name__})."), None


def _compare_with_ledger(folder: Folder, plan: Plan, reading: Reading) -> dict[str, Any]:
    """Return what follows from plan and ledger, and as problems what in the folder differs from it."""
    problems = _plan_problems(folder, plan) + _noise_problems(plan, reading) + _prior_problems(plan, reading)
    epsilons, charged = plan.spent_by_owner(reading.counted), plan.spent_by_owner(reading.reserved)
    for owner, (name, epsilon, budget) in enumerate(zip(plan.facts.owner_names, epsilons, plan.budgets, strict=True)):
        if epsilon is not None and budget is not None and not _holds(plan, owner, reading.counted, budget, epsilon):
            problems.append(f"owner {name!r} was promised epsilon {budget:g} but plan and ledger count {epsilon:.6g}.")
    problems += [statement_warnings.blocked(row) for row in reading.blocked] + _checkpoint_problems(folder, reading)
    unshareable = _unshareable_files(plan, reading)
    problems += _file_problems(folder, reading, unshareable)
    problems += record.problems(folder.path, plan, blocked=bool(reading.blocked))
    problems += _statement_problems(folder, plan, reading, unshareable)
    about = released_weights.check_figures(folder, reading)
    problems += about.problems
    return {
        "ok": not problems,
        "epsilon": None if reading.blocked else _largest(epsilons),
        "charged": _largest(charged),
        "delta": plan.delta,
        "unit": plan.unit,
        "steps": reading.reserved,
        "planned": plan.steps,
        "owners": {} if reading.blocked else dict(zip(plan.facts.owner_names, epsilons, strict=True)),
        "problems": problems,
        "notes": [*_notes(folder, reading), *about.notes],
    }


def _unshareable_files(plan: Plan, reading: Reading) -> list[str]:
    """Return the files that must not be shared, so that a copy of the folder may lack them."""
    return list(statement_files.of_run(plan, reading, reading.files())["must_not_be_shared"])


def _history(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the plans before this one, each with the steps charged when it was replaced, as the ledger lists them."""
    ends = itertools.accumulate(stage.steps for stage in plan.earlier)
    return tuple((stage.plan, end) for stage, end in zip(plan.earlier, ends, strict=True))


def _there(file: Path) -> bool:
    """Return whether there is something of this name, a broken link included."""
    return file.exists() or file.is_symlink()


def _largest(epsilons: Sequence[float | None]) -> float | None:
    """Return the largest over the owners; None if one of them has none."""
    values = [epsilon for epsilon in epsilons if epsilon is not None]
    return max(values) if len(values) == len(epsilons) else None


def _unreadable(problem: str) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(("epsilon", "charged", "delta", "unit"))
    return {"ok": False, **figures, "steps": 0, "planned": 0, "owners": {}, "problems": [problem], "notes": []}


def _plan_problems(folder: Folder, plan: Plan) -> list[str]:
    """Check that plan.json is as it was written, and that its epsilons follow from its noise and steps."""
    problems = [] if untrusted.read_bytes(folder.plan_file) == as_json(plan.to_json()) else ["plan.json was changed."]
    for owner, (recomputed, written) in enumerate(zip(plan.spent_by_owner(), plan.epsilons, strict=True)):
        if recomputed is None or written is None:
            holds = recomputed is written
        else:
            holds = _holds(plan, owner, plan.steps, written, recomputed)
        if not holds:
            return [*problems, "an epsilon written in plan.json is smaller than its noise and steps allow."]
    return problems


def _holds(plan: Plan, owner: int, steps: int, written: float, computed: float) -> bool:
    """Return whether an epsilon is a true bound: it is not below the computed one, or a finer computation proves it.

    There is no tolerance downwards, apart from the last digits of a float. The computed value is an upper bound with
    some slack, and another machine may round it elsewhere: what is below it must be proved with less slack.
    """
    if written >= computed * (1 - _ROUNDING):
        return True
    if written < computed * (1 - _LOOSER) or owner >= _PROOFS:
        return False
    return plan.composed(owner, steps, rel=_FINER).epsilon(plan.delta) <= written


def _noise_problems(plan: Plan, reading: Reading) -> list[str]:
    """Check that every committed step was reserved, and used at least the planned noise for every class."""
    if not plan.certified:
        return []
    for commit in reading.commits:
        if commit.first < 0 or commit.first + commit.count > reading.reserved:
            return ["a step was run that the ledger did not reserve."]
        for position in range(commit.first, commit.first + commit.count):
            level, scales = plan.level_at(position), plan.scales_at(position)
            if len(commit.sensitivity) not in (1, len(scales)) or len(commit.queries) != len(level.queries):
                return [f"step {position} records other owner classes or side queries than the plan has."]
            gradient = [
                commit.std >= level.noise / scale * value * (1 - 1e-12) for value, scale in _covered(scales, commit)
            ]
            side = [
                std >= noise * value * (1 - 1e-12)
                for noise, (value, std) in zip(level.queries, commit.queries, strict=True)
            ]
            if not all(gradient + side):
                return [f"step {position} used less noise than planned."]
    return []


def _prior_problems(plan: Plan, reading: Reading) -> list[str]:
    """Check that released counts of labels are those of the plan, with at least its noise."""
    row, planned = reading.prior, plan.prior
    if row is None:
        return []
    if planned is None:
        return ["counts of labels were released that the plan does not charge."]
    labels, groups = len(plan.facts.labels), len(plan.facts.groups) if planned.kind == "labels by group" else 1
    if row.kind != planned.kind or [len(part) for part in row.counts] != [labels] * groups:
        return ["the counts of labels in the ledger are not those that the plan names."]
    moved = math.sqrt(labels) if planned.kind == "each label" else 1.0
    if row.sensitivity < moved or row.std < planned.noise * row.sensitivity * (1 - 1e-12):
        return ["the counts of labels were released with less noise than planned."]
    return []


def _covered(scales: Sequence[float], commit: Commit) -> list[tuple[float, float]]:
    """Return sensitivity and scale of every class in a commit; one number for many classes is per unit of scale."""
    if len(commit.sensitivity) == 1 < len(scales):
        return [(commit.sensitivity[0], 1.0)]
    return list(zip(commit.sensitivity, scales, strict=True))


def _checkpoint_problems(folder: Folder, reading: Reading) -> list[str]:
    """Check that the ledger has the rows that checkpoints, and the note of a withdrawal, were written after."""
    known = set(reading.hashes)
    for marker in folder.markers():
        try:
            if untrusted.read_json(marker, {"ledger_head": str}, largest=untrusted.SMALL)["ledger_head"] not in known:
                return ["the ledger no longer contains the row that a checkpoint was written after: it was shortened."]
        except VerificationError as error:
            return [f"in private/, {error}"]
    if folder.withdrawn_file.exists() and reading.withdrawn is None:
        return ["this run was withdrawn, and its ledger does not say so any more: it was shortened."]
    return []


def _file_problems(folder: Folder, reading: Reading, unshareable: Collection[str]) -> list[str]:
    """Check that every file is the one that the ledger records, and that every shareable file is recorded.

    A file that must not be shared may be missing: then this is a copy that was made to be shared. So may a page that
    somebody wrote into the folder under a name of their own.
    """
    recorded, late = reading.files(), find_unplaced_files(folder.path)
    problems = []
    for name, digest in recorded.items():
        file = folder.path / name
        file_digest = untrusted.digest(file)
        if file_digest == digest or (not _there(file) and (name in unshareable or name not in RECORDED)):
            continue
        if digest in late:
            problems.append(
                f"{name} was recorded, and a crash came before it was in place: `evenhand report` on this folder, or "
                "any other command that writes to it, puts it there."
            )
        elif not _there(file):
            problems.append(f"{name} is missing: the ledger records it.")
        else:
            problems.append(f"{name} is not the file that the ledger records: it was changed or exchanged.")
    for name in RECORDED if reading.covering else ():
        if name not in recorded and _there(folder.path / name):
            problems.append(f"{name} is not in the ledger: that was shortened, or the file was put here by hand.")
    for file in (folder.model_file, folder.last_model_file):
        if file.exists() and untrusted.digest(file) not in reading.released:
            problems.append(f"{file.name} is not a model whose release the ledger records.")
    return problems


def _statement_problems(folder: Folder, plan: Plan, reading: Reading, unshareable: Collection[str]) -> list[str]:
    """Check that the statement follows from plan, ledger and model. Its own numbers are never trusted."""
    name = folder.statement_file.name
    if not _there(folder.statement_file) or reading.files().get(name) not in (
        None,
        untrusted.digest(folder.path / name),
    ):
        return []  # what is not the recorded file is one line already
    try:
        text = untrusted.read_bytes(folder.statement_file, largest=untrusted.PARSED)
        written = untrusted.parse_json(text, name, _DECLARED)
        if text != as_written(written) or statements.digest(written) != written["digest"]:
            return ["statement.json was changed."]
        written = statement_files.unpacked(written)
        if not untrusted.fits(written, _OWNERS):
            return ["statement.json cannot be read: it was damaged or edited."]
        if written["ledger_head"] not in reading.hashes[1:]:
            return ["the ledger no longer contains the row that the statement was written after: it was shortened."]
        again = _rebuilt(folder, plan, reading, written, unshareable)
    except VerificationError as error:
        return [str(error)]
    same_words = reading.covering and written["software"].get("evenhand") == software()["evenhand"]
    compared = {*again, *written} - {"digest"} if same_words else set(_COMPUTED)
    problems = [
        f"the statement's {key[:40]!r} does not follow from the plan, the ledger and the model."
        for key in sorted(compared)
        if key not in again or key not in written or not _alike(again[key], written[key])
    ]
    if same_words and not problems:
        problems += _page_problems(folder.path / "statement.md", written)
    return problems


def _page_problems(page: Path, written: Mapping[str, Any]) -> list[str]:
    """Check that the words of statement.md are those of statement.json."""
    try:
        said = untrusted.read_bytes(page)
    except VerificationError as error:
        return [str(error)]
    same = said == statements.markdown(written).encode()
    return [] if same else ["statement.md does not say what statement.json says."]


def _rebuilt(
    folder: Folder, plan: Plan, reading: Reading, written: Mapping[str, Any], unshareable: Collection[str]
) -> dict[str, Any]:
    """Return the statement that follows from the plan and from the ledger as it was when the statement was written.

    Epsilons are computed; a written one is put in their place only where it holds.
    """
    then = read_until(folder.ledger_file, written["ledger_head"])
    row = next((row.place for row in reversed(reading.file_rows) if row.name == folder.statement_file.name), None)
    recorded = {name: digest for name, digest in reading.files(row).items() if name in folder.HASHED}
    again = statements.build(
        plan,
        then,
        model=_model(folder, written["model_sha256"], unshareable),
        software=written["software"],
        groups=written["groups"],
        composition=folder.composition(),
        files=recorded if reading.covering else folder.hashes() | recorded,
        audit=record.read(folder.path, plan.digest) if record.FILE in recorded else None,
    )
    proved: dict[float, float] = {}
    for owner, (ours, theirs) in enumerate(zip(again["owners"], written["owners"], strict=False)):
        computed, given = ours["epsilon"], theirs["epsilon"]
        if computed is None or given is None or given > computed * (1 + _LOOSER):
            continue
        if _holds(plan, owner, then.counted, given, computed):
            ours["epsilon"] = proved[computed] = given
    again["guarantee"]["epsilon"] = proved.get(again["guarantee"]["epsilon"], again["guarantee"]["epsilon"])
    return again


def _model(folder: Folder, written: str | None, unshareable: Collection[str]) -> str | None:
    """Return the model digest that a statement must name; a copy may lack a model that must not be shared."""
    if written is None or (folder.model_file.name in unshareable and not _there(folder.model_file)):
        return written
    return untrusted.digest(folder.model_file)


def _alike(ours: Any, theirs: Any) -> bool:
    """Return whether ``_follows`` holds; equal JSON decides at once, since thousands of owners take long one by one."""
    return json.dumps(ours) == json.dumps(theirs) or _follows(ours, theirs)


def _follows(ours: Any, theirs: Any, slack: float = 0.0) -> bool:
    """Return whether two values agree in value and kind; bounds beside epsilon may be looser, or lower by rounding."""
    if isinstance(ours, Mapping):
        return (
            isinstance(theirs, Mapping)
            and set(ours) == set(theirs)
            and all(_follows(ours[key], theirs[key], _FURTHER.get(key, slack)) for key in ours)
        )
    if isinstance(ours, list | tuple):
        return (
            isinstance(theirs, list)
            and len(ours) == len(theirs)
            and all(_follows(one, other, slack) for one, other in zip(ours, theirs, strict=True))
        )
    if isinstance(ours, float) and type(theirs) in (int, float):
        return bool(
            ours == theirs or (slack and ours * (1 - slack) - _ROUNDING <= theirs <= ours * (1 + _LOOSER) + _ROUNDING)
        )
    return type(ours) is type(theirs) and bool(ours == theirs)


def _notes(folder: Folder, reading: Reading) -> list[str]:
    notes = []
    if statement_warnings.insecure(reading):
        notes.append("the noise comes from a public seed: this run protects nobody who knows or guesses it.")
    if reading.foreign:
        notes.append(
            "weights, or settings of model or loss, were also changed outside of private steps; what did that is not "
            "accounted."
        )
    notes += [statement_warnings.forked(row) for row in reading.forks]
    if reading.withdrawn is not None:
        notes.append(statement_warnings.withdrawn(reading.withdrawn))
    if reading.stopped:
        notes.append(statement_warnings.STOPPED)
    if reading.committed < reading.reserved:
        notes.append(f"{reading.reserved - reading.committed} charged steps have no record of what they used.")
    if not folder.anchors():
        notes.append(
            "no statement or checkpoint anchors the ledger: that it was not shortened cannot be told from here."
        )
    return notes + _uncovered(folder, reading)


def _uncovered(folder: Folder, reading: Reading) -> list[str]:
    """Return notes on files that no row is about: nothing about them is checked."""
    recorded = reading.files()
    names = {entry.name for entry in folder.path.iterdir()} - recorded.keys()
    early = sorted(name for name in names if name in RECORDED and not reading.covering)
    known = {*RECORDED, *statement_files.KEPT, "plan.json", LEDGER, f"{LEDGER}.lock", SIGNATURE, "private"}
    others = sorted(name for name in names - known if not name.endswith(".part"))
    notes = []
    if early:
        notes.append(f"an earlier version wrote the ledger, which does not record {', '.join(early)}: not checked.")
    if others:
        shown = ", ".join(repr(name) for name in others[:5]) + (" and more" if len(others) > 5 else "")
        notes.append(f"not part of the run, nothing about it is checked: {shown}.")
    return notes
