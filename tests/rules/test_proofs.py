"""Every batch rule and every query has a proof, and no proof is older than the code it is about."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from evenhand import registry
from evenhand.rules import BatchRule

ROOT = Path(__file__).parents[2]
PROOFS = ROOT / "docs" / "proofs"
LINE = re.compile(r"^<!-- source: (\S+) sha256: (\S+) -->$", re.MULTILINE)
PAGES = sorted(page for page in PROOFS.glob("*.md") if LINE.search(page.read_text()))


def ours(kind: str) -> list[type]:
    parts = [registry.part(kind, name) for name in registry.names(kind)]
    return [part for part in parts if part.__module__.startswith("evenhand.")]


def test_every_batch_rule_and_query_of_ours_has_a_proof() -> None:
    named = [part for part in ours("rule") if issubclass(part, BatchRule)] + ours("query")
    assert len(named) >= 4
    for part in named:
        page = PROOFS / f"{part.name}.md"  # type: ignore[attr-defined]
        assert page in PAGES, f"{part.__name__} needs docs/proofs/{page.name}"
        source = "src/" + part.__module__.replace(".", "/") + ".py"
        assert source in [path for path, _ in LINE.findall(page.read_text())], f"{page.name} must name {source}"
        for word in ("Unit", "add/remove", "Proved"):
            assert word in page.read_text()


def stale(text: str, root: Path) -> list[str]:
    """What to do about each source that is no longer the one that the proof was read against."""
    found = [
        (path, digest, hashlib.sha256((root / path).read_bytes()).hexdigest()) for path, digest in LINE.findall(text)
    ]
    return [
        f"{path} changed after its proof was last read against it: read the proof again, line by line, mend it if it "
        f"no longer holds, then write sha256: {now}"
        for path, before, now in found
        if before != now
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_proof_is_about_the_code_as_it_is(page: Path) -> None:
    assert stale(page.read_text(), ROOT) == []


def test_a_changed_source_asks_for_another_reading(tmp_path: Path) -> None:
    text = (PROOFS / "ordered.md").read_text()
    sources = [path for path, _ in LINE.findall(text)]
    assert len(sources) == 3
    for path in sources:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    assert stale(text, tmp_path) == []
    (tmp_path / sources[1]).write_bytes((ROOT / sources[1]).read_bytes().replace(b"<=", b"<", 1))
    (message,) = stale(text, tmp_path)
    assert message.startswith(f"{sources[1]} changed")
    assert "read the proof again" in message
