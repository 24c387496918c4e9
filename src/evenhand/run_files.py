"""Writing files of a run folder: durably, and recorded. A shareable file has its digest in the ledger before its name.

The row comes first and the name after it. A crash in between leaves the new file in private/, where the next command
that writes to the folder finds it and puts it in place (``mend``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.privacy.chain import plain_name
from evenhand.privacy.ledger import Ledger, sync_folder
from evenhand.privacy.statement_sharing import FROM_FACTS, FROM_NOISE, KEPT

LEDGER = "ledger.jsonl"
SIGNATURE = "signature.json"
_BY_THEMSELVES = ("plan.json", LEDGER, SIGNATURE)
"""The plan's digest opens the ledger, the ledger's rows are chained, and a signature is over the ledger's head."""
RECORDED = tuple(name for name in ("README.md", *FROM_FACTS, *FROM_NOISE) if name not in _BY_THEMSELVES)
"""Files of a run that may be shared, and whose digests the ledger records."""


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the shareable files that lie in a run folder, by name."""
    found = {name: untrusted.digest(folder / name) for name in RECORDED}
    return {name: digest for name, digest in found.items() if digest is not None}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data so that a crash leaves either the old file or the new one."""
    write_durably(path, as_json(data))


def as_json(data: Mapping[str, Any]) -> bytes:
    """The one way in which a file of this folder is written, so that a changed byte shows."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def write_durably(path: Path, data: bytes) -> None:
    """Write, sync and rename into place; a file that lies beside a ledger has its row there before it has its name."""
    if not _recorded(path):
        _replace(_synced(path.with_name(path.name + ".part"), data), path)
        return
    with Ledger.writing(path.parent / LEDGER) as ledger:
        mend(path.parent, ledger)
        _synced(waiting(path), data)
        put_in_place(path, ledger)


def put_in_place(path: Path, ledger: Ledger) -> None:
    """Record the file that is ``waiting`` for this name, then give it the name."""
    ledger.file(path.name, sha256(waiting(path)))
    _replace(waiting(path), path)


def waiting(path: Path) -> Path:
    """Where a file of a run folder is written before it gets its name: in private/, so that it is not shared by then.

    The caller must have synced it to disk before ``put_in_place``.
    """
    private = path.parent / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    return private / f"{path.name}.part"


def mend(folder: Path, ledger: Ledger) -> None:
    """Put files in place that the ledger records, where a crash came between the row and the name."""
    for name, digest in ledger.files.items():
        part = folder / "private" / f"{name}.part"
        if untrusted.digest(part) == digest != untrusted.digest(folder / name):
            _replace(part, folder / name)


def _recorded(path: Path) -> bool:
    return (path.parent / LEDGER).exists() and plain_name(path.name) and path.name not in (*_BY_THEMSELVES, *KEPT)


def _synced(path: Path, data: bytes) -> Path:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def _replace(part: Path, path: Path) -> None:
    os.replace(part, path)
    sync_folder(path.parent)
