"""Beside the real Opacus: its interface, its accountant, and its tutorials as examples with an import changed."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenhand as eh
from evenhand.integrations import opacus as ours
from evenhand.integrations.opacus_arguments import Arguments

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent.parent / "shared" / "data"
EXAMPLES = sorted((ROOT / "examples").glob("opacus_*.py"))
SOURCES = {"image": "mnist", "names": "names", "text": "sentiment"}


def test_the_examples_are_short_and_change_imports_only() -> None:
    assert [file.stem for file in EXAMPLES] == ["opacus_image", "opacus_names", "opacus_text"]
    for file in EXAMPLES:
        text = file.read_text()
        assert len(text.splitlines()) <= 40
        assert "from evenhand.integrations.opacus import" in text
        assert "loss.backward()" in text or ".backward()" in text
        assert "private.step" not in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 1000), (0.8, 0.05, 100), (2.0, 0.02, 5000)])
def test_epsilon_is_that_of_its_accountant_but_for_rounding(noise: float, rate: float, steps: int) -> None:
    pytest.importorskip("opacus")
    from opacus.accountants import PRVAccountant, RDPAccountant

    theirs = {"prv": PRVAccountant(), "rdp": RDPAccountant()}
    for accountant in theirs.values():
        accountant.history = [(noise, rate, steps)]
    epsilon = eh.epsilon([(rate, noise, steps)], delta=1e-5)
    assert epsilon == pytest.approx(theirs["prv"].get_epsilon(delta=1e-5), rel=0.02)
    assert epsilon < theirs["rdp"].get_epsilon(delta=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_argument_of_its_engine_is_known_here() -> None:
    real = pytest.importorskip("opacus")
    for name in ("make_private", "make_private_with_epsilon"):
        theirs = set(inspect.signature(getattr(real.PrivacyEngine, name)).parameters) - {"self", "kwargs"}
        mine = set(inspect.signature(getattr(ours.PrivacyEngine, name)).parameters) | set(Arguments.__annotations__)
        assert theirs <= mine


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_a_tutorial_of_opacus_runs_and_its_ledger_verifies(example: Path, tmp_path: Path) -> None:
    name = example.stem.removeprefix("opacus_")
    data = Path(os.environ.get("EVENHAND_DATA", DATA))
    if not (data / SOURCES[name]).exists():
        pytest.skip(f"no files of {SOURCES[name]} here")
    environment = {**os.environ, "EVENHAND_DATA": str(data), "EVENHAND_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / f"opacus-{name}"
    checked = eh.verify(folder)
    assert checked["ok"], checked["problems"]
    assert checked["steps"] == checked["planned"]
    assert f"epsilon {checked['epsilon']:.3f}"[:-1] in done.stdout
    assert (folder / "statement.md").exists()
