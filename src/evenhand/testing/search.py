"""The search for an input that breaks a claim, and for the smallest such input."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from evenhand.testing.cases import Case, simpler

T = TypeVar("T")

_PATIENCE = 2000
_RAISES = "raises"


def search(draw: Callable[[random.Random], T], broken: Callable[[T], str], count: int) -> str:
    """Try ``count`` drawn inputs; say what is broken, and by the smallest input found, or nothing.

    The draws are the same at every run. An exception of the code under test counts as broken.

    Examples:
      >>> from evenhand.testing.cases import cases
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
