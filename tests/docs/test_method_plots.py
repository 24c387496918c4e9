"""Every method's page shows a picture, and the picture is the one that the method's code gives now."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from evenhand.methods import catalogue
from evenhand.methods.catalogue import DENSITIES

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.syspath_prepend(str(DOCS))
    import _plots

    return _plots.PLOTS


def test_every_method_has_a_picture_on_its_page(plots: dict) -> None:
    names = [*(recipe.name for recipe in catalogue.catalogue()), *DENSITIES]
    assert sorted(set(names) & set(plots)) == sorted(
        name for name in names if (DOCS / "methods" / f"{name}.md").exists()
    )
    for name in plots:
        assert f"](plots/{name}.svg)" in (DOCS / "methods" / f"{name}.md").read_text(), name


def test_pictures_are_what_the_code_draws_now(plots: dict) -> None:
    for name, make in plots.items():
        kept, now = (DOCS / "methods" / "plots" / f"{name}.svg").read_text(), make().drawn()
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", now), f"{name}: run python docs/_plots.py"
        places = [np.array([float(found) for found in NUMBER.findall(text)]) for text in (kept, now)]
        np.testing.assert_allclose(*places, atol=0.3, err_msg=f"{name}: run python docs/_plots.py")
