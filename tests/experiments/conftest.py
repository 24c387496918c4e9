"""The modules of experiments/, which is no package: imported for a test file and forgotten after it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parents[2] / "experiments"
NAMES = (
    *("results", "page_text", "index_text", "judging", "summarising", "plotting", "correlating", "epsilon_study"),
    *("pooled_tables", "group_curves", "lined", "density_page", "densities", "following", "owner_curves"),
    *("lira_owners", "findings", "adapt_curves", "idp_mnist"),
    *("serving", "serving_data", "serving_page", "serving_studies", "serving_train"),
    *(
        "matched_study",
        "matched_owners",
        "matched_groups",
        "matched_studies",
        "matched_data",
        "matched_settings",
        "matched_page",
    ),
    *("matched", "prior_split", "sad_noise", "ham_ideas", "knn_distances", "papers_tables", "papers"),
    "matched_guides",
)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)
