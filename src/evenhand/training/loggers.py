"""Loggers, which are given what is released only: held-out accuracy, epsilon, the plan, files that may be shared."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenhand import durable
from evenhand._versions import software
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.runs.folder import Folder
from evenhand.terminal import say

_SECRET = re.compile(r"//[^/@\s]+@|(?i:key|token|password|secret)\w*[=:]\s*\S+")
_OTHER = re.compile(r"[^A-Za-z0-9_ -]")


@runtime_checkable
class Logger(Protocol):
    """Anything with ``log``. It is called at each evaluation on held-out data, and never with a training value.

    Three further methods are called if the logger has them: ``begin(parameters, tags)`` before the first value, with
    numbers and names of the plan; ``finish(files)`` after the release, with the paths of files of the run that may be
    shared; ``stop()`` if training ends by an error or a signal instead.

    Examples:
      >>> class Printer:
      ...     def log(self, step, values):
      ...         print(step, values["accuracy"])
      >>> isinstance(Printer(), Logger)
      True
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record these values after ``step`` steps."""


def collect_released(evaluation: Mapping[str, Any], epsilon: float | None, charged: float | None) -> dict[str, float]:
    """Collect the values of one evaluation: accuracy, accuracy per group, and epsilon if one is established.

    Names are ``accuracy``, ``accuracy/<group>``, ``epsilon`` (of the whole plan: the promise, whichever step is chosen
    by looking at these values) and ``epsilon_charged`` (so far: no promise). All else in ``evaluation`` is left out.

    Examples:
      >>> collect_released({"accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}, "loss": 3.0}, 3.0, 1.5)
      {'accuracy': 0.75, 'accuracy/a': 1.0, 'accuracy/b': 0.5, 'epsilon': 3.0, 'epsilon_charged': 1.5}
    """
    values = {"accuracy": evaluation["accuracy"]}
    values |= {f"accuracy/{plain(name)}": value for name, value in evaluation["groups"].items()}
    values |= {"epsilon": epsilon, "epsilon_charged": charged}
    return {name: float(value) for name, value in values.items() if value is not None}


def plain(name: str, limit: int = 80) -> str:
    """Return a name that every logger accepts; a changed name ends in a hash, so that no two become equal.

    Examples:
      >>> plain("class 8"), plain("../a"), plain("<a>") != plain("[a]")
      ('class 8', '___a-61b4c98b', True)
    """
    changed = _OTHER.sub("_", name)[:limit]
    if changed == name and name.strip():
        return name
    return f"{changed}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def parameters(plan: Plan) -> dict[str, str | float]:
    """Return the numbers and names of a plan that loggers are given; all of them are public.

    Examples:
      >>> from evenhand.accounting.budgets import FixedNoise
      >>> from evenhand.mechanism.make_plan import plan
      >>> from evenhand.types import Facts
      >>> made_up = plan("psac", FixedNoise(1.0, 1e-5), data=Facts(100, (("all", 100),)), epochs=1, batch_size=10)
      >>> {name: value for name, value in parameters(made_up).items() if name in ("method", "steps", "rule.r")}
      {'method': 'psac', 'steps': 10, 'rule.r': 0.1}
    """
    epsilons = [epsilon for epsilon in plan.epsilons if epsilon is not None]
    values: dict[str, Any] = {
        "method": plan.method,
        "guarantee": plan.guarantee,
        "epsilon": max(epsilons) if epsilons else None,
        "delta": plan.delta if epsilons else None,
        "steps": plan.steps,
        "expected_batch": plan.expected_batch,
        "records": plan.facts.records,
        "noise_multiplier": plan.levels[0].noise if epsilons else None,
        "clip_bound": plan.levels[0].bound if epsilons else None,
    }
    settings = {f"rule.{name}": value for name, value in plan.rule["settings"].items()}
    numbers = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
    return {name: value for name, value in {**values, **numbers}.items() if value is not None}


def tags(plan: Plan) -> dict[str, str]:
    """Return what identifies a run: the plan's hash, the unit of its promise, and the versions behind it."""
    return {
        "evenhand.plan": plan.digest,
        "evenhand.unit": plan.unit,
        "evenhand.adjacency": plan.adjacency,
        "evenhand.version": software()["evenhand"],
        **({"evenhand.packages": ", ".join(plan.packages)} if plan.packages else {}),
    }


def shareable(folder: Folder) -> list[Path]:
    """Return the files of a finished run that its statement says may be shared; nothing in ``private`` is."""
    names = folder.statement()["sharing"]["may_be_shared"]
    return [path for name in names if (path := folder.path / name).is_file()]


class Broadcast:
    """Several loggers as one. A logger that fails is switched off: it must not stop a run that has spent already."""

    def __init__(self, loggers: Sequence[Logger], *, evaluates: bool) -> None:
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise UsageError(f"A logger needs a method log(step, values); {type(logger).__name__} has none.")
        if loggers and not evaluates:
            raise UsageError("Loggers are given released values on held-out data only: pass test= as well.")
        self._loggers = list(loggers)

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give the values to every logger that still works."""
        self._each("log", lambda: (step, dict(values)))

    @contextmanager
    def training(self, plan: Plan) -> Iterator[None]:
        """Tell the loggers what is planned, and inside the block that training ended early if an error leaves it."""
        self._each("begin", lambda: (parameters(plan), tags(plan)))
        try:
            yield
        except BaseException:
            self._each("stop", tuple)
            raise

    def finish(self, folder: Folder) -> None:
        """Give the loggers the files of a finished run that may be shared."""
        if self._loggers:
            files = shareable(folder)
            self._each("finish", lambda: (list(files),))

    def _each(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """Call a method of every logger that has it, with arguments of its own."""
        for logger in tuple(self._loggers):
            if not hasattr(logger, method):
                continue
            try:
                getattr(logger, method)(*arguments())
            except (Exception, SystemExit) as error:
                self._loggers.remove(logger)
                reason = f"{type(error).__name__}: {_reason(error)}".removesuffix(": ")
                say(f"{type(logger).__name__} failed ({reason}) and is switched off; training goes on.")


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text, without addresses' passwords and at most 200 characters long.

    Examples:
      >>> _reason(OSError("no way to https://me:pass@host/x"))
      'no way to https://***host/x'
    """
    return _SECRET.sub(lambda match: "//***" if match[0].startswith("//") else "***", str(error).split("\n")[0])[:200]


def _imported(name: str, extra: str, title: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{title} is not installed: pip install 'evenhand[{extra}]'. Nothing was spent.") from None


class MlflowLogger:
    """A logger to MLflow: the plan as parameters and tags, released values as metrics, shareable files as artifacts.

    The active MLflow run is used, if there is one, and left open; else a new run is made. Nothing else is sent: no user
    name, no source file, no system metrics. ``pip install evenhand[mlflow]``.

    Args:
      uri: where runs are stored, for example "file:runs/mlflow" or "sqlite:///mlflow.db"; default MLflow's own setting
        (``MLFLOW_TRACKING_URI``).
      experiment: name of the experiment that a new run belongs to.
    """

    def __init__(self, uri: str | None = None, experiment: str = "evenhand") -> None:
        self._mlflow = _imported("mlflow", "mlflow", "MLflow")
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run, self._ours = "", False

    def begin(self, parameters: Mapping[str, str | float], tags: Mapping[str, str]) -> None:
        """Open a run, or take the active one, and log parameters and tags."""
        self._open()
        for name, value in parameters.items():
            self._client.log_param(self._run, name, value)
        for name, value in tags.items():
            self._client.set_tag(self._run, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one metric per value; "accuracy/a" becomes "accuracy.a", since a folder of runs has a file per metric."""
        self._open()
        for name, value in values.items():
            self._client.log_metric(self._run, name.replace("/", "."), value, step=step)

    def finish(self, files: Sequence[Path]) -> None:
        """Log the files as artifacts, and end the run if it was made here."""
        for file in files:
            self._client.log_artifact(self._run, str(file))
        self._end("FINISHED")

    def stop(self) -> None:
        """End a run that was made here as killed."""
        self._end("KILLED")

    def _open(self) -> None:
        if self._client is not None:
            return
        uri = self._uri or self._mlflow.get_tracking_uri()
        if uri.startswith("file:"):  # newer MLflow asks whether a folder, rather than a data base, is really meant
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        active = None if self._uri else self._mlflow.active_run()
        if active is not None:
            self._run = active.info.run_id
            return
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        self._run, self._ours = self._client.create_run(number).info.run_id, True

    def _end(self, status: str) -> None:
        if self._ours:
            self._client.set_terminated(self._run, status)


class TensorBoardLogger:
    """A logger to TensorBoard: released values as scalars, plan and statement as texts.

    Look at them with ``tensorboard --logdir FOLDER``. The names of its files contain the name of this computer.
    ``pip install evenhand[tensorboard]``.

    Args:
      folder: where to write; made with the first values.
    """

    def __init__(self, folder: str | Path) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard", "TensorBoard")
        self._make: Any = module.SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, parameters: Mapping[str, str | float], tags: Mapping[str, str]) -> None:
        """Write the plan's numbers as a table."""
        rows = [f"| {name} | {value} |" for name, value in {**parameters, **tags}.items()]
        self._open().add_text("plan", "\n".join(["| plan | |", "|---|---|", *rows]), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point per value; all are on disk when this returns."""
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def finish(self, files: Sequence[Path]) -> None:
        """Write the statement's words, and close the file."""
        for file in files:
            if file.name == "statement.md":
                self._open().add_text("statement", file.read_text(encoding="utf-8"), 0)
        self.stop()

    def stop(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._make(log_dir=str(self._folder))
        return self._writer


class WandbLogger:
    """A logger to Weights & Biases: the plan as config, released values as history, shareable files as an artifact.

    All that W&B records by itself is switched off: console output (it holds raw losses), system metrics, code, git
    state, names of user and computer. ``pip install evenhand[wandb]``.

    Args:
      folder: where W&B writes; never inside a ``private`` folder.
      project: name of the project.
      mode: "offline" writes files only, which ``wandb sync`` sends later; "online" sends the values at once.
    """

    def __init__(self, folder: str | Path, project: str = "evenhand", mode: str = "offline") -> None:
        self._wandb = _imported("wandb", "wandb", "Weights & Biases")
        self._folder, self._project, self._mode = Path(folder), project, mode
        self._run: Any = None
        self._name = "run"

    def begin(self, parameters: Mapping[str, str | float], tags: Mapping[str, str]) -> None:
        """Open a run with the plan as its config."""
        self._name = f"evenhand-{tags['evenhand.plan'][:12]}"
        self._open().config.update({**parameters, **tags})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values as one point."""
        self._open().log(dict(values), step=step)

    def finish(self, files: Sequence[Path]) -> None:
        """Log the files as one artifact, and end the run."""
        artifact = self._wandb.Artifact(self._name, type="evenhand-run")
        for file in files:
            artifact.add_file(str(file))
        self._open().log_artifact(artifact)
        self._run.finish()

    def stop(self) -> None:
        """End the run as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)

    def _open(self) -> Any:
        if self._run is None:
            durable.make_folder(self._folder, parents=True)
            quiet = self._wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                host="",
                username="",
            )
            self._run = self._wandb.init(
                project=self._project, dir=str(self._folder), mode=self._mode, settings=quiet, reinit="create_new"
            )
        return self._run
