"""Says what the held-out records of one run can tell: rates per group with intervals, gaps, who is served worst.

A rate of one model on held-out records is a share of a countable number of them, so its interval is Wilson's and that
of a difference is Newcombe's (1998, method 10). They hold the chance of the held-out records, not that of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, TypeVar

from evenhand import untrusted
from evenhand._numbers import bare_percent, count, percent
from evenhand.reporting.charts import lines
from evenhand.reporting.group_metrics import Estimate, GroupFrame, estimate, wilson
from evenhand.reporting.held_out import effective_records, small_cells
from evenhand.reporting.metrics import METRICS, ORDINAL, by_group
from evenhand.reporting.page import Block, Figure, Notes, Section, Table, Words, figure
from evenhand.reporting.text import label, listed
from evenhand.reporting.uncertainty import FEWEST, Split, named_group

_FOLLOWED: untrusted.Shape = {str: {str: (int, float)}}
RATES = ("accuracy", "selection_rate", "tpr", "fpr", "tnr", "precision")
_DISPARITIES = {
    "demographic_parity": ("selection_rate",),
    "equalized_odds": ("tpr", "fpr"),
    "equal_opportunity": ("tpr",),
}


def per_group(row: Mapping[str, Any], *, level: float = 0.95) -> dict[str, dict[str, Estimate]]:
    """Return the rates of one line of metrics.jsonl with their intervals: rate -> group -> estimate.

    ``count`` is the number of records that the rate is a share of. Rates other than accuracy are shares of records only
    where there are two classes; of more classes they are means, and left out here.

    Examples:
        >>> row = {"groups": {"a": 0.5}, "group_records": {"a": 40},
        ...        "group_metrics": {"fpr": {"a": 0.25}, "base_rate": {"a": 0.5}}}
        >>> per_group(row)["fpr"]["a"].count, round(per_group(row)["fpr"]["a"].high, 3)
        (20, 0.469)
    """
    records, independent = row.get("group_records", {}), effective_records.sizes(row)
    positive, selected = by_group(row, "base_rate"), by_group(row, "selection_rate")
    rates: dict[str, dict[str, Estimate]] = {}
    for name in RATES if positive else RATES[:1]:
        rates[name] = {}
        for group, share in by_group(row, name).items():
            whole = {"tpr": positive, "precision": selected}.get(name, {}).get(group, 1.0)
            whole = 1 - positive[group] if name in ("fpr", "tnr") else whole
            counted = round(records.get(group, 0) * whole)
            told = effective_records.of_rate(row, name).get(group, round(independent.get(group, 0) * whole))
            told = min(counted, max(1, told))
            if counted:
                rates[name][group] = Estimate(share, *wilson(share, told, level=level), counted, told)
    return rates


def difference(left: Estimate, right: Estimate) -> Estimate:
    """Return ``left - right`` of two rates with intervals, by Newcombe's method.

    Examples:
        >>> rates = [Estimate(share, *wilson(share, count), count) for share, count in ((56 / 70, 70), (48 / 80, 80))]
        >>> apart = difference(*rates)
        >>> round(apart.value, 4), round(apart.low, 4), round(apart.high, 4)  # Newcombe 1998: 0.0524 to 0.3339
        (0.2, 0.0524, 0.3339)
    """
    apart = left.value - right.value
    below = math.hypot(left.value - left.low, right.high - right.value)
    above = math.hypot(left.high - left.value, right.value - right.low)
    fewer = min(left, right, key=lambda rate: rate.independent)
    return Estimate(
        apart, max(-1.0, apart - below), min(1.0, apart + above), min(left.count, right.count), fewer.independent
    )


def gaps(row: Mapping[str, Any], *, level: float = 0.95, fewest: int = 1) -> dict[str, Estimate]:
    """Return how far apart groups are in each rate, and in parity and odds: largest minus smallest, with intervals.

    Guarantee:
        The true gap lies in the interval with probability of about ``level`` at least: each pair of groups has one
        at ``1 - (1 - level) / pairs``, and the gap is at least the largest lower end and at most the largest upper end.
        Small groups make it wide; those whose rate counts fewer than ``fewest`` records are left out.

    Examples:
        >>> row = {"groups": {"a": 0.9, "b": 0.5}, "group_records": {"a": 400, "b": 400}}
        >>> gap = gaps(row)["accuracy_difference"]
        >>> round(gap.low, 2), round(gap.high, 2)
        (0.34, 0.46)
    """
    groups = len(row.get("group_records", {}))
    if groups < 2:
        return {}
    pairs = groups * (groups - 1) / 2
    single, double = (
        {
            name: {group: rate for group, rate in part.items() if rate.independent >= fewest}
            for name, part in per_group(row, level=1 - (1 - level) / (pairs * times)).items()
        }
        for times in (1, 2)
    )
    wide = {f"{name}_difference": _widest(part) for name, part in single.items() if len(part) > 1}
    for name, rates in _DISPARITIES.items():
        known = [(double if len(rates) > 1 else single).get(rate, {}) for rate in rates]
        if all(len(part) > 1 for part in known):
            parts = [_widest(part) for part in known]
            wide[f"{name}_difference"] = _largest(parts)
    return wide


def _widest(rates: Mapping[str, Estimate]) -> Estimate:
    """Return largest minus smallest rate, with an interval from those of all pairs."""
    every = [difference(rates[one], rates[other]) for one, other in permutations(rates, 2)]
    return _largest([*every, Estimate(0.0, 0.0, 0.0, every[0].count)])


def _largest(parts: Sequence[Estimate]) -> Estimate:
    """Return the largest of several values, and of each end."""
    return Estimate(
        value=max(part.value for part in parts),
        low=max(part.low for part in parts),
        high=max(part.high for part in parts),
        count=min(part.count for part in parts),
    )


def columns(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the ends of all intervals by name: ``fpr_low[<group>]``, ``fpr_difference_low`` and so on.

    Examples:
        >>> ends = columns({"groups": {"a": 0.9, "b": 0.5}, "group_records": {"a": 400, "b": 400}})
        >>> sorted(ends)[:2], round(ends["accuracy_difference_low"], 2)
        (['accuracy_difference_high', 'accuracy_difference_low'], 0.34)
    """
    ends: dict[str, float] = {}
    for name, gap in gaps(row).items():
        ends |= {f"{name}_low": gap.low, f"{name}_high": gap.high}
    for name, estimates in per_group(row).items():
        for group, rate in estimates.items():
            ends |= {f"{name}_low[{group}]": rate.low, f"{name}_high[{group}]": rate.high}
    return ends


