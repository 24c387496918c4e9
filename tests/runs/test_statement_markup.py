"""Names that anyone chose: no renderer of Markdown makes a link, a picture, a tag or code of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import evenhand as eh
from evenhand.runs.folder import Folder
from evenhand.runs.statement import markdown

MARKS = [
    "\\",
    "[",
    "]",
    "(",
    ")",
    "<",
    ">",
    "&",
    "`",
    "!",
    ":",
    "/",
    "javascript:alert(1)",
    "click",
    "http://x.y",
    "\n",
]
NAMES = st.one_of(st.lists(st.sampled_from(MARKS), max_size=14).map("".join), st.text(max_size=30))
INNER = {"text", "softbreak", "hardbreak", "code_inline", "text_special", "em_open", "em_close"}
INNER |= {"strong_open", "strong_close"}


@pytest.fixture(scope="module")
def statement(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("markup")
    data = eh.data.wrap([[0.0]] * 99, [0, 1, 1] * 33, owners=["one", "two", "two"] * 33)
    made = eh.plan("idp_sample", eh.Budgets({"one": 1, "two": 2}, 1e-4), data=data.facts, epochs=1)
    folder = Folder.create(out / "run", made)
    from evenhand.runs.ledger import Ledger

    with Ledger.open(folder.ledger_file, plan=made.digest, steps=made.steps, key="k", insecure=False):
        pass
    found: dict[str, Any] = json.loads(json.dumps(folder.statement()))
    return found


def named(statement: dict[str, Any], name: str) -> str:
    """The page of a statement in which every name that a user chooses is this one."""
    owners = [{**row, "name": name} for row in statement["owners"]]
    return markdown({**statement, "owners": owners, "warnings": [f"the group {name} is small", name]})


@settings(max_examples=150, deadline=None)
@example("\\[click](javascript:alert(1))")
@example("\\\\[click](javascript:alert(1))")
@example("`a` [b][c]\\`")
@example("<https://x.y>")
@example("![x](y) &lt;b&gt; &#91;x](y)")
@given(NAMES)
def test_no_name_becomes_markup(statement: dict[str, Any], name: str) -> None:
    text = named(statement, name)
    tokens = MarkdownIt("commonmark").parse(text)
    inner = [child for token in tokens for child in token.children or []]
    kinds = {child.type for child in inner}
    assert not kinds & {"link_open", "image", "html_inline"}, text
    assert "html_block" not in {token.type for token in tokens}, text
    assert kinds <= INNER, kinds - INNER
    assert sum(child.type == "code_inline" for child in inner) == 3, "those of the last line"


@pytest.mark.parametrize("name", ["https://evil.example/x", "www.evil.example", "a@evil.example"])
def test_no_address_is_found_by_itself(statement: dict[str, Any], name: str) -> None:
    """Some renderers make links of bare addresses: none stands in the page as it is written."""
    assert name not in named(statement, name)
