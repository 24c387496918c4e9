"""Files that somebody made to do harm, one for every input that a command reads.

``python tests/faults/hostile_files.py`` runs them all: nothing in them is executed, nothing hangs, no value is printed.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inputs_harness import MARK, Watch, before_training, evil, main

from cli.ways import CANARY, TOML, people
from commands import evenhand
from evenhand import _toml

Maker = bytes | Callable[[Path], None]
PREDICT = ("predict", "run", "people.csv")
TRAIN = ("train", "people.toml", "--epsilon", 3, "--out", "made")
DEEP = b"[" * 200_000


class Evil:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call that an unpickler makes."""
        return os.mkdir, (MARK,)


def pipe(place: Path) -> None:
    """Put a pipe that nobody writes to."""
    os.mkfifo(place)


def endless(place: Path) -> None:
    """Put a link to a device without end."""
    place.symlink_to("/dev/zero")


def folder(place: Path) -> None:
    """Put a folder."""
    place.mkdir()


def nowhere(place: Path) -> None:
    """Put a link to nothing."""
    place.symlink_to("/nonexistent/file")


def circle(place: Path) -> None:
    """Put a link to itself."""
    place.symlink_to(place)


def hollow(place: Path) -> None:
    """Put a file that claims three gigabytes and takes none."""
    with place.open("wb") as file:
        file.truncate(3 * 2**30)


ANY: dict[str, Maker] = {
    "pipe": pipe,
    "endless": endless,
    "folder": folder,
    "nowhere": nowhere,
    "circle": circle,
    "hollow": hollow,
    "empty": b"",
    "zeros": bytes(4096),
    "noise": random.Random(0).randbytes(4096),
    "pickle": pickle.dumps(Evil()),
    "deep": DEEP,
    "text": f"{CANARY}\n".encode() * 9,
    "html": b"<script>" + CANARY.encode() + b"</script>",
}
"""What may lie in the place of any file."""


def saved(found: Any) -> bytes:
    """Bytes of ``torch.save``, a pickle in a zip."""
    made = io.BytesIO()
    torch.save(found, made)
    return made.getvalue()


def tensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with a header of one's own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def one(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> bytes:
    """A safetensors file with one tensor."""
    return tensors({"1.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(24))


WEIGHTS: dict[str, Maker] = {
    "torch pickle": saved({"1.weight": Evil()}),
    "huge header": tensors(b"{}", size=2**60),
    "longer header": tensors(b"{}", size=100),
    "deep header": tensors(DEEP),
    "no json": tensors(b"not json"),
    "other name": tensors({"evil": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, bytes(24)),
    "huge shape": one(shape=(2**40, 2**20)),
    "negative shape": one(shape=(-2, -3)),
    "odd type": one(dtype="OBJECT"),
    "whole numbers": one(dtype="I32"),
    "outside": one(offsets=(0, 2**40)),
    "backwards": one(offsets=(24, 0)),
    "bytes missing": one()[:-9],
    "not a number": one()[:-24] + struct.pack("<6f", *[float("nan")] * 6),
    "list": tensors([1, 2]),
    "names": tensors({f"t{number}": {} for number in range(9999)}),
}


def declaration(**changes: Any) -> bytes:
    """A preprocessing.json with something changed."""
    known: dict[str, Any] = {
        "schema": 1,
        "label": "ill",
        "labels": ["no", "yes"],
        "groups": "city",
        "owners": None,
        "budgets": None,
        "missing_tokens": [""],
        "columns": {
            "age": {"kind": "number", "low": 0, "high": 100, "missing": "refuse"},
            "city": {"kind": "category", "values": ["north", "south"], "missing": "refuse", "feature": True},
        },
    }
    return json.dumps(known | changes).encode()


AGE = {"kind": "number", "low": 0, "high": 100}
DECLARED: dict[str, Maker] = {
    "schema": declaration(schema=99),
    "more": declaration(evil=1),
    "label list": declaration(label=["ill"]),
    "label number": declaration(label=3),
    "labels text": declaration(labels="no"),
    "labels deep": declaration(labels=[["no"], ["yes"]]),
    "one label": declaration(labels=["no"]),
    "many labels": declaration(labels=[f"l{number}" for number in range(100_000)]),
    "escape": declaration(labels=["\x1b[2J", "yes"]),
    "long label": declaration(labels=["x" * 10**6, "yes"]),
    "columns list": declaration(columns=[1, 2]),
    "columns text": declaration(columns={"age": "number"}),
    "no columns": declaration(columns={}),
    "other kind": declaration(columns={"age": {"kind": "pickle"}}),
    "kind list": declaration(columns={"age": {"kind": ["number"]}}),
    "low text": declaration(columns={"age": {**AGE, "low": "0"}}),
    "low huge": declaration(columns={"age": {**AGE, "low": -(10**17)}}),
    "backwards": declaration(columns={"age": {**AGE, "low": 200}}),
    "image": declaration(columns={"image": {"kind": "image", "height": 10**6, "width": 10**6}}),
    "image size": declaration(columns={"image": {"kind": "image", "height": "8", "width": None}}),
    "many columns": declaration(columns={f"c{number}": AGE for number in range(20_000)}),
    "missing list": declaration(columns={"age": {**AGE, "missing": ["middle"]}}),
    "feature text": declaration(columns={"city": {"kind": "category", "values": ["a"], "feature": "yes"}}),
    "tokens": declaration(missing_tokens=3),
    "groups": declaration(groups={"a": 1}),
    "code": declaration(code={"model": 3}),
    "code deep": declaration(code=[["x"]]),
    "no number": declaration().replace(b"100", b"NaN"),
    "a key twice": declaration().replace(b'"schema": 1,', b'"schema": 1, "schema": 1,'),
    "digits": declaration().replace(b"100", b"9" * 5000),
    "surrogate": declaration().replace(b'"no"', b'"\\ud800"'),
}
FACTS = (
    "(3,) load",
    "(3,) Tensor",
    "(99999999999,) float32",
    "(3,) float32; x",
    "items of x",
    "",
    "(3,)",
    "() float32",
)
CONFIGS: dict[str, Maker] = {
    **{f"model {name}": f"model = {json.dumps(name)}\n".encode() for name in ("EVIL:net", "evil.py:net", "os:system")},
    **{f"features {name}": f"features = {json.dumps(name)}\n".encode() for name in ("EVIL:net", "../evil.py:net")},
    "both": b'model = "EVIL:net"\nfeatures = "EVIL:net"\n',
    "zip": b'model = "evil.zip/evil.py:net"\n',
    "long model": b'model = "' + b"x" * 5000 + b'.py:net"\n',
    "nul model": b'model = "\\u0000.py:net"\n',
    "device": b'device = "$(touch x)"\nmodel = "linear"\n',
    "dotted": b"a." * 50_000 + b"a = 1",
    "digits": b"seed = " + b"9" * 100_000,
    "lists": b"labels = " + b"[" * 100_000,
    "large": b"#" * (_toml.LARGEST + 1),
    "features list": b'features = ["EVIL:net"]\n',
    "unknown": b"evil = 1\n",
    "latin": b"data = '\xff'\n",
    "seed": b"seed = -1\n",
    "data": b'data = "/dev/zero"\nmodel = "linear"\n',
}


def archive(entries: dict[str, bytes]) -> bytes:
    """A zip of these entries."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return made.getvalue()


def npy(found: Any, **options: Any) -> bytes:
    """Bytes of ``numpy.save``."""
    made = io.BytesIO()
    np.save(made, found, **options)
    return made.getvalue()


def header(text: str) -> bytes:
    """An NPY file with a header of one's own."""
    line = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + bytes(64)


SHAPE = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,)}"
ARRAYS: dict[str, bytes] = {
    "objects": npy(np.array([Evil(), CANARY], dtype=object), allow_pickle=True),
    "huge": header(SHAPE % (2**60)),
    "negative": header(SHAPE % -5),
    "call": header(f"__import__('os').mkdir('{MARK}')"),
    "object type": header("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}"),
    "version": b"\x93NUMPY\x09\x09" + bytes(100),
    "deep": header(SHAPE.replace("'<f8'", "[" * 90)),
    "two dimensions": npy(np.zeros((3, 3))),
    "not numbers": npy(np.full(60, np.nan)),
    "negative epsilons": npy(np.full(60, -1.0)),
    "times": npy(np.array(["2024-01-01"] * 60, dtype="datetime64[D]")),
}
TABLES: dict[str, Maker] = {
    **{f"npz {name}": archive({"age.npy": data}) for name, data in ARRAYS.items()},
    "npz bomb": archive({"age.npy": bytes(2**24)}),
    "npz path": archive({"../../evil.npy": ARRAYS["times"]}),
    "npz same": archive({"age.npy": b"", "age": b""}),
    "npz none": archive({}),
    "npz name": archive({f"{CANARY}.npy": ARRAYS["objects"], "b.npy": ARRAYS["objects"]}),
}
OWNERS: dict[str, Maker] = {
    **{f"npy {name}": data for name, data in ARRAYS.items()},
    "empty lines": b"\n" * 60,
    "values": f"{CANARY}\n".encode() * 7,
    "nul": b"a\0b\n" * 60,
    "records": f"37,{CANARY},f\n".encode() * 60,
}
EPSILONS: dict[str, Maker] = {
    "dotted": b"a." * 50_000 + b"a = 1",
    "text": b'strict = "x"\n',
    "deep": b"a = {b = {c = 1}}\n",
    "list": b"strict = [1]\n",
    "no number": b"strict = nan\nopen = inf\n",
    "negative": b"strict = -1\n",
    "date": b"strict = 2024-01-01\n",
    "nothing": b"",
    "table": b"[budgets]\n",
    "budgets number": b"budgets = 3\n",
    "digits": b"strict = " + b"9" * 5000,
    "others": b"strict = 1\n",
}


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A picture that claims a size."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", body), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PICTURES: dict[str, Maker] = {
    "bomb": png(60_000, 60_000),
    "wide": png(2**31 - 1, 1),
    "none": png(0, 0),
    "cut": png(8, 8, bytes(9)),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>' + CANARY.encode() + b"</script></svg>",
    "gif": b"GIF89a\xff\xff\xff\xff" + bytes(99),
    "tiff": b"II*\0\xff\xff\xff\xff",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(" + MARK.encode() + b") run\n",
}
SKIPPED = ("hollow",)
"""Pictures are small: a file with a hole of three gigabytes is read to its end by no format, but takes long to skip."""