_SHOWN = ("selection_rate", "fpr", "tpr", "precision")
"""Rates of the section on errors; the true negative rate is the false positive one the other way round."""


def section(row: Mapping[str, Any]) -> Section | None:
    r"""Return the part of a page on errors of both kinds by group; None unless there are two classes and two groups.

    Examples:
        >>> row = {"group_records": {"a": 80, "b": 80}, "group_metrics": {
        ...     "base_rate": {"a": 0.5, "b": 0.5}, "fpr": {"a": 0.5, "b": 0.1}}}
        >>> section(row).blocks[0].text.partition(' No two')[0]
        'Groups are apart in false positive rate by 40.0 points (95 % interval 20.3 to 56.0; a 50\xa0%, b 10\xa0%).'
    """
    estimates = per_group(row)
    if "base_rate" not in row.get("group_metrics", {}) or len(row.get("group_records", {})) < 2:
        return None
    head = ["group", *(METRICS[name].words.split(":")[0] + ", %" for name in _SHOWN)]
    cells = [[group, *(_cell(estimates.get(name, {}).get(group)) for name in _SHOWN)] for group in row["group_records"]]
    wide = {name: gap for name in _SHOWN if (gap := gaps(row, fewest=FEWEST).get(f"{name}_difference")) is not None}
    told = sorted((name for name in wide if wide[name].low > 0), key=lambda name: -wide[name].value)
    apart = [_apart(name, wide[name], estimates[name], first=place == 0) for place, name in enumerate(told)]
    remarks = [
        f"In brackets: 95 % interval (Wilson), and the records that the rate is a share of; fewer than {FEWEST} are "
        "too few to tell. Intervals of gaps (Newcombe) hold for all pairs of groups together, without such groups.",
        "They hold the chance of the held-out records, which the privacy promise does not cover, not that of training.",
    ]
    rest = [METRICS[name].words.split(":")[0] for name in _SHOWN if name not in told]
    close = f"No two groups can be told apart in {listed(rest)}." if rest else ""
    finding = Words(" ".join(filter(None, [f"Groups are apart in {listed(apart)}." if apart else "", close])))
    intro = "Who is selected, and who is wrongly selected or wrongly left out: rates of the second class by group."
    return Section("Errors per group", [finding, Table(head, cells, intro, folded=False), Notes(remarks)])


