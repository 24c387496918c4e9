"""Says what the held-out records of one run can tell: who is served worst, and whether a constant answer is beaten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from evenhand._numbers import count, percent
from evenhand.reporting.group_metrics import wilson
from evenhand.reporting.uncertainty import Split, named_group

Value = TypeVar("Value")
NOT_BETTER = "This model does not beat always answering the largest class"
TOO_CLOSE = "This model cannot be told apart from always answering the largest class"
NO_WORST = "no group can be told apart as worst"


def worst_group(shares: Mapping[str, float | None], records: Mapping[str, int]) -> str | None:
    """Return the group that this one model serves worst, if its held-out records can tell; else None.

    Examples:
        >>> worst_group({"a": 0.9, "b": 0.5}, {"a": 400, "b": 300})
        'b'
        >>> worst_group({"a": 0.9, "b": 0.5}, {"a": 400, "b": 4}) is None
        True
    """
    known = {name: [float(share)] for name, share in shares.items() if share is not None}
    return named_group(known, records, Split())


def against_majority(accuracy: float | None, majority: float | None, records: int) -> str | None:
    r"""Return a warning about a model that is no better than always answering the largest class; None if it is better.

    Args:
        accuracy: share of the held-out records that the model gets right.
        majority: share of the largest class among them.
        records: how many they are.

    Examples:
        >>> against_majority(0.779, 0.779, 1000).replace("\u00a0", " ")
        'This model does not beat always answering the largest class: that is right for 77.9 % of the held-out records.'
        >>> against_majority(0.9, 0.5, 1000) is None
        True
    """
    if accuracy is None or majority is None:
        return None
    rate = percent(majority, records)
    if accuracy <= majority:
        return f"{NOT_BETTER}: that is right for {rate} of the held-out records."
    if wilson(accuracy, records)[0] <= majority:
        return f"{TOO_CLOSE}: that is right for {rate} of the {count(records)} held-out records."
    return None


def named(group: str, column: str | None) -> str:
    """Return the name of a group with its column, where that is known and not said already.

    Examples:
        >>> named("Native American", "race"), named("race = a, sex = f", "race"), named("class 8", None)
        ('race = Native American', 'race = a, sex = f', 'class 8')
    """
    return group if column is None or " = " in group else f"{column} = {group}"


def with_column(by_group: Mapping[str, Value], column: str | None) -> dict[str, Value]:
    """Return values by group, each group with the name of its column where that is known.

    Examples:
        >>> with_column({"f": 0.9}, "sex")
        {'sex = f': 0.9}
    """
    return {named(name, column): value for name, value in by_group.items()}
