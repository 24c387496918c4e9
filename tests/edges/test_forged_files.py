"""Line 8: whatever is done to the files of a run folder, no epsilon that ``verify`` prints is lowered unnoticed."""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
from pathlib import Path

import forging
import pytest

import evenhand as eh
from commands import evenhand
from evenhand.errors import LedgerError, VerificationError
from evenhand.runs import run_files
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger, read
from evenhand.runs.statement import markdown
from evenhand.training.run import Run
from evenhand.untrusted import read_bytes, read_json

EDITED = ("report.html", "model-card.md", "owners.csv", "statement.md", "metrics.jsonl", "README.md", "statement.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make in forging.KINDS.items():
        made[name] = tmp_path_factory.mktemp("forged") / name
        make(made[name])
    return made


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run with owners, as it would be shared."""
    ignored = shutil.ignore_patterns("private", "config.toml", "env.json", "*.lock")
    return Path(shutil.copytree(folders["owners"], tmp_path / "copy", ignore=ignored))


def problems(folder: Path) -> list[str]:
    return list(eh.verify(folder)["problems"])


def test_every_shareable_file_has_its_digest_in_the_ledger(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        recorded = read(folder / "ledger.jsonl").files()
        assert recorded == run_files.digests(folder), name
        assert {"README.md", "statement.json", "statement.md", "composition.json", "model.safetensors"} <= set(recorded)
    assert {"owners.csv", "report.html", "model-card.md", "metrics.jsonl"} <= set(
        read(folders["owners"] / "ledger.jsonl").files()
    )
    assert "model-last.safetensors" in read(folders["signed"] / "ledger.jsonl").files()


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_file_is_one_line_and_exit_code_1(name: str, copy: Path) -> None:
    assert problems(copy) == []
    text = (copy / name).read_bytes()
    places = [found.start() for found in forging.NUMBER.finditer(text)] or [0]
    other = b"0" if text[places[-1]] != ord("0") else b"1"
    (copy / name).write_bytes(text[: places[-1]] + other + text[places[-1] + 1 :])
    done = evenhand("verify", copy)
    assert done.returncode == 1
    assert f"NOT verified: {name} is not the file that the ledger records" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_removed_row_does_not_make_a_file_uncovered(copy: Path) -> None:
    rows = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    forged = {"report.html": b"<p>epsilon 0.098</p>", "model-card.md": b"# epsilon 0.098\n"}
    for name, text in forged.items():
        (copy / name).write_bytes(text)
    while json.loads(rows[-1])["type"] == "file":
        rows.pop()
    (copy / "ledger.jsonl").write_bytes(b"".join(rows))
    found = problems(copy)
    assert all(any(problem.startswith(name) for problem in found) for name in forged), found


@pytest.mark.parametrize("share", [1e-9, 1e-4, 9e-4, 0.5])
def test_a_lowered_epsilon_is_noticed_even_if_all_hashes_are_made_anew(share: float, copy: Path) -> None:
    truth = eh.verify(copy)
    body = json.loads((copy / "statement.json").read_bytes())
    for row in (body["guarantee"], *body["owners"]):
        row["epsilon"] *= 1 - share
    forging.rechain(copy, "statement.json", json.dumps(body).encode())
    forging.rechain(copy, "statement.md", markdown(json.loads((copy / "statement.json").read_bytes())).encode())
    found = eh.verify(copy)
    assert found["owners"] == truth["owners"], "what is printed comes from the ledger"
    if share > 2e-4:
        assert not found["ok"], "it is below what holds"
    else:
        assert found["ok"] == (share < 2e-5), "what is accepted below the computed bound was proved on a finer grid"


def test_an_epsilon_of_the_plan_has_no_tolerance_downwards(copy: Path) -> None:
    body = json.loads((copy / "plan.json").read_bytes())
    body["epsilons"] = [epsilon * (1 - 5e-4) for epsilon in body["epsilons"]]
    made = eh.Plan.from_json(body)
    (copy / "plan.json").write_bytes(run_files.as_json(made.to_json()))
    forging.rechain(copy, "plan.json", (copy / "plan.json").read_bytes())
    assert any("smaller than its noise and steps allow" in problem for problem in problems(copy))


def test_a_statement_of_an_earlier_state_is_not_accepted(copy: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """An honest statement of fewer steps, from a backup, says less than was spent since."""
    run = tmp_path / "run"
    forging.rebudgeted(run)
    old = {name: (run / name).read_bytes() for name in ("statement.json", "statement.md")}
    eh.rebudget(run, eh.Privacy(4), epochs=1, train=forging.data())
    eh.resume(run, model=forging.nn.Linear(3, 2), train=forging.data(), progress=False)
    assert problems(run) == []
    for name, text in old.items():
        (run / name).write_bytes(text)
    assert len(problems(run)) >= 2


def test_exchanged_models_are_noticed_although_both_were_released(folders: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(folders["signed"], tmp_path / "run"))
    (run / "model-last.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    assert problems(run)[0].startswith("model-last.safetensors is not the file")


def test_a_report_that_is_written_later_is_recorded(copy: Path) -> None:
    Run(Folder(copy)).report().save(copy / "report.html")
    rows = (copy / "ledger.jsonl").read_bytes()
    assert evenhand("report", copy).returncode == 0
    assert (copy / "ledger.jsonl").read_bytes() == rows, "the same page needs no further row"
    assert evenhand("report", copy, "--out", copy / "mine.html").returncode == 0
    assert "mine.html" in read(copy / "ledger.jsonl").files()
    assert problems(copy) == []
    (copy / "mine.html").write_text("epsilon 0.098")
    assert problems(copy) == ["mine.html is not the file that the ledger records: it was changed or exchanged."]
    (copy / "mine.html").unlink()
    assert problems(copy) == [], "nobody needs it"


def test_files_that_are_not_of_the_run_are_named(copy: Path) -> None:
    (copy / "summary.html").write_text("epsilon 0.098")
    found = eh.verify(copy)
    assert found["ok"]
    assert any("'summary.html'" in note for note in found["notes"])


def test_a_missing_file_is_a_problem_unless_it_must_not_be_shared(copy: Path, tmp_path: Path) -> None:
    (copy / "report.html").unlink()
    assert problems(copy) == ["report.html is missing: the ledger records it."]
    train = forging.data()
    eh.fit(forging.nn.Linear(3, 2), train, method="sgd", epochs=1, test=forging.data(seed=4), out=tmp_path / "sgd")
    for name in ("model.safetensors", "metrics.jsonl", "model-card.md", "report.html"):
        (tmp_path / "sgd" / name).unlink()
    assert problems(tmp_path / "sgd") == []
    (tmp_path / "sgd" / "statement.md").unlink()
    assert "statement.md is missing: the ledger records it." in problems(tmp_path / "sgd")


def test_a_folder_of_an_earlier_version_verifies_and_says_what_is_not_covered(copy: Path) -> None:
    forging.as_before(copy)
    found = eh.verify(copy)
    assert found["problems"] == []
    note = next(note for note in found["notes"] if "an earlier version" in note)
    assert all(name in note for name in ("report.html", "model-card.md", "owners.csv"))


def test_a_run_of_an_earlier_version_goes_on_and_its_new_files_are_recorded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(folders["rebudgeted"], tmp_path / "run"))
    forging.as_before(run)
    assert problems(run) == []
    eh.rebudget(run, eh.Privacy(4), epochs=1, train=forging.data())
    eh.resume(run, model=forging.nn.Linear(3, 2), train=forging.data(), progress=False)
    found = eh.verify(run)
    assert found["problems"] == []
    assert any("does not record README.md" in note for note in found["notes"])
    (run / "model-card.md").write_text("epsilon 0.098")
    assert problems(run) == ["model-card.md is not the file that the ledger records: it was changed or exchanged."]


@pytest.mark.parametrize("name", ["report.html", "statement.json", "metrics.jsonl"])
def test_a_crash_between_row_and_name_is_explained_and_mended(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(folders["owners"], tmp_path / "run"))
    text = (run / name).read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run_files.write_durably(run / name, text + b"\n")
    assert (run / name).read_bytes() == text
    assert problems(run)[0].startswith(f"{name} was recorded, and a crash came before it was in place")
    with Ledger.writing(run / "ledger.jsonl") as ledger:
        run_files.place_recorded_files(run, ledger)
    assert (run / name).read_bytes() == text + b"\n"


def test_files_are_not_written_beside_another_writer(copy: Path) -> None:
    from evenhand.runs.ledger import acquire_lock

    lock = acquire_lock(copy / "ledger.jsonl")
    try:
        with pytest.raises(LedgerError, match="Another process"):
            run_files.write_durably(copy / "report.html", b"")
    finally:
        lock.release()
    assert problems(copy) == []


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"[" * 10**5, b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"1" * 5000, b'{"a": "\\ud800"}', b""],
)
def test_the_reader_refuses_what_no_run_writes(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_bytes(text)
    with pytest.raises(VerificationError, match=r"some\.json cannot be read"):
        read_json(tmp_path / "some.json")


def test_the_reader_opens_only_files_of_usual_size(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"0" * 1001)
    for name in ("large", "none", "."):
        with pytest.raises(VerificationError):
            read_bytes(tmp_path / name, largest=1000)


def campaign(folders: dict[str, Path], count: int, seed: int) -> collections.Counter[str]:
    """Change one file at a time; returns how many changes were reported, and how many changed nothing covered."""
    source, seen = random.Random(seed), collections.Counter[str]()
    truth = {name: eh.verify(folder, forging.public_key(folder)) for name, folder in folders.items()}
    whole = {name: forging.promised(folder) for name, folder in folders.items()}
    for number in range(count):
        name = source.choice(list(folders))
        folder, key = folders[name], forging.public_key(folders[name])
        with forging.changed(folder, source) as change:
            case = f"{number}: {change} in {name}"
            found = eh.verify(folder, key)
            if found["ok"]:
                assert {**found, "notes": None} == {**truth[name], "notes": None}, case
                assert forging.promised(folder) == whole[name], case
            else:
                assert all("\n" not in problem and len(problem) < 400 for problem in found["problems"]), case
            if number % 10 == 0:
                done = evenhand("verify", folder, *(() if key is None else ("--key", key)))
                assert done.returncode == (0 if found["ok"] else 1), case
                assert "Traceback" not in done.stdout + done.stderr, case
                assert found["ok"] or "epsilon 0." not in done.stdout.replace("promised epsilon", ""), case
            seen["unnoticed, nothing covered changed" if found["ok"] else "reported"] += 1
            seen[f"{change.kind}: {'ok' if found['ok'] else 'reported'}"] += 1
    assert {name: eh.verify(folder, forging.public_key(folder)) for name, folder in folders.items()} == truth
    return seen


def rechained(folders: dict[str, Path], tmp_path: Path, count: int, seed: int) -> collections.Counter[str]:
    """Forge data with all hashes made anew: no crash, and an accepted statement promises no less than the ledger."""
    source, seen = random.Random(seed), collections.Counter[str]()
    for number in range(count):
        name = source.choice(list(folders))
        file = source.choice(["statement.json", "statement.json", "composition.json", "plan.json", "ledger.jsonl"])
        ignored = shutil.ignore_patterns("private", "*.lock")
        copy = Path(shutil.copytree(folders[name], tmp_path / str(number), ignore=ignored))
        before = json.loads((copy / "statement.json").read_bytes())
        if file == "ledger.jsonl":
            forging.write_rows(copy, forging.edited(forging.rows_of(copy), source))
        else:
            forging.rechain(copy, file, forging.DATA["edit"]((copy / file).read_bytes(), source))
        found = eh.verify(copy, forging.public_key(folders[name]))
        seen[f"{file}: {'ok' if found['ok'] else 'reported'}"] += 1
        seen["ok" if found["ok"] else "reported"] += 1
        if found["ok"] and file == "statement.json":
            after = json.loads((copy / "statement.json").read_bytes())
            assert name != "signed" or after == before, number
            assert markdown(after) == markdown(before), number
            assert (copy / "statement.md").read_text() == markdown(after), number
        shutil.rmtree(copy)
    return seen


def test_no_change_to_a_file_lowers_an_epsilon_unnoticed(folders: dict[str, Path]) -> None:
    seen = campaign(folders, 200, seed=0)
    assert seen["reported"] > 100


def test_no_forged_statement_with_new_hashes_promises_more(folders: dict[str, Path], tmp_path: Path) -> None:
    assert rechained(folders, tmp_path, 40, seed=0)["reported"] > 20


@pytest.mark.slow
def test_five_thousand_changes_lower_no_epsilon_unnoticed(folders: dict[str, Path], tmp_path: Path) -> None:
    seen = campaign(folders, 5000, seed=1)
    print(dict(sorted(seen.items())))
    print(rechained(folders, tmp_path, 500, seed=1))
