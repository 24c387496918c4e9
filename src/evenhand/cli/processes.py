"""Several processes of one command, started by torchrun: they join, train one run, and speak with one voice."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from evenhand import terminal
from evenhand.errors import UsageError

TRAINING = ("train", "resume")
"""Commands that several processes run together."""


def several() -> bool:
    """Return whether torchrun started this process with others.

    Examples:
      >>> several()
      False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def leads() -> bool:
    """Return whether this process prints the results: process 0, or the only one."""
    return not several() or os.environ.get("RANK") == "0"


def speak_once() -> None:
    """Let a line that several processes say be printed once, by the first that says it."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(  # type: ignore[attr-defined] # torch exports it without saying so
        host, port, is_master=False, timeout=timedelta(seconds=30)
    )
    said: Counter[str] = Counter()

    def first(text: str) -> bool:
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        said[key] += 1
        with suppress(Exception):  # of torchrun that is gone: then it is printed
            return store.add(f"evenhand/{key}/{said[key]}", 1) == 1
        return True

    terminal.ask_before_saying(first)


def refuse_other_commands(command: str) -> None:
    """Raise in several processes unless they are to train."""
    if command not in TRAINING:
        raise UsageError(
            f"torchrun starts {os.environ['WORLD_SIZE']} processes, and `evenhand {command}` is done by one: leave out "
            "torchrun. It is for: torchrun --nproc-per-node 2 -m evenhand train ... (or resume). Nothing was spent."
        )


@contextmanager
def joined(device: Callable[[], str]) -> Iterator[None]:
    """Join the process group that torchrun describes, for the time inside; alone do nothing.

    On GPUs each process takes its own, and they talk over nccl; else over gloo. ``device`` is asked only then.
    All threads of the group have ended on return.
    """
    if not several():
        yield
        return
    import torch
    import torch._dynamo  # optimizers import it: where that is after the group began, it keeps the group for good
    from torch import distributed

    cuda = device().startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield
    finally:
        with suppress(Exception):
            distributed.destroy_process_group()
