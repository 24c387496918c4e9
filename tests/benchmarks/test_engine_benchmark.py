"""The engine's benchmark runs, compares before it times, and says which bars are missed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [file.stem for file in BENCHMARKS.glob("engine*.py")]
    yield importlib.import_module("engine")
    for name in names:
        sys.modules.pop(name, None)


def row(competitor: str, ratio: float, peak: float = 10.0, **cell: object) -> dict[str, object]:
    where = {"model": "MNIST CNN", "batch": 256, "threads": 1} | cell
    times = {"wall_ms": 5 * ratio, "cpu_ms": 5 * ratio, "ratio": ratio, "quartiles": [ratio, ratio]}
    return where | {"competitor": competitor, "peak_mb": peak} | times


def test_a_small_run_gives_a_table_and_a_file(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", "<!-- benchmark: begin -->", "old", "<!-- benchmark: end -->", "after"]))
    small = "--models logistic --batches 8 --threads 1 --rounds 2 --competitors ours --no-memory"
    arguments = ["engine.py", *small.split(), "--json", str(tmp_path / "found.json"), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", arguments)
    engine.main()
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {entry["competitor"]: entry for entry in found["rows"]}
    assert rows["SGD"]["ratio"] == 1.0
    assert rows["ours"]["cpu_ms"] > rows["SGD"]["cpu_ms"] > 0
    assert 0 < found["deviations"]["logistic regression"]["ours"] < engine.EXACT
    assert f"| logistic regression | 8 | 1 | {rows['SGD']['cpu_ms']:.2f} | {rows['ours']['ratio']:.2f} (" in printed
    assert page.read_text() == f"before\n<!-- benchmark: begin -->\n{printed}<!-- benchmark: end -->\nafter"


def test_a_wrong_competitor_is_not_timed(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "worker", lambda *_: {"ours": 0.02})
    with pytest.raises(SystemExit, match="not the gradient that plain autograd gives"):
        engine.exact("MNIST CNN", ["ours"])


def test_the_deviation_sees_a_gradient_that_is_not_clipped(engine: ModuleType) -> None:
    import torch

    case = engine.CASES["logistic regression"]
    torch.manual_seed(0)
    plain, private = (engine.competitors()[name] for name in ("SGD", "vmap(grad)"))
    assert engine.deviation(private, case.build(), *case.data(4)) < engine.EXACT
    assert engine.deviation(plain, case.build(), *case.data(4)) > 0.1


def test_every_bar_can_be_missed(engine: ModuleType) -> None:
    good = [row("SGD", 1.0), row("ours", 1.1), row("ours, memory mode", 1.3, 15.0), row("Opacus ghost", 1.2)]
    assert engine.misses(good) == []
    bad = [row("SGD", 1.0), row("ours", 1.2), row("ours, memory mode", 1.6, 16.0), row("Opacus ghost", 1.1)]
    assert len(engine.misses(bad)) == 4
    assert engine.misses([row("SGD", 1.0, threads=2), row("ours", 1.24, threads=2)]) == []
    assert len(engine.misses([row("SGD", 1.0)])) == 1


def test_parts_that_were_measured_apart_are_joined(engine: ModuleType) -> None:
    first = {"rounds": 9, "machine": {"cores": 2}, "rows": [row("SGD", 1.0), row("ours", 1.5)]}
    second = {"rounds": 3, "machine": {"cores": 2}, "rows": [row("SGD", 1.1), row("Opacus hooks", 70.0)]}
    found = engine.joined([first, second])
    assert [(each["competitor"], each["ratio"]) for each in found["rows"]] == [
        ("SGD", 1.0),
        ("ours", 1.5),
        ("SGD, without ours", pytest.approx(1.1)),
        ("Opacus hooks", 70.0),
    ]
    assert found["rounds"] == "9 or 3"
