"""Compile one of the package's C files, as it is or changed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "evenhand"
HEADER = "simd_dispatch.h"
FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
QUICK = ("-O1", "-w")
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
LESS = {
    "as built": (),
    "without avx512": ('__builtin_cpu_supports("avx512dq")',),
    "plain": ('__builtin_cpu_supports("avx512dq")', '__builtin_cpu_supports("avx2")'),
}
"""What a processor may lack, by the conditions that ask for it."""


def build(folder: Path, text: str, *more: str) -> ctypes.CDLL:
    """The library that this text makes."""
    (folder / "made.c").write_text(text)
    command = [str(COMPILER), *FLAGS, *more, "made.c", "-o", "made.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "made.so"))


def changed(source: str, *changes: tuple[str, str]) -> str:
    """A C file's text and that of its header, with something else in some places, all of which must be there."""
    text = (PACKAGE / source).read_text().replace(f'#include "{HEADER}"', (PACKAGE / HEADER).read_text())
    for what, instead in changes:
        assert what in text
        text = text.replace(what, instead)
    return text


def lacking(source: str, conditions: tuple[str, ...]) -> str:
    """The text for a processor that lacks something."""
    return changed(source, *[(condition, "0") for condition in conditions])
