"""What a statement says of public counts, copies and other runs, and what the trainer is told of copied records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from edges.runs_made import RECORDS, begun, planned, records
from evenhand.data.dataset import Data
from evenhand.data.record_checks import copies, warning
from evenhand.runs.folder import Folder
from evenhand.runs.statement import public_counts
from evenhand.runs.statement_page import render_statement as page
from evenhand.training.run import Run


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    out = tmp_path_factory.mktemp("released")
    data = records(owners="ab")
    with begun(out, 3, data, planned(data, eh.Budgets({"a": 1.0, "b": 4.0}, 1e-4), "idp_sample")) as private:
        private.release()
    return Folder.existing(out)


def test_the_statement_names_its_public_counts_in_every_form(released: Folder) -> None:
    sentence = public_counts(released.statement()["public_inputs"])
    assert f"the number of records ({RECORDS})" in sentence
    assert "each of the 2 owners" in sentence
    assert "the expected batch (20)" in sentence
    assert "learns from these alone that one more was there" in sentence
    for text in (
        (released.path / "statement.md").read_text(),
        page(released.statement()),
        Run(released).card(),
        Run(released).report().page,
    ):
        assert sentence in text


def test_the_statement_says_what_copies_and_uncounted_runs_mean(released: Folder) -> None:
    left_out = " ".join(released.statement()["does_not_cover"])
    assert "copies of a record (oversampling)" in left_out
    assert "arrays in another order, size or scale" in left_out
    assert "files cut from the same source" in left_out


def oversampled(times: int = 3) -> Data:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 8, generator=generator)
    rows = torch.cat([torch.arange(200), *[torch.arange(20)] * times])
    return eh.data.wrap(inputs[rows], (rows % 2).tolist(), labels=(0, 1))


def fitted(data: Data, out: Path) -> None:
    eh.fit(nn.Linear(8, 2), data, epsilon=3.0, epochs=1, batch_size=50, out=out, progress=False)


def test_oversampled_records_are_named_to_the_trainer_and_in_no_shareable_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fitted(oversampled(), tmp_path)
    said = capfd.readouterr().err
    assert "60 of the 260 training records have exactly the inputs of an earlier one" in said
    assert "up to k times as large" in said
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"of an earlier one" not in file.read_bytes()


def test_the_warning_comes_before_the_first_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charged = []
    monkeypatch.setattr(
        "evenhand.data.record_checks.tell", lambda data: charged.append(eh.verify(tmp_path)["steps"]), raising=True
    )
    fitted(oversampled(), tmp_path)
    assert charged == [0]


def test_honest_twins_of_few_columns_are_not_called_copies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(2)
    age, sex = torch.randint(18, 90, (3000,), generator=generator), torch.randint(0, 2, (3000,), generator=generator)
    table = eh.data.wrap(torch.stack([age, sex], 1).float(), sex.tolist(), labels=(0, 1))
    count = copies(table)
    assert count is not None
    assert count > 2500
    assert warning(table) is None
    assert warning(records()) is None


COUNTED = """
import re
import torch
import evenhand as eh
from evenhand.data.record_checks import copies

def anonymous():
    return int(re.search(r"Anonymous: +(\\d+) kB", open("/proc/self/smaps_rollup").read())[1]) / 1e3

data = eh.data.wrap(torch.arange(4e6)[:, None], torch.zeros(4_000_000))
copies(data.take(torch.arange(100)))
before = anonymous()
assert copies(data, seconds=1000.0) == 0
print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory a process holds")
def test_looking_for_copies_keeps_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 100, "megabytes, of four million records"


def test_data_that_are_slow_to_read_are_left_alone() -> None:
    assert copies(oversampled(), seconds=-1.0) is None
