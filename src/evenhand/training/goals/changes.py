"""Say what changed: against always answering the largest class, against plain outputs, against the decision before.

Everything is read from one line of metrics.jsonl as it may be shared, so that nothing new about a small group is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenhand import untrusted
from evenhand._numbers import bare_percent, percent
from evenhand.reporting.metrics import CLASSES, ORDINAL
from evenhand.reporting.page import Bullets, Section, Words
from evenhand.reporting.text import label, listed
from evenhand.reporting.uncertainty import FEWEST

_NUMBER = (int, float, type(None))
_BEFORE: untrusted.Shape = {"goal": str, "accuracy": _NUMBER, "balanced_accuracy": _NUMBER, "groups": {str: _NUMBER}}
_OVERALL = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy"}
_AT_ONE_TAU = {"accuracy": "accuracy", "balanced": "mean of all classes", "worst": "worst class"}


def remembered(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the line of a new decision keeps of the line before it, which may be shared.

    Examples:
      >>> remembered({"step": 9, "accuracy": 0.5, "groups": {"a": 0.5}})
      {'goal': 'overall', 'accuracy': 0.5, 'balanced_accuracy': None, 'groups': {'a': 0.5}}
    """
    return {
        "goal": str(row.get("goal", "overall")),
        **{name: row.get(name) for name in _OVERALL},
        "groups": dict(row.get("groups", {})),
    }


def changes(row: Mapping[str, Any]) -> list[str]:
    r"""Return one sentence per thing that answers can be compared with; none where nothing was measured.

    Args:
      row: the last line of metrics.jsonl, as it may be shared.

    Examples:
      >>> for text in changes({"records": 400, "accuracy": 0.7, "majority": 0.5, "groups": {}}):
      ...     print(text.replace("\u00a0", " "))
      Against always answering the largest class: accuracy 70.0 % instead of 50.0 % (+20.0 points).
    """
    told = [_against_majority(row), _against_plain(row), _against_before(row)]
    return [sentence for sentence in told if sentence]


def changes_section(row: Mapping[str, Any]) -> Section | None:
    """Return the part of a page on what changed; None where there is nothing to compare with.

    Examples:
      >>> changes_section({}) is None
      True
    """
    lines = [Words(sentence) for sentence in changes(row)]
    return Section("What changed", [Bullets(lines)]) if lines else None


def _against_majority(row: Mapping[str, Any]) -> str:
    """Return the gain over answering without learning: over all records, and in which range those of groups lie."""
    accuracy, majority = row.get("accuracy"), row.get("majority")
    if accuracy is None or majority is None or row.get("targets", CLASSES) not in (CLASSES, ORDINAL):
        return ""
    whole, shares = row.get("metrics", {}).get("base_rate"), row.get("group_metrics", {}).get("base_rate", {})
    constant = {
        name: base if whole > 0.5 else 1 - base for name, base in shares.items() if None not in (whole, base)
    }  # of two classes: the base rate of a group says how often the largest class is right there
    words = f"Against always answering the largest class: accuracy {_instead(accuracy, majority)}"
    return f"{words}{_between(row, constant)}."


def _against_plain(row: Mapping[str, Any]) -> str:
    """Return what the offset of the decision changes against tau 0; empty where there is none."""
    rows, tau = row.get("frontier") or [], row.get("tau")
    if not tau or not untrusted.fits(rows, [{"tau": (int, float)}]):
        return ""
    ends = [next((one for one in rows if one["tau"] == strength), {}) for strength in (tau, 0.0)]
    if not all(ends):
        return ""
    return _listed("Against answers without an offset (tau 0)", _AT_ONE_TAU, *ends)


def _against_before(row: Mapping[str, Any]) -> str:
    """Return what changed since the decision before; empty where there was none."""
    before = row.get("before")
    if before is None or not untrusted.fits(before, _BEFORE):
        return ""
    words = _listed(f"Against the decision before (goal {label(before['goal'], 60)})", _OVERALL, row, before)
    return f"{words[:-1]}{_between(row, before['groups'])}." if words else ""


def _between(row: Mapping[str, Any], before: Mapping[str, float | None]) -> str:
    """Return in which range the changes of accuracy of large groups lie; no group is named, since it may be chance."""
    records = row.get("group_records", {})
    moved = [
        share - known
        for name, share in row.get("groups", {}).items()
        if records.get(name, 0) >= FEWEST and share is not None and (known := before.get(name)) is not None
    ]
    if len(moved) < 2:
        return ""
    return f"; groups of {FEWEST} records or more {_points(min(moved))} to {_points(max(moved))}"


def _listed(words: str, names: Mapping[str, str], after: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    both = {name: (after.get(name), before.get(name)) for name in names}
    told = [f"{names[name]} {_instead(*pair)}" for name, pair in both.items() if None not in pair]
    return f"{words}: {listed(told)}." if told else ""


def _instead(after: float, before: float) -> str:
    return f"{percent(after, 1000)} instead of {percent(before, 1000)} ({_points(after - before)} points)"


def _points(difference: float) -> str:
    return f"{'+' if difference > 0 else ''}{bare_percent(difference)}"
