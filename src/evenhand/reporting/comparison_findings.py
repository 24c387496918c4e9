"""Writes what a comparison found, one sentence each: who is served worst or pays most, and which method is better.

A group or a method is named only if it is told apart from every other, at a level that is corrected for everything that
the page looks at: where nothing differs, one comparison in twenty names anything at all. Methods that do not beat the
most common label come first, groups with too few held-out records last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from evenhand._numbers import NO_BREAK, bare_percent, ends_in_words, points
from evenhand.reporting import metrics, replicas
from evenhand.reporting.comparison_sections import Entry, difference, plain
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.reporting.text import label, listed
from evenhand.reporting.uncertainty import FEWEST, LEVEL

_FIGURES = 3
"""Figures that a sentence gives; the tables have all."""
_GROUPS = 12
"""Small groups that a sentence lists."""


def corrected(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with the level at which they may name a group: 5 % over all that the page looks at.

    Examples:
        >>> rows = {0: {"groups": {"a": 0.9, "b": 0.8}, "group_records": {"a": 50, "b": 50}}}
        >>> [entry.level for entry in corrected([Entry("dpsgd", epsilon, rows=rows) for epsilon in (1.0, 3.0)])]
        [0.975, 0.975]
    """
    level = 1 - (1 - LEVEL) / _families(entries)
    return [dataclasses.replace(entry, level=level) for entry in entries]


def _families(entries: Sequence[Entry]) -> int:
    """Return how many questions are asked: per entry who is worst and who pays most, per promise who is best."""
    groups = [len(replicas.large(entry.rows)) > 1 for entry in entries]
    worst = sum(groups)
    pays = sum(several and bool(entry.costs) for several, entry in zip(groups, entries, strict=True))
    promises = [promise for promise, rivals in _rivals(entries).items() if len(rivals) > 1]
    asked = max((len(entry.asked) for entry in entries), default=0)
    changed = sum(name in _CHANGED for entry in entries for name in entry.against)
    return max(1, worst + pays + changed + 2 * len(promises) + asked * (len(promises) + len(entries)))


_CHANGED = {"accuracy": "over all records", "worst": "in the worst group"}


def changed(entry: Entry, against: Callable[[float], Mapping[str, Estimate]]) -> Entry:
    """Return the entry with its differences to the baseline at the level of ``corrected``.

    Args:
        entry: from ``corrected``, with its differences at 95 %.
        against: gives the same differences at another level.

    Examples:
        >>> wide = {"accuracy": Estimate(5.0, 1.0, 9.0, 3), "gap": Estimate(0.0, -9.0, 9.0, 3)}
        >>> sorted(changed(Entry("psac", 3.0, against=wide), lambda level: wide).changed)
        ['accuracy']
    """
    known = against(entry.level) if entry.against else {}
    return dataclasses.replace(entry, changed={name: known[name] for name in _CHANGED if name in known})


def findings(entries: Sequence[Entry], least: int = LEAST, baseline: str = "") -> list[str]:
    r"""Return what the comparison found, one sentence each; names below ``least`` records come without their number.

    ``baseline`` is the method that the entries' differences are counted against.

    Examples:
        >>> rows = {seed: {"accuracy": 0.7, "records": 99, "majority": 0.8, "groups": {}} for seed in range(3)}
        >>> print(findings([Entry("dpsgd", 3.0, seeds=3, rows=rows)])[0].replace("\u00a0", " "))
        dpsgd at epsilon 3 does not beat answering always the most common label, right for 80 % of held-out records.
    """
    done = [entry for entry in entries if entry.seeds]
    private = [entry for entry in done if entry.private]
    asked = _asked(private or done)
    sentences = [
        *(_baseline(done), *asked, *_groups(private or done), *_methods(private)),
        *(_against(private, baseline), _few(done, least)),
    ]
    return [sentence for sentence in sentences if sentence]


def lead(entries: Sequence[Entry]) -> str:
    """Return the headline: methods that beat nothing, then the metric asked for, else who is served worst or pays most.

    Examples:
        >>> lead([])
        'No run was finished, so there is nothing to compare yet.'
    """
    done = [entry for entry in entries if entry.seeds]
    if not done:
        return "No run was finished, so there is nothing to compare yet."
    private = [entry for entry in done if entry.private]
    first = [sentence for sentence in (_baseline(done), *(_asked(private) or _groups(private or done))[:1]) if sentence]
    return " ".join(first) or finding(_middle(private or done))