def _apart(name: str, gap: Estimate, rates: Mapping[str, Estimate], *, first: bool) -> str:
    """Return how far apart groups are in one rate, and which two are."""
    large = [group for group, rate in rates.items() if rate.independent >= FEWEST]
    high, low = (pick(large, key=lambda group: rates[group].value) for pick in (max, min))
    ends = f"{bare_percent(gap.low)} to {bare_percent(gap.high)}"
    between = ", ".join(f"{label(group)} {percent(rates[group].value)}" for group in (high, low))
    stated = f"95 % interval {ends}" if first else ends
    unit = " points" if first else ""
    return f"{METRICS[name].words.split(':')[0]} by {bare_percent(gap.value)}{unit} ({stated}; {between})"


def bounds_section(curves: Sequence[Mapping[str, Any]], worst: str | None) -> Section | None:
    """Return the part of a page on bounds and thresholds while training; None unless one of them moved or has groups.

    Examples:
        >>> rows = [{"epoch": epoch, "followed": {"threshold Z": {"": 9.0 / epoch}}} for epoch in (1, 2)]
        >>> bounds_section(rows, None).blocks[-1].rows
        [['threshold Z', '', '9', '4.5']]
    """
    rows = [row for row in curves if row.get("followed") and untrusted.fits(row["followed"], _FOLLOWED)]
    if not rows:
        return None

    def values(name: str, group: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(row["followed"].get(name, {}).get(group, math.nan)) for row in rows]

    epochs = [float(row["epoch"]) for row in rows]
    blocks: list[Block] = [
        Words(
            "What the training held each record's gradient to, at each evaluation. These numbers are public, or made "
            "of noisy answers that the budget paid for."
        )
    ]
    picked = [rows[i] for i in sorted({(len(rows) - 1) * part // 4 for part in range(5)})]
    cells = []
    for name, last in rows[-1]["followed"].items():
        if len(last) == 1 and len({value for group in last for value in values(name, group, rows)}) == 1:
            continue
        series = {group or name: list(zip(epochs, values(name, group, rows), strict=True)) for group in last}
        blocks.append(_followed_chart(name, series, worst))
        cells += [[name, group, *(f"{value:.3g}" for value in values(name, group, picked))] for group in last]
    if not cells:
        return None
    head = ["what", "group", *(f"{float(row['epoch']):.3g}" for row in picked)]
    return Section("Bounds over training", [*blocks, Table(head, cells, "After this many epochs.")])


def _followed_chart(name: str, series: Mapping[str, Sequence[tuple[float, float]]], worst: str | None) -> Figure:
    """Return one line per group, or one for all."""
    return figure(
        lambda size: lines(
            series,
            title=f"{name[:1].upper()}{name[1:]} over the training",
            x_label="epoch",
            y_label=name,
            highlight=worst if worst in series else None,
            size=size,
        )
    )


def _cell(rate: Estimate | None) -> str:
    if rate is None or rate.independent < FEWEST:
        return "too few to tell"
    ends = f"{bare_percent(rate.low)}\u2013{bare_percent(rate.high)}"
    return f"{bare_percent(rate.value)} ({ends}, {count(rate.count)})"


FURTHER = ("balanced_accuracy", "roc_auc", "mcc", "log_loss", "rank_mae")


def further(last: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics beside accuracy that a card gives: a few of classes, all of other targets.

    Examples:
        >>> further({"targets": "numbers", "metrics": {"mae": 0.5}})
        {'mae': 0.5}
    """
    if last.get("targets") in (None, ORDINAL):
        return {name: last[name] for name in FURTHER if name in last}
    return {name: value for name, value in last["metrics"].items() if name != "accuracy"}


def recorded(last: Mapping[str, Any]) -> GroupFrame:
    """Return the accuracy overall and per group of one line of metrics.jsonl; groups that it leaves out come last.

    Examples:
        >>> recorded({"accuracy": 0.5, "records": 40, "groups": {"a": 0.5}, "group_records": {"a": 40}}).by_group["a"].count
        40
    """  # noqa: E501
    overall = _share(last.get("accuracy"), last.get("records", 0), effective_records.size(last))
    return GroupFrame(overall=overall, by_group=_shares(last, "groups", last.get("group_records", {})))


def owners(last: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the accuracy per owner of one line of metrics.jsonl; owners that it leaves out come last."""
    return _shares(last, "owners", last.get("owner_records", {}))


def _shares(last: Mapping[str, Any], table: str, records: Mapping[str, int]) -> dict[str, Estimate]:
    """Return the accuracy of every group (or owner) with its interval; those that are left out come last."""
    independent = effective_records.sizes(last, table)
    shares = {
        name: _share(value, records.get(name, 0), independent.get(name)) for name, value in last.get(table, {}).items()
    }
    return small_cells.with_hidden(shares, last, table)


def _share(value: float | None, records: int, independent: int | None) -> Estimate:
    """Return an accuracy with its interval; not measured where targets are real numbers."""
    return estimate(math.nan, 0) if value is None else estimate(value, records, independent)


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


def row_with_column(row: Mapping[str, Any], column: str | None) -> dict[str, Any]:
    """Return one line of metrics.jsonl with the name of the column before every group, where that is known.

    Examples:
        >>> row_with_column({"groups": {"f": 0.9}, "group_metrics": {"fpr": {"f": 0.1}}}, "sex")
        {'groups': {'sex = f': 0.9}, 'group_metrics': {'fpr': {'sex = f': 0.1}}}
    """
    keys = ("groups", "group_records", effective_records.BY_GROUP)
    tables = {key: with_column(row[key], column) for key in keys if key in row}
    metrics = {
        key: {name: with_column(part, column) for name, part in row[key].items()}
        for key in ("group_metrics", effective_records.BY_SIDE)
        if row.get(key)
    }
    return {**row, **tables, **metrics}


def metrics_section(
    metrics: Mapping[str, Mapping[str, float | None]],
    groups: Mapping[str, Estimate],
    ranked: Sequence[str],
    together: Mapping[str, float | None],
) -> Section | None:
    """Return every metric of every group as one table, and every label with its metrics as another; None without any.

    Examples:
        >>> labels = metrics_section({}, {}, [], {"roc_auc": 0.8, "roc_auc[Edema]": 0.8})
        >>> labels.blocks[0].head, labels.blocks[0].rows
        (['label', 'roc auc'], [['Edema', '0.800']])
    """
    columns = {name: of for name, of in metrics.items() if "[" not in name and any(v is not None for v in of.values())}
    tables = [part for part in [_by_label(metrics, ranked, together)] if part is not None]
    if not (columns and groups):
        return Section("Every metric per label", tables) if tables else None
    cells = [
        [name, *_size(groups[name]), *(_figure(values.get(name)) for values in columns.values())] for name in ranked
    ]
    cells.append(["all records", "", *(_figure(together.get(name)) for name in columns)])
    head = ["group", "records", *(name.replace("_", " ") for name in columns)]
    note = "Measured on held-out records; a cell is empty where the metric is undefined for the group, or left out."
    return Section("Every metric per group", [Table(head, cells, note, folded=False), *tables])


def _by_label(
    metrics: Mapping[str, Mapping[str, float | None]], ranked: Sequence[str], together: Mapping[str, float | None]
) -> Table | None:
    """Return metrics of each of several labels over all records, the first also by group; None without labels."""
    parts = [name.partition("[") for name in together if "[" in name]
    stems, labels = (list(dict.fromkeys(part[place].removesuffix("]") for part in parts)) for place in (0, 2))
    if not labels:
        return None
    few = [group for group in ranked[:_ACROSS] if any(of.get(group) is not None for of in metrics.values())]
    rows = [
        [
            name,
            *(_figure(together.get(f"{stem}[{name}]")) for stem in stems),
            *(_figure(metrics.get(f"{stems[0]}[{name}]", {}).get(group)) for group in few),
        ]
        for name in labels
    ]
    first = stems[0].replace("_", " ")
    head = ["label", *(stem.replace("_", " ") for stem in stems), *(f"{first}, {label(group)}" for group in few)]
    return Table(head, rows, "Each label against the rest, over all held-out records, and by group.", folded=False)


_ACROSS = 6
"""Groups that get a column beside each label; --json and metrics.jsonl have all."""


def _size(group: Estimate) -> list[str]:
    return ["left out" if small_cells.hidden(group) else count(group.count)]


def _figure(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3f}"


def span_of_large(groups: Sequence[tuple[float, int]]) -> str:
    """Return from what to what the groups with enough records range, as the end of a sentence; "" of fewer than two.

    Args:
        groups: share and number of records of each group.

    Examples:
        >>> span_of_large([(0.5, 100), (0.75, 40), (1.0, 1)]).replace(chr(160), " ")
        ': groups of 20 records or more range from 50 % to 75 % correct'
    """
    large = [share for share, records in groups if records >= FEWEST]
    if len(large) < 2:
        return ""
    return f": groups of {FEWEST} records or more range from {percent(min(large))} to {percent(max(large))} correct"
