"""Processes that train one run together, and what they say to each other.

Process 0 leads: it alone charges, weighs, adds noise, writes and decides. Before numbers are exchanged all processes
meet: each says in which run and step it is and whether something failed, so that all stop together, for one reason.

All of it runs over ``torch.distributed`` (all_gather, gather and broadcast), in the process group that is there.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from evenhand import errors
from evenhand.errors import CoupledError, EvenhandError, ProcessError, UsageError

T = TypeVar("T")
_LAST_WORDS = timedelta(seconds=5)
"""How long a process that stops waits for the others to hear why."""
_RELEASE = timedelta(seconds=1)
"""How long a thread of gloo may hold the tensors of an exchange that is over."""
_ALONE = torch.empty(0)._use_count()  # type: ignore[attr-defined] # untyped in torch
"""How often torch counts a tensor that nobody but the caller holds."""
_REASON = 4096
"""Bytes of the reason why a process stops."""
_BITS = 62


class Word(NamedTuple):
    """A word of one process when all meet: where it is, whether it failed, how many numbers it has, two marks."""

    run: int
    step: int
    meeting: int
    failed: int
    size: int
    mark: int
    draw: int


@dataclass
class Group:
    """The processes of one run, seen from one of them. A group of one talks to nobody.

    ``advice`` gives the end of every message about a process that is gone: what is charged, and how to go on.

    Examples:
      >>> alone = Group()
      >>> alone.size, alone.leads, alone.first(lambda: 7), alone.largest(0, 3, 1)
      (1, True, 7, [3, 1])
    """

    rank: int = 0
    size: int = 1
    leads: bool = field(init=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    advice: Callable[[], str] = field(default=lambda: "", repr=False)
    _run: int = 0
    _meetings: int = 0
    _over: bool = False

    def __post_init__(self) -> None:
        self.leads = self.rank == 0

    @classmethod
    def of_this_process(cls) -> Group:
        """Return the group that ``torch.distributed`` was given, with a new number for the run; else a group of one.

        All its processes must ask.
        """
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return cls()
        cuda = "nccl" in str(distributed.get_backend())
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        group = cls(distributed.get_rank(), distributed.get_world_size(), device)
        group._run = group.first(lambda: int.from_bytes(os.urandom(7), "big"))
        return group

    def meet(
        self, step: int, error: Exception | None = None, *, size: int = 0, mark: int = 0, draw: int = 0
    ) -> list[Word]:
        """Return what every process says, once all are here.

        Raises:
          EvenhandError: in all processes the reason of the first one that failed, and in that one its own error; or
            that a process is gone, or is somewhere else than process 0.
        """
        words = [Word(*word) for word in self.all_of(*self._word(step, error is not None, size, mark, draw))]
        failed = next((rank for rank, word in enumerate(words) if word.failed), None)
        if failed is not None:
            blank = torch.zeros(_REASON, dtype=torch.uint8)
            told = self.broadcast(_reason(error, self.rank) if error is not None else blank, failed)
            raise self.ending(_failure(told) if error is None else error)
        for rank, word in enumerate(words):
            if word[:3] != words[0][:3]:
                place = "in another run" if word.run != words[0].run else f"at step {word.step}"
                raise self.ending(
                    ProcessError(
                        f"Process {rank} is {place} and process 0 at step {words[0].step}, or they make other calls: "
                        f"every process makes the same calls of evenhand in the same order. {self.advice()}".rstrip()
                    )
                )
        return words

    def attempt(self, step: int, work: Callable[[], T], *, mark: int = 0, draw: int = 0) -> tuple[T, list[Word]]:
        """Do something in this process, meet the others, and return what came of it and what they say."""
        with self.answering(step):
            value = work()
        return value, self.meet(step, mark=mark, draw=draw)

    @contextmanager
    def answering(self, step: int) -> Iterator[None]:
        """Meet the others with what fails inside, which is raised in all of them."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self._over:
                self.meet(step, error)
            raise

    def first(self, work: Callable[[], T], step: int = 0) -> T:
        """Do something in process 0 only, and return in every process what came of it: plain values and tensors."""
        if self.size == 1:
            return work()
        sent = torch.empty(0, dtype=torch.uint8)
        if self.leads:
            with self.answering(step):
                value = work()
                sent = encoded(value)
        size = self.meet(step, size=sent.numel())[0].size
        told = self.broadcast(sent if self.leads else torch.zeros(size, dtype=torch.uint8))
        if not self.leads:
            value = decoded(told)
        return value

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raise in every process unless these facts, by name, are the same in all; a name says what differs."""
        if self.size == 1:
            facts()
            return
        mine, _ = self.attempt(0, facts)
        numbers = self.all_of(*(_number(text) for text in mine.values()))
        for rank, theirs in enumerate(numbers):
            pairs = zip(mine, theirs, numbers[0], strict=True)
            differing = [name for name, one, other in pairs if one != other]
            if differing:
                raise self.ending(
                    UsageError(
                        f"Process {rank} has other {' and other '.join(differing)} than process 0: they would not "
                        "train one run. Start every process alike, each with the whole data: every step gives it a "
                        "part of the batch. Nothing was spent."
                    )
                )

    def largest(self, step: int, *numbers: int) -> list[int]:
        """Return the largest of each of these numbers over all processes, in all of them."""
        if self.size == 1:
            return list(numbers)
        self.meet(step)
        return [max(column) for column in zip(*self.all_of(*numbers), strict=True)]

    def all_of(self, *numbers: int) -> list[list[int]]:
        """Return the whole numbers that every process gives, as many from each, in the order of the processes."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(lambda: distributed.all_gather(heard, mine, async_op=True), mine, *heard)
        return [part.tolist() for part in heard]

    def broadcast(self, numbers: Tensor, source: int = 0) -> Tensor:
        """Return the numbers of one process in all of them; the others give room of the same size and type."""
        room = numbers.detach().to(self.device).contiguous()
        if room.numel():
            self._finish(lambda: distributed.broadcast(room, source, async_op=True), room)
        return room.cpu()

    def gather(self, numbers: Tensor) -> list[Tensor]:
        """Return in process 0 the numbers of every process, as many from each, in their order; in others nothing."""
        mine = numbers.detach().to(self.device).contiguous()
        heard = [torch.empty_like(mine) for _ in range(self.size)] if self.leads else None
        if mine.numel():
            self._finish(lambda: distributed.gather(mine, heard, 0, async_op=True), mine, *heard or ())
        return [part.cpu() for part in heard or ()]

    def fail(self, error: BaseException) -> None:
        """Tell the others, if they meet within some seconds, that this process stops, and why."""
        if self._over or self.size == 1:
            return
        reason = error if isinstance(error, EvenhandError) else ProcessError(_stopped(error, self.rank))
        mine = torch.tensor(self._word(0, True, 0, 0, 0), dtype=torch.int64, device=self.device)
        told = _reason(reason, self.rank).to(self.device)
        self._over = True
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        with suppress(Exception):
            distributed.all_gather(heard, mine, async_op=True).wait(_LAST_WORDS)
            if next(rank for rank, word in enumerate(heard) if Word(*word.tolist()).failed) == self.rank:
                distributed.broadcast(told, self.rank, async_op=True).wait(_LAST_WORDS)
        await_release(mine, told, *heard)

    def _word(self, step: int, failed: bool, *further: int) -> Word:
        self._meetings += 1
        return Word(self._run, step, self._meetings, int(failed), *further)

    def ending(self, error: Exception) -> Exception:
        """Return an error that every process raises now, and that process 0 reports for all."""
        self._over = True
        if isinstance(error, EvenhandError):
            error.reported = not self.leads
        return error

    def _finish(self, begin: Callable[[], Any], *tensors: Tensor) -> None:
        """Begin an exchange of these tensors and wait until it is done; an error of the connection says what it means.

        Guarantee: afterwards only the caller holds them, or they are never freed (``await_release``).
        """
        if self._over:
            raise ProcessError(f"The processes of this run have stopped. {self.advice()}".rstrip())
        try:
            begin().wait()
        except (RuntimeError, ValueError) as error:
            self._over = True
            raise ProcessError(
                "A process of this run does not answer: it died, was stopped, or takes longer than the process group "
                f"waits. {self.advice()}".rstrip()
            ) from error
        finally:
            await_release(*tensors)


