"""Leaves figures of small groups out of what may be shared: held-out records are people too, and nothing protects them.

A group with fewer held-out records than a stated number shows no figure, only that it has fewer. If those left out have
together fewer records than that number, the next smallest group is left out as well: otherwise their figure would
follow from the total and the others. So of two groups with one too small, neither is shown.

The same holds within groups for the records of one class (or with one label), of which rates such as the true positive
rate are shares: where a group has too few of either side, every figure that tells the sides apart is left out. It holds
for all records together with any number of classes: balanced accuracy is a mean over classes, so that the figure of a
class with too few records would follow from it and those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out import effective_records

LEAST = 10
"""Held-out records that a group needs for a figure of it to be shared; of one person several count for less."""
LEFT_OUT = "left_out"
"""Where an evaluation that may be shared says which groups and owners it leaves out, and how many records they need."""
_BY_GROUP = ("groups", "group_records", "group_log_loss", effective_records.BY_GROUP)
_BY_OWNER = ("owners", "owner_records", effective_records.BY_OWNER)
_OF_SIDES = ("base_rate", "tpr", "fpr", "tnr", "precision", "balanced_accuracy", "mcc", "roc_auc", "pr_auc")
"""Metrics of two classes from which the answers about the records of one of them follow."""
_OF_LABEL = ("base_rate", "roc_auc", "pr_auc")
FEWEST_OF_CLASS = "fewest_of_class"
"""Where a full evaluation says how many held-out records its smallest class has, by group; never shared."""
_EVERYBODY = ""


def left_out(sizes: Mapping[str, float], least: int = LEAST, *, overlap: bool = False) -> list[str]:
    """Return the groups whose figures are not shared.

    Args:
        sizes: held-out records by group; a group without any has nothing to leave out.
        least: records that a figure needs; 0 or 1 leaves out nothing.
        overlap: whether a person may be in several groups, so that sizes of groups do not add up.

    Examples:
        >>> left_out({"a": 500, "b": 30, "c": 4}), left_out({"a": 500, "b": 7, "c": 4}), left_out({"a": 500, "b": 30})
        (['b', 'c'], ['b', 'c'], [])
        >>> left_out({"a": 500, "b": 5, "c": 5}), left_out({"a": 500, "b": 5, "c": 5}, overlap=True)
        (['b', 'c'], ['a', 'b', 'c'])
    """
    together = max if overlap else sum
    present = sorted((name for name in sizes if sizes[name]), key=lambda name: sizes[name])
    chosen = [name for name in present if sizes[name] < least]
    for name in present[len(chosen) :]:
        if not chosen or together(sizes[one] for one in chosen) >= least:
            break
        chosen.append(name)
    return [name for name in sizes if name in chosen]


def suppress(estimates: Mapping[str, Estimate], names: Collection[str], least: int = LEAST) -> dict[str, Estimate]:
    """Return the estimates without the figures of ``names``; ``count`` of these is ``least``, and nothing is measured.

    Examples:
        >>> suppress({"a": Estimate(0.5, 0.1, 0.9, 4)}, ["a"])
        {'a': Estimate(value=nan, low=nan, high=nan, count=10)}
    """
    hidden = Estimate(math.nan, math.nan, math.nan, least)
    return {name: hidden if name in names else estimate for name, estimate in estimates.items()}


def by_size(estimates: Mapping[str, Estimate], least: int = LEAST) -> dict[str, Estimate]:
    """Return estimates per group without the figures of those that are too small, whose ``count`` says how small.

    Examples:
        >>> by_size({"a": Estimate(0.5, 0.4, 0.6, 400), "b": Estimate(0.9, 0.8, 1.0, 90)})["b"].value
        0.9
    """
    sizes = {name: estimate.independent for name, estimate in estimates.items()}
    overlap = any(estimate.effective is not None for estimate in estimates.values())
    return suppress(estimates, left_out(sizes, least, overlap=overlap), least)


def hidden(estimate: Estimate) -> bool:
    """Return whether the estimate was left out because of few records.

    Examples:
        >>> hidden(Estimate(math.nan, math.nan, math.nan, 10)), hidden(Estimate(math.nan, 0.0, 1.0, 0))
        (True, False)
    """
    return not estimate.measured and estimate.count > 0


def words(least: int = LEAST) -> str:
    """Return what stands in place of a figure that was left out.

    Examples:
        >>> words(10)
        'left out to protect fewer than 10 records'
    """
    return f"left out to protect fewer than {least} records"


SMALL_CELLS = (
    "groups with too few records, and the next smallest where the rest would follow from the total; rates of too few "
    "records of one class"
)
"""Why figures are missing, as the end of a sentence."""


def at_most(least: int) -> str:
    """Return why groups are not shown, as the end of a sentence.

    Examples:
        >>> at_most(10)
        'fewer than 10 held-out records, or the next smallest beside such a group'
    """
    return f"fewer than {least} held-out records, or the next smallest beside such a group"


def instead(estimate: Estimate, missing: str = "not measured") -> str:
    """Return what stands in place of the figure of a group that has none to show.

    Examples:
        >>> instead(Estimate(math.nan, math.nan, math.nan, 10)), instead(Estimate(math.nan, 0.0, 1.0, 0))
        ('left out to protect fewer than 10 records', 'not measured')
    """
    return words(estimate.count) if hidden(estimate) else missing


@dataclass(frozen=True)
class Hidden:
    """Figures of one evaluation, or of several of the same kind, that are not shared.

    Attributes:
        groups: groups with too few records.
        owners: owners with too few records.
        sides: groups ("" for all records together) with too few records of one class, or with or without one label,
            by what follows the metric's name: "" for two classes, "[Edema]" for a label.
    """

    groups: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    sides: Mapping[str, Collection[str]] = field(default_factory=dict)

    def shows(self, metric: str, group: str = _EVERYBODY) -> bool:
        """Return whether a metric of a group, or of all records, may be shared."""
        stem, bracket, rest = metric.partition("[")
        named = _OF_LABEL if bracket else _OF_SIDES
        return group not in self.groups and not (stem in named and group in self.sides.get(f"{bracket}{rest}", ()))


def too_small(rows: Sequence[Mapping[str, Any]], least: int = LEAST) -> Hidden:
    """Return what is not shared of these evaluations, by the records that a group has in one of them on average.

    Several records of one person count for less, see ``effective_records``.

    Examples:
        >>> row = {"records": 90, "group_records": {"a": 50, "b": 40}, "metrics": {"base_rate": 0.3},
        ...        "group_metrics": {"base_rate": {"a": 0.5, "b": 0.05}}}
        >>> hidden = too_small([row])
        >>> hidden.groups, hidden.shows("tpr", "b"), hidden.shows("tpr", "a"), hidden.shows("tpr"), hidden.shows("brier", "b")
        ((), False, False, True, True)
    """  # noqa: E501
    overlap = any(effective_records.ALL in row for row in rows)

    def few_in(sizes: Mapping[str, float]) -> list[str]:
        return left_out(sizes, least, overlap=overlap)

    def few(table: str) -> tuple[str, ...]:
        return tuple(few_in(_mean([dict(effective_records.sizes(row, table)) for row in rows])))

    sides: dict[str, set[str]] = {}
    for ending in dict.fromkeys(name[9:] for row in rows for name in _tables(row) if name.startswith("base_rate")):
        within, outside = (_mean([_side(row, ending, second) for row in rows]) for second in (True, False))
        small = {name for part in (within, outside) for name in few_in(_groups_only(part))}
        total = {str(place): part.get(_EVERYBODY, 0.0) for place, part in enumerate((within, outside))}
        sides[ending] = small | ({_EVERYBODY} if few_in(total) else set())
    known = [row[FEWEST_OF_CLASS] for row in rows if FEWEST_OF_CLASS in row]
    fewest = [one if isinstance(one, Mapping) else {_EVERYBODY: one} for one in known]  # older runs have one number
    if any(table[_EVERYBODY] < least for table in fewest):
        sides[""] = sides.get("", set()) | {_EVERYBODY}
    sides[""] = sides.get("", set()) | set(few_in(_groups_only(_mean(fewest)) if fewest else {}))
    return Hidden(few("groups"), few("owners"), sides)


def _tables(row: Mapping[str, Any]) -> dict[str, Mapping[str, float | None]]:
    """Return every metric by group, with that over all records under ""."""
    overall, parts = row.get("metrics", {}), row.get("group_metrics", {})
    return {name: {**parts.get(name, {}), _EVERYBODY: overall.get(name)} for name in (*overall, *parts)}


def _side(row: Mapping[str, Any], ending: str, second: bool) -> dict[str, float]:
    """Return how many records of each group, and of all, are in the second class (or not), several of one for less."""
    side = effective_records.SECOND if second else effective_records.FIRST
    known: dict[str, float] | None = row.get(effective_records.BY_SIDE, {}).get(f"{side}{ending}")
    if known is not None:
        return known
    counts = {**effective_records.sizes(row), _EVERYBODY: effective_records.size(row)}
    shares = _tables(row).get(f"base_rate{ending}", {})
    return {
        name: round(counts.get(name, 0) * (share if second else 1 - share))
        for name, share in shares.items()
        if share is not None
    }


def _groups_only(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in sizes.items() if name != _EVERYBODY}


def _mean(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean number of records by name; a name that a table lacks counts as none there."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: round(sum(table.get(name, 0) for table in tables) / len(tables)) for name in names}


def fewest_of_class(truth: Any, code: Any, names: Sequence[str], whose: Any | None) -> dict[str, int]:
    """Return how many independent records the smallest class that occurs has, by group, "" for all records together.

    Groups are listed where there are more than two classes: of two the base rate says it.

    Args:
        truth: the class of each record.
        code: the number of each record's group.
        names: the groups.
        whose: a number for the person of each record, if that is known.

    Examples:
        >>> import numpy as np
        >>> fewest_of_class(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1]), ["a", "b"], None)
        {'': 1, 'a': 1, 'b': 1}
    """
    import numpy as np

    def fewest(rows: Any) -> int:
        classes, place, counts = np.unique(truth[rows], return_inverse=True, return_counts=True)
        if whose is None:
            return int(counts.min())
        return min(effective_records.by_name(whose[rows], place, [str(one) for one in classes.tolist()]).values())

    parts = {}
    if len(np.unique(truth)) > 2:
        members = {name: np.flatnonzero(code == number) for number, name in enumerate(names)}
        parts = {name: fewest(rows) for name, rows in members.items() if len(rows)}
    return {_EVERYBODY: fewest(slice(None)), **parts}


def without(row: Mapping[str, Any], hidden: Hidden) -> dict[str, Any]:
    """Return an evaluation without the figures that are hidden; a metric of one class's records becomes None.

    The mean over labels is taken again over those that are shown.

    Examples:
        >>> without({"accuracy": 0.9, "groups": {"a": 1.0, "b": 0.5}}, Hidden(groups=("b",)))
        {'accuracy': 0.9, 'groups': {'a': 1.0}}
    """

    def rest(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name not in names}

    shown = dict(row)
    for keys, names in ((_BY_GROUP, hidden.groups), (_BY_OWNER, hidden.owners)):
        shown |= {key: rest(row[key], names) for key in keys if isinstance(row.get(key), Mapping)}
    if effective_records.BY_SIDE in row:
        shown[effective_records.BY_SIDE] = {
            side: {name: size for name, size in part.items() if hidden.shows(_rate_of(side), name)}
            for side, part in row[effective_records.BY_SIDE].items()
        }
    groups = [name for name in row.get("group_records", row.get("groups", {})) if name not in hidden.groups]
    tables = _tables(row)
    parts = {
        group: _shown(hidden, {name: table[group] for name, table in tables.items() if group in table}, group)
        for group in (_EVERYBODY, *groups)
    }
    if isinstance(row.get("metrics"), Mapping):
        shown["metrics"] = {name: parts[_EVERYBODY][name] for name in row["metrics"]}
        shown |= {name: value for name, value in shown["metrics"].items() if name in row}
    if isinstance(row.get("group_metrics"), Mapping):
        shown["group_metrics"] = {
            name: {group: parts[group][name] for group in rest(table, hidden.groups)}
            for name, table in row["group_metrics"].items()
        }
    return shown


def _rate_of(side: str) -> str:
    """Return a metric that is shown where the number of records on a side may be: of a label that of the same label.

    Examples:
        >>> _rate_of("second"), _rate_of("first[Edema]")
        ('base_rate', 'base_rate[Edema]')
    """
    _, bracket, rest = side.partition("[")
    return f"base_rate{bracket}{rest}"


def _shown(hidden: Hidden, metrics: Mapping[str, float | None], group: str) -> dict[str, float | None]:
    """Return the metrics of one group, None for those that are hidden, and means over the labels that are shown."""
    shown = {name: value if hidden.shows(name, group) else None for name, value in metrics.items()}
    for stem in _OF_LABEL:
        labels = [name for name in metrics if name.startswith(f"{stem}[")]
        if stem in shown and any(not hidden.shows(name, group) for name in labels):
            defined = [value for name in labels if (value := shown[name]) is not None]
            shown[stem] = sum(defined) / len(defined) if defined else None
    return shown


def shareable(row: Mapping[str, Any], least: int = LEAST) -> dict[str, Any]:
    """Return one evaluation of a model as it may be shared; ``left_out`` names what it leaves out.

    It is the one way from a full evaluation to a file that may be shared: metrics.jsonl, and from it report, card,
    statement and what commands print.

    Examples:
        >>> row = {"records": 104, "groups": {"a": 0.9, "b": 0.5, "c": 1.0}, "group_records": {"a": 60, "b": 40, "c": 4}}
        >>> shareable(row)["left_out"], shareable(row)["groups"]
        ({'least': 10, 'groups': ['b', 'c'], 'owners': []}, {'a': 0.9})
        >>> shareable({"records": 9, "groups": {}})
        {'records': 9, 'groups': {}}
        >>> shareable({"balanced_accuracy": 0.5, "metrics": {"balanced_accuracy": 0.5}, "fewest_of_class": {"": 4}})["metrics"]
        {'balanced_accuracy': None}
    """  # noqa: E501
    hidden = too_small([row], least)
    plain = {key: value for key, value in row.items() if key != FEWEST_OF_CLASS}
    shown = without(plain, hidden)
    if shown == plain:
        return shown
    return {**shown, LEFT_OUT: {"least": least, "groups": list(hidden.groups), "owners": list(hidden.owners)}}


def with_hidden(
    estimates: Mapping[str, Estimate], row: Mapping[str, Any], table: str = "groups"
) -> dict[str, Estimate]:
    """Return estimates by group (or ``owners``) of a shared evaluation, with those that it leaves out at the end.

    Examples:
        >>> with_hidden({}, {"left_out": {"least": 10, "groups": ["b"], "owners": []}})
        {'b': Estimate(value=nan, low=nan, high=nan, count=10)}
    """
    said = row.get(LEFT_OUT, {})
    blank = Estimate(math.nan, math.nan, math.nan, said.get("least", LEAST))
    return {**estimates, **dict.fromkeys(said.get(table, ()), blank)}
