"""Loggers are given released values and nothing else, and cannot harm a run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn

import evenhand as eh
from evenhand.cli import train
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.training.loggers import Broadcast, Logger, MlflowLogger, TensorBoardLogger, collect_released, plain
from evenhand.training.run import Run


class Keeper:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, dict(values)))


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("a secret address")


@pytest.fixture
def held_out() -> Data:
    return eh.data.wrap([[0.0, 1.0, 2.0]] * 20, [0, 1] * 10, groups=["a", "b"] * 10)


def fit(train: Data, out: Path, **options: object) -> Run:
    made = {"epsilon": 3.0, "delta": 1e-3} | options
    return eh.fit(nn.Linear(3, 2), train, epochs=3, batch_size=8, out=out, progress=False, **made)


def test_what_is_logged_is_what_is_released(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    keeper = Keeper()
    run = fit(tiny, tmp_path, test=held_out, loggers=[keeper])
    assert [step for step, _ in keeper.told] == [line["step"] for line in run.evaluations]
    assert len(keeper.told) >= 3
    for (_, values), line in zip(keeper.told, run.evaluations, strict=True):
        assert set(values) == {"accuracy", "accuracy/a", "accuracy/b", "epsilon", "epsilon_charged"}
        assert values["accuracy"] == line["accuracy"]
        assert values["accuracy/b"] == line["groups"]["b"]
    assert len({values["epsilon"] for _, values in keeper.told}) == 1, "the promise is that of the whole plan"
    spent = [values["epsilon_charged"] for _, values in keeper.told]
    assert spent == sorted(spent)
    assert spent[-1] == run.privacy.epsilon
    raw = (tmp_path / "private" / "training.jsonl").read_text()
    losses = {json.loads(line)["loss"] for line in raw.splitlines()}
    assert not losses & {value for _, values in keeper.told for value in values.values()}


def test_a_method_without_a_guarantee_logs_no_epsilon(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    keeper = Keeper()
    fit(tiny, tmp_path, epsilon=None, delta=None, method="sgd", test=held_out, loggers=[keeper])
    assert {name for _, values in keeper.told for name in values} == {"accuracy", "accuracy/a", "accuracy/b"}


def test_a_logger_that_fails_is_switched_off_and_the_run_goes_on(
    tiny: Data, held_out: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, keeper = Failing(), Keeper()
    run = fit(tiny, tmp_path, test=held_out, loggers=[failing, keeper])
    assert failing.calls == 1
    assert len(keeper.told) == len(run.evaluations)
    said = capsys.readouterr().err
    assert "Failing failed (ConnectionError) and is switched off" in said
    assert "secret" not in said
    assert eh.verify(run.path)["ok"]


def test_a_resumed_run_goes_on_logging(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    with pytest.raises(StopError):
        fit(tiny, tmp_path, test=held_out, on_start=stop)
    keeper = Keeper()
    eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny, test=held_out, loggers=[keeper], progress=False)
    assert keeper.told


def test_wrong_loggers_are_refused_before_a_folder_exists(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="held-out data only: pass test="):
        fit(tiny, tmp_path / "run", loggers=[Keeper()])
    with pytest.raises(UsageError, match="needs a method log"):
        fit(tiny, tmp_path / "run", test=held_out, loggers=[print])
    assert not (tmp_path / "run").exists()


def test_undefined_values_are_left_out() -> None:
    assert collect_released({"accuracy": None, "groups": {"a": None}}, None, None) == {}


def test_a_logger_cannot_change_what_the_next_one_sees() -> None:
    class Greedy(Keeper):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            values.clear()  # type: ignore[attr-defined]

    keeper = Keeper()
    Broadcast([Greedy(), keeper], evaluates=True).log(1, {"accuracy": 1.0})
    assert keeper.told == [(1, {"accuracy": 1.0})]


@pytest.mark.parametrize("name", ["", " ", "../../x", "a/b", "<script>", "\u202e", "\ud800", "x" * 500, "caf\u00e9"])
def test_group_names_become_names_that_loggers_take(name: str) -> None:
    made = plain(name)
    assert made == plain(name)
    assert len(made) < 100
    assert all(character.isascii() and (character.isalnum() or character in "_ -") for character in made)
    assert made != plain(name + "?")


def test_tensorboard_is_missing_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[tensorboard\]'"):
        TensorBoardLogger(tmp_path / "board")


def test_tensorboard_gets_scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            calls.append(("open", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    logger = TensorBoardLogger(tmp_path / "board")
    assert isinstance(logger, Logger)
    assert calls == []
    logger.log(3, {"accuracy": 0.5})
    logger.log(4, {"epsilon": 1.0})
    assert calls[0] == ("open", str(tmp_path / "board"))
    assert calls[1:] == [("accuracy", 0.5, 3), ("flush",), ("epsilon", 1.0, 4), ("flush",)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_real_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoardLogger(tmp_path).log(7, collect_released({"accuracy": 0.5, "groups": {"<b>": 0.25}}, 1.5))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"accuracy", f"accuracy/{plain('<b>')}", "epsilon"}
    assert [(event.step, event.value) for event in read.Scalars("epsilon")] == [(7, 1.5)]


def test_mlflow_is_missing_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[mlflow\]'"):
        MlflowLogger()


def test_mlflow_gets_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, int]] = []
    fake = types.ModuleType("mlflow")
    fake.log_metrics = lambda values, step: calls.append((values, step))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logger = MlflowLogger()
    assert isinstance(logger, Logger)
    logger.log(3, {"accuracy": 0.5})
    assert calls == [({"accuracy": 0.5}, 3)]


def test_the_command_line_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    assert isinstance(train.logger("mlflow", None), MlflowLogger)
    with pytest.raises(UsageError, match="Did you mean 'tensorboard'"):
        train.logger("tensorbord", tmp_path)
    with pytest.raises(UsageError, match="--out"):
        train.logger("tensorboard", None)


def test_importing_evenhand_imports_no_logger() -> None:
    code = "import evenhand.training.fit, sys; print({'mlflow', 'tensorboard', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
