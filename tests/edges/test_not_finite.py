"""Line 10 of the edges: records that are not finite are told to the trainer, and refused where they are many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenhand as eh
from commands import evenhand
from evenhand.data import fingerprint as looking
from evenhand.data import wrap
from evenhand.data.fingerprint import survey
from evenhand.density import MomentDensity
from evenhand.errors import DataError, UnsupportedModelError
from evenhand.training.config import Config, from_toml, to_toml

NAN = float("nan")
LOSS = nn.CrossEntropyLoss(reduction="none")
COUNT = 700
"""Enough that ten records are more than one in a hundred of some, and fewer of others."""


def records(spoilt: int, value: float = NAN, count: int = COUNT) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    inputs[torch.arange(spoilt) * (count // max(1, spoilt)), 1] = value
    return inputs, torch.arange(count) % 2


class Read(Dataset[Any]):
    """Records that are read one by one, some of them slowly."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def fit(train: Any, out: Path, **options: Any) -> eh.Run:
    return eh.fit(nn.Linear(4, 2), train, epsilon=3.0, epochs=1, out=out, compose=False, **options)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_half_of_the_records_not_finite_is_refused_before_anything_is_spent(value: float, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not finite"):
        fit(records(COUNT // 2, value), tmp_path)
    assert eh.runs.folder.Folder(tmp_path).ledger().reserved == 0
    assert fit(records(0), tmp_path).privacy.epsilon is not None


def test_targets_that_are_not_finite_count_too(tmp_path: Path) -> None:
    inputs, targets = records(0)[0], torch.randn(COUNT)
    targets[::3] = NAN
    with pytest.raises(DataError, match="not finite"):
        eh.fit(nn.Linear(4, 1), (inputs, targets), epsilon=3.0, epochs=1, out=tmp_path)


def test_a_dataset_that_is_read_record_by_record_is_looked_at_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "SECONDS", 0.0)
    data = wrap(Read(*records(COUNT // 2)))
    with pytest.raises(DataError, match="not finite"):
        fit(data, tmp_path)
    assert len(survey(data).rows) < COUNT


def test_attach_refuses_them_when_batches_are_asked_for(tmp_path: Path) -> None:
    data, model = wrap(*records(COUNT // 2)), nn.Linear(4, 2)
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=data.facts, epochs=1, batch_size=70)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, plan, out=tmp_path / "a") as run, pytest.raises(DataError, match="finite"):
        next(run.batches(data))
    with eh.attach(model, optimizer, LOSS, plan, out=tmp_path / "b", allow_not_finite=True) as run:
        for batch in run.batches(data):
            run.step(batch)
    assert run.left_out > 0


def test_a_density_refuses_them(tmp_path: Path) -> None:
    inputs, targets = (part.numpy() for part in records(COUNT // 2))
    with pytest.raises(DataError, match="not finite"):
        MomentDensity(epsilon=3.0).fit(inputs, targets)
    assert MomentDensity(epsilon=3.0).fit(inputs, targets, allow_not_finite=True).model_ is not None


def shared_words(folder: Path) -> str:
    """All that may leave the machine, as text."""
    return "".join(file.read_bytes().decode("latin-1") for file in sorted(folder.iterdir()) if file.is_file())


@pytest.mark.parametrize("dataset", [False, True], ids=["arrays", "dataset"])
def test_a_few_are_told_in_the_terminal_and_nowhere_else(
    dataset: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = records(0, count=60)
    train = Read(*records(7)) if dataset else records(7)
    run = fit(train, tmp_path / "some", test=(held_out[0] + 1, held_out[1]))
    said = capsys.readouterr()
    assert said.out == ""
    assert "7 of 700 records hold values that are not finite" in said.err
    assert "keep it to yourself" in said.err
    assert "rows drawn in all steps were not finite" in said.err
    words = shared_words(run.path)
    for hint in ("not finite", "left_out", "keep it to yourself"):
        assert hint not in words.replace("allow_not_finite", "")
    fit(records(0), tmp_path / "none")
    assert "finite" not in capsys.readouterr().err


def test_rows_that_the_model_makes_infinite_are_told_while_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(torch.sqrt(rows + 0.6))

    inputs, targets = records(0)
    inputs[:8] = inputs[:8].abs()
    run = eh.fit(Root(), (inputs, targets), epsilon=3.0, epochs=2, out=tmp_path)
    said = capsys.readouterr().err
    assert "rows drawn so far were not finite" in said
    assert said.count("rows drawn so far") == 1
    assert "rows drawn in all steps were not finite" in said
    assert "finite" not in shared_words(run.path).replace("allow_not_finite", "")


def test_flags_and_files_allow_them_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(to_toml(Config(allow_not_finite=True)))
    assert from_toml(file).allow_not_finite
    assert not Config().allow_not_finite
    shown = evenhand("train", "--help").stdout
    assert "--allow-not-finite" in shown
    assert "--training-records" in shown


class Filled(nn.Module):
    """Fills missing values: with means of the batch, with zero, or shifts all records where one is missing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(4, 2), way

    def forward(self, rows: Tensor) -> Tensor:
        if self.way == "mean":
            return self.layer(torch.where(rows.isnan(), rows.nanmean(0), rows))
        shift = rows.nanmean() if self.way == "shift" and bool(rows.isnan().any()) else 0.0
        return self.layer(rows.nan_to_num() - shift)


@pytest.mark.parametrize("way", ["mean", "shift"])
def test_a_model_that_couples_records_only_where_values_are_missing_is_refused(way: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="other records"):
        eh.fit(Filled(way), records(COUNT // 5), epsilon=3.0, epochs=1, out=tmp_path, allow_not_finite=True)
    assert eh.runs.folder.Folder(tmp_path).ledger().reserved == 0


def test_a_record_that_is_not_finite_adds_nothing_even_where_the_model_makes_something_of_it(tmp_path: Path) -> None:
    """The message says so, and no look at some records could find every way in which others might fill it."""
    ends = []
    for value in (0.5, 5.0):
        inputs, targets = records(7)
        inputs[inputs[:, 1].isnan(), 0] = value
        torch.manual_seed(0)
        model = Filled("zero")
        eh.fit(model, (inputs, targets), epsilon=3.0, epochs=1, prior=False, insecure_seed=3, out=tmp_path / str(value))
        ends.append(model.layer.weight.detach().clone())
    assert torch.equal(*ends)
