"""Train one run on a Ray cluster: several processes, on one machine or many, by Ray Train's TorchTrainer."""

from __future__ import annotations

import base64
import importlib
import json
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evenhand import _validate, errors
from evenhand.errors import EvenhandError, ProcessError, UsageError
from evenhand.runs.folder import Folder
from evenhand.training.run import Run
from evenhand.training.steps.surroundings import Surroundings

_TOLD = re.compile(r"evenhand<([A-Za-z0-9+/=]+)>")


def train(
    make: Callable[[], Mapping[str, Any]],
    *,
    processes: int,
    out: str | Path,
    gpus: bool = False,
    cpus: float = 1,
    **options: Any,
) -> Run:
    """Train by ``evenhand.fit`` in several processes of a Ray cluster, and return the finished run.

    The cluster is the one that ``ray.init`` or ``RAY_ADDRESS`` named, or one on this machine. It is one run, as with
    torchrun: see the how-to "More than one process". All machines share ``out`` and ``EVENHAND_STATE``.

    Args:
      make: called in every process; returns what ``fit`` needs to be given there, by name: ``model`` and ``train``, and
        whatever else cannot be sent, such as ``test`` or ``loss``. It must build the same in every process.
      processes: how many train together.
      out: the run folder, new, where all machines see it.
      gpus: whether each process gets a GPU; they then talk over nccl, else over gloo.
      cpus: processors of each process.
      options: further arguments of ``fit``: epsilon, epochs, batch_size and so on.

    Raises:
      EvenhandError: what process 0 raised, or that one of the processes is gone: what is charged stays charged.
    """
    _validate.whole(processes, "processes")
    library = _library()
    folder = Path(out).absolute()
    with Surroundings.shared() as shared:
        task = {"make": make, "options": {**options, "out": str(folder)}, "surroundings": shared, "threads": cpus}
        trainer = library.TorchTrainer(
            _work,
            train_loop_config=task,
            scaling_config=library.ScalingConfig(
                num_workers=processes, use_gpu=gpus, resources_per_worker={"CPU": cpus, **({"GPU": 1} if gpus else {})}
            ),
            torch_config=library.TorchConfig(backend="nccl" if gpus else "gloo"),
        )
        try:
            trainer.fit()
        except Exception as error:  # Ray has an error of its own for every way in which a worker can end
            raise _outcome("".join(traceback.format_exception(error)), type(error).__name__, folder) from None
    return Run(Folder(folder))


def _work(task: Mapping[str, Any]) -> None:
    """Train in one process of the cluster; an error of ours leaves it in words that the process that asked can read."""
    import torch

    from evenhand.training.fit import fit

    try:
        task["surroundings"].take()
        torch.set_num_threads(max(1, int(task["threads"])))
        fit(**{"progress": False, **task["options"], **task["make"]()})
    except EvenhandError as error:
        words = base64.b64encode(json.dumps([type(error).__name__, str(error)]).encode()).decode()
        raise RuntimeError(f"evenhand<{words}>") from None


def _outcome(trace: str, kind: str, folder: Path) -> EvenhandError:
    """Return the error that a process of the cluster ended with, from what Ray shows of it.

    Examples:
      >>> words = base64.b64encode(json.dumps(["UsageError", "epsilon=-1 cannot be used."]).encode()).decode()
      >>> _outcome(f"RuntimeError: evenhand<{words}>", "TrainingFailedError", Path("run"))
      UsageError('epsilon=-1 cannot be used.')
    """
    told = _TOLD.search(trace)
    if told is not None:
        name, message = json.loads(base64.b64decode(told[1]))
        error = getattr(errors, name, ProcessError)(message)
        assert isinstance(error, EvenhandError)
        return error
    begun = (folder / "ledger.jsonl").exists()
    advice = f"What is charged stays charged: evenhand resume {folder}" if begun else "Nothing was spent."
    return ProcessError(f"A process on the cluster ended ({kind}). {advice}")


class _Library:
    """The names of Ray Train that are used here."""

    def __init__(self, train: Any, torch: Any) -> None:
        self.ScalingConfig = train.ScalingConfig
        self.TorchTrainer, self.TorchConfig = torch.TorchTrainer, torch.TorchConfig


def _library() -> _Library:
    try:
        return _Library(importlib.import_module("ray.train"), importlib.import_module("ray.train.torch"))
    except ModuleNotFoundError as error:
        raise UsageError(
            f'Training on a cluster needs Ray Train ({error.name} is not installed): pip install "evenhand[ray]", or '
            "use torchrun on one machine. Nothing was spent."
        ) from None
