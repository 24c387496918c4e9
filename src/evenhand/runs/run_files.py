"""Write files of a run folder: durably, and recorded. The ledger has a shareable file's digest before it has its name.

The row comes first and the name after it. A crash in between leaves the new file in private/, under a random name,
where the next command that writes to the folder finds it by its digest and puts it in place (``place_recorded_files``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from evenhand import durable, untrusted
from evenhand.runs.ledger import Ledger
from evenhand.runs.ledger_rows import plain_name
from evenhand.runs.statement_files import FROM_FACTS, FROM_NOISE, KEPT

LEDGER = "ledger.jsonl"
SIGNATURE = "signature.json"
_BY_THEMSELVES = ("plan.json", LEDGER, SIGNATURE)
"""The plan's digest opens the ledger, the ledger's rows are chained, and a signature is over the ledger's head."""
_CLOSED = ("private", "kept")
"""Folders whose files only their owner may read."""
RECORDED = tuple(name for name in ("README.md", *FROM_FACTS, *FROM_NOISE) if name not in _BY_THEMSELVES)
"""Files of a run that may be shared, and whose digests the ledger records."""

_EARLIER = tuple(f"{name}.part" for name in RECORDED)
"""Names that files which wait for their own had in an earlier version."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the shareable files that lie in a run folder, by name."""
    file_digests = {name: untrusted.digest(folder / name) for name in RECORDED}
    return {name: digest for name, digest in file_digests.items() if digest is not None}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data; durable on return, and a crash leaves either the old file or the new one."""
    write_durably(path, as_json(data))


def as_json(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file of the folder. All are written this one way, so that a changed byte shows."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, sync it and rename it into place; durable on return.

    A file that lies beside a ledger has its row there before it has its name. In a folder that is no part of a run,
    files that a killed command left half written are removed first.
    """
    _refuse_links(path)
    if not _recorded(path):
        private = path.parent.name in _CLOSED
        if not private and not (path.parent / LEDGER).exists():
            durable.clean(path.parent)
        durable.write(path, data, durable.PRIVATE if private else durable.SHARED)
        return
    with Ledger.writing(path.parent / LEDGER) as ledger:
        place_recorded_files(path.parent, ledger)
        put_in_place(path, ledger, lambda file: file.write(data))


def put_in_place(
    path: Path, ledger: Ledger, fill: Callable[[BinaryIO], object], record: Callable[[str], None] = lambda digest: None
) -> None:
    """Write a file in private/, where it is not shared, sync it, record it in the ledger, then give it its name.

    ``record`` is called with its digest, to write other rows before it has its name. All is durable on return.
    """
    private = path.parent / "private"
    durable.make_folder(private, private=True)
    with durable.waiting(path, private) as (part, file):
        fill(file)
    digest = sha256(part)
    record(digest)
    ledger.file(path.name, digest)
    durable.rename(part, path)


def place_recorded_files(folder: Path, ledger: Ledger) -> None:
    """Put recorded files in place where a crash came between the row and the name, and remove other unfinished files.

    A file is taken only if its digest is the one that the ledger records.
    """
    _refuse_links(folder / "private" / "kept" / "checkpoint")
    parts = find_unplaced_files(folder)
    for name, digest in ledger.files.items() if parts else ():
        if digest in parts and untrusted.digest(folder / name) != digest:
            durable.rename(parts.pop(digest), folder / name)
    durable.clean(folder, folder / "private", folder / "private" / "kept")


def find_unplaced_files(folder: Path) -> dict[str, Path]:
    """Return the files in private/ that a crash left without their name, by digest."""
    parts = durable.parts(folder / "private", _EARLIER)
    files = {untrusted.digest(file): file for file in parts if not file.is_symlink()}
    return {digest: file for digest, file in files.items() if digest is not None}


def _refuse_links(path: Path) -> None:
    """Raise if a folder that evenhand makes in a run folder is a link: a received run could write elsewhere by it."""
    for folder in path.parents[:2]:
        if folder.name in _CLOSED:
            durable.refuse_link(folder)


def _recorded(path: Path) -> bool:
    """Return whether the ledger beside a file must record it."""
    return (path.parent / LEDGER).exists() and plain_name(path.name) and path.name not in (*_BY_THEMSELVES, *KEPT)
