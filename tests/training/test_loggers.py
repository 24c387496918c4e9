"""Loggers are given released values and nothing else, and cannot harm a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import evenhand as eh
from evenhand.cli import train
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.training.loggers import (
    Broadcast,
    Logger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    collect_released,
    parameters,
    plain,
)
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
        raise ConnectionError("no way to https://me:pass@host?token=abc\nand a second line")


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
    assert "Failing failed (ConnectionError: no way to https://***host?***) and is switched off" in said
    assert said.count("Failing") == 1
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

        def add_text(self, name: str, text: str, step: int) -> None:
            calls.append((name, text))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

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
    logger.begin({"steps": 3}, {"evenhand.unit": "one record"})
    (tmp_path / "statement.md").write_text("the words")
    logger.finish([tmp_path / "statement.md", tmp_path / "model.safetensors"])
    assert "| steps | 3 |\n| evenhand.unit | one record |" in str(calls[5][1])
    assert calls[6:] == [("statement", "the words"), ("close",)]


def test_mlflow_is_missing_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[mlflow\]'"):
        MlflowLogger()


class Mlflow(types.ModuleType):
    """Remembers what its client is asked for, as MLflow does."""

    def __init__(self, active: str | None = None) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[object, ...]] = []
        self._active = active

    def MlflowClient(self, tracking_uri: str) -> Mlflow:  # noqa: N802 - its name
        self.calls.append(("client", tracking_uri))
        return self

    def get_tracking_uri(self) -> str:
        return "sqlite:///default.db"

    def active_run(self) -> object:
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id=self._active))
        return run if self._active else None

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"of {name}"

    def create_run(self, number: str) -> object:
        self.calls.append(("run", number))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="new"))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith(("log_", "set_")):
            raise AttributeError(name)
        return lambda run, *values, **more: self.calls.append((name, run, *values, *more.values()))

    def asked(self, name: str) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def test_mlflow_gets_the_plan_released_values_and_shareable_files(
    tiny: Data, held_out: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    logger = MlflowLogger(uri="file:store")
    assert isinstance(logger, Logger)
    run = fit(tiny, tmp_path, test=held_out, loggers=[logger])
    assert fake.calls[:2] == [("client", "file:store"), ("run", "of evenhand")]
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
    told = {name: value for _, name, value in fake.asked("log_param")}
    assert told == parameters(run.plan)
    assert (told["method"], told["epsilon"], told["steps"]) == ("dpsgd", run.plan.epsilons[0], run.plan.steps)
    assert ("new", "evenhand.plan", run.plan.digest) in fake.asked("set_tag")
    assert [row[3] for row in fake.asked("log_metric") if row[1] == "accuracy"] == [
        line["step"] for line in run.evaluations
    ]
    files = [Path(str(path)) for _, path in fake.asked("log_artifact")]
    assert {file.name for file in files} >= {"model.safetensors", "statement.json", "report.html", "ledger.jsonl"}
    assert not {"private", "config.toml", "env.json"} & {part for file in files for part in file.parts}
    assert fake.calls[-1] == ("set_terminated", "new", "FINISHED")


def test_an_active_mlflow_run_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Mlflow(active="mine")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logger = MlflowLogger()
    logger.log(3, {"accuracy": 0.5})
    logger.finish([])
    assert fake.calls == [("client", "sqlite:///default.db"), ("log_metric", "mine", "accuracy", 0.5, 3)]


def test_files_of_a_run_that_protects_nobody_are_not_logged(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    class Librarian(Keeper):
        files: Sequence[Path] = ()

        def finish(self, files: Sequence[Path]) -> None:
            self.files = files

    told = {name: Librarian() for name in ("private", "insecure", "sgd")}
    fit(tiny, tmp_path / "a", test=held_out, loggers=[told["private"]])
    fit(tiny, tmp_path / "b", test=held_out, loggers=[told["insecure"]], insecure_seed=1)
    fit(tiny, tmp_path / "c", epsilon=None, delta=None, method="sgd", test=held_out, loggers=[told["sgd"]])
    names = {name: {file.name for file in logger.files} for name, logger in told.items()}
    assert "model.safetensors" in names["private"]
    for name in ("insecure", "sgd"):
        assert names[name] == {"plan.json", "ledger.jsonl", "statement.json", "statement.md", "composition.json"}


def test_training_that_ends_by_an_error_tells_the_loggers(tiny: Data, held_out: Data, tmp_path: Path) -> None:
    class Witness(Keeper):
        stopped = 0

        def stop(self) -> None:
            self.stopped += 1

    class StopError(Exception):
        pass

    witness = Witness()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(witness.told) == 1:
            raise StopError
        return eh.losses.CrossEntropy()(outputs, targets)

    with pytest.raises(StopError):
        fit(tiny, tmp_path, test=held_out, loggers=[witness], loss=loss)
    assert witness.stopped == 1


@pytest.mark.parametrize("method", ["begin", "finish"])
def test_a_logger_that_fails_before_or_after_training_costs_nothing(
    method: str, tiny: Data, held_out: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Keeper):
        def __getattr__(self, name: str) -> Callable[..., None]:
            if name != method:
                raise AttributeError(name)
            return self.fail

        def fail(self, *_: object) -> None:
            raise SystemExit("no server")

    run = fit(tiny, tmp_path, test=held_out, loggers=[Broken()])
    assert "Broken failed (SystemExit: no server) and is switched off; training goes on." in capsys.readouterr().err
    assert eh.verify(run.path)["ok"]


def test_wandb_is_missing_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[wandb\]'"):
        WandbLogger(tmp_path)


def test_wandb_gets_what_mlflow_gets_and_records_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[object, ...]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *values, **more: calls.append((name, *values, *more.values()))

    fake = types.ModuleType("wandb")
    fake.Settings = lambda **settings: settings  # type: ignore[attr-defined]
    run = types.SimpleNamespace(config=types.SimpleNamespace(update=noted("config")))
    run.log, run.log_artifact, run.finish = noted("log"), noted("artifact"), noted("finish")
    opened: dict[str, Any] = {}
    fake.init = lambda **options: opened.update(options) or run  # type: ignore[attr-defined]
    fake.Artifact = lambda name, type: types.SimpleNamespace(add_file=noted(f"file of {name}"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(tmp_path)
    logger.begin({"steps": 3}, {"evenhand.plan": "0123456789abcdef"})
    logger.log(1, {"accuracy": 0.5})
    logger.finish([tmp_path / "statement.md"])
    assert [call[0] for call in calls] == ["config", "log", "file of evenhand-0123456789ab", "artifact", "finish"]
    assert calls[1] == ("log", {"accuracy": 0.5}, 1)
    assert opened["mode"] == "offline"
    assert opened["settings"]["console"] == "off", "console output holds raw losses"
    assert opened["settings"]["x_disable_stats"]
    assert opened["settings"]["x_disable_meta"]


def test_the_command_line_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert isinstance(train.logger("mlflow", None), MlflowLogger)
    assert isinstance(train.logger("wandb", tmp_path), WandbLogger)
    with pytest.raises(UsageError, match="Did you mean 'tensorboard'"):
        train.logger("tensorbord", tmp_path)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UsageError, match="--out"):
            train.logger(name, None)


def test_importing_evenhand_imports_no_logger() -> None:
    code = "import evenhand.training.fit, sys; print({'mlflow', 'tensorboard', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