def finding(entry: Entry) -> str:
    r"""Return one sentence on one method at one promise.

    Examples:
        >>> accuracy = Estimate(0.84, 0.81, 0.87, 900)
        >>> print(finding(Entry("dpsgd", 3.0, seeds=3, metrics={"accuracy": accuracy})).replace("\u00a0", " "))
        Under dpsgd at epsilon 3, 84 % of held-out records are answered correctly (95 % interval 81 to 87).
    """
    if not entry.seeds:
        return f"{entry.method} at {entry.promise} has no finished run."
    costed = bool(entry.costs and entry.pays_most)
    group, cost = (entry.pays_most, entry.costs) if costed else (entry.worst_group, {})
    if group and cost:
        words = f"{label(group, 60)} pays most: {_points(cost[group])}; all records together {points(entry.cost.value)}"
    elif group:
        share = entry.groups[group]
        words = f"{label(group, 60)} is served worst: {_percent(share)} correct, {_percent(entry.accuracy)} overall"
    else:
        words = f"{_percent(entry.accuracy)} of held-out records are answered correctly"
        if math.isfinite(entry.accuracy.low):
            words += f" (95{NO_BREAK}% interval {ends_in_words(entry.accuracy.low, entry.accuracy.high, 100)})"
    return f"Under {_named(entry)}, {words}."


def _baseline(entries: Sequence[Entry]) -> str:
    """Return a sentence on methods that do not beat the most common label; empty if all do."""
    weak = [entry for entry in entries if entry.gain.measured and not entry.gain.low > 0]
    if not weak:
        return ""
    worse = [entry for entry in weak if entry.gain.value <= 0]
    chosen = worse or weak
    verb = ("do" if len({entry.method for entry in chosen}) > 1 else "does") + " not "
    verb += "beat" if worse else "measurably beat"
    rate = f"{bare_percent(chosen[0].majority, 0)}{NO_BREAK}%"
    return f"{_all_named(chosen)} {verb} answering always the most common label, right for {rate} of held-out records."


def _groups(entries: Sequence[Entry]) -> list[str]:
    """Return one sentence per group that is named, over all methods and promises at which it is; else that none is.

    Named is who pays most, where the costs of privacy are known and tell somebody apart, else who is served worst.
    """
    several = [entry for entry in entries if len(replicas.large(entry.rows)) > 1]
    if not several:
        return []
    for costed in (True, False):
        named: dict[str, list[Entry]] = {}
        for entry in several:
            named.setdefault((entry.pays_most if entry.costs else "") if costed else entry.worst_group, []).append(
                entry
            )
        verb = "pays most for privacy" if costed else "is served worst"
        sentences = [
            f"{label(group, 60)} {verb} under {_where(chosen, several)}: {_figures(group, chosen, costed)}."
            for group, chosen in named.items()
            if group
        ]
        if sentences:
            return sentences
    shares = [
        replicas.share(entry.rows, entry.split, name).value for entry in several for name in replicas.large(entry.rows)
    ]
    low, high = bare_percent(min(shares), 0), bare_percent(max(shares), 0)
    return [
        f"No group can be told to be served worse than all others: accuracy lies between {low} and {high}{NO_BREAK}%, "
        "and which group is lowest may be chance."
    ]


def _asked(entries: Sequence[Entry]) -> list[str]:
    """Return one sentence per metric that the comparison was asked for: who is best in it, and which group worst."""
    names = dict.fromkeys(name for entry in entries for name in entry.asked)
    told = [part for name in names for part in (_by_metric(name, entries), _worst_by(name, entries))]
    return [sentence for sentence in told if sentence]


