"""What a notebook shows of a run, a plan, a promise, a statement and a report: tables in which names are text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    inputs, groups = torch.randn(60, 3), [HOSTILE, "b"] * 30
    data = eh.data.wrap(inputs, [0, 1] * 30, groups=groups, owners=groups)
    test = eh.data.wrap(inputs + 1, [0, 1] * 30, groups=groups, owners=groups)
    out: Path = tmp_path_factory.mktemp("notebook") / "run"
    return eh.fit(torch.nn.Linear(3, 2), data, epsilon=3.0, epochs=1, test=test, out=out)


def test_every_display_is_a_table_and_escapes_names(run: Any) -> None:
    shown = {
        "run": run._repr_html_(),
        "plan": run.plan._repr_html_(),
        "statement": run.privacy._repr_html_(),
        "privacy": eh.Privacy(3)._repr_html_(),
        "budgets": eh.Budgets({HOSTILE: 1.0})._repr_html_(),
        "report": run.report()._repr_html_(),
    }
    for name, text in shown.items():
        assert HOSTILE not in text, name
    for name in ("run", "plan", "statement", "privacy", "budgets"):
        assert "<table>" in shown[name]
    assert "&lt;script&gt;" in shown["plan"]
    assert shown["report"].startswith("<iframe srcdoc=")
    assert shown["report"].count("<") == 2, "the page is an attribute, nothing of it is a tag of the notebook"
