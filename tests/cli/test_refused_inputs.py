"""Pictures, models and flags that cannot be used: a clear message, exit code 2, nothing spent, nothing told."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from ways import CANARY, spent, train, write

PICTURES = """
data = "scans"
label = "folder"
labels = ["well", "ill"]
model = "cnn"
[columns.image]
kind = "image"
height = 8
width = 8
channels = 1
"""


def png(width: int, height: int, pixels: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (CANARY.encode() * 9, "Picture 3 of sub-folder 2 is not a readable picture"),
        (png(9, 8, b"\0" * 80), "not 8 x 8 as declared"),
        (png(60_000, 60_000, b"\0"), "was not unpacked"),
        (png(8, 8, b"\0" * 9)[:-20], "not a readable picture"),
        (b"", "not a readable picture"),
        (None, "not an ordinary file"),
    ],
    ids=["not an image", "other size", "bomb", "cut short", "empty", "link"],
)
def test_a_malformed_picture_is_refused(wrong: bytes | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "people.toml").write_text(PICTURES)
    for label in ("well", "ill"):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "scans" / label / f"{number}.png").write_bytes(png(8, 8, b"\0" * 72))
    place = tmp_path / "scans" / "well" / f"{CANARY}.png"
    place.symlink_to("/etc/hostname") if wrong is None else place.write_bytes(wrong)
    done = train(tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert spent(tmp_path) == 0


MODELS = {
    "missing": (None, "There is no model file"),
    "syntax": ("def net(:", "cannot be imported: SyntaxError"),
    "stops": ("raise SystemExit(0)", "cannot be imported: SystemExit"),
    "no factory": ("import torch", "has no function 'net'"),
    "not callable": ("net = 3", "has no function 'net'"),
    "raises": ("def net(facts): raise KeyError('width')", "failed with KeyError"),
    "no module": ("def net(): return 3", "returned int"),
    "nothing to train": (
        "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(3, 2)).requires_grad_(False)",
        "no trainable parameter",
    ),
    "too many outputs": (
        "import torch\ndef net(facts): return torch.nn.Linear(3, 3)",
        "give one output per label",
    ),
    "wrong width": ("import torch\ndef net(facts): return torch.nn.Linear(99, 2)", "cannot take inputs of shape (3,)"),
    "batch statistics": (
        "from torch import nn\ndef net(): return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))",
        "BatchNorm",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    code, words = MODELS[name]
    write(tmp_path)
    if code is not None:
        (tmp_path / "nets.py").write_text(code)
    done = train(tmp_path, "--model", "nets.py:net")
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert spent(tmp_path) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "nets.py"], "file.py:factory"),
        (["--model", "nets:net"], "file.py:factory"),
        (["--model", "cnn"], "--model mlp"),
        (["--device", "cuda:99"], "--device cpu"),
        (["--device", "toaster"], "--device cpu"),
        (["--budgets", "north=1"], "leave out epsilon and noise"),
        (["--budgets", "north"], "NAME=NUMBER"),
        (["--test-share", "0"], "test_share=0"),
        (["--owners", "name"], "used for owners"),
    ],
)
def test_flags_that_contradict_are_refused(flags: list[str], words: str, tmp_path: Path) -> None:
    write(tmp_path)
    done = train(tmp_path, *flags)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr
    assert spent(tmp_path) == 0
