"""Remember which files of user code a run used, and which of them a person has named on this machine.

A run folder may come from anybody, so no file of code that a folder names is executed because the folder names it. A
person must name it on the command line. The name is remembered in the state folder of this machine, for this file with
these bytes, so that ``evenhand resume RUN`` finds it again; nobody can send that memory along with a folder.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evenhand import _user_code, durable, untrusted
from evenhand.errors import EvenhandError, VerificationError
from evenhand.runs.folder import Folder, write_json

if TYPE_CHECKING:
    from evenhand.data import Declaration

ROLES = ("model", "features")
"""Settings that may name a file of code: file.py:factory."""
KEY = "code"
"""In preprocessing.json: the SHA-256 of each file of code, by what it is for."""
_DIGESTS: untrusted.Shape = {str: str}


def write(folder: Folder, declared: Declaration | None, references: Mapping[str, str | None]) -> None:
    """Write preprocessing.json, with the digests of the code that ``references`` name, by role."""
    digests = {role: _user_code.digest(text) for role, text in references.items() if text and _user_code.is_own(text)}
    if declared is not None:
        write_json(folder.path / "preprocessing.json", {**declared.to_json(), **({KEY: digests} if digests else {})})
    if digests:
        write_json(_file(folder), digests)


def copy(folder: Folder, new: Folder) -> None:
    """Copy the digests into a fork of the run."""
    if _file(folder).exists():
        write_json(_file(new), untrusted.read_json(_file(folder), _DIGESTS))


def tell_difference(path: Path, role: str, reference: str) -> None:
    """Print on stderr if a file of code is not the one that the run was trained with."""
    recorded = _recorded(Folder(path)).get(role)
    if recorded is not None and recorded != _user_code.digest(reference):
        print(
            f"evenhand: the {role} file that you name is not the one that this run was trained with: their digests "
            "differ. What it computes may be something else, even if the weights fit.",
            file=sys.stderr,
        )


def remember(references: Iterable[str | None]) -> None:
    """Remember files of code that a person named; nothing happens if the state folder cannot be written."""
    for reference in references:
        if reference and _user_code.is_own(reference):
            with suppress(OSError, EvenhandError):
                place = _place(reference)
                durable.make_folder(place.parent, private=True, parents=True)
                durable.write(place, b"", durable.PRIVATE)


def remembered(reference: str) -> bool:
    """Return whether a person named this very file, with these bytes and this factory, on this machine."""
    try:
        return _user_code.parts(reference, "", "")[0].is_absolute() and _place(reference).is_file()
    except (OSError, EvenhandError, ValueError):
        return False


def _place(reference: str) -> Path:
    """Return the file whose existence says that a person named this code."""
    from evenhand.runs.dataset_ledger import state_folder  # imports torch

    secret = f"{reference}\0{_user_code.digest(reference)}"
    return state_folder() / "code" / hashlib.sha256(secret.encode()).hexdigest()


def _file(folder: Folder) -> Path:
    return folder.private / "code.json"


def _recorded(folder: Folder) -> Mapping[str, str]:
    """Return the digests in a run: the shared ones, else those in private/; older runs have none."""
    for file, key in ((folder.path / "preprocessing.json", KEY), (_file(folder), None)):
        with suppress(VerificationError):
            content = untrusted.read_json(file)
            inner = content if key is None else content.get(key)
            if untrusted.fits(inner, _DIGESTS):
                return dict(inner)
    return {}
