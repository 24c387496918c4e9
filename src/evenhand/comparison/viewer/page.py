"""Lays out runs beside each other as one page: what was promised and spent, two compared, the frontier, the planner.

The page is the same on the local server and in a file of its own. On the server a dial has many values and each
position is answered when it is asked for; the file carries the answers of fewer positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenhand._numbers import MISSING, NO_BREAK, count, interval, percent
from evenhand.comparison import recommend
from evenhand.comparison.viewer import planner
from evenhand.comparison.viewer.released import ReleasedRun, Strength
from evenhand.errors import UsageError
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.page import document
from evenhand.reporting.text import label
from evenhand.terminal import progress_bar

TEMPLATE, STYLE, SCRIPT = "viewer.html.j2", "viewer.css", "viewer.js"
_LONGEST = 60
_SIGN = f"{NO_BREAK}%"


def names(runs: Sequence[ReleasedRun]) -> list[str]:
    """Return a name for each run: that of its folder, with a number where two are alike."""
    chosen: list[str] = []
    for run in runs:
        name = label(run.name, _LONGEST)
        alike = sum(other.name == run.name for other in runs[: len(chosen)])
        chosen.append(f"{name} ({alike + 1})" if alike else name)
    return chosen


def live(runs: Mapping[int, ReleasedRun], failures: Sequence[str] = ()) -> str:
    """Return the page for the local server, which answers the planner and shows the reports.

    Args:
      runs: the runs that can be read, by the number that the server knows them by.
      failures: a sentence for each run that can no longer be read.
    """
    every = list(runs.values())
    plans = [_dials(run, fine=True) | {"run": number} for number, run in runs.items()]
    reports = [None if run.report() is None else number for number, run in runs.items()]
    return _page(every, plans, failures, reports=reports, ask=True)


def exported(runs: Sequence[ReleasedRun], *, progress: bool | None = None) -> str:
    """Return the page as one file that loads and sends nothing; the planner's answers are in it."""
    answered: dict[str, dict[str, Any]] = {}
    distinct = {run.plan.digest: run for run in runs if not planner.lacks(run.plan)}
    with progress_bar("plans", progress) as tell:
        for number, (digest, run) in enumerate(distinct.items()):
            answered[digest] = _answers(run)
            tell(number + 1, len(distinct))
    plans = [_dials(run, fine=False) | answered.get(run.plan.digest, {}) for run in runs]
    return _page(runs, plans, (), reports=[None] * len(runs), ask=False)


def reply(run: ReleasedRun, position: Sequence[int], kind: str) -> dict[str, str]:
    """Return the planner's answer for one position of the many-valued dials, with the nearest study."""
    if why := planner.lacks(run.plan):
        raise UsageError(why)
    of = planner.dials(run.plan, fine=True)
    figures = planner.answer(run.plan, of, position)
    return _shown(figures | {"Nearest study": planner.study(run.plan, planner.largest(run.plan, of, position), kind)})


def _page(
    runs: Sequence[ReleasedRun],
    plans: Sequence[Mapping[str, Any]],
    failures: Sequence[str],
    *,
    reports: Sequence[int | None],
    ask: bool,
) -> str:
    called, subjects = names(runs), [_subject(run) for run in runs]
    data = {
        "live": ask,
        "kinds": list(recommend.KINDS),
        "runs": [
            {"name": name, "subject": subjects.index(subject), **_figures(run), "planner": plan}
            for name, subject, run, plan in zip(called, subjects, runs, plans, strict=True)
        ],
    }
    rows = [
        {
            "name": name,
            "method": run.plan.method,
            "promise": run.promise,
            "spent": run.spent,
            "accuracy": _in_words(run.overall),
            "worst": _worst(run),
            "report": report,
        }
        for name, run, report in zip(called, runs, reports, strict=True)
    ]
    warnings = [f"{name}: {text}" for name, run in zip(called, runs, strict=True) for text in run.warnings]
    lists = {"rows": rows, "failures": failures, "warnings": warnings, "data": data, "ask": ask}
    connect = "'self'" if ask else ""
    return document(TEMPLATE, "Runs of evenhand", style=STYLE, script=SCRIPT, connect=connect, **lists)


def _subject(run: ReleasedRun) -> tuple[Any, ...]:
    """Return what a run predicts from what: two that differ in it have no accuracies to compare."""
    facts = run.plan.facts
    return facts.labels, facts.inputs, facts.features


def _figures(run: ReleasedRun) -> dict[str, Any]:
    """Return what the script shows of one run."""
    return {
        "method": label(run.plan.method, _LONGEST),
        "promise": run.promise,
        "spent": run.spent,
        "goal": label(run.goal, _LONGEST),
        "tau": None if run.goal.startswith("parity") else run.tau,
        "withheld": run.withheld,
        "overall": _numbers(run.overall),
        "groups": _cells(run.groups),
        "strengths": [_strength(one) for one in run.strengths],
    }


def _strength(one: Strength) -> dict[str, Any]:
    return {
        "tau": one.tau,
        "overall": _numbers(one.overall),
        "balanced": one.balanced,
        "classes": _cells(one.classes),
        "groups": _cells(one.groups),
    }


def _cells(estimates: Mapping[str, Estimate]) -> list[list[Any]]:
    """Return name, value, ends of the interval and records of each; what was not measured is left out."""
    return [[label(name), *_numbers(one)] for name, one in estimates.items() if one.measured]


def _numbers(one: Estimate) -> list[Any]:
    """Return value, ends of the interval, records, and the words for a table of percentages; empty if not measured."""
    if not one.measured:
        return []
    return [round(one.value, 6), round(one.low, 6), round(one.high, 6), one.count, _in_words(one).replace(_SIGN, "")]


def _in_words(one: Estimate) -> str:
    if not one.measured:
        return MISSING
    return f"{percent(one.value, one.count)} ({interval(one.low, one.high, records=one.count)})"


def _worst(run: ReleasedRun) -> str:
    """Return the group that is served worst, where the held-out records can tell which one it is."""
    if run.withheld:
        return f"not shown: {run.withheld}"
    if run.worst is None:
        return "no group stands out" if len(run.groups) > 1 else MISSING
    served = run.groups[run.worst]
    return f"{label(run.worst, _LONGEST)}: {_in_words(served)} of {count(served.count)}"


def _dials(run: ReleasedRun, *, fine: bool) -> dict[str, Any]:
    why = planner.lacks(run.plan)
    if why:
        return {"why": why, "dials": []}
    dials = [
        {"name": label(dial.name, _LONGEST), "values": [f"{value:.3g}" for value in dial.values], "start": dial.start}
        for dial in planner.dials(run.plan, fine=fine)
    ]
    return {"why": "", "dials": dials, "kind": planner.kind(run.plan)}


def _answers(run: ReleasedRun) -> dict[str, Any]:
    """Return the answers of all positions of the few-valued dials, and the nearest study for each promise."""
    of = planner.dials(run.plan, fine=False)
    promises = range(len(of[0].values))
    return {
        "answers": {
            ",".join(map(str, position)): _shown(planner.answer(run.plan, of, position))
            for position in planner.positions(of)
        },
        "studies": {
            kind: [planner.study(run.plan, planner.largest(run.plan, of, [index]), kind) for index in promises]
            for kind in recommend.KINDS
        },
    }


def _shown(figures: Mapping[str, str]) -> dict[str, str]:
    return {name: label(words) for name, words in figures.items()}
