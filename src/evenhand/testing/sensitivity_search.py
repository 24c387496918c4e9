"""The search for an input that breaks a claim, and for the smallest such input."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from evenhand.errors import UsageError
from evenhand.mechanism.step import bounded
from evenhand.methods.rules import BatchRule, Rule, SampleRule
from evenhand.testing.made_up_batches import Case, simpler
from evenhand.types import State, Stats

T = TypeVar("T")

_PATIENCE = 2000
_RAISES = "raises"


def search(draw: Callable[[random.Random], T], broken: Callable[[T], str], count: int) -> str:
    """Try ``count`` drawn inputs; say what is broken, and by the smallest input found, or nothing.

    The draws are the same at every run. An exception of the code under test counts as broken.

    Examples:
      >>> from evenhand.testing.made_up_batches import cases
      >>> words = search(cases(), lambda case: "has rows of group 2" if {2} & {r.group for r in case.rows} else "", 50)
      >>> words.startswith("has rows of group 2. Smallest input found: (norm 1, loss 0, group 2, owner 0); bounds 1")
      True
    """

    def said(case: T) -> str:
        try:
            return broken(case)
        except Exception as error:
            return (
                f"{_RAISES} {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no words'}"
            )

    source = random.Random(0)
    for _ in range(count):
        case = draw(source)
        words = said(case)
        if words:
            return _worded(*_smallest(case, words, said))
    return ""


def _smallest(case: T, words: str, said: Callable[[T], str]) -> tuple[T, str]:
    """Take the first simpler case that is still broken, until none is; a crash is not traded for another fault."""
    tries = 0
    while tries < _PATIENCE:
        for other in _simpler(case):
            tries += 1
            heard = said(other)
            if heard and heard.startswith(_RAISES) == words.startswith(_RAISES):
                case, words = other, heard
                break
        else:
            return case, words
    return case, words


def _simpler(case: Any) -> Iterator[Any]:
    if isinstance(case, Case):
        yield from simpler(case)
    elif isinstance(case, tuple):
        for i, part in enumerate(case):
            yield from ((*case[:i], other, *case[i + 1 :]) for other in _simpler(part))


def _worded(case: object, words: str) -> str:
    shown = " and ".join(map(str, case)) if isinstance(case, tuple) else str(case)
    return f"{words}. Smallest input found: {shown}"


Reading = Callable[[Stats, State], Tensor]


def columns(stats: Stats) -> tuple[Tensor, ...]:
    """The columns in the order in which Stats takes them."""
    return (stats.norm, stats.loss, stats.group, stats.owner, stats.record)


def taken(stats: Stats, index: Tensor) -> Stats:
    """The rows with these numbers, in this order."""
    return Stats(*(column[index] for column in columns(stats)))


def by_row(function: Reading, stats: Stats, state: State) -> Tensor:
    """``function`` on each row alone: what a sample rule and a query mean, whatever the step does for speed."""
    rows = columns(stats)
    if not stats.norm.numel():  # vmap cannot run on no rows: the shape is that of a made-up row, taken zero times
        return by_row(
            function, Stats(*(row.new_ones(1) for row in rows[:2]), *(row.new_zeros(1) for row in rows[2:])), state
        )[:0]
    return vmap(lambda *row: function(Stats(*row), state))(*rows)


def weights(rule: Rule, stats: Stats, state: State) -> Tensor:
    """What the rule returns, before the step holds it to its bound."""
    if isinstance(rule, SampleRule):
        return by_row(rule.weight, stats, state)
    if isinstance(rule, BatchRule):
        return rule.weights(stats, state)
    raise UsageError(f"{type(rule).__name__} is neither a SampleRule nor a BatchRule: derive it from one.")


def movements(rule: Rule, case: Case, state: State) -> Tensor:
    """For each row, how far removing it moves the weighted sum when gradients point where that hurts most.

    Exact: ``w_r n_r + sum_j |w_j(with) - w_j(without)| n_j``, reached by gradients that are all parallel. For a sample
    rule other rows cannot move, and its weight counts as returned; a batch rule is held to its bound by the step first.
    """
    stats = case.stats()
    if isinstance(rule, SampleRule):
        return weights(rule, stats, state) * stats.norm
    sensitivity = rule.sensitivity(state)
    here = bounded(weights(rule, stats, state), stats, sensitivity)
    moved = here * stats.norm
    for removed in range(len(case.rows)):
        rest = case.stats(without=removed)
        there = bounded(weights(rule, rest, state), rest, sensitivity)
        stayed = torch.cat([here[:removed], here[removed + 1 :]])
        moved[removed] += ((stayed - there).abs() * rest.norm).sum()
    return moved


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Equality of tensors, numbers, and mappings and sequences of them; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        close = torch.allclose(left, right, rtol=tolerance, atol=0.0, equal_nan=True)
        return close if tolerance else torch.equal(left.nan_to_num(nan=-77.0), right.nan_to_num(nan=-77.0)) and close
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key], tolerance) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b, tolerance) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and (bool(left == right) or (left != left and right != right))
