"""Errors that nobody foresaw: what they say may quote a record, so only their kind and place are printed."""

from __future__ import annotations

import traceback
from pathlib import Path

VARIABLE = "EVENHAND_TRACEBACK"
"""Set to anything, it shows the whole traceback, with whatever data values are in it."""


def said(error: BaseException) -> str:
    """Return one sentence with the kind of an error and the place that raised it, and nothing of its message.

    Examples:
      >>> try: float("37 years")
      ... except ValueError as error: print("37" in said(error), said(error)[:30])
      False An error that was not foreseen
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "evenhand" in Path(frame.filename).parts]
    last = (own or frames)[-1] if frames else None
    place = "" if last is None else f" in {Path(last.filename).name}, line {last.lineno}"
    return (
        f"An error that was not foreseen: {type(error).__name__}{place}. Its message is not shown, since it may quote "
        f"your data; {VARIABLE}=1 shows it. What a run has spent is in its ledger: `evenhand verify RUN` says it, and "
        "`evenhand resume RUN` goes on. Please report this."
    )
