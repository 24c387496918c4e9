"""The page to sign: one sheet of paper, nothing but text, the same figures as the data."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evenhand.reporting.page import asset, policy
from evenhand.runs.folder import Folder
from evenhand.runs.statement_page import STYLE
from evenhand.runs.statement_page import render_statement as page

TAGS = {"html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "p", "div", "dl", "dt", "dd"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "section", "ul", "li", "code", "footer"}


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_every_kind_makes_a_page_of_known_parts(folder: Folder) -> None:
    made = folder.statement()
    text = page(made)
    seen = Seen(text)
    assert seen.tags <= TAGS
    assert seen.attributes <= {"lang", "charset", "http-equiv", "content", "name", "class", "scope", "data-n"}
    said = " ".join(seen.words)
    for part in (made["digest"], made["plan"], made["ledger_head"], "Signed by", "Date", "Intermediate checkpoints"):
        assert part in said
    assert "Must not be shared: " in said
    assert len(text) < 60_000


def test_the_policy_admits_the_style_and_nothing_else(folders: dict[str, Folder]) -> None:
    text = page(folders["dpsgd"].statement())
    assert text.count(f"<style>{asset(STYLE)}</style>") == 1
    assert f'content="{policy(STYLE, "")}"' in unescape(text)
    assert "script" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert " style=" not in text


def test_no_guarantee_means_no_epsilon_on_the_page(folders: dict[str, Folder]) -> None:
    said = " ".join(Seen(page(folders["sgd"].statement())).words)
    assert "NOT private" in said
    assert "epsilon" not in said.replace("their epsilons add up", "").replace(asset(STYLE), "")


def test_the_page_says_what_was_read_off_the_data(folders: dict[str, Folder]) -> None:
    derived = folders["dpsgd"].statement()["public_inputs"]["read_off_the_data"]
    assert derived
    assert f"<td>{', '.join(derived)}: declare them" in page(folders["dpsgd"].statement())


def test_fifty_owners_have_a_line_and_the_rest_a_sentence(folders: dict[str, Folder]) -> None:
    made: dict[str, Any] = copy.deepcopy(folders["owners"].statement())
    row = made["owners"][0]
    made["owners"] = [row | {"name": f"owner {i}"} for i in range(80)]
    text = page(made)
    assert len(re.findall(r'<tr><td data-n="[\w ,.%-]*">owner ', text)) == 50
    assert "<p>And 30 more owners, each within its own budget.</p>" in text


def test_a_page_is_for_the_board_even_if_names_are_long(folders: dict[str, Folder]) -> None:
    made: dict[str, Any] = copy.deepcopy(folders["dpsgd"].statement())
    made["owners"][0]["name"] = "x" * 5000
    made["public_inputs"]["groups"] = ["y" * 5000] * 5000
    text = page(made)
    assert len(text) < 20_000
    assert "and 4988 more" in text


def chromium() -> str:
    """The browser, if there is one; in CI there must be."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs chromium for the browser tests")
        pytest.skip("no chromium here")
    return found


def browse(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "page.html").write_text(text)
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *flags, f"file://{tmp_path / 'page.html'}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def sheets(tmp_path: Path, text: str) -> int:
    browse(tmp_path, text, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    return len(re.findall(rb"/Type /Page\b(?!s)", (tmp_path / "page.pdf").read_bytes()))


@pytest.mark.parametrize("kind", ["dpsgd", "sgd", "insecure", "alone", "early", "fixed_noise"])
def test_one_owner_fits_one_sheet_of_letter_paper(kind: str, folders: dict[str, Folder], tmp_path: Path) -> None:
    assert sheets(tmp_path, page(folders[kind].statement())) == 1


def test_and_one_sheet_of_a4(folders: dict[str, Folder], tmp_path: Path) -> None:
    text = page(folders["dpsgd"].statement())
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert sheets(tmp_path, text.replace("@page{", "@page{size:A4;")) == 1
    assert b"841." in (tmp_path / "page.pdf").read_bytes()


def test_hostile_names_are_inert_in_a_browser(folders: dict[str, Folder], tmp_path: Path) -> None:
    done = browse(tmp_path, page(folders["hostile"].statement()), "--dump-dom")
    seen = Seen(done.stdout)
    assert seen.tags <= TAGS
    assert not [name for name in seen.attributes if name.startswith("on")]
    assert "<title>Privacy statement " in done.stdout
    assert [row for row in done.stderr.splitlines() if ":CONSOLE" in row] == []
