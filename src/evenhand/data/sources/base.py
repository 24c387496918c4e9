"""Finds and fetches the files of named data: one folder per source, files under official names, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import os
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand import durable
from evenhand.data.dataset import Data, wrap
from evenhand.data.read_files import LIMIT
from evenhand.errors import DataError, UsageError

VARIABLE = "EVENHAND_DATA"


def cache_folder() -> Path:
    """Return the user's cache folder of evenhand, as the platform has it."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "evenhand"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "evenhand"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "evenhand" / "cache"
    return Path.home() / ".cache" / "evenhand"


def data_folder(given: str | Path | None = None) -> Path:
    """Return the folder of all sources: the given one, EVENHAND_DATA, or ``data`` in the user's cache.

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
        """Return the path of the file or folder of this name, or of the file with ``.gz`` appended; None if absent."""
        for path in (self.folder / name, self.folder / f"{name}.gz"):
            if os.path.exists(path):
                return path
        return None

    def path(self, name: str) -> Path:
        """Return the path of a file, gzipped or not; raise UsageError if there is none."""
        path = self.find(name)
        if path is None:
            raise UsageError(f"There is no file {self.folder / name}, gzipped or not.")
        return path

    def content(self, name: str) -> bytes:
        """Return the content of a file, unpacked; refuse one that unpacks to more than the limit."""
        path = self.path(name)
        try:
            packed = path.suffix == ".gz" and not name.endswith(".gz")
            with gzip.open(path, "rb") if packed else path.open("rb") as file:
                content = file.read(LIMIT + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise DataError(f"{path} is damaged: it cannot be unpacked. Delete it and fetch it again.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}).") from None
        if len(content) > LIMIT:
            raise DataError(f"{path} unpacks to more than {LIMIT / 2**30:.3g} GiB: it is not the official file.")
        return content

    def text(self, name: str) -> str:
        """Return the content of a UTF-8 text file."""
        try:
            return self.content(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise damaged(self.path(name), "UTF-8 text") from None


def damaged(path: Path, what: str) -> DataError:
    """Return the error for a file that is not what its name says; nothing of its content is shown.

    Examples:
      >>> print(damaged(Path("mnist/t10k-labels-idx1-ubyte"), "an IDX file"))
      mnist/t10k-labels-idx1-ubyte is not an IDX file as published: it is damaged or another file. Delete it and get it again.
    """  # noqa: E501
    return DataError(f"{path} is not {what} as published: it is damaged or another file. Delete it and get it again.")


Loaded: TypeAlias = tuple[Data, Data | None]
"""Training data, and what is held out."""


@dataclass(frozen=True)
class File:
    """A file by its official name; ``url`` and ``digest`` are given where both are known, so that it can be fetched.

    ``digest`` is ``sha256:...`` or ``md5:...`` of the file as it is downloaded.
    """

    name: str
    url: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Source:
    """A data set that ``--data`` takes by name.

    Attributes:
      name: what ``--data`` takes.
      read: makes the data from the files; its keyword arguments are the options of the source.
      records: training and held-out records, in words.
      groups: who is reported on.
      licence: what is known about the terms of use.
      files: sets of files, any one of which is enough; ``evenhand data fetch`` gets the first.
      folder: its folder inside the data folder; default: its name.
      public: whether the records are published for anyone to see, so that nothing about them is secret. It goes by the
        name: files of one's own in their place are not told apart.
      hint: how to get files that are not downloaded.
    """

    name: str
    read: Callable[..., Loaded]
    records: str
    groups: str
    licence: str
    files: Sequence[Sequence[File]] = ()
    folder: str = ""
    public: bool = True
    hint: str = field(default="")

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword arguments of ``read``."""
        return tuple(inspect.signature(self.read).parameters)[1:]

    @property
    def fetchable(self) -> bool:
        """Return whether every file of the first set can be downloaded and checked."""
        return bool(self.files) and all(file.url and file.digest for file in self.files[0])

    def present(self, place: Place) -> bool:
        """Return whether one whole set of files is there."""
        return not self.files or any(all(place.find(file.name) for file in files) for files in self.files)

    def absent(self, place: Place) -> UsageError:
        """Return the error for a source without files: which files, where, and the command that gets them."""
        sets = [", ".join(file.name for file in files) for files in self.files]
        told = f"The files of {self.name} are not in {place.folder}. Put there (gzipped or not): {'; or '.join(sets)}."
        get = f" {self.hint}" if self.hint else ""
        fetch = f" Or let evenhand get them: evenhand data fetch {self.name}" if self.fetchable else ""
        return UsageError(f"{told}{get} Another folder: --data-dir or EVENHAND_DATA.{fetch}")


