"""Code of the user's own: ``file.py:name``. It is executed, so it comes from the user, never from a run folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from evenhand.errors import EvenhandError, UsageError


def is_own(text: str) -> bool:
    """Whether a flag names a file rather than something built in.

    Examples:
      >>> is_own("nets.py:small"), is_own("mlp")
      (True, False)
    """
    return ".py" in text or ":" in text


def parts(text: str, flag: str, example: str) -> tuple[Path, str]:
    """File and name of ``file.py:name``.

    Examples:
      >>> parts("nets.py:small", "--model", "nets.py:small")[1]
      'small'
    """
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{flag} takes a built-in name or file.py:factory, for example {flag} {example}.")
    return Path(file), name


def executed(path: Path, role: str) -> ModuleType:
    """The file as a module. ``role`` (model, features, rule) is named in errors and keeps modules apart."""
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"There is no {role} file {path}: pass a Python file of your own.")
    spec = importlib.util.spec_from_file_location(f"evenhand_{role}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except EvenhandError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path.name} cannot be imported: {described(error)}. Nothing was spent.") from error
    return module


def described(error: BaseException) -> str:
    """An error of the user's code in words.

    Examples:
      >>> described(ValueError("no")), described(ValueError())
      ('ValueError: no', 'ValueError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
