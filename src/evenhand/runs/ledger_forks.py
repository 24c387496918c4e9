"""A ledger that begins with rows of another one: the run went back to an earlier checkpoint, under lower budgets.

The rows up to that checkpoint are copied byte for byte, so their chain stays as it was; then come a ``fork`` row, which
names the other ledger's head, and a ``replan`` row.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping

from evenhand.errors import LedgerError
from evenhand.runs.ledger_rows import Reading, encoded, parse

_LEFT = (b'{"type":"release",', b'{"type":"told",', b'{"type":"file",')


def beginning(data: bytes, head: str) -> bytes:
    """The rows of a ledger up to the one with hash ``head``, and what left the run right behind it at no cost."""
    hashes, lines = parse(data).hashes, data.splitlines(keepends=True)
    if head not in hashes[1:]:
        raise LedgerError("The ledger does not contain the row that this checkpoint was written after.")
    end = next(place for place, line in enumerate(lines) if _hash(line) == head) + 1
    while end < len(lines) and lines[end].startswith(_LEFT) and _hash(lines[end]) in hashes:
        end += 1
    found = b"".join(lines[:end])
    return found if found.endswith(b"\n") else found + b"\n"


def forked(start: bytes, left: Reading, *, position: int, plan: str, steps: int) -> tuple[bytes, str]:
    """The ledger of a run that goes on from ``start`` under another plan, and the hash of its ``fork`` row.

    Args:
      start: from ``beginning``.
      left: the whole ledger of the run that is left.
      position: steps that the checkpoint holds; a foreign change noted right behind it may be in its weights, and
        figures of them may have been told later.
      plan: digest of the new plan.
      steps: its steps in all.
    """
    before = parse(start)
    fork = {"type": "fork", "head": left.head, "from": before.reserved, "charged": left.reserved}
    keys = [key for key in left.keys if key not in before.keys]
    foreign, told = left.foreign[len(before.foreign) :], left.told[len(before.told) :]
    line, mark = encoded({**fork, "keys": keys, "id": secrets.token_hex(16)}, before.head)
    lines, head = [start, line], mark
    for row in (
        *({"type": "foreign", "position": place} for place in foreign if place <= position),
        *({"type": "told", "position": place} for place in told if place <= position),
        {"type": "replan", "plan": plan, "steps": steps, "from": before.reserved},
    ):
        line, head = encoded(row, head)
        lines.append(line)
    return b"".join(lines), mark


def with_files(data: bytes, files: Mapping[str, str]) -> bytes:
    """A ledger that ends with a row for each of these files, by name and digest; rows that it has are not repeated."""
    reading, lines = parse(data), [data]
    head, known = reading.head, reading.files()
    for name, digest in files.items():
        if known.get(name) != digest:
            line, head = encoded({"type": "file", "name": name, "sha256": digest}, head)
            lines.append(line)
    return b"".join(lines)


def _hash(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError):
        return None
