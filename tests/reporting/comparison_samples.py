"""Comparisons to look at: two methods at three promises, with or without a non-private reference."""

from __future__ import annotations

from evenhand.reporting.comparison_findings import corrected
from evenhand.reporting.comparison_page import ComparisonData
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.group_metrics import Estimate

NAMES = ["class 8", *(f"class {i}" for i in range(8))]


def around(value: float, half: float = 5.0) -> Estimate:
    return Estimate(value, value - half, value + half, 3)


def evaluations(groups: dict[str, float], records: int = 20_000) -> dict[int, dict[str, object]]:
    """Three trainings that hardly differ, each with so many held-out records of every group."""
    return {
        seed: {
            "accuracy": 0.9,
            "records": records * len(groups),
            "groups": {name: value / 100 + seed / 1000 for name, value in groups.items()},
            "group_records": dict.fromkeys(groups, records),
        }
        for seed in range(3)
    }


def entry(method: str, epsilon: float | None, groups: dict[str, float], costed: bool = True, **more: object) -> Entry:
    shares = {name: around(value / 100, 0.05) for name, value in groups.items()}
    costs = {name: around(95 - value) for name, value in groups.items()} if costed and epsilon else {}
    metrics = {"accuracy": around(0.9, 0.02), "accuracy_group_min": around(min(groups.values()) / 100, 0.05)}
    given = {"spent": epsilon, "seeds": 3, "metrics": metrics, "groups": shares, "costs": costs, "cost": around(6.0)}
    given |= {"rows": evaluations(groups), "reference": evaluations(dict.fromkeys(groups, 95.0)) if costs else {}}
    return Entry(method, epsilon, **{**given, **more})  # type: ignore[arg-type]


def page_data(names: list[str], research: bool = True, **more: object) -> ComparisonData:
    groups = {name: 50.0 + 40 * i / len(names) for i, name in enumerate(names)}
    better = {name: value + 5 for name, value in groups.items()}
    entries = [
        entry(method, epsilon, found, costed=research)
        for method, found in (("dpsgd", groups), ("other", better))
        for epsilon in (1.0, 3.0, 8.0)
    ]
    entries += [entry("sgd", None, dict.fromkeys(names, 95.0))] if research else []
    given = {"title": "T", "delta": 1e-4, "together": 20.0, "runs": 18, "records": 450, "facts": {}, "reproduce": "r"}
    return ComparisonData(entries=corrected(entries), research=research, **{**given, **more})  # type: ignore[arg-type]
