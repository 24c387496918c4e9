"""Damaged copies of run folders, and what ``verify`` and the commands that read a folder make of each.

Copies are judged in processes of their own that import no torch, each with its time and its peak of memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEGABYTES = 2.0, 200
"""What one verification may take: Done when 3 of the issue."""
PATIENCE = 60.0
"""Seconds in all, with other work on the machine: what hangs takes more."""
BATCH = 25
"""Folders that one process verifies, one after the other."""
COVERED = (".json", ".jsonl", ".md", ".html", ".csv", ".safetensors")
FREE = ("env.json", "records.json", "training.jsonl", "next-plan.json")
"""Files that ``verify`` says nothing about: it is a check of what is shared, and of the ledger's anchors."""


@dataclass(frozen=True)
class Outcome:
    """One verification: exit code, what was printed, its seconds of the processor and in all, its peak of memory."""

    folder: str
    code: int
    text: str
    seconds: float
    waited: float
    megabytes: float


def covered(name: str) -> bool:
    """Return whether ``verify`` must notice a change to this file of a run folder."""
    return name.endswith(COVERED) and Path(name).name not in FREE


def _tail(file: Path, size: int, fill: bytes = b"") -> None:
    """Make a file longer by ``size`` bytes: a hole, or the same few bytes over and over."""
    if fill:
        with file.open("ab") as out:
            for _ in range(size // 2**20):
                out.write(fill * (2**20 // len(fill)))
    else:
        os.truncate(file, file.stat().st_size + size)


def _instead(text: bytes) -> Callable[[Path, Path, random.Random], None]:
    return lambda file, _, __: _write(file, text)


def _write(file: Path, text: bytes) -> None:
    file.write_bytes(text)


def _link(target: str) -> Callable[[Path, Path, random.Random], None]:
    def damage(file: Path, _: Path, __: random.Random) -> None:
        file.unlink()
        file.symlink_to(file if target == "itself" else Path(target))

    return damage


def _longer(size: int, fill: bytes = b"") -> Callable[[Path, Path, random.Random], None]:
    return lambda file, _, __: _tail(file, size, fill)


def _holed(file: Path, _: Path, source: random.Random) -> None:
    """A page of zeros, as a file system leaves after a power cut."""
    text = bytearray(file.read_bytes())
    place = source.randrange(len(text) + 1)
    text[place : place + 4096] = bytes(len(text[place : place + 4096]) or 16)
    file.write_bytes(text)


def _half(file: Path, _: Path, source: random.Random) -> None:
    os.truncate(file, source.randrange(file.stat().st_size + 1))


def _swapped(file: Path, other: Path, _: random.Random) -> None:
    """The file of the same name of another run; of one that has none, another file."""
    file.write_bytes(other.read_bytes())


def bomb(size: int = 2**29) -> bytes:
    """Return a small archive that would unpack to ``size`` bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("archive/data.pkl", "rows.npy", "counts.npy"):
            with archive.open(name, "w") as part:
                for _ in range(size // 2**22):
                    part.write(bytes(2**22))
    return made.getvalue()


class Shell:
    """An object whose unpickling would run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


GIGABYTE = 2**30
DAMAGE: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "page of zeros": _holed,
    "truncation": _half,
    "truncation again": _half,
    "file of another run": _swapped,
    "hole of a gigabyte at the end": _longer(GIGABYTE),
    "hole of a terabyte at the end": _longer(1000 * GIGABYTE),
    "hole of 20 megabytes at the end": _longer(20 * 2**20),
    "30 megabytes of spaces at the end": _longer(30 * 2**20, b" "),
    "40 megabytes of line ends": _longer(40 * 2**20, b"\n"),
    "20 megabytes of empty lists": _longer(20 * 2**20, b"[],["),
    "20 megabytes of rows": _longer(20 * 2**20, b'{"type":"open","plan":"", "x":1}\n'.ljust(64, b" ")),
    "link to /dev/zero": _link("/dev/zero"),
    "link to /dev/stdin": _link("/dev/stdin"),
    "link to itself": _link("itself"),
    "nesting": _instead(b"[" * 10**6),
    "nested tables": _instead(b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "list for a table": _instead(b"[1, 2]\n"),
    "not a number": _instead(b'{"runs": NaN, "ledger_head": NaN, "schema": 1}\n'),
    "long integer": _instead(b'{"runs": ' + b"9" * 10**6 + b"}\n"),
    "invalid UTF-8": _instead(b'{"runs": "\xff\xfe"}\n'),
    "archive bomb": lambda file, _, __: _write(file, _BOMB),
    "pickle of a list": _instead(pickle.dumps([1, 2, 3])),
}
_BOMB = bomb(2**27)


def damages() -> dict[str, Callable[[Path, Path, random.Random], None]]:
    """Return every kind of damage by name: those here, and those of the forging campaign."""
    from edges import forging

    def changed(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, Path, random.Random], None]:
        return lambda file, _, source: _write(file, change(file.read_bytes(), source))

    bytewise = {name: changed(change) for name, change in forging.BYTES.items()}
    data = {name: changed(change) for name, change in forging.DATA.items()}
    return {**DAMAGE, **bytewise, **data, **forging.PLACES}


def damaged(runs: Sequence[Path], to: Path, number: int, seed: int) -> tuple[Path, str, str, Path]:
    """Make copy ``number``; returns it, the damaged file's name, the kind of damage, and the run it was made of."""
    source, kinds = random.Random(seed * 10**6 + number), damages()
    run, kind = runs[number % len(runs)], list(kinds)[number // len(runs) % len(kinds)]
    copy = to / f"{number:05d}"
    shutil.copytree(run, copy)
    names = sorted(file.relative_to(copy).as_posix() for file in copy.rglob("*") if file.is_file())
    names = [name for name in names if not name.endswith(".lock")]
    name = source.choice([*names, *(name for name in names if covered(name))])
    file = copy / name
    same = [other / name for other in runs if other != run and (other / name).is_file()]
    kinds[kind](file, source.choice(same or [copy / other for other in names if other != name]), source)
    return copy, name, kind, run


def verified(folders: Sequence[Path], patience: float = 600.0) -> dict[str, Outcome]:
    """Return what ``evenhand verify`` says of each folder, run in one process; a process that hangs is ended."""
    command = [sys.executable, "-m", "faults.damaged_folders", *map(str, folders)]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        text, _ = started.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        started.kill()
        text, _ = started.communicate()
    found = [Outcome(**json.loads(line)) for line in text.splitlines() if line.startswith(b"{")]
    by_name = {outcome.folder: outcome for outcome in found}
    for folder in folders:
        if str(folder) not in by_name:
            by_name[str(folder)] = Outcome(str(folder), -1, f"hang or crash: {text[-2000:]!r}", 0.0, patience, 0.0)
    return by_name


def verdicts(runs: Sequence[Path], to: Path, numbers: Sequence[int], seed: int) -> Iterator[tuple[str, Outcome, bool]]:
    """Give the case in words, its outcome, and whether all that is covered is as it was, for each number."""
    from edges import forging

    whole = {run: forging.promised(run) for run in runs}
    for start in range(0, len(numbers), BATCH):
        cases = [damaged(runs, to, number, seed) for number in numbers[start : start + BATCH]]
        outcomes = verified([copy for copy, *_ in cases])
        for copy, name, kind, run in cases:
            outcome = outcomes[str(copy)]
            same = outcome.code != 0 or not covered(name) or _same(copy, whole[run], name)
            yield f"{kind} of {name} of {run.name} ({copy.name})", outcome, same
            shutil.rmtree(copy)


def _same(copy: Path, whole: dict[str, Any], name: str) -> bool:
    """Whether nothing that a reader relies on changed: markers and signatures may be gone, but not be others."""
    from edges import forging

    return forging.promised(copy) == whole and (
        Path(name).name not in ("signature.json",) or not (copy / name).exists()
    )


def faults(outcome: Outcome) -> list[str]:
    """Return what is wrong with how a damaged folder was refused, or accepted."""
    lines = outcome.text.splitlines()
    found = []
    if outcome.code not in (0, 1):
        found.append(f"exit code {outcome.code}: {outcome.text[:500]}")
    if outcome.code == 1 and not any(line.startswith("NOT verified: ") for line in lines):
        found.append(f"no line says what is wrong: {outcome.text[:500]}")
    if "Traceback" in outcome.text or not all(
        line.startswith(("NOT verified: ", "note: ", "verified: ")) for line in lines
    ):
        found.append(f"other text: {outcome.text[-1500:]}")
    if len(set(lines)) < len(lines) or any(len(line) > 500 for line in lines):
        found.append(f"a line twice, or a long one: {outcome.text[:1500]}")
    if outcome.seconds > SECONDS or outcome.waited > PATIENCE:
        found.append(f"{outcome.seconds:.1f} s of the processor, {outcome.waited:.1f} s in all")
    if outcome.megabytes > MEGABYTES:
        found.append(f"{outcome.megabytes:.0f} MB")
    return found


def _peak() -> float:
    """Megabytes at the peak since the last ``_forget_peak``; where there is no such thing, since the start."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _verify(folder: str) -> Outcome:
    from evenhand import cli

    sys.argv = ["evenhand", "verify", folder]
    _forget_peak()
    text, code, began = io.StringIO(), 0, (time.process_time(), time.monotonic())
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException as error:
            text.write(f"Traceback: {error!r}")
            code = -2
    seconds, waited = time.process_time() - began[0], time.monotonic() - began[1]
    return Outcome(folder, code, text.getvalue(), seconds, waited, _peak())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(json.dumps(_verify(argument).__dict__) + "\n")
        sys.stdout.flush()
