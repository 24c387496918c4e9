"""What a page of the docs asks its reader to do, in order: files to write, Python to run, commands to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_INCLUDE = re.compile(r"```\{include\} (.+?)\n```")
_BLOCK = re.compile(r"^```(?:\{code-block\} )?(\w+)\n(?::caption: (\S+)\n\n)?(.*?)^```", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"# exit code (\d+)$")


@dataclass(frozen=True)
class Command:
    """A line of a console block, and the exit code that its comment announces."""

    arguments: list[str]
    code: int = 0


@dataclass(frozen=True)
class Block:
    """An example; one with a caption is a file that the reader writes."""

    language: str
    caption: str
    text: str

    def commands(self) -> list[Command]:
        lines = self.text.replace("\\\n", " ").strip().splitlines()
        return [
            Command(shlex.split(line, comments=True), int(code[0]) if (code := _EXIT.findall(line)) else 0)
            for line in lines
        ]


def text(page: Path) -> str:
    """The page with its hand-written includes in place."""
    return _INCLUDE.sub(
        lambda found: "" if "_generated" in found[1] else (page.parent / found[1]).read_text(), page.read_text()
    )


def blocks(page: Path) -> list[Block]:
    found = [Block(language, caption, body) for language, caption, body in _BLOCK.findall(text(page))]
    return [block for block in found if block.caption or block.language in ("python", "console")]


def written() -> list[Path]:
    """Every page that people write: not the generated ones (results are), the proofs, and the template of a package."""
    kept = [
        page
        for page in DOCS.rglob("*.md")
        if not {"_generated", "_build", "proofs", "results", "plugin-template"} & set(page.parts)
    ]
    return sorted(kept)


def with_examples() -> list[Path]:
    return [page for page in written() if not page.name.startswith("_") and blocks(page)]
