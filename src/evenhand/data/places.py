"""Where the files of named data lie: one folder per source, files under their official names, gzipped or not."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from evenhand.data.files import LIMIT
from evenhand.errors import DataError, UsageError

VARIABLE = "EVENHAND_DATA"


def cache_folder() -> Path:
    """The user's cache of evenhand, as the platform has it."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "evenhand"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "evenhand"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "evenhand" / "cache"
    return Path.home() / ".cache" / "evenhand"


def data_folder(given: str | Path | None = None) -> Path:
    """The folder of all sources: what was given, EVENHAND_DATA, or ``data`` in the user's cache.

    Examples:
      >>> data_folder("mine")
      PosixPath('mine')
    """
    if given:
        return Path(given)
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else cache_folder() / "data"


@dataclass(frozen=True)
class Place:
    r"""The folder of one source.

    Examples:
      >>> import tempfile
      >>> place = Place(Path(tempfile.mkdtemp()))
      >>> _ = (place.folder / "names.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
      >>> place.text("names.txt").split(), place.find("other.txt")
      (['one', 'two'], None)
    """

    folder: Path

    def find(self, name: str) -> Path | None:
        """The file or folder of this name, or the file with ``.gz`` behind it."""
        for path in (self.folder / name, self.folder / f"{name}.gz"):
            if path.exists():
                return path
        return None

    def path(self, name: str) -> Path:
        """The same, when it must be there."""
        found = self.find(name)
        if found is None:
            raise UsageError(f"There is no file {self.folder / name}, gzipped or not.")
        return found

    def content(self, name: str) -> bytes:
        """The content of a file, unpacked; a file that unpacks to more than the limit is refused."""
        path = self.path(name)
        try:
            packed = path.suffix == ".gz" and not name.endswith(".gz")
            with gzip.open(path, "rb") if packed else path.open("rb") as file:
                found = file.read(LIMIT + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise DataError(f"{path} is damaged: it cannot be unpacked. Delete it and fetch it again.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}).") from None
        if len(found) > LIMIT:
            raise DataError(f"{path} unpacks to more than {LIMIT / 2**30:.3g} GiB: it is not the official file.")
        return found

    def text(self, name: str) -> str:
        """The content of a UTF-8 text file."""
        try:
            return self.content(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise damaged(self.path(name), "UTF-8 text") from None


def damaged(path: Path, what: str) -> DataError:
    """A file that is there but is not what its name says; nothing of its content is shown.

    Examples:
      >>> print(damaged(Path("mnist/t10k-labels-idx1-ubyte"), "an IDX file"))
      mnist/t10k-labels-idx1-ubyte is not an IDX file as published: it is damaged or another file. Delete it and get it again.
    """  # noqa: E501
    return DataError(f"{path} is not {what} as published: it is damaged or another file. Delete it and get it again.")
