"""Truth about noise, written outside of evenhand's own files: which key gave which noise to which step."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookup import defined, modules


@dataclass(frozen=True)
class Noise:
    """Noise that was made: fingerprint of its key, what for, the step, its place in it, a hash of its first numbers."""

    key: str
    domain: str
    step: int
    offset: int
    values: str


class Witness:
    """Notes every release of noise on its way back to its caller, and can stop the process after some of them."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._rehearsing = False
        self._stop_after: int | None = None
        self._seen = 0

    def begin(self, file: Path, stop_after: int | None = None) -> None:
        """Write to this file from now on; after ``stop_after`` releases the process gets a SIGTERM."""
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stop_after = stop_after

    def install(self) -> None:
        """Put the witness around every function through which noise leaves, wherever it is known by name."""
        _wrap(defined("release_parts"), lambda f: self._around(f, lambda a: (a[3], "gradient", a[4], 0)))
        _wrap(defined("release_few"), lambda f: self._around(f, lambda a: (a[3], a[4], a[5], a[6])))
        _wrap(defined("release"), lambda f: self._around(f, lambda a: (a[3], a[4], a[5], a[6] if len(a) > 6 else 0)))
        _wrap(defined("rehearse"), self._quiet)

    def _around(self, inner: Callable[..., Any], of: Callable[[Any], tuple[Any, str, int, int]]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def noted(*args: Any, **options: Any) -> Any:
            found = inner(*args, **options)
            if self._file is not None and not self._rehearsing:
                source, domain, number, offset = of(args)
                self._note(getattr(source, "stream", source), domain, number, offset)
            return found

        return noted

    def _note(self, stream: Any, domain: str, number: int, offset: int) -> None:
        assert self._file is not None
        values = hashlib.sha256(stream.normals(domain, number, 4, offset).tobytes()).hexdigest()[:32]
        os.write(self._file, f"{stream.fingerprint} {domain} {number} {offset} {values}\n".encode())
        self._seen += 1
        if self._seen == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def _quiet(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out what is rehearsed on made-up rows with a key of its own."""

        @functools.wraps(inner)
        def rehearsed(*args: Any, **options: Any) -> Any:
            self._rehearsing = True
            try:
                return inner(*args, **options)
            finally:
                self._rehearsing = False

        return rehearsed


def _wrap(function: Callable[..., Any], around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    wrapped = around(function)
    for module in modules():
        for key, value in list(vars(module).items()):
            if value is function:
                setattr(module, key, wrapped)


def read(file: Path) -> list[Noise]:
    """Return all noise that was made, in order."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = (line.split() for line in lines)
    return [Noise(key, domain, int(number), int(offset), values) for key, domain, number, offset, values in rows]