def pixels(values: NDArray[np.uint8], *, low: float = -1.0) -> Tensor:
    """Return bytes as numbers from ``low`` to 1: a public range, so it depends on no other record.

    Examples:
      >>> grey = np.array([[0, 255]], dtype=np.uint8)
      >>> pixels(grey).tolist(), pixels(grey, low=0).tolist()
      ([[-1.0, 1.0]], [[0.0, 1.0]])
    """
    scaled = torch.from_numpy(values.astype(np.float32, order="C")).div_(255)
    return scaled if low == 0 else scaled.mul_(1 - low).add_(low)


def classified(inputs: Tensor, codes: NDArray[Any], names: Sequence[str], groups: Sequence[str] | None = None) -> Data:
    """Return records with a class each; the classes are the groups too.

    Examples:
      >>> classified(torch.zeros(2, 1), np.array([1, 0]), ["a", "b"]).group_names()
      ['b', 'a']
    """
    shown = list(names if groups is None else groups)
    return wrap(
        inputs,
        [names[code] for code in codes.tolist()],
        labels=names,
        groups=[shown[code] for code in codes.tolist()],
        group_names=shown,
    )


def held_out(keys: Sequence[str], share: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask of the held-out records, by a hash of each record's key: equal keys are on the same side.

    Examples:
      >>> side = held_out(["a", "b", "a"], 0.5, seed=0)
      >>> bool(side[0] == side[2])
      True
    """
    limit = share * 2.0**64
    sides = {key: int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8], "big") < limit for key in keys}
    return np.array([sides[key] for key in keys])


def held_out_of_each(classes: Sequence[str], share: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask that holds out the same number of records of every class, whatever the seed, drawn by the seed.

    All splits then have the same public facts, so that one plan serves all of them.

    Examples:
      >>> masks = [held_out_of_each(["a"] * 10 + ["b"] * 5, 0.2, seed) for seed in (0, 1)]
      >>> [int(mask[:10].sum()) for mask in masks], [int(mask[10:].sum()) for mask in masks]
      ([2, 2], [1, 1])
    """
    names, generator = np.asarray(classes), np.random.default_rng([seed, 20])
    mask = np.zeros(len(names), dtype=np.bool_)
    for name in dict.fromkeys(classes):
        rows = np.flatnonzero(names == name)
        mask[generator.permutation(rows)[: round(share * len(rows))]] = True
    return mask


def divided(data: Data, mask: NDArray[np.bool_]) -> tuple[Data, Data]:
    """Divide records into training and held-out ones."""
    return data.take(torch.from_numpy(np.flatnonzero(~mask))), data.take(torch.from_numpy(np.flatnonzero(mask)))


def choice(value: Any, allowed: Mapping[str, Any] | Sequence[str], option: str) -> str:
    """Return the value of an option, or raise UsageError if it is not one of the allowed words."""
    if value not in tuple(allowed):
        raise UsageError(f"The option {option} of the source takes one of: {', '.join(allowed)}.")
    return str(value)


CHUNK = 2**18
TIMEOUT = 30.0
Watch = Callable[[str, int, int | None], None]
"""Told the file, the bytes so far, and how many there will be if the server says so."""


def fetch(source: Source, place: Place, watch: Watch = lambda name, done, total: None) -> list[Path]:
    """Download the missing files of a source and return the paths that were written.

    A file gets its name only when it is complete and its checksum is the published one. Data whose licence asks for
    more than a download, or whose checksum is not known, are not downloaded.
    """
    if source.present(place):
        return []
    if not source.fetchable:
        raise UsageError(
            f"evenhand does not download {source.name}: its terms ask you to get it yourself, or no published checksum "
            f"is known. {source.absent(place)}"
        )
    try:
        durable.make_folder(place.folder, parents=True)
    except OSError as error:
        raise UsageError(f"{place.folder} cannot be made ({error.strerror}): choose another --data-dir.") from None
    return [_download(file, source, place, watch) for file in source.files[0] if not place.find(file.name)]


def _download(file: File, source: Source, place: Place, watch: Watch) -> Path:
    """Download one file: it is written under another name, checked, then renamed."""
    name = file.url.rpartition("/")[2]
    target = place.folder / name
    kind, _, wanted = file.digest.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    try:
        with urllib.request.urlopen(_request(file.url), timeout=TIMEOUT) as reply, durable.writing(target) as out:
            length = reply.headers.get("Content-Length")
            total, done = int(length) if length and length.isdigit() else None, 0
            while chunk := reply.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                watch(name, done, total)
            if digest.hexdigest() != wanted:
                raise DataError(
                    f"{file.url} is not the published file: its {kind} checksum differs, so nothing was kept. The "
                    f"download was cut short or the file was changed. Try again, or put {name} into {place.folder} "
                    "yourself."
                )
        return target
    except (urllib.error.URLError, HTTPException, OSError) as error:
        raise UsageError(
            f"{file.url} cannot be fetched ({_reason(error)}). Without a network: put "
            f"{', '.join(entry.name for entry in source.files[0])} (gzipped or not) into {place.folder}."
        ) from None


def _request(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"User-Agent": "evenhand"})


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or type(error).__name__)
