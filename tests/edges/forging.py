"""Run folders of several kinds, and random changes to any file of one: what a forger, a disk or an editor may do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.density import MomentDensity
from evenhand.runs.ledger_rows import encode_row, parse
from evenhand.runs.run_files import RECORDED, as_json
from evenhand.runs.signatures import new_key
from evenhand.runs.statement import digest, markdown
from evenhand.runs.verify import sign

PROMISED = (*RECORDED, "plan.json")
"""Files whose every byte is covered, beside the ledger's rows."""
NUMBER = re.compile(rb"\d+\.\d+")


def data(owners: bool = False, seed: int = 3) -> Data:
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
    named = ["strict", "open"] * 30 if owners else None
    return wrap(inputs, [i % 2 for i in range(60)], groups=["a", "b", "b"] * 20, owners=named)


def owners(out: Path) -> None:
    budgets = eh.Budgets({"strict": 1, "open": 8}, 1e-3)
    options: dict[str, Any] = {"method": "idp_sample", "epochs": 2, "batch_size": 20, "progress": False}
    eh.fit(nn.Linear(3, 2), data(True), privacy=budgets, test=data(seed=4), out=out, **options)


def density(out: Path) -> None:
    inputs, labels = torch.randn(90, 3, generator=torch.Generator().manual_seed(5)), [0, 1] * 45
    MomentDensity(epsilon=2.0, delta=1e-4, out=out).fit(inputs, labels)


def signed(out: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 20, "average": 0.9, "progress": False}
    eh.fit(nn.Linear(3, 2), data(), epsilon=3.0, delta=1e-3, test=data(seed=4), out=out, **options)
    new_key(key_of(out))
    sign(out, key_of(out))


def rebudgeted(out: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "batch_size": 20, "progress": False}
    eh.fit(nn.Linear(3, 2), data(), epsilon=1.0, delta=1e-3, out=out, **options)
    eh.rebudget(out, eh.Privacy(2), epochs=1, train=data())
    eh.resume(out, model=nn.Linear(3, 2), train=data(), progress=False)


KINDS: dict[str, Callable[[Path], None]] = {make.__name__: make for make in (owners, density, signed, rebudgeted)}


def key_of(out: Path) -> Path:
    """The private key of a signed folder, beside it."""
    return out.with_name(out.name + "-key")


def public_key(out: Path) -> Path | None:
    """The public key of a signed folder; None for the others."""
    file = out.with_name(out.name + "-key.pub")
    return file if file.exists() else None


@dataclass(frozen=True)
class Change:
    """One change to a folder: to which file, of which kind."""

    file: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.file}"


