"""Digest of a model's weights, and the check that figures in a run folder are of the weights that lie in it.

The digest is over the tensors alone, by name, equal for the model in memory and for its file, computed without torch
for the file: whoever measured a model can write down which one, before it has a file. Each evaluation names the weights
it measured by it; card and report name the file. Folders of an earlier version name neither.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from evenhand import untrusted
from evenhand.errors import VerificationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenhand.runs.folder import Folder
    from evenhand.runs.ledger import Reading

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


FACT, SHOWN = "Model file", 16
"""Under what name card and report give the digest of the model's file, and how much of it."""
_PAGES = ("report.html", "model-card.md")
_NAMING = 2
"""Format of run folders from which on evaluations and pages name what they are about."""


@dataclass(frozen=True)
class Findings:
    """Problems: files that are not about the released model. Notes: what cannot be told."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_figures(folder: Folder, reading: Reading) -> Findings:
    """Compare the figures of a folder that has released a model with that model; only the folder is read."""
    digest = untrusted.digest(folder.model_file)
    if digest is None or reading.withdrawn is not None:
        return Findings()
    try:
        findings = (_metrics(folder, reading), *(_page(folder.path / name, digest, reading) for name in _PAGES))
    except VerificationError as error:
        return Findings((str(error),))
    problems = tuple(problem for part in findings for problem in part.problems)
    return Findings(problems, tuple(note for part in findings for note in part.notes))


def _metrics(folder: Folder, reading: Reading) -> Findings:
    lines = folder.metrics()
    unnamed = [line for line in lines if not isinstance(line.get("weights"), str)]
    if unnamed and reading.format >= _NAMING:
        return Findings(("a line of metrics.jsonl does not say which weights it measured: it was edited.",))
    if not lines or lines[-1] in unnamed:
        early = "an earlier version wrote metrics.jsonl: whether its figures are of the released model is not checked."
        return Findings(notes=(early,) if lines else ())
    digest = digest_of_file(folder.model_file)
    about = [line for line in lines if line.get("weights") == digest]
    said = _read_statement(folder)
    if said is None:
        return Findings()
    if not (said["groups"] or about):
        text = "the released model was not evaluated: metrics.jsonl is about weights before the last ones."
        return Findings(notes=(text,))
    if not about:
        return Findings(
            ("the statement's figures are not of model.safetensors: no line of metrics.jsonl measured it.",)
        )
    if said["groups"] and said["groups"] != about[-1]["groups"]:
        return Findings(("the statement's figures are not those that metrics.jsonl has of model.safetensors.",))
    if said["ledger_head"] == reading.charged_head and lines[-1]["weights"] != digest:
        return Findings(("the last line of metrics.jsonl measured other weights than those in model.safetensors.",))
    return Findings()


def _read_statement(folder: Folder) -> Mapping[str, Any] | None:
    """Return the parts of a statement that are compared here; None if there is none."""
    if not folder.statement_file.exists():
        return None
    said: Mapping[str, Any] = untrusted.read_json(folder.statement_file, {"groups": dict, "ledger_head": str})
    return said


def _page(page: Path, digest: str, reading: Reading) -> Findings:
    """Check that a page names the model's file as it is now, which one written before its release does not.

    A page that is not the recorded one is another problem, found elsewhere.
    """
    recorded = reading.files().get(page.name)
    if not page.exists() or recorded not in (None, untrusted.digest(page)):
        return Findings()
    text = untrusted.read_bytes(page)
    if FACT.encode() not in text and reading.format < _NAMING:
        return Findings(notes=(f"an earlier version wrote {page.name}: of which model it speaks is not checked.",))
    if digest[:SHOWN].encode() in text:
        return Findings()
    again = "evenhand report RUN --card RUN/model-card.md"
    return Findings((f"{page.name} does not speak of model.safetensors as it is now: write it again with `{again}`.",))
