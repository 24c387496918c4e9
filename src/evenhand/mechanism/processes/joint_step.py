"""One step of several processes: each runs a part of the batch; process 0 weighs all rows, adds up, and adds noise.

Which process a row belongs to is decided by the row's own secret key, so one record more changes the part of one
process only. Norms and losses of all rows are weighed in process 0 by the same code as in a single process: to the
private step the parts are one pass. Sums are added in float64 in the order of the processes, then rounded once.
Proof: docs/proofs/float_sums.md, section 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenhand.errors import ProcessError
from evenhand.gradients.record_blocks import Blocks, chunks_of
from evenhand.gradients.row_norms import working_dtype
from evenhand.mechanism.processes.group import Group, Word, decoded, encoded
from evenhand.mechanism.step import Mechanism
from evenhand.summation import KEY_BITS
from evenhand.types import Batch, Pass

_DIGITS = 40
"""First digits of a record's key that decide which process it belongs to."""
AT_ONCE = 1 << 20
"""Numbers of a sum that process 0 hears from all others at a time."""
EXCESS = 1.01
"""A sum longer than this many times the lengths of its parts together was not made as it should be."""
_MARKED_EACH = 1 << 20
"""Numbers of a model whose mark costs little beside a step; of larger ones it is taken at every so many steps."""


class Outcome(NamedTuple):
    """The outcome of a step for every process: private gradient, the rule's memory, deviation of the noise."""

    gradient: Mapping[str, Tensor]
    memory: Mapping[str, Any]
    std: float


