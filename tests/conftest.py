from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

import processes
from evenhand.accounting.budgets import Privacy
from evenhand.comparison import executors
from evenhand.data import Data, wrap
from evenhand.data.sources import digits
from evenhand.mechanism.make_plan import Plan, plan
from evenhand.training.guards import coupling_guard

collect_ignore = ["house/typed_use.py"]
"""Uses for type checkers only: they are never run."""

torch.set_num_threads(1)
os.environ["EVENHAND_STATE"] = tempfile.mkdtemp(prefix="evenhand-tests-")


@pytest.fixture(autouse=True)
def _few_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other things need not wait for a hundred draws of batches before every training."""
    if request.path.name != "test_coupling.py":
        monkeypatch.setattr(coupling_guard, "DRAWS", 4)
        monkeypatch.setattr(coupling_guard, "LOOKS", 2)


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Workers of a comparison need not import torch for seconds; ``test_executors.py`` has some that do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "START", "forkserver")
        patch.setattr(executors, "_serve", processes.Serve())
        yield


@pytest.fixture(scope="session")
def digit_data() -> tuple[Data, Data]:
    return digits()


@pytest.fixture
def tiny() -> Data:
    """Forty records of two classes, in two groups and two owner classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    return wrap(inputs, [i % 2 for i in range(40)], groups=["a", "b"] * 20, owners=["x"] * 30 + ["y"] * 10)


@pytest.fixture
def tiny_plan(tiny: Data) -> Plan:
    return plan("dpsgd", Privacy(3, 1e-3), data=tiny.facts, epochs=3, batch_size=8)
