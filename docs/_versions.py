"""The docs of every version beside each other: one folder a tag, and one for what is not released.

    python docs/_versions.py OUT [TAG...]     builds OUT/<version> of these tags (default: every vX), and OUT/unreleased

Each version is built from its own tree, by its own docs and package. OUT/index.html lists them, the newest release
first.
A version that is there already is not built again.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
UNRELEASED = "unreleased"
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>evenhand: versions of the documentation</title>
<h1>evenhand</h1><p>The documentation of</p><ul>
{items}
</ul></html>
"""


def releases(root: Path) -> list[str]:
    """Return the tags of releases, newest first; others, such as release candidates, are left out."""
    tags = subprocess.run(["git", "-C", root, "tag"], capture_output=True, text=True, check=True).stdout.split()
    found = [tag for tag in tags if RELEASE.fullmatch(tag)]
    return sorted(found, key=lambda tag: [int(part) for part in tag[1:].split(".")], reverse=True)


def build(root: Path, tag: str, out: Path) -> None:
    """Build the docs of one tag, or of HEAD if it is not released, from a tree of its own."""
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.run(
            ["git", "-C", root, "archive", "HEAD" if tag == UNRELEASED else tag], capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", place], input=packed, check=True)
        environment = {**os.environ, "PYTHONPATH": str(Path(place, "src")), "EVENHAND_STATE": str(Path(place, "state"))}
        line = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(Path(place, "trees"))]
        subprocess.run([*line, str(Path(place, "docs")), str(out)], check=True, env=environment)


def index(tags: Sequence[str]) -> str:
    """Return the page that lists the versions.

    Examples:
      >>> "0.2.0</a> (the newest release)" in index(["v0.2.0", "v0.1.0"])
      True
    """
    named = [(tag.removeprefix("v"), tag.removeprefix("v")) for tag in tags]
    words = [f"{name} (the newest release)" if place == 0 else name for place, (name, _) in enumerate(named)]
    rows = [(folder, name, shown) for (folder, name), shown in zip(named, words, strict=True)]
    rows.append((UNRELEASED, UNRELEASED, f"{UNRELEASED}: what will come"))
    items = (
        f'<li><a href="{html.escape(folder)}/index.html">{html.escape(name)}</a>{html.escape(shown.removeprefix(name))}'
        for folder, name, shown in rows
    )
    return _PAGE.format(items="\n".join(items))


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Build what is missing, and the list."""
    if not arguments:
        raise SystemExit(__doc__)
    out, tags = Path(arguments[0]), list(arguments[1:]) or releases(root)
    out.mkdir(parents=True, exist_ok=True)
    for tag in (*tags, UNRELEASED):
        folder = out / tag.removeprefix("v")
        if tag == UNRELEASED or not (folder / "index.html").exists():
            build(root, tag, folder)
    (out / "index.html").write_text(index(tags), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
