"""Printed numbers: bounds hold as printed, and one run's epsilon reads the same wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from html import unescape
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import evenhand as eh
from evenhand._numbers import promised, rounded_up
from evenhand.comparison.tables import as_markdown
from evenhand.data import wrap
from evenhand.reporting.comparison_page import ComparisonData, render_comparison
from evenhand.reporting.comparison_sections import Entry
from evenhand.runs.folder import Folder
from evenhand.runs.statement_page import render_statement

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)")


@given(st.floats(0, 1e6))
def test_printed_bounds_still_hold(value: float) -> None:
    shown = Decimal(rounded_up(value))
    assert Decimal(repr(value)) <= shown
    assert float(shown) <= value * 1.011 + 1e-6


@given(st.floats(0, 1e3), st.integers(1, 6))
def test_bounds_are_never_rounded_down_by_a_hair(value: float, digits: int) -> None:
    assert Decimal(rounded_up(value, digits)) >= Decimal(repr(value))


def test_a_hair_above_a_promise_shows() -> None:
    assert rounded_up(3.0000000000001) == "3.001"


def trained(out: Path, owners: list[str], **options: object) -> eh.Run:
    """A tiny run with held-out records of every owner."""
    generator = torch.Generator().manual_seed(3)
    train, test = (
        wrap(torch.randn(60, 3, generator=generator), [i % 2 for i in range(60)], groups=["a", "b"] * 30, owners=owners)
        for _ in range(2)
    )
    model = nn.Linear(3, 2)
    return eh.fit(model, train, epochs=2, batch_size=20, out=out, test=test, progress=False, **options)  # type: ignore[arg-type]


def texts(run: eh.Run) -> dict[str, str]:
    """What a reader, a screen reader or a pointer meets on every page about this run."""
    folder = Folder.existing(run.folder.path)
    statement = folder.statement()
    owners = {row["name"]: row for row in statement["owners"]}
    budgets = {name: (row["budget"], row["epsilon"]) for name, row in owners.items() if row["budget"] is not None}
    entry = Entry("dpsgd", 9.0, spent=statement["guarantee"]["epsilon"], seeds=1, budgets=budgets)
    data = ComparisonData("T", [entry], 1e-3, statement["guarantee"]["epsilon"], 2, 60, {}, "")
    pages = {
        "report": run.report().page,
        "comparison": render_comparison(data),
        "statement": render_statement(statement),
    }
    bodies = {name: re.sub(r"(?s)<(style|script)>.*?</\1>", "", page) for name, page in pages.items()}
    measured = r"(?s)<table(?:(?!</table>).)*>tpr<.*?</table>"  # metrics of groups may lie near any number
    bodies["report"], tables = re.subn(measured, "", bodies["report"])
    assert tables, "the report has a table of metrics by group"
    shown = {name: unescape(re.sub("<[^>]+>", " ", body)) for name, body in bodies.items()}
    return shown | {"card": run.card(), "table": as_markdown(data), "words": (folder.path / "statement.md").read_text()}


def near(text: str, value: float) -> set[str]:
    """The printed numbers that can only be meant as this one."""
    return {number for number in NUMBER.findall(text) if abs(float(number) - value) <= 0.01 * value}


def check(run: eh.Run, spent: Mapping[str, float], budgets: Mapping[str, float | None]) -> None:
    pages = texts(run)
    for owner, epsilon in spent.items():
        expected, limit = rounded_up(epsilon), budgets[owner]
        for name, text in pages.items():
            allowed = {expected} | ({promised(limit)} if limit is not None else set())
            assert near(text, epsilon) <= allowed, (name, owner)
        for name in ("report", "statement", "words"):
            assert expected in near(pages[name], epsilon), (name, owner)
    for name, text in pages.items():
        for found in re.findall(r"spent (?:epsilon )?(\d[\d.]*\d)|e\^(\d[\d.]*\d)", text):
            assert "".join(found) in set(map(rounded_up, spent.values())), (name, found)


@pytest.mark.parametrize("noise", [1.0, 0.8])
def test_a_spent_epsilon_reads_the_same_on_every_page(tmp_path: Path, noise: float) -> None:
    run = trained(tmp_path / "run", ["all"] * 60, noise=noise, delta=1e-3)
    spent = {"all": run.folder.statement()["guarantee"]["epsilon"]}
    assert rounded_up(spent["all"]) != f"{spent['all']:.3g}"
    check(run, spent, {"all": None})


def test_and_so_do_those_of_several_owners(tmp_path: Path) -> None:
    budgets = {"strict": 1.3, "open": 7.7}
    privacy = eh.Budgets(budgets, 1e-3)
    run = trained(tmp_path / "run", ["strict", "open"] * 30, privacy=privacy, method="idp_sample")
    spent = {row["name"]: row["epsilon"] for row in run.folder.statement()["owners"]}
    check(run, spent, budgets)
