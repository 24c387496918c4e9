"""Loggers of the real libraries, read back: released values, the plan, files that may be shared, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import evenhand as eh
from evenhand.training.loggers import Logger, MlflowLogger, TensorBoardLogger, WandbLogger
from evenhand.training.run import Run

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trained(out: Path, logger: Logger) -> Run:
    train, test = eh.data.digits()
    return eh.fit(nn.Linear(64, 10), train, epsilon=3.0, epochs=2, test=test, out=out, loggers=[logger])


def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(tmp_path / "run", TensorBoardLogger(tmp_path / "board"))
    assert "switched off" not in capsys.readouterr().err
    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert {"accuracy", "epsilon", "epsilon_charged", "accuracy/class 8"} <= set(read.Tags()["scalars"])
    assert [event.step for event in read.Scalars("accuracy")] == [line["step"] for line in run.evaluations]
    (words,) = read.Tensors("statement/text_summary")
    assert "add/remove" in words.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("scheme", ["file:", "sqlite:///"])
def test_mlflow(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = f"{scheme}{tmp_path / ('store' if scheme == 'file:' else 'store.db')}"
    run = trained(tmp_path / "run", MlflowLogger(uri))
    assert "switched off" not in capsys.readouterr().err
    client = mlflow.MlflowClient(tracking_uri=uri)
    (stored,) = client.search_runs([client.get_experiment_by_name("evenhand").experiment_id])
    assert stored.info.status == "FINISHED"
    assert stored.data.params["method"] == "dpsgd"
    assert stored.data.tags["evenhand.plan"] == run.plan.digest
    assert {key for key in stored.data.tags if not key.startswith("evenhand.")} == {"mlflow.runName"}
    assert stored.data.metrics["accuracy.class 8"] == run.evaluations[-1]["groups"]["class 8"]
    history = client.get_metric_history(stored.info.run_id, "accuracy")
    assert [point.step for point in history] == [line["step"] for line in run.evaluations]
    names = {artifact.path for artifact in client.list_artifacts(stored.info.run_id)}
    assert {"statement.json", "model.safetensors", "report.html"} <= names
    assert not {"private", "config.toml", "env.json"} & names


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-state"))
    run = trained(tmp_path / "run", WandbLogger(tmp_path / "logged"))
    assert "switched off" not in capsys.readouterr().err
    wandb.teardown()  # its other process has written the file when this returns
    (file,) = (tmp_path / "logged").rglob("*.wandb")
    written = file.read_bytes().decode("latin-1")
    for line in run.evaluations:
        assert str(line["accuracy"]) in written
    assert run.plan.digest in written
    assert "statement.json" in written
    raw = [json.loads(line)["loss"] for line in (run.path / "private" / "training.jsonl").read_text().splitlines()]
    assert raw
    for secret in (*map(str, raw), "private/", "config.toml", "env.json", str(ROOT)):
        assert secret not in written
