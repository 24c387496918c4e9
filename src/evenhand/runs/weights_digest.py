"""Digest of a model's weights, equal for the model in memory and for its file, and computed without torch for the file.

It is over the tensors alone, by name: whoever measured a model can write down which one, before it has a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from evenhand import untrusted
from evenhand.errors import VerificationError

if TYPE_CHECKING:
    from torch import Tensor, nn

CHUNK = 2**20
LARGEST_HEADER = 2**27
"""Bytes of a file's table of tensors, as the format limits it."""
_ENTRY: untrusted.Shape = {"dtype": str, "shape": [int], "data_offsets": [int]}


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model as its file holds them, and the names left out with the one that has their numbers.

    Of tensors in the same memory the first name that covers all of it is kept.

    Examples:
      >>> from torch import nn
      >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
      >>> tied[1].weight = tied[0].weight
      >>> [sorted(part) for part in stored_tensors(tied)]
      [['0.weight'], ['1.weight']]
    """
    state = model.state_dict()
    shared: dict[tuple[str, int], list[str]] = {}
    for name, value in state.items():
        if value.untyped_storage().nbytes():
            shared.setdefault((str(value.device), value.untyped_storage().data_ptr()), []).append(name)
    left_out: dict[str, str] = {}
    for names in shared.values():
        whole = sorted(name for name in names if state[name].nbytes == state[name].untyped_storage().nbytes())
        if len(names) > 1 and whole:
            left_out |= {name: whole[0] for name in names if name != whole[0]}
    return {name: value.contiguous() for name, value in state.items() if name not in left_out}, left_out


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's tensors: names, shapes and numbers, by name.

    Examples:
      >>> import tempfile, torch
      >>> from safetensors.torch import save_model
      >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
      >>> model = torch.nn.Linear(3, 2)
      >>> save_model(model, str(file))
      >>> digest(model) == digest_of_file(file)
      True
    """
    import torch

    total = hashlib.sha256()
    for name, value in sorted(stored_tensors(model)[0].items()):
        total.update(_heading(name, list(value.shape), value.nbytes))
        total.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the ``digest`` of the model in a safetensors file of any size, in little memory and without torch.

    The file is not trusted: its header is checked before any length in it is used.

    Raises:
      VerificationError: it is not a file, or not one of that format.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unreadable(path)
        with path.open("rb") as file:
            return _hashed(file, path)
    except OSError as error:
        raise VerificationError(f"{path.name} cannot be read ({error.strerror}).") from None


def _hashed(file: BinaryIO, path: Path) -> str:
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise _unreadable(path)
    table = untrusted.parse_json(file.read(length), path.name)
    entries = sorted((name, entry) for name, entry in table.items() if name != "__metadata__")
    start, room = 8 + length, path.stat().st_size - 8 - length
    if not all(untrusted.fits(entry, _ENTRY) and _placed(entry, room) for _, entry in entries):
        raise _unreadable(path)
    if sum(entry["data_offsets"][1] - entry["data_offsets"][0] for _, entry in entries) != room:
        raise _unreadable(path)
    total = hashlib.sha256()
    for name, entry in entries:
        first, end = entry["data_offsets"]
        total.update(_heading(name, entry["shape"], end - first))
        file.seek(start + first)
        for part in _parts(file, end - first):
            total.update(part)
    return total.hexdigest()


def _placed(entry: dict[str, Any], room: int) -> bool:
    """Return whether a tensor lies within the file, with as many bytes as its shape can have."""
    offsets = entry["data_offsets"]
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= room or any(size < 0 for size in entry["shape"]):
        return False
    numbers = math.prod(entry["shape"])
    return bool((offsets[1] - offsets[0]) % numbers == 0 if numbers else offsets[0] == offsets[1])


def _parts(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0:
        part = file.read(min(CHUNK, length))
        if not part:
            return
        length -= len(part)
        yield part


def _heading(name: str, shape: list[int], length: int) -> bytes:
    return json.dumps([name, shape, length]).encode() + b"\n"


def _unreadable(path: Path) -> VerificationError:
    return VerificationError(f"{path.name} cannot be read: it was damaged or edited.")
