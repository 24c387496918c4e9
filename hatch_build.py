"""Compile the loops of noise, dense models and LSTMs, where there is a compiler; everything works without one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src" / "evenhand"
FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
"""Nothing of -ffast-math: the arithmetic stays that of IEEE 754, but for products that are added without rounding."""


SOURCES = {
    "_noise.so": "mechanism/noise.c",
    "_dense.so": "gradients/fast/dense.c",
    "_recurrent.so": "gradients/fast/recurrent.c",
}


class Compiled(BuildHookInterface[Any]):
    """Leaves the libraries in the package; no Python is linked, so one file serves every version of it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and name the wheel for this machine if that worked."""
        for name in SOURCES:
            (PACKAGE / name).unlink(missing_ok=True)
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None or sys.platform == "win32":
            self.app.display_warning("No C compiler: the noise will be made in Python, several times slower.")
            return
        built = [name for name, source in SOURCES.items() if self._compile(compiler, source, PACKAGE / name)]
        if built:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")
            build_data["artifacts"].extend(f"src/evenhand/{name}" for name in built)

    def _compile(self, compiler: str, source: str, built: Path) -> bool:
        try:
            command = [compiler, *FLAGS, f"-I{PACKAGE}", str(PACKAGE / source), "-o", str(built), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            built.unlink(missing_ok=True)
            said = getattr(error, "stderr", "")
            self.app.display_warning(f"{source} did not compile: Python does its work, slower.\n{error}\n{said}")
            return False
        return True
