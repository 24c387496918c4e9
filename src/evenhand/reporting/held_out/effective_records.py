"""Counts how many independent answers held-out records are worth where several of them are of one person.

A person's records are often answered alike: ten pictures of one mole tell less about a model than ten moles do. Here n
records count as ``n^2 / sum(n_i^2)`` with n_i of person i (Kish 1965): all of them if every person has one, the number
of persons if each has as many. That is exact where all of a person's records are answered alike and too few otherwise,
so that intervals are too wide rather than too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from evenhand._numbers import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
ALL, BY_GROUP, BY_OWNER, BY_SIDE = "effective_records", "group_effective", "owner_effective", "side_effective"
"""Keys of an evaluation, which it has only if a person has several held-out records."""
_COUNTS = {"groups": "group_records", "owners": "owner_records"}
_EFFECTIVE = {"groups": BY_GROUP, "owners": BY_OWNER}
FIRST, SECOND, SELECTED = "first", "second", "selected"
"""Sides of two classes: records of the first, of the second, and those that are answered with the second."""
_COUNTED = {"tpr": SECOND, "fpr": FIRST, "tnr": FIRST, "precision": SELECTED}
"""The side that a rate is a share of."""


def effective(whose: Array) -> int:
    """Return how many independent records these count as, rounded down.

    Args:
        whose: a number for the person of each record.

    Examples:
        >>> import numpy as np
        >>> [effective(np.array(persons)) for persons in ([1, 2, 3], [7, 7, 8, 8], [7, 7, 7, 8], [])]
        [3, 2, 1, 0]
    """
    import numpy as np

    _, counts = np.unique(whose, return_counts=True)
    return int(counts.sum() ** 2 // (counts**2).sum()) if len(counts) else 0


def by_name(whose: Array, code: Array, names: Sequence[str]) -> dict[str, int]:
    """Return how many independent records each group (or owner) that occurs has.

    Args:
        whose: a number for the person of each record.
        code: the number of each record's group.
        names: the groups.

    Examples:
        >>> import numpy as np
        >>> by_name(np.array([1, 1, 2, 2]), np.array([0, 0, 1, 0]), ["a", "b", "c"])
        {'a': 1, 'b': 1}
    """
    return {name: effective(whose[code == place]) for place, name in enumerate(names) if place in code}


def figures(
    whose: Array | None, groups: tuple[Array, Sequence[str]], owners: tuple[Array, Sequence[str]]
) -> dict[str, Any]:
    """Return what an evaluation says of its held-out records; nothing if no person has several of them.

    Args:
        whose: a number for the person of each record, None if that is not known.
        groups: the number of each record's group, and their names.
        owners: likewise; no names if owners are not measured one by one.

    Examples:
        >>> import numpy as np
        >>> whose, code = np.array([1, 1, 2]), np.array([0, 0, 1])
        >>> figures(whose, (code, ["a", "b"]), (code, []))
        {'effective_records': 1, 'group_effective': {'a': 1, 'b': 1}}
        >>> figures(np.arange(3), (code, ["a", "b"]), (code, []))
        {}
    """
    import numpy as np

    if whose is None or len(np.unique(whose)) == len(whose):
        return {}
    said: dict[str, Any] = {ALL: effective(whose), BY_GROUP: by_name(whose, *groups)}
    return said | ({BY_OWNER: by_name(whose, *owners)} if owners[1] else {})


def by_side(whose: Array, code: Array, names: Sequence[str], sides: Mapping[str, Array]) -> dict[str, Any]:
    """Return how many independent records of each group, and of all under "", are on each side.

    Args:
        whose: a number for the person of each record.
        code: the number of each record's group.
        names: the groups.
        sides: which records are on a side, by its name.

    Examples:
        >>> import numpy as np
        >>> by_side(np.array([1, 1, 2]), np.array([0, 0, 0]), ["a"], {"second": np.array([True, True, False])})
        {'side_effective': {'second': {'a': 1, '': 1}}}
    """
    cells = {
        side: {**by_name(whose[inside], code[inside], names), "": effective(whose[inside])}
        for side, inside in sides.items()
    }
    return {BY_SIDE: cells} if cells else {}


def of_rate(row: Mapping[str, Any], rate: str) -> Mapping[str, int]:
    """Return the independent records that a rate is a share of, by group; nothing where that is not known.

    Examples:
        >>> of_rate({"side_effective": {"first": {"a": 9}}}, "fpr"), of_rate({}, "fpr")
        ({'a': 9}, {})
    """
    known: Mapping[str, int] = row.get(BY_SIDE, {}).get(_COUNTED.get(rate, ""), {})
    return known


def words(records: int, independent: int) -> list[str]:
    """Return why intervals are wider than so many records alone would make them; nothing if they are not.

    Examples:
        >>> words(400, 400), words(400, 90)[0].partition(":")[2]
        ([], ' intervals count the 400 as 90, as if all of one person were.')
    """
    if independent >= records:
        return []
    return [
        "Several of the held-out records are of one person (or of what splits keep together) and may be answered "
        f"alike: intervals count the {count(records)} as {count(independent)}, as if all of one person were."
    ]


def sizes(row: Mapping[str, Any], table: str = "groups") -> Mapping[str, int]:
    """Return the independent records of every group (or ``owners``) of an evaluation; all of them if none says less.

    Examples:
        >>> sizes({"group_records": {"a": 40}, "group_effective": {"a": 9}}), sizes({"group_records": {"a": 40}})
        ({'a': 9}, {'a': 40})
    """
    known: Mapping[str, int] = row.get(_EFFECTIVE[table]) or row.get(_COUNTS[table], {})
    return known


def size(row: Mapping[str, Any]) -> int:
    """Return the independent records of an evaluation; all of them if it says nothing else.

    Examples:
        >>> size({"records": 40, "effective_records": 9}), size({"records": 40}), size({})
        (9, 40, 0)
    """
    return int(row.get(ALL, row.get("records", 0)))
