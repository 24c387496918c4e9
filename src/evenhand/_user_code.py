"""Runs code of the user's own: ``file.py:name``. It is executed, so it comes from the user, never from a run folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from evenhand.errors import EvenhandError, UsageError


def is_own(text: str) -> bool:
    """Return whether a flag names a file rather than something built in.

    Examples:
      >>> is_own("nets.py:small"), is_own("mlp")
      (True, False)
    """
    return ".py" in text or ":" in text


def parts(text: str, flag: str, example: str) -> tuple[Path, str]:
    """Return file and name of ``file.py:name``.

    Examples:
      >>> parts("nets.py:small", "--model", "nets.py:small")[1]
      'small'
    """
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{flag} takes a built-in name or file.py:factory, for example {flag} {example}.")
    return Path(file), name


def absolute(text: str, base: Path, flag: str = "--model") -> str:
    """Return ``file.py:name`` with its path resolved against ``base``.

    Examples:
      >>> absolute("nets.py:small", Path("/project"))
      '/project/nets.py:small'
    """
    file, name = parts(text, flag, "file.py:factory")
    return f"{os.path.abspath(base / file)}:{name}"


def digest(text: str) -> str:
    """Return the SHA-256 of the file that ``file.py:name`` names."""
    path, _ = parts(text, "--model", "nets.py:small")
    return hashlib.sha256(_source(path, "code")).hexdigest()


def executed(path: Path, role: str) -> ModuleType:
    """Execute the file and return it as a module; ``role`` (model, features, rule) is part of its name and of errors.

    What is executed are the bytes of this file, never a compiled copy that lies beside it.
    """
    source = _source(path, role)
    spec = importlib.util.spec_from_file_location(f"evenhand_{role}_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except EvenhandError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path.name} cannot be imported: {described(error)}. Nothing was spent.") from error
    return module


def _source(path: Path, role: str) -> bytes:
    try:
        if path.suffix == ".py" and path.is_file():
            return path.read_bytes()
    except (OSError, ValueError):  # names that no disk takes
        pass
    raise UsageError(f"There is no {role} file {str(path)[:200]!r}: pass a Python file of your own.")


def described(error: BaseException) -> str:
    """Return an error of the user's code in words.

    Examples:
      >>> described(ValueError("no")), described(ValueError())
      ('ValueError: no', 'ValueError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
