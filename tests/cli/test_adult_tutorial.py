"""Adult (census income) as a plain CSV, in one sitting: the commands of the tutorial, word for word."""

from __future__ import annotations

import csv
import gzip
import re
import shlex
import time
from pathlib import Path

import pytest
from ways import done, evenhand

ROOT = Path(__file__).parents[2]
SOURCE = ROOT.parent / "shared" / "data" / "adult"
TUTORIAL = ROOT / "docs" / "tutorials" / "_adult_commands.md"
COLUMNS = """age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain
capital-loss hours-per-week native-country income"""
NAMES = COLUMNS.split()

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="the Adult files are not in ../shared/data/adult")


def plain(part: str, out: Path) -> None:
    text = gzip.decompress((SOURCE / f"adult.{part}.gz").read_bytes()).decode()
    rows = [line.rstrip(".").split(", ") for line in text.splitlines() if line.count(",") == len(NAMES) - 1]
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([NAMES, *rows])


def commands() -> list[list[str]]:
    (block,) = re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines()]


def test_adult_from_csv_to_report_in_one_sitting(tmp_path: Path) -> None:
    plain("data", tmp_path / "adult.csv")
    plain("test", tmp_path / "adult-test.csv")
    typed = commands()
    assert [line[1] for line in typed] == ["init", "train", "predict", "report", "verify"]
    started = time.monotonic()
    for line in typed:
        found = evenhand(*line[1:], cwd=tmp_path)
        assert found.returncode == 0, (line, found.stderr)
    assert time.monotonic() - started < 150
    (run,) = (tmp_path / "runs").iterdir()
    assert done("verify", run, cwd=tmp_path)["ok"]
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    truth = list(csv.DictReader((tmp_path / "adult-test.csv").read_text().splitlines()))
    right = sum(row["prediction"] == true["income"] for row, true in zip(rows, truth, strict=True)) / len(truth)
    assert right > 0.8
    page = (run / "report.html").read_text()
    assert "Female" in page
    assert "Male" in page