def _by_metric(metric: str, entries: Sequence[Entry]) -> str:
    """Return the values of all methods in a metric at the promise in the middle, and whether one is told to be best."""
    known = [entry for entry in entries if metric in entry.metrics]
    if not known:
        return ""
    promise = _middle(known).promise
    better = metrics.higher_is_better(metric)
    ranked = sorted(
        (entry for entry in known if entry.promise == promise),
        key=lambda entry: (-1 if better else 1) * entry.metrics[metric].value,
    )
    figures = [f"{plain(entry.metrics[metric])} under {label(entry.method, 40)}" for entry in ranked[:_FIGURES]]
    words = f"{metric} at {promise}: {', '.join(figures)}"
    if len(ranked) < 2:
        return f"{words}."
    rows = {entry.method: entry.rows for entry in ranked}
    winner = replicas.best_by(metric, rows, ranked[0].split, level=ranked[0].level)
    return f"{words}; {f'{label(winner, 40)} is best' if winner else 'no method can be told to be best'}."


def _worst_by(metric: str, entries: Sequence[Entry]) -> str:
    """Return the group that fares worst in a metric under some method at the promise in the middle; empty if none."""
    entry = next((entry for entry in entries if entry.promise == _middle(entries).promise), None)
    group = "" if entry is None else replicas.worst_by(metric, entry.rows, entry.split, level=entry.level)
    if entry is None or not group or group not in entry.asked.get(metric, {}):
        return ""
    whole = f", against {entry.metrics[metric].value:.3g} overall" if metric in entry.metrics else ""
    figure = plain(entry.asked[metric][group])
    return f"{label(group, 60)} fares worst in {metric}, {figure} under {_named(entry)}{whole}."


def _methods(entries: Sequence[Entry]) -> list[str]:
    """Return one sentence per measure on the method that is better than all others; else that none can be told."""
    sentences, contested = [], {promise: rivals for promise, rivals in _rivals(entries).items() if len(rivals) > 1}
    for words, worst in (
        ("is more accurate than every other private method", False),
        ("serves the worst group best", True),
    ):
        winners: dict[str, list[str]] = {}
        for promise, rivals in contested.items():
            winners.setdefault(_better(rivals, worst), []).append(promise)
        sentences += [
            f"{label(method, 40)} {words} at {listed(promises)}: {_shares(method, promises[-1], contested, worst)}."
            for method, promises in winners.items()
            if method
        ]
    if contested and not sentences:
        sentences.append(
            "No private method can be told to be better than all others, over all records or in the worst group."
        )
    return sentences


def _against(entries: Sequence[Entry], baseline: str) -> str:
    """Return one sentence on what changed against the baseline: who is better or worse in what; empty without one."""
    asked = [entry for entry in entries if entry.changed]
    if not asked:
        return ""
    parts = []
    for name, words in _CHANGED.items():
        for sign, verb in ((1, "better"), (-1, "worse")):
            known = [entry for entry in asked if name in entry.changed]
            chosen = [e for e in known if min(sign * e.changed[name].low, sign * e.changed[name].high) > 0]
            if chosen:
                middle = _middle(chosen)
                where = f" under {_named(middle)}" if len(chosen) > 1 else ""
                figure = f"{difference(middle.changed[name])} points{where}"
                parts.append(f"{_all_named(chosen)} {_is(chosen)} {verb} {words}, {figure}")
    if not parts:
        return f"Against {label(baseline, 40)} no difference can be told from chance."
    return f"Against {label(baseline, 40)}: {'; '.join(parts)}; no other difference can be told from chance."


def _is(entries: Sequence[Entry]) -> str:
    return "are" if len({entry.method for entry in entries}) > 1 else "is"


