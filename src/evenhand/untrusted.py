"""The one reader for files that somebody else may have written or damaged: a problem is one sentence, never a crash.

Whatever the bytes are, these functions return plain data of the asked shape or raise ``VerificationError``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from evenhand.errors import VerificationError

LARGEST = 2**28
"""Bytes of a file that is read or hashed, unless the caller says another number."""
PARSED = 2**25
"""Bytes of JSON that is parsed as a whole: a plan of fifty thousand owners takes a fifth of this."""
SMALL = 2**20
"""Bytes of a file that holds a few numbers and names, such as a checkpoint's marker."""
LONGEST = 2**24
"""Bytes of one line of a file that is read line by line."""
DEEPEST = 32
"""Levels of nesting; no file of a run folder has more than ten."""
WEIGHTS = ".safetensors"
"""How the name of a file of weights ends: it may have any size, but only the one that its header states."""
_CROWDED = 12
"""Fewest bytes per list or table in large JSON: a file of empty ones would take thirty times its size in memory."""
Shape = Any
"""A type, a tuple of types, ``[shape]`` for a list of it, ``{str: shape}`` for a table, ``{"key": shape}`` for keys."""


@contextmanager
def opened(path: Path, *, largest: int | None = LARGEST) -> Iterator[io.BufferedReader]:
    """Yield a regular file, open for reading; refuse folders, devices, pipes and files that are too large.

    Args:
      path: the file; a pipe without a writer does not make this wait.
      largest: bytes that it may have, None for any number.

    Raises:
      VerificationError: the file is missing, is not a regular one, is too large or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise VerificationError(f"{path.name} cannot be read: it is not a file.")
            if largest is not None and about.st_size > largest:
                raise VerificationError(f"{path.name} cannot be read: it has more than {largest} bytes.")
            yield file
    except IsADirectoryError:
        raise VerificationError(f"{path.name} cannot be read: it is not a file.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its name or content cannot be used"
        raise VerificationError(f"{path.name} cannot be read ({why}).") from None


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file of at most ``largest``; see ``opened``."""
    with opened(path, largest=largest) as file:
        return file.read(largest)


def lines(path: Path, *, largest: int = LARGEST, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield the lines of a file one by one, each with its end; the last one may have none.

    Raises:
      VerificationError: as ``opened``, or a line is longer than ``longest``: no more of it than that is read.
    """
    with opened(path, largest=largest) as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise VerificationError(f"{path.name} cannot be read: it has a line of more than {longest} bytes.")
            yield line


def digest(path: Path, *, largest: int | None = LARGEST) -> str | None:
    """Return the SHA-256 of a regular file; None if there is no such file or it cannot belong to a run.

    A file of weights may have any size, but only that which its own header states.
    """
    weights = path.name.endswith(WEIGHTS)
    try:
        with opened(path, largest=None if weights else largest) as file:
            if weights and os.fstat(file.fileno()).st_size > LARGEST and not _whole(file):
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except VerificationError:
        return None


def check_stored(file: IO[bytes], name: str) -> None:
    """Refuse a file that is no archive, or that has compressed parts, which could take more memory than its size.

    Raises:
      VerificationError: torch and numpy write archives without compression, so that this one is not theirs.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, LookupError, struct.error):
        raise _damaged(name) from None
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise _damaged(name)
    file.seek(0)


def read_json(path: Path, shape: Shape = dict, *, largest: int = PARSED) -> Any:
    """Return the plain data in a JSON file, checked to have a shape; see ``parse_json`` and ``fits``."""
    return parse_json(read_bytes(path, largest=largest), path.name, shape)


def parse_json(data: bytes, name: str, shape: Shape = dict) -> Any:
    """Return the plain data in JSON bytes: UTF-8, finite numbers, no key twice, little nesting, of the shape asked for.

    Examples:
      >>> parse_json(b'{"runs": 2}', "composition.json", {"runs": int})
      {'runs': 2}
      >>> try: parse_json(b'{"runs": NaN}', "composition.json")
      ... except VerificationError as error: print(error)
      composition.json cannot be read: it was damaged or edited.
    """
    if data.count(b"[") + data.count(b"{") > 2**16 + len(data) // _CROWDED:
        raise _damaged(name)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_short,
        )
    except (ValueError, RecursionError):
        raise _damaged(name) from None
    if not _plain(value) or not fits(value, shape):
        raise _damaged(name)
    return value


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


def _whole(file: IO[bytes]) -> bool:
    """Return whether a file of weights ends where its header says; it is read from the start again after this."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = parse_json(file.read(length) if length <= LARGEST else b"", "the header", {})
        ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
        stated = 8 + length + max(ends, default=0)
    except (VerificationError, LookupError, TypeError):
        return False
    return file.seek(0, os.SEEK_END) == stated and file.seek(0) == 0


def _damaged(name: str) -> VerificationError:
    return VerificationError(f"{name} cannot be read: it was damaged or edited.")


def _once(pairs: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    pairs = list(pairs)
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key stands twice")
    return mapping


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


def _plain(value: Any) -> bool:
    """Return whether nesting is shallow and every text can be written again; walks without recursion."""
    level, depth = [value], 0
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
