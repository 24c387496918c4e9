"""Records with values that are not finite: told to the trainer in the terminal, refused where there are too many.

Such a record contributes nothing, while noise and charge stay (law 5). How many there are says something about the
records, so the count goes to the terminal and to ``private`` only, never into a file that is shared.
"""

from __future__ import annotations

from evenhand.data.row_digests import Survey
from evenhand.errors import DataError
from evenhand.terminal import say

SHARE, COUNT = 0.01, 10
"""More than one record in a hundred, and at least ten, is no accident: a failed sensor or a mistyped cell spoils single
records, a division by zero, a logarithm or missing cells read as NaN spoil a column. Then the model would be trained on
other records than the statement speaks of."""


def check_finite(found: Survey, allowed: bool) -> None:
    """Say how many records are not finite, before anything is spent; raise DataError where they are too many.

    Examples:
      >>> from evenhand.data import wrap
      >>> from evenhand.data.row_digests import survey
      >>> rows = [[float("nan")]] * 10 + [[1.0]] * 10
      >>> check_finite(survey(wrap(rows, [0] * 20)), allowed=False)
      Traceback (most recent call last):
      ...
      evenhand.errors.DataError: Too many records hold values that are not finite ...
    """
    seen = len(found.rows)
    if too_many(found.not_finite, seen) and not allowed:
        raise DataError(
            "Too many records hold values that are not finite (NaN or infinite): more than one in a hundred. They "
            "would contribute nothing, and the model would be trained on fewer records than the statement speaks of. "
            "Fill or declare missing values first; if it is meant, pass allow_not_finite=True (--allow-not-finite). "
            "Nothing was spent."
        )
    if found.not_finite:
        part = "" if seen == found.records else f" {seen:,} that were looked at, out of"
        _tell(f"{found.not_finite:,} of{part} {found.records:,} records hold values that are not finite", "will add")


def too_many(count: int, among: int) -> bool:
    """Return whether so many rows that are not finite cannot be an accident.

    Examples:
      >>> too_many(9, 9), too_many(10, 1000), too_many(11, 1000)
      (False, False, True)
    """
    return count >= COUNT and count > SHARE * among


class LeftOut:
    """Counts the rows of steps that were not finite, and tells the trainer: once in training, and at its end.

    Training goes on: to stop by a rule that looks at the records would itself tell something about them.
    """

    def __init__(self) -> None:
        self.count = self.drawn = 0
        self._said = False

    def add(self, left_out: int, drawn: int) -> None:
        """Take in one step; the first time that too many were left out, say so."""
        self.count += left_out
        self.drawn += drawn
        if left_out and not self._said and too_many(self.count, self.drawn):
            self._said = True
            _tell(f"{self.count:,} of {self.drawn:,} rows drawn so far were not finite", "add")

    def summary(self) -> None:
        """Say at the end how many there were, if any."""
        if self.count:
            _tell(f"{self.count:,} of {self.drawn:,} rows drawn in all steps were not finite", "added")


def _tell(what: str, contribute: str) -> None:
    say(f"evenhand: {what}: they {contribute} nothing to the model. This count is not private: keep it to yourself.")
