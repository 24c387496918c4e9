"""Write what the page of a run says about its decision: what it changed, and whom other decisions would serve.

What changed is read from one line of metrics.jsonl as it may be shared: nothing new about a small group is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand import untrusted
from evenhand._numbers import bare_percent, percent
from evenhand.reporting.charts import lines
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.metrics import CLASSES, ORDINAL
from evenhand.reporting.page import Bullets, Commands, Section, Table, Words, figure
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
    ends: list[Mapping[str, Any]] = [
        next((one for one in rows if one["tau"] == strength), {}) for strength in (tau, 0.0)
    ]
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
    records = effective_records.sizes(row)
    moved = [
        share - known
        for name, share in row.get("groups", {}).items()
        if records.get(name, 0) >= FEWEST and share is not None and (known := before.get(name)) is not None
    ]
    if len(moved) < 2:
        return ""
    return f"; groups of {FEWEST} records or more {_points(min(moved))} to {_points(max(moved))}"


def _listed(words: str, names: Mapping[str, str], after: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    told = [
        f"{words_of} {_instead(new, old)}"
        for name, words_of in names.items()
        if (new := after.get(name)) is not None and (old := before.get(name)) is not None
    ]
    return f"{words}: {listed(told)}." if told else ""


def _instead(after: float, before: float) -> str:
    return f"{percent(after, 1000)} instead of {percent(before, 1000)} ({_points(after - before)} points)"


def _points(difference: float) -> str:
    return f"{'+' if difference > 0 else ''}{bare_percent(difference)}"


_FRONTIER: untrusted.Shape = [{"tau": (int, float), "accuracy": (int, float)}]
_ENDS = {"accuracy": "overall", "balanced": "mean of all classes", "worst": "worst class"}


def frontier_section(curves: Sequence[Mapping[str, Any]]) -> Section | None:
    """Return the part of a page on whom other decisions of the same training would serve; None without counts.

    Examples:
        >>> rows = [{"tau": tau, "accuracy": 0.9, "balanced": 0.8, "worst": tau / 10} for tau in (0.0, 1.0)]
        >>> section = frontier_section([{"goal": "overall", "tau": 0.0, "frontier": rows}])
        >>> section.blocks[2].rows[1]
        ['1', '90.0', '80.0', '10.0']
    """
    last = curves[-1] if curves else {}
    rows = last.get("frontier")
    if not rows or not untrusted.fits(rows, _FRONTIER):
        return None

    def points(key: str) -> list[tuple[float, float]]:
        return [(float(row["tau"]), _hundred(row.get(key))) for row in rows]

    goal, tau = last.get("goal"), last.get("tau")
    words = Words(
        f"Answers of this run serve the goal {goal} (tau {_strength(tau)}). tau is the strength of an offset that "
        "lifts rare labels; it can be moved without training anew and at no further cost. Measured on the held-out "
        "records as they are."
    )
    at = float(tau) if isinstance(tau, int | float) and not str(goal).startswith("parity") else None
    chart = figure(
        lambda size: lines(
            {name: points(key) for key, name in _ENDS.items()},
            title="Accuracy overall, of the mean class and of the worst class over tau",
            x_label="tau",
            y_label="correct, %",
            highlight=_ENDS["worst"],
            band=None if at is None else (at, at, f"chosen: tau {at:g}"),
            size=size,
        )
    )
    cells = [[_strength(row["tau"]), *(_cell(row.get(key)) for key in _ENDS)] for row in rows]
    table = Table(["tau", *(f"{name}, %" for name in _ENDS.values())], cells, "One training, other decisions.")
    move = Commands("evenhand adjust RUN --goal balanced      # or --goal worst, or --tau NUMBER")
    few = [Words(too_few)] if (too_few := not_shown(rows[-1])) else []
    return Section("Whom other decisions would serve", [words, *few, chart, table, move])


def not_shown(row: Mapping[str, Any]) -> str:
    """Return why a line of the frontier names no worst class; empty if it may.

    Examples:
      >>> not_shown({"classes_not_shown": 2}).split(".")[0], not_shown({"classes_not_shown": 0})
      ('2 classes have too few held-out records to be shown', '')
    """
    few = row.get("classes_not_shown")
    if not isinstance(few, int) or few < 1:
        return ""
    many = "1 class has" if few == 1 else f"{few} classes have"
    return (
        f"{many} too few held-out records to be shown. The worst served may be among them, so no class is called the "
        "worst. Hold out more records (--test-share), or look at them yourself: evenhand report RUN --full."
    )


def _cell(value: Any) -> str:
    return f"{_hundred(value):.1f}" if isinstance(value, int | float) else "not shown"


def _hundred(value: Any) -> float:
    return 100 * float(value) if isinstance(value, int | float) else math.nan


def _strength(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "chosen on held-out records"
