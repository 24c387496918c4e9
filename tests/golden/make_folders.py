"""Make the golden run folders with the code that is on the path: ``python tests/golden/make_folders.py NAME``.

They are made before something large changes, and never again: what other people hold was written by older versions, and
``evenhand verify`` must go on reading it. Only files that may be shared are kept, and ``expected.json`` says what
``verify`` answered then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = {
    "owners": [
        "train --data digits --owners label --budgets 0=1,1=1,2=2,3=2,4=3,5=3,6=3,7=4,8=8,9=8 "
        "--method idp_sample --model linear --epochs 2"
    ],
    "density": ["train --data digits --method moment_density --epsilon 3"],
    "rebudgeted": ["train --data digits --model linear --epsilon 3 --epochs 2", "resume --epsilon 4 --epochs 1"],
}
LEFT_OUT = ("private", "config.toml", "env.json")


def run(line: list[str], state: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "evenhand", *line],
        capture_output=True,
        text=True,
        check=True,
        env={"EVENHAND_STATE": state, "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
    )
    return done.stdout


def make(version: str) -> None:
    """Write the folders of a version, which must be new."""
    target = HERE / version
    target.mkdir()
    answers = {}
    with tempfile.TemporaryDirectory() as work:
        for name, commands in COMMANDS.items():
            folder = Path(work) / name
            for command in commands:
                words = command.split()
                place = ["--out", str(folder)] if words[0] == "train" else [str(folder)]
                run([words[0], *place, *words[1:]], f"{work}/state-{name}")
            shutil.copytree(folder, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT, "*.lock"))
            answers[name] = json.loads(run(["verify", str(target / name), "--json"], work).splitlines()[-1])
    (target / "expected.json").write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(sys.argv[1])