def _few(entries: Sequence[Entry], least: int) -> str:
    """Return a sentence on groups with too few held-out records; empty if there are none."""
    sizes = {name: count for entry in entries for name, count in replicas.small(entry.rows).items()}
    sizes |= {name: count for entry in entries for name, count in entry.small.items()}
    if not sizes:
        return ""
    shown = [
        f"{label(name, 60)} ({f'fewer than {least}' if count < least else count})"
        for name, count in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    more = [f"{len(shown) - _GROUPS} more"] if len(shown) > _GROUPS else []
    return f"Too few held-out records to tell (fewer than {FEWEST}): {listed(shown[:_GROUPS] + more)}."


def _rivals(entries: Sequence[Entry]) -> dict[str, dict[str, Entry]]:
    """Return the private methods at each promise, by name."""
    rivals: dict[str, dict[str, Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.epsilon or 0.0):
        if entry.private and entry.rows:
            rivals.setdefault(entry.promise, {})[entry.method] = entry
    return rivals


def _better(rivals: Mapping[str, Entry], worst: bool) -> str:
    first = next(iter(rivals.values()))
    groups = replicas.large(first.rows) if worst else []
    if worst and len(groups) < 2:
        return ""
    rows = {method: entry.rows for method, entry in rivals.items()}
    return replicas.better_method(rows, first.split, groups, level=first.level)


def _shares(method: str, promise: str, contested: Mapping[str, Mapping[str, Entry]], worst: bool) -> str:
    """Return the figures of the better method and of the next best at one promise."""
    rivals = contested[promise]
    values = {name: entry.worst if worst else entry.accuracy for name, entry in rivals.items()}
    ranked = sorted((name for name in values if name != method), key=lambda name: -values[name].value)
    words = f"{_interval(values[method])} at {promise}" if len(contested) > 1 else _interval(values[method])
    return words + (f", next {label(ranked[0], 40)} with {_interval(values[ranked[0]])}" if ranked else "")


def _figures(group: str, entries: Sequence[Entry], costed: bool) -> str:
    """Return a group's figures at the promise in the middle, the worst first."""
    promise = _middle(entries).promise
    chosen = [entry for entry in entries if entry.promise == promise]
    if costed:
        chosen = sorted(chosen, key=lambda entry: -entry.costs[group].value)
        paid = [f"{_points(entry.costs[group])} under {_named(entry)}" for entry in chosen[:_FIGURES]]
        return f"{', '.join(paid)}; all records together pay {points(chosen[0].cost.value)}"
    chosen = sorted(chosen, key=lambda entry: entry.groups[group].value)
    served = [f"{_interval(entry.groups[group])} correct under {_named(entry)}" for entry in chosen[:_FIGURES]]
    return f"{', '.join(served)}, against {_percent(chosen[0].accuracy)} overall"


def _where(chosen: Sequence[Entry], all_entries: Sequence[Entry]) -> str:
    """Return where a group is named: everywhere, or which methods at which promises."""
    if len(chosen) == len(all_entries):
        return "every method and promise" if len(chosen) > 1 else _named(chosen[0])
    if len(chosen) > _FIGURES:
        return f"{len(chosen)} of {len(all_entries)} methods and promises"
    return _all_named(chosen)


def _all_named(entries: Sequence[Entry]) -> str:
    """Return methods with their promises, each method once."""
    methods: dict[str, list[Entry]] = {}
    for entry in entries:
        methods.setdefault(entry.method, []).append(entry)
    promises = {tuple(entry.promise for entry in part if entry.private) for part in methods.values()}
    if len(promises) == 1 and all(entry.private for entry in entries):
        return f"{listed([label(method, 40) for method in methods])} at {listed(list(promises.pop()))}"
    several = [
        f"{label(method, 40)} at {listed([entry.promise for entry in part])}"
        if all(entry.private for entry in part)
        else listed([_named(entry) for entry in part])
        for method, part in methods.items()
    ]
    return several[0] if len(several) == 1 else f"{', '.join(several[:-1])}, and {several[-1]}"


def _middle(entries: Sequence[Entry]) -> Entry:
    ranked = sorted(entries, key=lambda entry: entry.epsilon or 0.0)
    promises = list(dict.fromkeys(entry.promise for entry in ranked))
    middle = promises[len(promises) // 2]
    return next(entry for entry in ranked if entry.promise == middle)


def _named(entry: Entry) -> str:
    return f"{label(entry.method, 40)}{f' at {entry.promise}' if entry.private else ', which is not private'}"


def _points(estimate: Estimate) -> str:
    ends = ends_in_words(estimate.low, estimate.high) if math.isfinite(estimate.low) else "not known"
    return f"{points(estimate.value)} (95{NO_BREAK}% interval {ends})"


def _interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return _percent(estimate)
    return f"{_percent(estimate)} ({ends_in_words(estimate.low, estimate.high, 100)})"


def _percent(estimate: Estimate) -> str:
    return f"{bare_percent(estimate.value, 0)}{NO_BREAK}%"
