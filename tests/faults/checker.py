"""Judge a folder after a fault, with a reader of its own: charges, noise, metrics, files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import witness
from host import Place, command
from lookup import home
from shim import Call, normalised

UNDER, REPEATED, MISREPORTED = "under-recorded", "repeated noise", "misreported metrics"
TRACEBACK, HANG, WORDLESS = "traceback", "hang", "no sentence"
DEAD_END, LOST, UNVERIFIED = "dead end", "spent and lost", "not verified"
LEFTOVER, MISSING, OUTSIDE = "leftover file", "missing file", "write outside"
CLASSES = (
    *(UNDER, REPEATED, MISREPORTED, TRACEBACK, HANG, WORDLESS),
    *(DEAD_END, LOST, UNVERIFIED, LEFTOVER, MISSING, OUTSIDE),
)


@dataclass(frozen=True)
class Finding:
    """Something that must not be: its class, and what was seen."""

    kind: str
    detail: str


def runs(place: Place) -> list[Path]:
    """Return every folder that is a run, or the beginning of one."""
    found = {file.parent for top in place.watched for file in top.rglob("plan.json")}
    found |= {file.parent for top in place.watched for file in top.rglob("ledger.jsonl")}
    return sorted(found)


def charges(run: Path) -> dict[str, set[int]]:
    """Read a ledger: only complete lines count, and a step is charged to the key of its segment."""
    found: dict[str, set[int]] = {}
    key = ""
    for row in _rows(run / "ledger.jsonl"):
        if row.get("type") == "segment":
            key = str(row["key"])
            found.setdefault(key, set())
        elif row.get("type") == "reserve":
            found.setdefault(key, set()).update(range(int(row["first"]), int(row["first"]) + int(row["count"])))
    return found


def _rows(ledger: Path) -> Iterable[dict[str, Any]]:
    complete = ledger.read_bytes().split(b"\n")[:-1] if ledger.exists() else []
    for line in complete:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def privacy(place: Place) -> list[Finding]:
    """Compare what the ledgers charge with what the witness saw."""
    seen, charged = witness.read(place.side / "witness"), dict[str, set[int]]()
    for run in runs(place):
        for key, steps in charges(run).items():
            charged.setdefault(key, set()).update(steps)
    found = [
        Finding(UNDER, f"{noise.domain} noise of step {noise.step} under a key that " + why)
        for noise in seen
        if (why := _uncharged(noise, charged))
    ]
    for name, counts in (
        ("address", Counter((noise.key, noise.domain, noise.step, noise.offset) for noise in seen)),
        ("values", Counter(noise.values for noise in seen)),
    ):
        twice = [key for key, count in counts.items() if count > 1]
        found += [Finding(REPEATED, f"the same {name} for {len(twice)} pieces of noise")] if twice else []
    return found


def _uncharged(noise: witness.Noise, charged: dict[str, set[int]]) -> str:
    if noise.key not in charged:
        return "no ledger has"
    return "" if noise.step in charged[noise.key] else "has no charge for it"


def unseen(place: Place) -> int:
    """Return how many charged steps of an undisturbed command have no noise that the witness saw."""
    seen = {(noise.key, noise.step) for noise in witness.read(place.side / "witness")}
    private = [run for run in runs(place) if json.loads((run / "plan.json").read_bytes())["guarantee"] != "not private"]
    charged = {(key, step) for run in private for key, steps in charges(run).items() for step in steps}
    return len(charged - seen)


def metrics(place: Place, run: Path, said: str = "") -> list[Finding]:
    """Evaluate a released model and compare with the last line of metrics, statement, card and printed words."""
    if not (run / "model.safetensors").exists() or not (run / "metrics.jsonl").exists():
        return []
    ended = command(place, lambda: _measure(run))
    if ended.code != 0:
        return [Finding(MISREPORTED, f"the released model cannot be evaluated: {ended.said}")]
    true = json.loads(ended.out.splitlines()[-1])
    wrong = _told(run, true, said)
    return [Finding(MISREPORTED, f"{where} {told}, the released file {is_so}") for where, told, is_so in wrong]


def _told(run: Path, true: dict[str, Any], said: str) -> Iterable[tuple[str, str, str]]:
    """Yield every place that says something else than what is true."""
    lines = list(_rows(run / "metrics.jsonl"))
    last, share = lines[-1] if lines else {}, 100 * true["accuracy"]
    statement = json.loads((run / "statement.json").read_bytes()) if (run / "statement.json").exists() else {}
    card = (run / "model-card.md").read_text() if (run / "model-card.md").exists() else ""
    told: list[tuple[str, Any, float, float]] = [("metrics.jsonl says", last.get("accuracy"), true["accuracy"], 1e-6)]
    for where, groups in (("metrics.jsonl", last.get("groups")), ("statement.json", statement.get("groups"))):
        of_group = [(value, true["groups"].get(name, math.nan)) for name, value in (groups or {}).items()]
        told += [(f"{where} says of a group", value, is_so, 1e-6) for value, is_so in of_group]
    told += [("model-card.md says", float(found), share, 0.51) for found in _CARD.findall(card)[:1]]
    told += [("the command printed", float(found), share, 0.051) for found in _PRINTED.findall(said)[:1]]
    for where, value, is_so, room in told:
        if not isinstance(value, int | float) or not abs(value - is_so) <= room:
            yield where, f"{value}", f"{is_so:.4f}"


_CARD = re.compile(r"^([\d.]+) % of \d+ held-out", re.MULTILINE)
_PRINTED = re.compile(r"^accuracy ([\d.]+)%", re.MULTILINE)


def _measure(run: Path) -> int:
    """Print accuracy overall and by group of the file model.safetensors on the held-out data."""
    import torch

    import evenhand as eh

    settings = vars(home("of_run", "PYTHON"))
    config, python = settings["of_run"](run), settings["PYTHON"]
    test = eh.data.digits()[1] if config.data == python else config.load_data()[1]
    assert test is not None
    architecture = torch.nn.Linear(64, 10) if config.model == python else None
    model = eh.load(run, model=architecture).model.eval()
    weights = safetensors(run / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in weights and not torch.equal(value.reshape(-1).to(torch.float64), weights[name]):
            raise RuntimeError("What is loaded is not what is in the file.")
    inputs, targets = test.fetch(torch.arange(len(test)))
    with torch.no_grad():
        right = (model(inputs).argmax(-1) == targets).double()
    rows: dict[str, list[int]] = {}
    for place, name in enumerate(test.group_names()):
        rows.setdefault(name, []).append(place)
    groups = {name: right[places].mean().item() for name, places in rows.items()}
    print(json.dumps({"accuracy": right.mean().item(), "groups": groups}))
    return 0


def safetensors(file: Path) -> dict[str, Any]:
    """Return the floating-point tensors of a file as flat float64 ones, read without the library."""
    import torch

    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    kinds = {"F32": torch.float32, "F64": torch.float64}
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and entry["dtype"] in kinds:
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            part = bytearray(data[begin:end])
            flat = torch.frombuffer(part, dtype=kinds[entry["dtype"]]) if part else torch.empty(0)
            found[name] = flat.to(torch.float64)
    return found


def names(place: Place) -> set[str]:
    """Return the files below the watched folders, with what changes from run to run taken out."""
    files = (file for top in place.watched for file in top.rglob("*") if not file.is_dir() or file.is_symlink())
    return {normalised(str(file), place.watched) for file in files}


def leftovers(place: Place, known: set[str]) -> list[Finding]:
    """Return a finding for every file that an undisturbed command does not leave."""
    return [Finding(LEFTOVER, name) for name in sorted(names(place) - known - _RECORDS)]


_RECORDS = {"run/private/failures.txt"}
"""Files that are there to tell of a fault."""


def outside(place: Place, logged: Sequence[Call]) -> list[Finding]:
    """Return a finding for every write that led out of the folders."""
    tops = tuple(f"{folder}/" for folder in place.watched)
    far = [call for call in logged if call.number == 0 and not f"{call.path}/".startswith(tops)]
    return [Finding(OUTSIDE, f"{call.kind} {call.path}") for call in far]