def cases(place: Path) -> Iterator[tuple[str, Path, Maker, tuple[object, ...]]]:
    """Name, the file that is exchanged, what takes its place, and the command that reads it."""
    run = place / "run"
    for file, makers, commands in (
        (run / "model.safetensors", WEIGHTS, (PREDICT,)),
        (run / "preprocessing.json", DECLARED, (PREDICT,)),
        (run / "config.toml", CONFIGS, (PREDICT, ("resume", "run", "--epsilon", 9, "--epochs", 1))),
        (run / "plan.json", {}, (PREDICT,)),
        (place / "people.toml", CONFIGS, ()),
        (place / "people.csv", {}, (TRAIN, ("init", "people.csv", "--out", "new.toml"), PREDICT)),
        (place / "people.npz", TABLES, (("init", "people.npz", "--out", "new.toml"), ("predict", "run", "people.npz"))),
        (place / "people.parquet", {}, (("init", "people.parquet"), ("predict", "run", "people.parquet"))),
        (place / "owners.npy", OWNERS, ((*TRAIN, "--owners", "owners.npy"),)),
        (place / "owners.txt", OWNERS, ((*TRAIN, "--owners", "owners.txt"), (*TRAIN, "--groups", "owners.txt"))),
        (place / "epsilons.npy", OWNERS, (("train", "people.toml", "--budgets", "epsilons.npy", "--out", "made"),)),
        (place / "owners.toml", EPSILONS, (("train", "people.toml", "--budgets", "owners.toml", "--owners", "city"),)),
        (place / "scans" / "well" / "2.png", PICTURES, (("predict", "seen", "scans"),)),
    ):
        for name, maker in ({**ANY, **makers} if commands else {}).items():
            if not (name in SKIPPED and file.suffix == ".png"):
                for command in commands:
                    yield f"{file.name} {name}", file, maker, command
    for inputs in FACTS:
        plan = json.loads((run / "plan.json").read_bytes())
        plan["facts"]["inputs"] = inputs
        yield f"plan.json {inputs}", run / "plan.json", json.dumps(plan).encode(), PREDICT


def campaign(count: int, draw: random.Random, folder: Path) -> Watch:
    """Run all cases, or as many as are asked for, taken at random."""
    watch, kept = Watch(), _kept(folder)
    found = list(cases(kept))
    for name, file, maker, command in found if count >= len(found) else draw.sample(found, count):
        place = folder / "place"
        shutil.copytree(kept, place)
        target = place / file.relative_to(kept)
        target.unlink(missing_ok=True)
        if callable(maker):
            maker(target)
        else:
            target.write_bytes(maker.replace(b"EVIL", str(place / "evil.py").encode()))
        with before_training():
            watch.command(name, place, *command, secrets=frozenset((CANARY,)))
        watch.unspent(name, place / "made")
        shutil.rmtree(place)
    return watch


def _kept(folder: Path) -> Path:
    """A project with a run on a table and one on pictures."""
    from PIL import Image

    kept = folder / "kept"
    for label in ("ill", "well"):
        (kept / "scans" / label).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(kept / "scans" / label / f"{number}.png")
    lines = ["age,city,name,ill", *(",".join(row) for row in people(60))]
    (kept / "people.csv").write_text("\n".join(lines) + "\n")
    (kept / "people.toml").write_text(TOML)
    for command in (
        ("train", "people.toml", "--epsilon", 3, "--out", "run"),
        ("init", "scans", "--size", "8x8", "--out", "scans.toml"),
        ("train", "scans.toml", "--epsilon", 3, "--epochs", 1, "--model", "linear", "--out", "seen"),
    ):
        done = evenhand(*command, cwd=kept)
        assert done.returncode == 0, done.stderr
    evil(kept / "evil.py")
    evil(kept / "run" / "evil.py")
    (kept / "evil.zip").write_bytes(archive({"evil.py": (kept / "evil.py").read_bytes()}))
    return kept


if __name__ == "__main__":
    main(campaign, 10_000)
