"""The one reader for files that somebody else may have written or damaged: a problem is one sentence, never a crash.

Whatever the bytes are, these functions return plain data of the asked shape or raise ``VerificationError``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from evenhand.errors import VerificationError

LARGEST = 2**28
"""Bytes of a file that is read into memory: a plan of a hundred thousand owners takes a twentieth of this."""
DEEPEST = 32
"""Levels of nesting; no file of a run folder has more than ten."""
Shape = Any
"""A type, a tuple of types, ``[shape]`` for a list of it, ``{str: shape}`` for a table, ``{"key": shape}`` for keys."""


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file; folders, devices, pipes and files that are too large are refused.

    Raises:
      VerificationError: the file is missing, is not a regular one, is too large or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise VerificationError(f"{path.name} cannot be read ({error.strerror}).") from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise VerificationError(f"{path.name} cannot be read: it is not a file.")
        if about.st_size > largest:
            raise VerificationError(f"{path.name} cannot be read: it has more than {largest} bytes.")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(largest)
    except OSError as error:
        raise VerificationError(f"{path.name} cannot be read ({error.strerror}).") from None
    finally:
        os.close(handle)


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a regular file of any size, None if there is no such file or it cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def read_json(path: Path, shape: Shape = dict) -> Any:
    """Return the plain data in a JSON file, checked to have a shape; see ``parse_json`` and ``check``."""
    return parse_json(read_bytes(path), path.name, shape)


def parse_json(data: bytes, name: str, shape: Shape = dict) -> Any:
    """Return the plain data in JSON bytes: UTF-8, finite numbers, no key twice, little nesting, of the shape asked for.

    Examples:
      >>> parse_json(b'{"runs": 2}', "composition.json", {"runs": int})
      {'runs': 2}
      >>> try: parse_json(b'{"runs": NaN}', "composition.json")
      ... except VerificationError as error: print(error)
      composition.json cannot be read: it was damaged or edited.
    """
    try:
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_short,
        )
    except (ValueError, RecursionError):
        raise _damaged(name) from None
    if not _plain(found) or not fits(found, shape):
        raise _damaged(name)
    return found


def fits(value: Any, shape: Shape) -> bool:
    """Return whether plain data have a shape; further keys are allowed where keys are named.

    Examples:
      >>> fits({"a": [1, 2.5], "b": None}, {"a": [(int, float)], "b": (str, type(None))})
      True
      >>> fits({"a": True}, {"a": int}), fits({"x": "y"}, {str: str})
      (False, True)
    """
    if isinstance(shape, list):
        return type(value) is list and all(fits(part, shape[0]) for part in value)
    if isinstance(shape, dict) and str in shape:
        return type(value) is dict and all(fits(part, shape[str]) for part in value.values())
    if isinstance(shape, dict):
        return type(value) is dict and all(key in value and fits(value[key], part) for key, part in shape.items())
    return type(value) in (shape if isinstance(shape, tuple) else (shape,))


def _damaged(name: str) -> VerificationError:
    return VerificationError(f"{name} cannot be read: it was damaged or edited.")


def _once(pairs: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(_: str) -> NoReturn:
    raise ValueError("not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _short(text: str) -> int:
    if len(text) > 18:
        raise ValueError("a whole number that no file of a run has")
    return int(text)


def _plain(found: Any) -> bool:
    """Return whether nesting is shallow and every text can be written again; walks without recursion."""
    level, depth = [found], 0
    while level:
        depth += 1
        texts = [part for part in level if isinstance(part, str)]
        texts += [key for part in level if isinstance(part, dict) for key in part]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            return False
        if depth > DEEPEST:
            return False
        level = [
            inner
            for part in level
            if isinstance(part, dict | list)
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
    return True
