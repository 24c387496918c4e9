"""MNIST, its unbalanced version, and Fashion-MNIST: four IDX files each."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.data.dataset import Data
from evenhand.data.sources.base import File, Loaded, Place, Source, classified, damaged, pixels
from evenhand.data.sources.variants import count_for_share, cut
from evenhand.errors import UsageError

PARTS = ("train", "t10k")
DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = (*("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),)


def mnist(place: Place) -> Loaded:
    """Read 60,000 and 10,000 handwritten digits, (1, 28, 28), ink from 0 to 1; groups are the classes.

    Preprocessing: every pixel divided by 255, nothing else. The usual mean and standard deviation of MNIST are not
    used, because they were taken from the records.
    """
    return _pair(place, DIGITS, [f"class {digit}" for digit in DIGITS])


def unbalanced(place: Place, minority: int = 8, kept: int | None = None, share: float | None = None) -> Loaded:
    """Read MNIST with one class of the training part cut down; the held-out part stays whole.

    Runs on it add up with runs on MNIST, whose records it has.

    Args:
      place: the folder of MNIST.
      minority: the class that is cut.
      kept: how many of its records stay, the first ones in the file. Default 500 (54,649 records in all).
      share: instead of ``kept``, what share of the remaining training records the class makes up, for example 0.01.
    """
    if _validate.whole(minority, "minority", low=0) > 9:
        raise UsageError("minority takes a digit from 0 to 9.")
    if kept is not None and share is not None:
        raise UsageError("Give kept (a number of records) or share (of the training records): not both.")
    train, test = mnist(place)
    rare = train.group == minority
    if share is not None:
        count = count_for_share(rare, _validate.number(share, "share", low=0, high=1))
    else:
        count = 500 if kept is None else _validate.whole(kept, "kept", low=0)
    return train.take(cut(rare, count)), test


def fashion(place: Place) -> Loaded:
    """Read 60,000 and 10,000 pictures of clothes in the format of MNIST, encoded alike."""
    return _pair(place, CLOTHES, CLOTHES)


def _pair(place: Place, names: tuple[str, ...], groups: Any) -> Loaded:
    train, test = (_part(place, part, names, groups) for part in PARTS)
    return train, test


def _part(place: Place, part: str, names: tuple[str, ...], groups: Any) -> Data:
    images, labels = idx(place, f"{part}-images-idx3-ubyte"), idx(place, f"{part}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or labels.max(initial=0) > 9:
        raise damaged(place.path(f"{part}-images-idx3-ubyte"), "a set of pictures with one class each")
    return classified(pixels(images[:, None], low=0), labels, names, groups)


def idx(place: Place, name: str) -> NDArray[np.uint8]:
    """Parse an array in the IDX format: 0, 0, type, dimensions, then one big-endian size per dimension."""
    content = place.content(name)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise damaged(place.path(name), "an IDX file of bytes")
    start = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
    if len(content) != start + math.prod(shape):
        raise damaged(place.path(name), "a whole IDX file")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _files(base: str, digests: dict[str, str]) -> tuple[tuple[File, ...], ...]:
    return (tuple(File(name, f"{base}{name}.gz", digest) for name, digest in digests.items()),)


_MNIST = _files(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)
_FASHION = _files(
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    {
        "train-images-idx3-ubyte": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
)
_source = partial(Source, licence="usually quoted as CC BY-SA 3.0", files=_MNIST, folder="mnist")
MNIST = _source("mnist", mnist, "60,000 + 10,000", "the ten digits")
UNBALANCED = _source("unbalanced-mnist", unbalanced, "54,649 + 10,000", "the ten digits, one of them rare")
FASHION = Source("fashion-mnist", fashion, "60,000 + 10,000", "the ten kinds of clothes", "MIT", _FASHION)
