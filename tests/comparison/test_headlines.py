"""Headlines end to end on simulated studies: what is not there is hardly ever named, what is large enough is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenhand.comparison.summary import estimates
from evenhand.reporting import replicas
from evenhand.reporting.comparison_findings import corrected, findings, lead
from evenhand.reporting.comparison_page import ComparisonData, render_comparison
from evenhand.reporting.comparison_sections import Entry
from evenhand.reporting.uncertainty import Split, power
from simulated_studies import MOST, Methods, Study, studies

NAMED = ("is served worst", "pays most", "is more accurate", "serves the worst group best")


def rows(study: Study) -> tuple[dict[int, dict[str, Any]], Split]:
    """The evaluations of a simulated study, as runs write them."""
    values, _, split = study.run()
    sizes = dict(zip(values, study.records, strict=True))
    whole = sum(sizes.values())
    table = {}
    for seed in range(study.replicas):
        groups = {name: shares[seed] for name, shares in values.items()}
        accuracy = sum(groups[name] * sizes[name] for name in groups) / whole
        table[seed] = {"accuracy": accuracy, "records": whole, "groups": groups, "group_records": sizes}
    return table, split


def entry(method: str, table: dict[int, dict[str, Any]], split: Split, **more: Any) -> Entry:
    groups = {name: replicas.share(table, split, name) for name in replicas.names(table)}
    given = {"seeds": len(table), "rows": table, "split": split, "metrics": estimates(table, split), "groups": groups}
    return Entry(method, 3.0, **{**given, **more})


def sentences(entries: list[Entry]) -> str:
    """What table and page print as found."""
    done = corrected(entries)
    return " ".join([lead(done), *findings(done)])


def test_a_page_names_a_group_or_a_method_hardly_ever_where_none_differs() -> None:
    named = 0
    for number, study in enumerate(studies()):
        again = Study(study.records, study.replicas, study.resampled, study.shares, study.between, 10_000 + number)
        (first, split), (second, _) = rows(study), rows(again)
        said = sentences([entry("one", first, split), entry("two", second, split)])
        named += any(words in said for words in NAMED)
    assert named <= MOST == 31


def test_a_page_names_who_pays_hardly_ever_where_all_pay_alike() -> None:
    named = 0
    for number, study in enumerate(studies()):
        private = Study(
            *(study.records, study.replicas, study.resampled),
            *(tuple(share - 0.1 for share in study.shares), study.between, 20_000 + number),
        )
        (before, split), (after, _) = rows(study), rows(private)
        costs = dict.fromkeys(replicas.names(after), replicas.share(after, split))
        named += "pays most" in sentences([entry("dpsgd", after, split, costs=costs, reference=before)])
    assert named <= MOST


@pytest.mark.parametrize("resampled", [False, True])
def test_a_group_that_is_worse_is_named_on_the_page(resampled: bool) -> None:
    def study(seed: int) -> Study:
        return Study((600, 600), 20, resampled, (0.66 if resampled else 0.72, 0.8), 0.02, seed)

    gaps, chances = [], []
    for number in range(10):
        table, split = rows(study(5_000 + number))
        gaps += [row["groups"]["group 1"] - row["groups"]["group 0"] for row in table.values()]
        chances.append(sum(replicas.variance(table, split, name) for name in replicas.names(table)))
    effect, deviation, chance = float(np.mean(gaps)), float(np.std(gaps, ddof=1)), float(np.mean(chances))
    assert power(effect, deviation, 20, split, chance=chance) >= 0.85, "large enough by its own estimate"
    named = 0
    for number in range(100):
        table, split = rows(study(number))
        named += "group 0 is served worst" in sentences([entry("dpsgd", table, split)])
    assert named >= 80


def test_a_better_method_is_named_on_the_page() -> None:
    gain, replicas_each, split = 0.08, 20, Split(1 / 3)

    def tables(seed: int) -> list[dict[int, dict[str, Any]]]:
        shares = Methods(gain, replicas_each, seed).run()
        return [
            {n: {"accuracy": float(value), "records": 1000, "groups": {}} for n, value in enumerate(side)}
            for side in shares
        ]

    pilot = np.concatenate([np.subtract(*Methods(gain, 10, 10_000 + number).run()) for number in range(20)])
    level = corrected([entry(name, table, split) for name, table in zip("ab", tables(0), strict=True)])[0].level
    assert power(float(pilot.mean()), float(pilot.std(ddof=1)), replicas_each, split, level=level) >= 0.85
    named = 0
    for number in range(100):
        better, worse = tables(number)
        text = sentences([entry("better", better, split), entry("worse", worse, split)])
        assert "worse is more accurate" not in text
        named += "better is more accurate than every other private method" in text
    assert named >= 80


def test_the_page_prints_these_sentences() -> None:
    table, split = rows(Study((2000, 2000), 20, False, (0.5, 0.9), 0.01, 1))
    done = corrected([entry("dpsgd", table, split)])
    page = render_comparison(ComparisonData("T", done, 1e-4, None, 1, 4000, {}, ""))
    assert "group 0 is served worst under dpsgd at epsilon 3" in page.replace("\u00a0", " ")


def test_no_interval_of_a_comparison_has_width_zero() -> None:
    row = {"accuracy": 0.75, "balanced_accuracy": 0.75, "roc_auc": 1.0, "mcc": 1.0, "log_loss": 0.3, "records": 8}
    row |= {"groups": {"a": 0.25, "b": 1.0}, "group_records": {"a": 4, "b": 4}}
    for table in ({0: row}, {0: row, 1: row}, dict.fromkeys(range(10), row)):
        for split in (Split(), Split(0.25)):
            single = entry("dpsgd", table, split)
            for name, value in {**single.metrics, **single.groups}.items():
                assert value.low != value.high, name
    assert single.groups["a"].low < 0.25 < single.groups["a"].high
    assert single.worst_group == ""
