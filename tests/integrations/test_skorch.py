"""PrivateNet over a stand-in of skorch's net; the real one trains in test_real_libraries.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from stand_ins import NeuralNet
from torch import nn
from torch.utils.data import Subset, TensorDataset

import evenhand as eh
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.integrations.skorch import PrivateNet, RecordLoss
from evenhand.runs.ledger import read


class Net(PrivateNet, NeuralNet):
    pass


def net(out: Path, criterion: Any = None, **options: Any) -> Net:
    return Net(nn.Linear(3, 2), criterion or nn.CrossEntropyLoss(), epsilon=3.0, delta=1e-3, out=out, **options)


@pytest.fixture
def rows(tiny: Data) -> TensorDataset:
    return TensorDataset(*tiny.fetch(torch.arange(40)))


def test_fit_is_a_run_and_the_history_has_no_training_loss(rows: TensorDataset, tmp_path: Path) -> None:
    fitted = net(tmp_path, owners=["x"] * 30 + ["y"] * 10).fit(Subset(rows, range(2, 40)), Subset(rows, range(2)))
    assert fitted.run_.plan.facts.owners == (("x", 28), ("y", 10))
    reading = read(tmp_path / "ledger.jsonl")
    assert reading.reserved == reading.committed == fitted.run_.plan.steps
    assert set(reading.told) == {5, 10, 15}
    assert fitted.recorded == {"train_batch_count": 5}
    assert not hasattr(fitted, "private_")
    assert eh.verify(tmp_path)["ok"]
    with pytest.raises(UsageError, match="holds a run already"):
        fitted.fit(rows)


def test_a_net_behind_a_step_that_learns_is_refused_in_a_plain_pipeline(rows: TensorDataset, tmp_path: Path) -> None:
    behind = make_pipeline(StandardScaler(), net(tmp_path))
    with pytest.raises(UsageError, match=r"learn from private records, .*\(StandardScaler\)"):
        behind.fit(rows.tensors[0].numpy(), Subset(rows, range(2)))
    assert not (tmp_path / "ledger.jsonl").exists()


class Stops:
    def on_epoch_end(self, net: Any) -> None:
        raise KeyboardInterrupt


class Fails:
    def on_batch_end(self, net: Any, **_: Any) -> None:
        raise ZeroDivisionError


def test_a_callback_that_stops_ends_in_a_release_of_the_whole_promise(rows: TensorDataset, tmp_path: Path) -> None:
    stopped = net(tmp_path)
    stopped.callbacks_ = [("stops", Stops())]
    stopped.fit(rows)
    assert read(tmp_path / "ledger.jsonl").reserved == 5
    assert stopped.run_.privacy.epsilon == max(stopped.run_.plan.epsilons)


def test_an_error_closes_the_run_and_another_fit_can_begin(rows: TensorDataset, tmp_path: Path) -> None:
    failing = net(tmp_path / "one")
    failing.callbacks_ = [("fails", Fails())]
    with pytest.raises(ZeroDivisionError):
        failing.fit(rows)
    assert read(tmp_path / "one" / "ledger.jsonl").reserved == 1
    failing.callbacks_, failing.out = [], tmp_path / "two"
    assert eh.verify(failing.fit(rows).run_.path)["ok"]


def test_what_looks_at_training_records_or_clips_means_is_refused(rows: TensorDataset, tmp_path: Path) -> None:
    scores = type("EpochScoring", (), {"on_train": True})()
    clips = type("GradientNormClipping", (), {})()
    for callback, message in ((scores, "no epsilon covers"), (clips, "bounds no record")):
        refused = net(tmp_path / "run")
        refused.callbacks_ = [("mine", callback)]
        with pytest.raises(UsageError, match=message):
            refused.fit(rows)
    with pytest.raises(UsageError, match="record_loss="):
        net(tmp_path / "run", criterion=object()).fit(rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["train_step", "train_step_single", "get_loss", "infer"])
def test_an_override_that_private_steps_would_not_call_is_refused(
    name: str, rows: TensorDataset, tmp_path: Path
) -> None:
    own = type("Own", (Net,), {name: lambda self, *_, **__: None})
    module = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=rf"Own\.{name} is not called .*record_loss="):
        own(module, nn.CrossEntropyLoss(), epsilon=3.0, delta=1e-3, out=tmp_path / "run").fit(rows)
    assert not (tmp_path / "run").exists()


def test_an_own_loss_of_the_net_may_stay_for_held_out_records(rows: TensorDataset, tmp_path: Path) -> None:
    own = type("Own", (Net,), {"get_loss": lambda self, *_, **__: None})
    each = nn.CrossEntropyLoss(reduction="none")
    own(nn.Linear(3, 2), nn.CrossEntropyLoss(), epsilon=3.0, delta=1e-3, record_loss=each, out=tmp_path).fit(rows)
    assert eh.verify(tmp_path)["ok"]


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "collate_fn"])
def test_draws_of_its_own_are_refused(name: str, rows: TensorDataset, tmp_path: Path) -> None:
    refused = net(tmp_path / "run")
    setattr(refused, f"iterator_train__{name}", object())
    with pytest.raises(UsageError, match=f"iterator_train__{name} is not followed"):
        refused.fit(rows)
    refused = net(tmp_path / "run")
    refused.iterator_train = object
    with pytest.raises(UsageError, match="iterator_train draws rows itself"):
        refused.fit(rows)


def test_folds_of_the_same_arrays_add_up(rows: TensorDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    inputs, targets = rows.tensors
    parts = [slice(0, 20), slice(20, 40), slice(0, 40)]
    runs = [
        net(tmp_path / str(number)).fit(TensorDataset(inputs[part], targets[part])).run_
        for number, part in enumerate(parts)
    ]
    counted = [(run.folder.composition() or {})["runs"] for run in runs]
    assert counted == [1, 1, 3], "a search trains on folds that share no record, then on all of them"


def test_a_validation_split_of_training_records_is_refused(rows: TensorDataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="validation data hold training records"):
        net(tmp_path / "run").fit(rows, rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])),
        (nn.MSELoss(), torch.randn(5, 2), torch.randn(5, 2)),
        (nn.BCEWithLogitsLoss(), torch.randn(5, 1), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])),
        (nn.NLLLoss(), torch.rand(5, 3).softmax(1), torch.tensor([0, 1, 2, 0, 1])),
    ],
)
def test_the_mean_over_records_is_what_skorch_would_have_minimised(
    criterion: Any, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    each = RecordLoss(criterion)(outputs, targets)
    seen = outputs.squeeze(-1) if isinstance(criterion, nn.BCEWithLogitsLoss) else outputs
    seen = torch.log(seen + torch.finfo(seen.dtype).eps) if isinstance(criterion, nn.NLLLoss) else seen
    assert each.shape == (5,)
    assert torch.allclose(each.mean(), criterion(seen, targets))
    assert criterion.reduction == "mean", "the net's criterion stays its own"
