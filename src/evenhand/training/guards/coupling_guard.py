"""Check that records of a batch do not influence each other: before anything is spent, and again at secret steps.

Records of a batch are run twice, among different other records, and their losses and gradients are compared
(``record_coupling.py``). The time is limited: before training and during it each at most ``SECONDS`` of this thread, or
half a percent of what training takes if that is more. Which steps are checked comes from the run's secret stream, never
from the data. Nothing that a check computes is released, only that a run was refused or stopped.

A batch that a user's own loop changed cannot be looked at, so it is not taken (`Handed`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from evenhand.data.dataset import Data
from evenhand.errors import CoupledError, EvenhandError, UnsupportedModelError, UsageError
from evenhand.gradients.batch_utils import batch_size, finite_rows, join, take, without_values
from evenhand.gradients.doctor.record_coupling import Company, Finding, Rows
from evenhand.gradients.memory import out_of_memory
from evenhand.mechanism.random_streams import Stream
from evenhand.model_io import Shared, plain

DRAWS = 100
"""Batches that are drawn before training, where time allows."""
LEAST = 4
"""Batches that are drawn in any case."""
SECONDS = 1.0
SHARE = 0.005
COST = 4
"""Steps that take as long as one look, about."""
LOOKS = 24
"""Steps that are looked at where time allows; more, if half a percent of the time is more."""
FEW = 3
"""Rows that are kept when all others are replaced."""
ROWS = 1 << 14
"""Records of a batch that a look takes at a time, at most."""
ROUNDED = 1e-4
"""Absolute difference of two losses that rounding explains: of records that fit well, float32 leaves nothing else."""
BYTES = 1 << 28
"""Memory for the records that are kept to replace others, at most."""
_BLOCK = 1024
_BEFORE = 1 << 40
"""Addresses of draws before training, apart from those of steps."""
REMEDY = (
    "no bound on a record's gradient holds then. Compute every loss from its own record only: no statistics, ranks, "
    "capacities or weights taken over the batch (nn.GroupNorm or nn.LayerNorm for normalisation), no mixing of records "
    "in augment"
)


def escape(share: float, looks: int = DRAWS) -> float:
    """Return the probability that a coupling which shows in this share of looks is missed by all of them.

    Examples:
      >>> [f"{escape(share):.2g}" for share in (0.2, 0.1, 0.05, 0.02, 0.01)]
      ['2e-10', '2.7e-05', '0.0059', '0.13', '0.37']
    """
    return (1 - share) ** looks


class Handed:
    """A batch given to a user's own loop; ``check`` takes no other one, since how it was changed cannot be looked at.

    A mean, a fill or a sort over the batch would let records influence each other, and random numbers of others'
    generators would shift with every record more. Copies on another device or of another precision pass, and parts.

    Examples:
      >>> rows = torch.ones(3, 2); handed = Handed(rows)
      >>> handed.check(rows.double())
      >>> handed.check(rows - rows.mean(0))
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: The batch was changed between its draw and this step, ...
    """

    def __init__(self, *values: Any) -> None:
        self._values, self._places = values, self._look(values)

    def check(self, *values: Any) -> None:
        """Raise if there are other rows than those that were drawn, or the same in another order."""
        places = self._look(values)
        if places == self._places:
            return
        if self._look(self._values) == self._places:  # else they were written to
            drawn = [leaf for leaf in _leaves(self._values) if isinstance(leaf, Tensor)]
            passed = zip(places, _leaves(values), strict=True)
            if all(place in self._places or any(_same_values(leaf, one) for one in drawn) for place, leaf in passed):
                return
        raise UsageError(
            "The batch was changed between its draw and this step, in a way that cannot be looked at: a mean, a fill "
            "or a sort over the batch, or random numbers that others can know, let records influence each other, and "
            "no bound holds. Nothing was released. Make the change where it is looked at, for each record by itself: "
            "in the dataset, in augment= (also for fixed changes), or in the model's forward. Another device or "
            "precision is no change."
        )

    @staticmethod
    def _look(values: Any) -> list[tuple[Any, ...]]:
        """Return address, version, shape and strides of every tensor, and what tells anything else."""
        return [_mark(leaf) for leaf in _leaves(values)]


def _every(number: int) -> bool:
    """Return whether a check takes rows that are not finite too, which spoil the comparison of gradients."""
    return number % 8 in (3, 5)


def _leaves(values: Any) -> list[Any]:
    """Return tensors and whatever else lies in inputs and targets."""
    if all(isinstance(value, Tensor) for value in values):
        return list(values)
    return [leaf for value in values for leaf in tree_leaves(plain(value)) if leaf is not None]


def _mark(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.data_ptr(), leaf._version, leaf.shape, None if leaf.is_nested else leaf.stride()
    if isinstance(leaf, bool | int | float | str):
        return type(leaf), leaf
    value = leaf.value if isinstance(leaf, Shared) else None
    return id(leaf), value._version if isinstance(value, Tensor) else None


def _same_values(one: Any, drawn: Tensor) -> bool:
    """Return whether a tensor holds the values of another, as its own device and precision have them."""
    if not isinstance(one, Tensor) or one.is_nested or one.shape != drawn.shape:
        return False
    given, expected = one.detach(), drawn.detach().to(one.device, one.dtype)
    return bool(((given == expected) | (given.isnan() & expected.isnan())).all())


class Coupling:
    """Checks of one segment of a run that records do not influence each other.

    Args:
      company: runs rows of a batch among different other rows.
      stream: the run's secret stream; it decides which steps are checked, and which rows are replaced.
      expected: records of a batch, as planned.
      steps: of the plan.
      limit: records that go through the model at once, at most.
      full: whether real passes run in full precision, so that their losses can be compared.
    """

    def __init__(
        self,
        company: Company,
        stream: Stream,
        *,
        expected: float,
        steps: int,
        limit: int | None = None,
        full: bool = True,
    ) -> None:
        self._company, self._stream, self._steps, self._full = company, stream, steps, full
        self._expected, self._rows = expected, min(limit or ROWS, ROWS)
        self._pool: tuple[Any, Any] | None = None
        self._finite = torch.empty(0, dtype=torch.long)
        self._coins: tuple[int, Any] = (-1, None)
        self._rate, self._looks, self._calls = 0.0, 0, 0
        self._real: tuple[Tensor, Tensor] | None = None

    def prepare(self, data: Data) -> None:
        """Check many drawn batches before anything is spent; raise if records influence each other."""
        first, self._calls = not self._calls, self._calls + 1
        started = time.perf_counter()
        draw = self._draw(_BEFORE + self._calls)
        if self._rows < 2:
            return  # one record at a time touches no other
        self._pool = self._fetched(data, draw, started)
        self._finite = finite_rows(*self._pool)
        if batch_size(*self._pool) < 2:
            return
        done, began = 0, time.thread_time()
        for done in range(1, (DRAWS if first else LEAST) + 1):
            self._raise(self._look(draw, self._batch(draw, done), done, learns=True)[0], before=True)
            pace = (time.thread_time() - began) / done
            if done >= LEAST and pace * done > max(SECONDS, SHARE * self._steps * pace / COST):
                break
        self._rate = min(1.0, max(min(LOOKS, SECONDS / pace), SHARE * self._steps / COST) / self._steps)

    def due(self, step: int) -> bool:
        """Return whether this step is checked: a secret coin, with the same probability for all steps."""
        block = step // _BLOCK
        if self._coins[0] != block:
            self._coins = block, self._stream.uniforms("checks", block, _BLOCK) < self._rate
        return bool(self._coins[1][step % _BLOCK])

    def look(self, step: int, inputs: Any, targets: Any) -> None:
        """Run rows of this step's batch among other rows; raise if records influence each other."""
        self._real = None
        self._looks += 1
        rows = torch.arange(batch_size(inputs, targets)) if _every(self._looks) else finite_rows(inputs, targets)
        if self._pool is None or len(rows) < 2:
            return
        draw = self._draw(_BEFORE + (1 << 40) + step)
        start = int(draw.integers(0, max(1, len(rows) - self._rows + 1)))
        rows = rows[start : start + self._rows]
        batch = take(inputs, rows), take(targets, rows)
        finding, fixed_rows = self._look(draw, batch, self._looks, learns=False)
        self._raise(finding, before=False)
        if finding.losses is not None and self._full:
            self._real = rows[fixed_rows], finding.losses

    def agree(self, losses: Tensor) -> None:
        """Compare losses of the real pass with those of the check before it; raise if two of them differ."""
        real, self._real = self._real, None
        if real is None:
            return
        rows, expected = real
        pass_losses = losses[rows.to(losses.device)].double()
        apart = (pass_losses - expected).abs() > 1e-3 * (expected.abs() + expected.abs().mean()) + ROUNDED
        if int((apart & torch.isfinite(pass_losses) & torch.isfinite(expected)).sum()) >= min(2, len(rows)):
            self._raise(Finding(coupled=True), before=False)

    def _fetched(self, data: Data, draw: np.random.Generator, started: float) -> tuple[Any, Any]:
        """Return records for three batches, or as many as half of the time and the memory allow."""
        wanted = min(len(data), 3 * self._largest() + LEAST)
        rows = torch.from_numpy(draw.choice(len(data), wanted, replace=False))
        with self._company.drawing(int(draw.integers(1 << 32))):
            parts = [data.fetch(rows[:LEAST])]
            room = BYTES // max(1, _bytes(parts[0]) // min(LEAST, wanted))
            for part in torch.split(rows[LEAST : max(2 * LEAST, room)], max(1, self._largest())):
                parts.append(data.fetch(part))
                if time.perf_counter() - started > SECONDS / 2:
                    break
        return _joined(parts)

    def _largest(self) -> int:
        """Return the size of a large batch: Poisson sampling rarely draws more records."""
        return min(self._rows, int(self._expected + 4 * self._expected**0.5) + 1)

    def _batch(self, draw: np.random.Generator, number: int) -> tuple[Any, Any]:
        """Return random records as a batch, of the expected size, a large one and a small one in turn."""
        assert self._pool is not None
        spread = (0.0, 4.0, -3.0)[number % 3] * self._expected**0.5
        numbers = draw.permutation(self._others(number))
        if _every(number):  # up to a quarter is not finite
            spoilt = ~np.isin(numbers, self._finite.numpy())
            few = np.flatnonzero(spoilt)[: max(1, round(self._expected) // 4)]
            numbers = np.concatenate([numbers[few], np.delete(numbers, few)])
        size = min(max(2, round(self._expected + spread)), self._rows, len(numbers))
        rows = torch.from_numpy(draw.permutation(numbers[:size]))
        return take(self._pool[0], rows), take(self._pool[1], rows)

    def _others(self, number: int) -> NDArray[np.int64]:
        """Return the rows of the pool that a check with this number takes."""
        assert self._pool is not None
        every = np.arange(batch_size(*self._pool))
        return every if _every(number) or len(self._finite) < 2 else self._finite.numpy()

    def _look(
        self, draw: np.random.Generator, batch: tuple[Any, Any], number: int, *, learns: bool
    ) -> tuple[Finding, Tensor]:
        """Return the finding of one check, and which rows were kept. Every fourth check runs in float64.

        What every pass moves is learned from the many checks before training only.
        """
        precise, seed = number % 4 == 1, int(draw.integers(1 << 32))
        again = partial(self._replaced, draw, batch, self._others(number))
        rows = again(few=precise or number % 2 == 0, copies=number % 5 == 0)
        try:
            finding = self._company.look(rows, seed, lambda: again(few=False), precise=precise, learns=learns)
            return finding, rows.indices
        except EvenhandError:
            raise
        except (RuntimeError, MemoryError, IndexError, ValueError, TypeError) as error:
            if not out_of_memory(error):
                raise without_values(error) from None
            self._rows = max(2, self._rows // 2)
            return Finding(), rows.indices

    def _replaced(
        self,
        draw: np.random.Generator,
        batch: tuple[Any, Any],
        others: NDArray[np.int64],
        few: bool,
        copies: bool = False,
    ) -> Rows:
        """Return a batch of which few rows, or half of them, stay; the others become other records or copies."""
        assert self._pool is not None
        size = batch_size(*batch)
        fixed_rows = torch.from_numpy(np.sort(draw.permutation(size)[: min(FEW, size - 1) if few else size // 2]))
        source = batch if copies or not _alike(batch, self._pool) else self._pool
        others = others if source is self._pool else np.arange(size)
        numbers = fixed_rows.numpy() if copies else draw.permutation(others)
        chosen = torch.from_numpy(np.resize(numbers, size - len(fixed_rows)))
        return Rows.of(batch, (take(source[0], chosen), take(source[1], chosen)), fixed_rows)

    def _draw(self, address: int) -> np.random.Generator:
        """Return a generator seeded from this address of the secret stream."""
        return np.random.default_rng((self._stream.uniforms("checks", address, 4) * 2**32).astype(np.uint32).tolist())

    def _raise(self, finding: Finding, *, before: bool) -> None:
        """Raise if a check found a coupling; ``before``: nothing is spent yet."""
        if not finding.coupled and finding.written is None:
            return
        kind = UnsupportedModelError if before else CoupledError
        when = (
            "Nothing was spent."
            if before
            else "Steps before this one may have been so too, so nothing of this run may be released; the ledger says "
            "so. Mend it and start a new run."
        )
        if finding.written is not None:
            raise kind(
                f"A pass sets {shown(finding.written)!r} from the records, and later losses or the released model "
                f"depend on it without noise. {when} Keep nothing of the batch in model, loss or augment between "
                "steps: no running statistics, counts or memories (freeze normalisation with .eval())."
            )
        raise kind(
            f"Loss or gradient of a record changed when other records of its batch were replaced (batches of about "
            f"{self._expected:g}): {REMEDY}. {when}"
        )


def shown(path: str) -> str:
    """Return the path of an attribute as its owner would write it.

    >>> shown("model._modules.0.seen")
    'model.0.seen'
    """
    for hidden in ("._modules", "._buffers", "._parameters", "()"):
        path = path.replace(hidden, "")
    return path


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return several batches as one; those of another shape than the first are left out."""
    flat = [tree_flatten(part) for part in parts if _alike(part, parts[0])]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [join(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    inputs, targets = tree_unflatten(joined, flat[0][1])
    return inputs, targets


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _alike(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Return whether rows of both fit into one batch."""
    first, second = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (one, other))
    return [_kind(leaf) for leaf in first] == [_kind(leaf) for leaf in second]


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    """Return what rows must have in common to be in one batch; those of nested tensors may differ in length."""
    shape = leaf.shape[2:] if leaf.is_nested else leaf.shape[1:]
    return shape, leaf.is_nested, leaf.dtype, leaf.device
