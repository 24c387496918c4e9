"""Progress is shown where somebody watches: in terminals and notebooks, and nowhere else."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
import torch

from evenhand.mechanism.make_plan import Plan
from evenhand.training import progress
from evenhand.training.progress import NotebookBar, Progress, TerminalBar, in_notebook


class Handle:
    """An output of a cell."""

    def __init__(self, first: dict[str, str]) -> None:
        self.shown = [first["text/plain"]]

    def update(self, picture: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(picture["text/plain"])


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """Pretends that a Jupyter kernel runs this process; gives the outputs of its cell."""
    outputs: list[Handle] = []

    def display(picture: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        outputs.append(Handle(picture))
        return outputs[-1]

    ipython: Any = types.ModuleType("IPython")
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return outputs


def run(plan: Plan, enabled: bool | None, first: int = 0) -> None:
    with Progress(plan, first, enabled=enabled) as shown:
        for position in range(first, plan.steps):
            shown.step(position + 1, torch.tensor([0.5]))


def test_a_notebook_shows_progress_by_default(
    cells: list[Handle], tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    run(tiny_plan, None)
    (output,) = cells
    total = tiny_plan.steps
    assert output.shown[0].startswith(f"step 0/{total} ")
    assert len(output.shown) == total + 2
    assert output.shown[-1].startswith(f"step {total}/{total} " + "\u2588" * 30)
    assert "epsilon 3.000 of 3  loss 0.500  0:00 left" in output.shown[-1]


def test_it_is_not_redrawn_at_every_step(cells: list[Handle], tiny_plan: Plan) -> None:
    run(tiny_plan, None, first=4)
    assert len(cells[0].shown) < tiny_plan.steps
    assert cells[0].shown[0].startswith("step 4/")
    assert cells[0].shown[-1].startswith(f"step {tiny_plan.steps}/")


def test_it_can_be_switched_off(cells: list[Handle], tiny_plan: Plan) -> None:
    run(tiny_plan, False)
    assert cells == []


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace(), types.SimpleNamespace(kernel=None)])
def test_ipython_in_a_terminal_is_no_notebook(shell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not in_notebook()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "kind"), [(Terminal(), TerminalBar), (io.StringIO(), type(None))])
def test_a_terminal_shows_progress_and_a_pipe_does_not(
    stream: io.StringIO, kind: type, tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(tiny_plan, 0, enabled=None) as shown:
        assert type(shown._bar) is kind
        shown.step(1, torch.tensor([]))
    assert ("empty batch" in stream.getvalue()) == (kind is TerminalBar)


def test_a_notebook_bar_with_nothing_left(cells: list[Handle]) -> None:
    NotebookBar(5, 5).stop()
    assert "left" not in cells[0].shown[-1]