def files(folder: Path) -> list[str]:
    """Every file of a run folder, checkpoints excepted: ``verify`` never opens those."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if not name.endswith((".pt", ".lock")))


@contextmanager
def changed(folder: Path, source: random.Random) -> Iterator[Change]:
    """Inside, one file of the folder is another one; afterwards all is as before."""
    name = source.choice([*files(folder), *(name for name in PROMISED if (folder / name).exists())])
    file = folder / name
    before = file.read_bytes()
    kind = source.choice(list(BYTES) + [*DATA] * file.name.endswith((".json", ".jsonl")) + list(PLACES))
    other = folder / source.choice(files(folder))
    try:
        if kind in PLACES:
            PLACES[kind](file, other, source)
        else:
            file.write_bytes((BYTES | DATA)[kind](before, source))
        yield Change(name, kind)
    finally:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        file.write_bytes(before)


def _flip(text: bytes, source: random.Random) -> bytes:
    found = bytearray(text or b"\0")
    for _ in range(source.choice([1, 1, 1, 5])):
        found[source.randrange(len(found))] ^= 1 << source.randrange(8)
    return bytes(found)


def _deleted(text: bytes, source: random.Random) -> bytes:
    first, count = source.randrange(len(text) + 1), source.choice([1, 2, 30])
    return text[:first] + text[first + count :]


def _inserted(text: bytes, source: random.Random) -> bytes:
    first = source.randrange(len(text) + 1)
    return (
        text[:first] + source.choice([b"0", b" ", b"\n", b"\0", b"\xff\xfe", b"[" * 5000, b"9" * 5000]) + text[first:]
    )


def _cut(text: bytes, source: random.Random) -> bytes:
    return text[: source.randrange(len(text) + 1)]


def _digit(text: bytes, source: random.Random) -> bytes:
    """A number in a text becomes smaller: epsilon 2.998 becomes 0.998, 1.998, 2.098 ..."""
    places = [place for found in NUMBER.finditer(text) for place in range(*found.span()) if text[place] in b"123456789"]
    if not places:
        return _flip(text, source)
    place = source.choice(places)
    return text[:place] + str(source.randrange(int(text[place : place + 1]))).encode() + text[place + 1 :]


def _line(text: bytes, source: random.Random) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    first, second = source.randrange(len(lines)), source.randrange(len(lines))
    action = source.choice(["remove", "double", "swap", "end"])
    if action == "remove":
        del lines[first]
    elif action == "double":
        lines.insert(second, lines[first])
    elif action == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    else:
        del lines[-source.randrange(1, len(lines) + 1) :]
    return b"".join(lines)


def _encoded(text: bytes, source: random.Random) -> bytes:
    return source.choice(
        [text.decode("latin-1").encode("utf-16"), b"\xef\xbb\xbf" + text, text.replace(b"\n", b"\r\n"), text + b"\n"]
    )


def _emptied(text: bytes, source: random.Random) -> bytes:
    return source.choice([b"", b"{}", b"[]", b"null", b"0", b'""', b"[" * 100_000])


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit flip": _flip,
    "deletion": _deleted,
    "insertion": _inserted,
    "truncation": _cut,
    "digit": _digit,
    "smaller digit": _digit,
    "line": _line,
    "encoding": _encoded,
    "emptying": _emptied,
}


def _value(found: Any, source: random.Random) -> Any:
    """Something else in place of a value: near it, far from it, or of another type."""
    if isinstance(found, int | float) and not isinstance(found, bool) and source.random() < 0.6:
        return source.choice([found * 0.9991, found * 0.5, found - 1, found + 1e-9, -found, 0, found * 1e300])
    return source.choice(
        [None, True, "", "x", "\ud800", [], {}, [[found]], {"a": found}, 10**17, -1, 1e308, float("nan"), _nested(500)]
    )


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def edited(found: Any, source: random.Random) -> Any:
    """Plain data with one value, key or entry changed somewhere."""
    if isinstance(found, dict) and found and source.random() < 0.9:
        key = source.choice(list(found))
        action = source.random()
        rest = {name: value for name, value in found.items() if name != key}
        if action < 0.08:
            return rest
        if action < 0.16:
            return {**rest, key + "x": found[key]}
        return {name: edited(value, source) if name == key else value for name, value in found.items()}
    if isinstance(found, list) and found and source.random() < 0.9:
        place = source.randrange(len(found))
        action = source.random()
        if action < 0.1:
            return found[:place] + found[place + 1 :]
        if action < 0.2:
            return [*found, found[place]]
        return [*found[:place], edited(found[place], source), *found[place + 1 :]]
    return _value(found, source)


def _edit(text: bytes, source: random.Random) -> bytes:
    """A value of a JSON file or of one line of it; written as evenhand writes."""
    lines = text.splitlines()
    try:
        if len(lines) == 1 or not text.startswith(b"{\n"):
            place = source.randrange(len(lines))
            lines[place] = json.dumps(edited(json.loads(lines[place]), source), separators=(",", ":")).encode()
            return b"\n".join(lines) + b"\n"
        return (json.dumps(edited(json.loads(text), source), indent=1) + "\n").encode()
    except (ValueError, RecursionError):
        return _flip(text, source)


def _doubled(text: bytes, source: random.Random) -> bytes:
    """A key that stands twice, the second time with another value."""
    keys = list(re.finditer(rb'"(\w+)": ?([^,\n{}\[\]]+)', text))
    if not keys:
        return _flip(text, source)
    found = source.choice(keys)
    return text[: found.start()] + b'"' + found[1] + b'": 0,' + text[found.start() :]


DATA: dict[str, Callable[[bytes, random.Random], bytes]] = {"edit": _edit, "other edit": _edit, "double key": _doubled}


def _folder(file: Path, other: Path, source: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _linked(file: Path, other: Path, source: random.Random) -> None:
    file.unlink()
    file.symlink_to(source.choice([other, Path("/dev/null"), Path("/nowhere"), file.parent, file]))


def _removed(file: Path, other: Path, source: random.Random) -> None:
    file.unlink()


def _exchanged(file: Path, other: Path, source: random.Random) -> None:
    file.write_bytes(other.read_bytes())


def _pipe(file: Path, other: Path, source: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


PLACES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "folder": _folder,
    "link": _linked,
    "removal": _removed,
    "exchange": _exchanged,
    **({"pipe": _pipe} if hasattr(os, "mkfifo") else {}),
}


def promised(folder: Path) -> dict[str, Any]:
    """All that must be as before if nothing is reported: every covered byte, and every row of the ledger."""
    found: dict[str, Any] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in PROMISED if (folder / name).is_file()
    }
    return {**found, "rows": parse((folder / "ledger.jsonl").read_bytes()).hashes}


def rechain(folder: Path, name: str, text: bytes) -> None:
    """Put a forged file in place as one who knows the format would: its row and all hashes after it are made anew."""
    rows = rows_of(folder)
    if name == "statement.json":
        text = _with_digest(text)
    if name == "plan.json":
        with suppress(ValueError, RecursionError):
            plain = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
            rows[0]["plan"] = hashlib.sha256(plain.encode()).hexdigest()
    for row in [row for row in rows if (row.get("type"), row.get("name")) == ("file", name)][-1:]:
        row["sha256"] = hashlib.sha256(text).hexdigest()
    (folder / name).write_bytes(text)
    write_rows(folder, rows)


def _with_digest(text: bytes) -> bytes:
    try:
        body = json.loads(text)
        return as_json({**body, "digest": digest(body)})
    except (ValueError, TypeError, RecursionError, AttributeError):
        return text


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a ledger without their hashes."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("prev", "hash")} for row in rows]


def write_rows(folder: Path, rows: Any) -> None:
    """Write a ledger of these rows with a chain that holds; a statement that named its head names the new one."""
    old = [json.loads(line)["hash"] for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    heads, head, lines = ["0" * 64], "0" * 64, []
    for row in rows if isinstance(rows, list) else [rows]:
        line, head = encode_row(row if isinstance(row, dict) else {"type": row}, head)
        heads.append(head)
        lines.append(line)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines))
    moved = dict(zip(old, heads[1:], strict=False))
    file = folder / "statement.json"
    try:
        body = json.loads(file.read_bytes())
        if moved.get(body["ledger_head"], body["ledger_head"]) != body["ledger_head"]:
            body["ledger_head"] = moved[body["ledger_head"]]
            rechain(folder, "statement.json", json.dumps(body).encode())
            rechain(folder, "statement.md", markdown(json.loads(file.read_bytes())).encode())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        pass


def as_before(folder: Path) -> None:
    """Make a folder one that an earlier version wrote: no file is recorded, and every head is the one without."""
    heads, head, lines = {}, "0" * 64, []
    for line in (folder / "ledger.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        if row["type"] != "file":
            bare = {key: value for key, value in row.items() if key not in ("prev", "hash")}
            written, head = encode_row(bare, head)
            lines.append(written)
        heads[row["hash"]] = head
    (folder / "ledger.jsonl").write_bytes(b"".join(lines))
    body = json.loads((folder / "statement.json").read_bytes())
    body["ledger_head"] = heads[body["ledger_head"]]
    body["sharing"]["may_be_shared"].remove("signature.json")
    (folder / "statement.json").write_bytes(as_json({**body, "digest": digest(body)}))
    (folder / "statement.md").write_text(markdown(json.loads((folder / "statement.json").read_bytes())))
    for file in (folder / "private").rglob("*.pt"):
        state = torch.load(file, weights_only=True)
        torch.save({**state, "ledger_head": heads[state["ledger_head"]]}, file)
        marker = {"ledger_head": heads[state["ledger_head"]], "position": state["position"]}
        file.with_suffix(".json").write_bytes(as_json(marker))
