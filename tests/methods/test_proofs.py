"""Every batch rule and every query has a proof, and no proof is older than the code it is about."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from evenhand.methods import registry
from evenhand.methods.rules import BatchRule

ROOT = Path(__file__).parents[2]
PROOFS = ROOT / "docs" / "proofs"
LINE = re.compile(r"^<!-- source: (\S+) ((?:\w+ )+)sha256: (\S+) -->$", re.MULTILINE)
"""A file, the classes, functions and constants of it that the proof is about, and the digest of their source."""
PAGES = sorted(page for page in PROOFS.glob("*.md") if LINE.search(page.read_text()))


def ours(kind: str) -> list[type]:
    parts = [registry.part(kind, name) for name in registry.names(kind)]
    return [part for part in parts if part.__module__.startswith("evenhand.")]


def pins(text: str) -> list[tuple[str, list[str], str]]:
    """File, names and digest of every line of a proof that names its source."""
    return [(path, names.split(), digest) for path, names, digest in LINE.findall(text)]


def definitions(source: str) -> dict[str, str]:
    """Source of every class, function and constant of a module by its name; no imports, no docstring of the module."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names, first = [node.name], min([node.lineno, *(each.lineno for each in node.decorator_list)])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names, first = [part.id for part in targets if isinstance(part, ast.Name)], node.lineno
        else:
            continue
        text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        found.update((name, text) for name in names)
    return found


def digest_of(source: str, names: Sequence[str]) -> str:
    """Digest of the named definitions: where they stand in the file, and what else it holds, does not matter."""
    defined = definitions(source)
    return hashlib.sha256("\n\n".join(defined.get(name, "missing") for name in names).encode()).hexdigest()


def test_every_batch_rule_and_query_of_ours_has_a_proof() -> None:
    named = [part for part in ours("rule") if issubclass(part, BatchRule)] + ours("query")
    assert len(named) >= 4
    for part in named:
        page = PROOFS / f"{part.name}.md"  # type: ignore[attr-defined]
        assert page in PAGES, f"{part.__name__} needs docs/proofs/{page.name}"
        source = "src/" + part.__module__.replace(".", "/") + ".py"
        pinned = {name for path, names, _ in pins(page.read_text()) if path == source for name in names}
        assert part.__name__ in pinned, f"{page.name} must name {source} {part.__name__}"
        for word in ("Unit", "add/remove", "Proved"):
            assert word in page.read_text()


def stale(text: str, root: Path) -> list[str]:
    """What to do about each source that is no longer the one that the proof was read against."""
    found = []
    for path, names, before in pins(text):
        source = (root / path).read_text()
        missing, now = [name for name in names if name not in definitions(source)], digest_of(source, names)
        if missing:
            found.append(f"{path} has no {', '.join(missing)} any more: name the code that the proof is about")
        elif before != now:
            found.append(
                f"{path} changed after its proof was last read against it: read the proof again, line by line, mend it "
                f"if it no longer holds, then write sha256: {now}"
            )
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_proof_is_about_the_code_as_it_is(page: Path) -> None:
    assert stale(page.read_text(), ROOT) == []


def test_a_changed_source_asks_for_another_reading(tmp_path: Path) -> None:
    text = (PROOFS / "ordered.md").read_text()
    sources = [path for path, _, _ in pins(text)]
    assert sources
    for path in sources:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    assert stale(text, tmp_path) == []
    changed = tmp_path / sources[-1]
    changed.write_bytes(b"import os\n" + changed.read_bytes())
    assert stale(text, tmp_path) == [], "an import is not what a proof is about"
    changed.write_bytes(changed.read_bytes().replace(b"<=", b"<", 1))
    (message,) = stale(text, tmp_path)
    assert message.startswith(f"{sources[-1]} changed")
    assert "read the proof again" in message
    changed.write_bytes(b"")
    (message,) = stale(text, tmp_path)
    assert "any more" in message
