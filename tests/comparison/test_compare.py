"""A comparison from flags to report: resumed, not repeated; equal epsilon; nothing private where it may be shared."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from commands import evenhand
from evenhand.comparison import summary, tables
from evenhand.comparison import write_results as files
from evenhand.comparison.compare import EXECUTORS, Comparison, compare
from evenhand.comparison.executors import Failure
from evenhand.comparison.run_cell import Task, finished, plan_task
from evenhand.comparison.sweep import Sweep, from_toml
from evenhand.errors import UsageError
from evenhand.reporting.comparison_page import ComparisonData
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.group_metrics import Estimate
from evenhand.runs.folder import Folder
from evenhand.runs.verify import verify
from evenhand.training.config import Config
from processes import Started, started, wait_for

BASE = Config(epochs=1.0, model="linear", prior=False)
SWEEP = Sweep(BASE, methods=("dpsgd",), epsilons=(1.0, 3.0), seeds=2, reference=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, compare(SWEEP, out, jobs=2, progress=False)


def test_every_run_has_its_own_folder_that_verifies_at_the_promise(made: tuple[Path, Comparison]) -> None:
    out, found = made
    assert len(found.results) == 6
    assert found.failed == []
    for result in found.results:
        checked = verify(result.task.path)
        assert checked["ok"], checked["problems"]
        promised = result.task.cell.epsilon
        if promised is None:
            assert result.task.path.parent == out / "private"
            assert checked["epsilon"] is None
        else:
            assert result.task.path.parent == out
            assert 0.99 * promised <= checked["epsilon"] <= promised


def test_tables_and_report_say_the_same(made: tuple[Path, Comparison]) -> None:
    out, found = made
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    body = json.loads((out / "table.json").read_text())
    assert (
        [row["method"] for row in rows] == [entry["method"] for entry in body["entries"]] == ["dpsgd", "dpsgd", "sgd"]
    )
    assert float(rows[1]["accuracy"]) == body["entries"][1]["metrics"]["accuracy"]["value"]
    assert rows[1]["unit"] == "one record"
    assert rows[1]["adjacency"] == "add/remove"
    assert rows[2]["private"] == "False"
    assert rows[2]["spent_epsilon"] == ""
    means = [result.last["accuracy"] for result in found.results if result.task.cell.epsilon == 3]
    assert float(rows[1]["accuracy"]) == pytest.approx(sum(means) / 2)
    reference = [result.last["groups"]["class 8"] for result in found.results if not result.task.cell.private]
    private = [result.last["groups"]["class 8"] for result in found.results if result.task.cell.epsilon == 3]
    assert float(rows[1]["privacy_cost[class 8]"]) == pytest.approx(50 * (sum(reference) - sum(private)), abs=1e-9)
    text = (out / "table.md").read_text()
    assert "per record, add/remove" in text
    assert "(not private, research only)" in text
    page = (out / "report.html").read_text()
    assert len(page.encode()) < 300_000
    assert "not private \u2013 research only" in page
    assert not (out / "private" / "report-full.html").exists()
    assert body["epsilon_of_all_runs_together"] > 3


def test_values_of_training_records_stay_in_private_folders(made: tuple[Path, Comparison]) -> None:
    out, found = made
    assert len(list(out.glob("*/private/training_groups.json"))) == 4
    assert "Inside the training" in (out / "report.html").read_text()
    assert found.entries[1].training["class 8"]["norm"].value > 0
    assert "clipped" not in found.entries[2].training["class 8"]
    assert "norm" not in (out / "table.json").read_text()


def test_finished_runs_are_not_repeated_and_a_sweep_can_grow(made: tuple[Path, Comparison], tmp_path: Path) -> None:
    out = shutil.copytree(made[0], tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("ledger.jsonl")}
    wider = Sweep(BASE, methods=("dpsgd",), epsilons=(1.0, 3.0, 8.0), seeds=2, reference=True)
    found = compare(wider, out, jobs=1, progress=False)
    assert found.reused == 6
    assert len(found.results) == 8
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_question_is_another_folder(made: tuple[Path, Comparison]) -> None:
    out, _ = made
    cell = SWEEP.cells()[0]
    assert finished(plan_task(cell, out))
    assert finished(plan_task(cell, out, research=True))
    longer = Sweep(Config(epochs=2.0, model="linear"), epsilons=(1.0,)).cells()[0]
    assert not finished(plan_task(longer, out))
    assert plan_task(longer, out).path != plan_task(cell, out).path


def test_a_task_asks_for_counts_of_labels_only_where_its_run_releases_them(tmp_path: Path) -> None:
    asking = Sweep(replace(BASE, prior=True), methods=("dpsgd",), epsilons=(1.0,), seeds=1, reference=True)
    private, reference = (plan_task(cell, tmp_path) for cell in asking.cells())
    assert private.plan.prior is not None
    assert private.cell.config.prior
    assert reference.plan.prior is None
    assert not reference.cell.config.prior


def test_a_run_that_does_not_verify_is_a_failure(made: tuple[Path, Comparison], tmp_path: Path) -> None:
    out = shutil.copytree(made[0], tmp_path / "copy")
    first = plan_task(SWEEP.cells()[0], out)
    statement = first.folder.statement_file
    statement.write_text(statement.read_text().replace("one record", "two records"))
    found = compare(SWEEP, out, jobs=1, progress=False)
    assert len(found.failed) == 1
    assert "does not verify" in found.failed[0]
    assert found.entries[0].seeds == 1
    asked = ("--model", "linear", "--epochs", "1", "--epsilons", "1,3", "--seeds", "2", "--reference")
    done = evenhand("compare", "--methods", "dpsgd", *asked, "--jobs", "1", "--out", out)
    assert done.returncode == 1
    assert "1 of 6 runs did not finish. " in done.stderr
    assert "the same command goes on with them" in done.stderr


def test_private_data_keep_the_reference_out_of_shared_files(
    made: tuple[Path, Comparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenhand.data.sources.PUBLIC", frozenset())
    written = files.write(_folder(tmp_path), SWEEP, made[1].entries, made[1].results)
    shared = "".join(path.read_text() for name, path in written.items() if not name.startswith("full_"))
    assert not re.search(
        r"\bsgd\b|privacy.cost|pays|not private \W research", re.sub("(?s)<style>.*?</style>", "", shared)
    )
    full = written["full_report"].read_text()
    assert written["full_report"] == tmp_path / "private" / "report-full.html"
    assert "Do not share this copy" in full
    assert "Inside the training" in full
    assert "gradient norm" not in shared
    assert "privacy_cost" in written["full_csv"].read_text()


def _folder(path: Path) -> Path:
    (path / "private").mkdir()
    return path


def test_spreadsheets_run_no_group_name() -> None:
    evil = Entry(
        "dpsgd", 3.0, seeds=1, groups={"=cmd|' /C calc'!A0": Estimate(0.5, 0.4, 0.6, 1), "@x": Estimate(1, 1, 1, 1)}
    )
    text = tables.as_csv(ComparisonData("t", [evil], 1e-4, None, 1, 9, {}, ""))
    assert not re.search(r'(^|,)"?[=@+]', text)


def test_metrics_of_rows_without_groups() -> None:
    assert summary.metrics_of({"accuracy": 0.5, "groups": {}}) == {"accuracy": 0.5}
    assert "accuracy_ratio" not in summary.metrics_of({"accuracy": 0.0, "groups": {"a": 0.0}})


def start(out: Path) -> Started:
    asked = ["--methods", "dpsgd", "--epsilons", 3, "--seeds", 2, "--epochs", 5, "--batch-size", 32]
    return started("compare", *asked, "--model", "linear", "--jobs", 1, "--out", out, "--json")


def done(out: Path) -> list[Path]:
    return [path.parent for path in out.glob("*/statement.json")]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in text if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, id="kill -9"), pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow)],
)
def test_a_stopped_compare_goes_on_without_repeating(tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "out"
    first = start(out)
    wait_for(lambda: done(out) or first.poll() is not None)
    assert first.poll() is None
    first.send_signal(how)
    _, told = first.communicate(timeout=60)
    if how == signal.SIGINT:
        assert first.returncode == 130
        assert "Continue with the same command" in told
        assert "Traceback" not in told
    finished_before = {path: (path / "ledger.jsonl").read_bytes() for path in done(out)}
    assert len(finished_before) == 1
    begun = {path.parent for path in out.glob("*/ledger.jsonl")}
    second = start(out)
    text, told = second.communicate(timeout=120)
    assert second.returncode == 0, told
    body = json.loads(text.splitlines()[-1])
    assert body["reused"] == len(finished_before)
    assert body["entries"][0]["seeds"] == 2
    assert {path: (path / "ledger.jsonl").read_bytes() for path in finished_before} == finished_before
    assert {path.parent for path in out.glob("*/ledger.jsonl")} >= begun
    assert len(list(out.glob("dpsgd-*"))) == 2
    for path in out.glob("dpsgd-*"):
        assert verify(path)["ok"]
        assert verify(path)["epsilon"] <= 3


def test_a_killed_worker_is_replaced_and_its_run_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parent = start(out)
    wait_for(lambda: list(out.glob("*/metrics.jsonl")) or parent.poll() is not None)
    victims = children(parent.pid)
    os.kill(victims[0], signal.SIGKILL)
    text, told = parent.communicate(timeout=180)
    assert parent.returncode == 0, told
    assert json.loads(text.splitlines()[-1])["failed"] == []
    segments = [len(Folder(path).ledger().segments) for path in done(out)]
    assert sorted(segments) == [1, 2]


def test_one_seed_of_all_methods_runs_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def execute(tasks: dict[str, Task], *_: object, **__: object) -> dict[str, Failure]:
        order.extend(task.cell.name for task in tasks.values())
        return {name: Failure("not run") for name in tasks}

    monkeypatch.setitem(EXECUTORS, "processes", execute)
    compare(replace(SWEEP, epsilons=(1.0,), replicas="off"), tmp_path, progress=False)
    assert order == ["dpsgd-eps1-seed0", "sgd-seed0", "dpsgd-eps1-seed1", "sgd-seed1"]


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "private").mkdir()
    with FileLock(str(tmp_path / "private" / "compare.lock")), pytest.raises(UsageError, match="Another comparison"):
        compare(SWEEP, tmp_path, progress=False)


def test_the_command_refuses_before_anything_is_written(tmp_path: Path) -> None:
    for arguments, words in (
        (["--epsilons", "1,x"], "takes numbers separated by commas"),
        (["--methods", "nothing"], "There is no method"),
        (["none.toml"], "There is no file"),
    ):
        ended = evenhand("compare", *arguments, "--out", tmp_path / "out", cwd=tmp_path)
        assert ended.returncode == 2, ended.stderr
        assert words in ended.stderr
        assert not (tmp_path / "out").exists()


def test_own_data_are_split_once_for_all_seeds(tmp_path: Path) -> None:
    rows = [f"{i % 50},{'ab'[i % 3 == 0]},{'no' if i % 50 < 25 else 'yes'}" for i in range(400)]
    (tmp_path / "d.csv").write_text("age,sex,ill\n" + "\n".join(rows) + "\n")
    (tmp_path / "d.toml").write_text(
        'data = "d.csv"\nlabel = "ill"\nlabels = ["no", "yes"]\ngroups = "sex"\nepochs = 1\nmodel = "linear"\n'
        'methods = ["dpsgd"]\nseeds = 2\nreference = true\n'
        '[columns.age]\nkind = "number"\nlow = 0\nhigh = 50\n[columns.sex]\nkind = "category"\nvalues = ["a", "b"]\n'
    )
    made = from_toml(tmp_path / "d.toml", {})
    assert not made.public
    found = compare(made, tmp_path / "out", jobs=1, progress=False)
    assert found.failed == []
    assert len({result.task.plan.facts.records for result in found.results}) == 1
    assert (tmp_path / "out" / "private" / "report-full.html").exists()
    assert "d.csv" not in (tmp_path / "out" / "report.html").read_text()