def process_of(keys: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Return which of ``size`` processes each row belongs to: equal ranges of its key, whatever its level.

    Examples:
      >>> keys = np.array([0, 1, 2, 3], dtype=np.uint64) << np.uint64(54)
      >>> process_of(keys, 2).tolist(), process_of(keys, 3).tolist()
      ([0, 0, 1, 1], [0, 0, 1, 2])
    """
    digits = (keys & np.uint64((1 << KEY_BITS) - 1)) >> np.uint64(KEY_BITS - _DIGITS)
    return ((digits * np.uint64(size)) >> np.uint64(_DIGITS)).astype(np.int64)


def rows_of(batch: Batch, size: int) -> list[Tensor]:
    """Return the places of the rows that each process takes of a batch, in their order."""
    assert batch.record_keys is not None
    numbers = process_of(batch.record_keys, size)
    return [torch.from_numpy(np.flatnonzero(numbers == rank)) for rank in range(size)]


def lead(
    group: Group,
    batch: Batch,
    run: Callable[[], Pass],
    mechanism: Mechanism,
    trainable: Mapping[str, nn.Parameter],
) -> Pass:
    """Return one pass over all rows of ``batch``, of which every process runs its own; for process 0.

    Args:
      group: with this process as its first.
      batch: all rows that were drawn.
      run: runs the rows of this process.
      mechanism: of the run; it says whether the total of this batch may be rounded to float32.
      trainable: parameters by the names that sums have; all processes must share them.

    Raises:
      ProcessError: a process is gone, has other weights or another draw, or its sum is longer than its records allow.
    """
    step, places = batch.position, rows_of(batch, group.size)
    mine, words = group.attempt(step, run, mark=mark_of(trainable.values(), step), draw=draw_of(batch))
    _check_marks(group, words)
    loss, norm = (torch.empty(len(batch), dtype=torch.float64) for _ in range(2))
    for rows, scalars in zip(places, group.gather(_scalars(mine, places)), strict=True):
        loss[rows], norm[rows] = scalars[:, : len(rows)]
    whole = Blocks(len(batch), summation=mechanism.summation)
    dtypes = {name: working_dtype(parameter.dtype) for name, parameter in trainable.items()}

    def weighted_sum(weights: Tensor) -> dict[str, Tensor]:
        group.meet(step)
        factors = group.broadcast(weights.double())
        part, _ = group.attempt(step, lambda: mine.last_sum(weights[places[0]]))
        flat = _joined(part).double()
        total, squares = torch.zeros_like(flat), torch.zeros(group.size, dtype=torch.float64)
        for stretch in chunks_of(len(flat), AT_ONCE):
            for rank, numbers in enumerate(group.gather(flat[stretch])):
                total[stretch] += numbers
                squares[rank] += numbers.square().sum()
        _check_lengths(group, squares.sqrt(), [factors[rows] @ norm[rows].nan_to_num(0.0, 0.0) for rows in places])
        split = _split(total, part)
        return {  # in the order of the parameters, which is that of the noise
            name: split[name].to(value.device, dtypes[name] if whole.rounds else torch.float64)
            for name, value in part.items()
        }

    return Pass(loss, norm, weighted_sum, spend=weighted_sum)


def follow(group: Group, batch: Batch, run: Callable[[], Pass], trainable: Mapping[str, nn.Parameter]) -> Outcome:
    """Run the rows of this process, give norms, losses and the weighted sum to process 0; return what it released."""
    step, places = batch.position, rows_of(batch, group.size)
    mine, words = group.attempt(step, run, mark=mark_of(trainable.values(), step), draw=draw_of(batch))
    _check_marks(group, words)
    group.gather(_scalars(mine, places))
    group.meet(step)
    weights = group.broadcast(torch.empty(len(batch), dtype=torch.float64))
    part, _ = group.attempt(step, lambda: mine.last_sum(weights[places[group.rank]]))
    flat = _joined(part).double()
    for stretch in chunks_of(len(flat), AT_ONCE):
        group.gather(flat[stretch])
    released = group.meet(step)[0]
    numbers = group.broadcast(torch.empty(len(flat), dtype=torch.float64 if released.mark else torch.float32))
    news = decoded(group.broadcast(torch.empty(released.size, dtype=torch.uint8)))
    gradient = {name: value.to(part[name].device) for name, value in _split(numbers, part).items()}
    return Outcome(gradient, news["memory"], float(news["std"]))


def hand_out(group: Group, step: int, outcome: Outcome) -> None:
    """Give what process 0 released to all others, which take the same step with it."""
    numbers, news = _joined(outcome.gradient), encoded({"memory": dict(outcome.memory), "std": outcome.std})
    group.meet(step, size=news.numel(), mark=int(numbers.dtype == torch.float64))
    group.broadcast(numbers)
    group.broadcast(news)


def mark_of(weights: Iterable[Tensor], step: int) -> int:
    """Return a number that is the same for equal weights only, or 0 at steps where those of a large model are not read.

    Examples:
      >>> one, two = [torch.zeros(2)], [torch.ones(2)]
      >>> mark_of(one, 0) == mark_of(one, 1), mark_of(one, 0) == mark_of(two, 0)
      (True, False)
    """
    tensors = list(weights)
    if step % (1 + sum(tensor.numel() for tensor in tensors) // _MARKED_EACH):
        return 0
    return int.from_bytes(_digest(tensors)[:8], "big") >> 2


def draw_of(batch: Batch) -> int:
    """Return a number that is the same for equal draws only: the same records, owners, groups and secret keys."""
    digest = hashlib.blake2b(digest_size=8)
    for column in (batch.record, batch.owner, batch.group):
        digest.update(column.cpu().contiguous().numpy().data)
    if batch.record_keys is not None:
        digest.update(np.ascontiguousarray(batch.record_keys).data)
    return int.from_bytes(digest.digest(), "big") >> 2


def weights_of(model: nn.Module) -> str:
    """Return a digest of all weights and buffers of a model."""
    return _digest([*model.parameters(), *model.buffers()]).hex()


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _scalars(mine: Pass, places: Sequence[Tensor]) -> Tensor:
    """Return losses and norms of a process in two rows, which are as long as those of the process with most records."""
    columns = torch.zeros(2, max(map(len, places)), dtype=torch.float64)
    columns[0, : len(mine.loss)], columns[1, : len(mine.norm)] = mine.loss, mine.norm
    return columns


def _check_marks(group: Group, words: Sequence[Word]) -> None:
    """Raise in all processes if one has other weights than process 0, or drew other records."""
    for rank, word in enumerate(words):
        if (word.mark, word.draw) == (words[0].mark, words[0].draw):
            continue
        what = "drew other records" if word.draw != words[0].draw else "has other weights"
        raise group.ending(
            ProcessError(
                f"Process {rank} {what} than process 0: data, random key, optimizer, schedule, and all else that "
                f"changes weights must be the same in every process. {group.advice()}".rstrip()
            )
        )


def _check_lengths(group: Group, lengths: Tensor, longest: Sequence[Tensor]) -> None:
    """Raise if the sum of a process is longer than the gradients it is made of: it would not be what noise covers."""
    for rank, (length, most) in enumerate(zip(lengths.tolist(), longest, strict=True)):
        if not length <= EXCESS * float(most):
            raise ProcessError(
                f"The sum of process {rank} is longer than the gradients of its records, so it cannot be right, and "
                f"nothing was released from it: compare libraries and memory of its machine. {group.advice()}".rstrip()
            )


def _joined(parts: Mapping[str, Tensor]) -> Tensor:
    """Return all numbers in a row, by name; in float64 if any of them is.

    Examples:
      >>> parts = {"b": torch.ones(2), "a": torch.zeros(1, 2)}
      >>> _joined(parts).tolist(), _split(_joined(parts), parts)["b"].tolist()
      ([0.0, 0.0, 1.0, 1.0], [1.0, 1.0])
    """
    wide = any(part.dtype == torch.float64 for part in parts.values())
    dtype = torch.float64 if wide else torch.float32
    rows = [parts[name].detach().to("cpu", dtype).reshape(-1) for name in sorted(parts)]
    return torch.cat(rows) if rows else torch.empty(0, dtype=dtype)


def _split(numbers: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return numbers in a row as the tensors that they are, in the shapes of ``like``."""
    names = sorted(like)
    parts = torch.split(numbers, [like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