def await_release(*tensors: Tensor) -> None:
    """Wait until only the caller holds these tensors, which were exchanged; keep them for ever if that takes too long.

    A thread of gloo holds them a little longer than the exchange lasts. If it were the last to do so, it would need the
    interpreter to free them, and abort the process if Python has begun to end.
    """
    deadline = time.monotonic() + _RELEASE.total_seconds()
    for tensor in tensors:
        while tensor.device.type == "cpu" and tensor._use_count() > _ALONE:  # type: ignore[attr-defined] # untyped in torch
            if time.monotonic() > deadline:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
                break
            time.sleep(0)


def _stopped(error: BaseException, rank: int) -> str:
    return f"Process {rank} stopped with {type(error).__name__}."


def _reason(error: Exception, rank: int) -> Tensor:
    """Return why a process stops, as bytes; of an error that is not ours only its kind, since it may name data."""
    ours = isinstance(error, EvenhandError)
    words = {
        "kind": type(error).__name__ if ours else "ProcessError",
        "message": str(error)[: _REASON // 8] if ours else _stopped(error, rank),
        "cause": getattr(error, "cause", ""),
    }
    return torch.frombuffer(bytearray(json.dumps(words).encode().ljust(_REASON)), dtype=torch.uint8)


def _failure(told: Tensor) -> EvenhandError:
    """Return the error that another process raised.

    Examples:
      >>> _failure(_reason(CoupledError("Mend it.", "state"), 1)).cause
      'state'
      >>> _failure(_reason(ValueError("a private value"), 1))
      ProcessError('Process 1 stopped with ValueError.')
    """
    words = json.loads(bytes(told.numpy()))
    kind, message = getattr(errors, str(words["kind"]), None), str(words["message"])
    if kind is CoupledError:
        return CoupledError(message, str(words["cause"]))
    if isinstance(kind, type) and issubclass(kind, EvenhandError):
        return kind(message)
    return ProcessError(message)


def _number(text: str) -> int:
    """Return a number that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)


def encoded(value: Any) -> Tensor:
    """Return plain values and tensors as bytes."""
    sink = io.BytesIO()
    torch.save(value, sink)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def decoded(payload: Tensor) -> Any:
    """Return the values in these bytes; nothing in them is executed.

    Examples:
      >>> decoded(encoded({"reserved": 3}))
      {'reserved': 3}
    """
    return torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True)


def refuse_several(what: str) -> None:
    """Raise in a process group of more than one process, for work that one process does."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            f"{what} runs in one process: start it without torchrun, or call torch.distributed.destroy_process_group() "
            "first if the group serves something else. Nothing was spent."
        )
