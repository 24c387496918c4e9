"""The engine's benchmark runs, compares before it times, and says which bars are missed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [file.stem for file in BENCHMARKS.glob("*.py")]
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


def test_small_cells_are_judged_by_live_bytes(engine: ModuleType) -> None:
    def found(peak: float, *live: float) -> list[str]:
        lean = row("ours, memory mode", 1.1, peak * 2, **{"live_mb": live[1]})
        return engine.misses([row("SGD", 1.0, peak, **{"live_mb": live[0]}), row("ours", 1.1), lean])

    assert found(3.9, 1.0, 1.5) == []
    assert ["1.60 times SGD's live bytes" in line for line in found(3.9, 1.0, 1.6)] == [True]
    assert ["2.00 times SGD's resident memory" in line for line in found(4.1, 1.0, 1.5)] == [True]


def test_every_byte_is_counted(engine: ModuleType, tmp_path: Path) -> None:
    memory = sys.modules["engine_memory"]
    environment = memory.counter(tmp_path)
    if not environment:
        pytest.skip("no compiler")
    told = """
import ctypes, sys
C = ctypes.CDLL(None)
for name in ("live_bytes", "live_peak", "malloc", "calloc", "realloc", "memalign", "aligned_alloc"):
    getattr(C, name).restype = ctypes.c_void_p
size, place, aligned = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p()
made = {
    "malloc": lambda: C.malloc(size(10**6)),
    "calloc": lambda: C.calloc(size(10**3), size(10**3)),
    "memalign": lambda: C.memalign(size(64), size(10**6)),
    "aligned_alloc": lambda: C.aligned_alloc(size(64), size(10**6)),
    "posix_memalign": lambda: C.posix_memalign(ctypes.byref(aligned), size(64), size(10**6)) or aligned.value,
    "realloc": lambda: C.realloc(place(C.malloc(size(5))), size(10**6)),
}
for name, make in made.items():
    C.live_restart()
    before = C.live_bytes()
    held = make()
    during = C.live_bytes()
    C.free(place(held))
    print(name, during - before, C.live_bytes() - before, C.live_peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", told], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, during, after, peak in lines:
        assert 1e6 <= int(during) < 1.01e6, name
        assert abs(int(after)) < 5000, name
        assert int(peak) >= int(during), name


def test_a_method_above_the_bar_is_named(engine: ModuleType) -> None:
    rules = importlib.import_module("rules")
    small, large = {"dpsgd": 1.0, "naive": 1.29, "ino": 1.31}, {"dpsgd": 100.0, "naive": 102.9, "ino": 103.1}
    text, above = rules.markdown({"small": small, "large": large})
    assert above == ["ino on small", "ino on large"]
    assert "| naive | 1.29 (+0.29) | 102.90 (+2.90) |" in text
    assert rules.markdown({"small": {"dpsgd": 1.0, "naive": 0.5}})[1] == []


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
