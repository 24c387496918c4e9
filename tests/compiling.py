"""Compile one of the package's C files, as it is or changed."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "evenhand"
HEADER = "simd_dispatch.h"
FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
QUICK = ("-O0", "-w", "-Wno-psabi")
"""For loops that must be noticed to be wrong: a third of the time of -O1, and right ones are right with it too."""
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
LESS = {"as built": (), "without avx512": ("avx512dq",), "plain": ("avx512dq", "avx2")}
"""What a processor may lack, by the names that the code asks for."""


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


@functools.cache
def _with_switches(source: str) -> ctypes.CDLL:
    """The library as the installation builds it, but that a switch can take instruction sets from the processor."""
    names = LESS["plain"]
    asked = [f'__builtin_cpu_supports("{name}")' for name in names]
    text = changed(source, *[(what, f"(has_{name} && {what})") for name, what in zip(names, asked, strict=True)])
    switches = "".join(f"int has_{name} = 1;\n" for name in names)
    return build(Path(tempfile.mkdtemp()), switches + text, *STRICT)


def lacking(source: str, names: tuple[str, ...]) -> ctypes.CDLL:
    """The library, optimised once for all variants, on a processor that lacks something until this is called again."""
    library = _with_switches(source)
    for name in LESS["plain"]:
        ctypes.c_int.in_dll(library, f"has_{name}").value = name not in names
    return library
