"""Statements of thousands of owner classes: columns in the file, and everything else as with a few."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import evenhand as eh
from commands import evenhand
from evenhand import untrusted
from evenhand.accounting import owner_classes
from evenhand.errors import UsageError, VerificationError
from evenhand.runs import statement as statements
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger
from evenhand.runs.run_files import as_json, digests, write_durably
from evenhand.runs.statement_files import LISTED, packed, schema, unpacked

OWNERS = LISTED + 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    names = [f"owner {place}" for place in range(OWNERS)]
    budgets = {name: 1.0 + place % 3 for place, name in enumerate(names)}
    data = eh.data.wrap([[0.0]] * 2 * OWNERS, [0, 1] * OWNERS, owners=names * 2)
    plan = eh.plan("idp_sample", eh.Budgets(budgets, 1e-5), data=data.facts, epochs=0.1)
    made = Folder.create(tmp_path_factory.mktemp("many") / "run", plan)
    with Ledger.open(
        *(made.ledger_file,), plan=plan.digest, steps=plan.steps, key="k", insecure=False, files=digests(made.path)
    ) as ledger:
        ledger.reserve(1)
    made.write_statement()
    return made


def test_columns_say_what_rows_say(folder: Folder) -> None:
    rows, written = folder.statement(), json.loads(folder.statement_file.read_bytes())
    assert len(written["owners"]["kinds"]["epsilon"]) == 3
    assert unpacked(written) == json.loads(json.dumps(rows))
    assert packed(written) is written
    assert statements.digest(written) == written["digest"] == rows["digest"]
    assert len(folder.statement_file.read_bytes()) < len(as_json(rows)) / 4
    jsonschema.Draft202012Validator(schema()).validate(written)
    assert eh.verify(folder.path)["problems"] == []


def test_the_command_gives_words_page_and_data(folder: Folder, tmp_path: Path) -> None:
    written = json.loads(folder.statement_file.read_bytes())
    assert json.loads(evenhand("statement", folder.path, "--json").stdout) == written
    for name in ("a.md", "a.html", "a.json"):
        assert evenhand("statement", folder.path, "--out", tmp_path / name).returncode == 0
    assert json.loads((tmp_path / "a.json").read_bytes()) == written
    assert f"And {OWNERS - owner_classes.OWNERS_SHOWN} more owners" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "a.md").read_bytes() == (folder.path / "statement.md").read_bytes()


def test_a_statement_that_an_earlier_version_wrote_in_rows_verifies(folder: Folder) -> None:
    before = folder.statement_file.read_bytes()
    rows = {key: value for key, value in folder.statement().items() if key != "digest"}
    try:
        write_durably(folder.statement_file, as_json({**rows, "digest": statements.digest(rows)}))
        assert eh.verify(folder.path)["problems"] == []
    finally:
        write_durably(folder.statement_file, before)


def change(table: dict[str, Any], kind: str) -> None:
    if kind == "epsilon":
        table["kinds"]["epsilon"][0] *= 0.9
    elif kind == "other kind":
        table["kind"][0] = 1
    elif kind == "short":
        table["kind"].pop()
    elif kind == "no kind":
        table["kind"][0] = 3
    elif kind == "negative":
        table["kind"][0] = -1
    elif kind == "ragged":
        table["kinds"]["rate"].pop()
    elif kind == "text":
        table["names"] = "names"
    elif kind == "empty":
        table["kinds"] = {}


@pytest.mark.parametrize("kind", ["epsilon", "other kind", "short", "no kind", "negative", "ragged", "text", "empty"])
def test_changed_columns_are_noticed_even_with_a_new_digest_and_row(folder: Folder, kind: str) -> None:
    before = folder.statement_file.read_bytes()
    forged = copy.deepcopy(json.loads(before))
    change(forged["owners"], kind)
    forged["digest"] = statements.digest(forged)
    from evenhand.runs.folder import as_written

    try:
        write_durably(folder.statement_file, as_written(forged))
        found = eh.verify(folder.path)["problems"]
    finally:
        write_durably(folder.statement_file, before)
    assert len(found) == 1, found
    assert "statement" in found[0]


def test_columns_of_a_few_are_not_taken() -> None:
    table = {"names": ["a"], "records": [1], "kind": [0], "kinds": {"epsilon": [1.0]}}
    with pytest.raises(VerificationError, match="lengths"):
        unpacked({"owners": table})


def test_a_plan_that_could_not_be_read_again_is_refused_before_anything_is_written(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = folder.plan()
    monkeypatch.setattr(untrusted, "PARSED", 1000)
    with pytest.raises(UsageError, match=f"{OWNERS} owner classes.*Nothing was spent"):
        Folder.create(tmp_path / "run", plan)
    assert not (tmp_path / "run").exists()
