"""The benchmark of real models writes its page from what it measured, and says which models miss a bar."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "models.py"
PAGE = "before\n<!-- table sizes: begin -->\nold\n<!-- table sizes: end -->\nafter"


def test_a_small_run_writes_its_page_and_the_same_again_from_its_file(tmp_path: Path) -> None:
    pages = [tmp_path / "first.md", tmp_path / "again.md"]
    found = tmp_path / "found.json"
    small = ["--models", "autoencoder", "--batch", "4", "--rounds", "1", "--json", str(found)]
    for page, options in zip(pages, (small, ["--again", str(found)]), strict=True):
        page.write_text(PAGE)
        command = [sys.executable, str(BENCHMARK), *options, "--page", str(page)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert pages[0].read_text() == pages[1].read_text()
    rows = json.loads(found.read_text())["rows"]
    assert [(row["model"], row["result"]) for row in rows] == [("autoencoder (ConvTranspose)", "accepted")]
    assert rows[0]["error"] < 1e-7
    text = pages[0].read_text()
    assert "| autoencoder (ConvTranspose) | accepted | kernels" in text
    assert "- Not exact: none.\n" in text
    assert "old" not in text


def test_the_page_names_models_that_are_slower_than_the_loop_or_not_exact(tmp_path: Path) -> None:
    slow = {"model": "Slow", "result": "accepted", "couples": False, "way": "loop", "apart": 0, "SGD": 1.0}
    slow |= {"ours": [9.0, 8.0, 9.5], "loop": [5.0, 4.0, 6.0], "Opacus": "RuntimeError"}
    wrong = {"model": "Wrong", "result": "accepted", "couples": False, "way": "kernels", "apart": 0}
    wrong |= {"error": 0.5, "precision": "float64"}
    found = {"sizes": "table", "rounds": 1, "machine": {"processor": "p", "cores": 2}, "rows": [slow, wrong]}
    (tmp_path / "found.json").write_text(json.dumps(found))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = [sys.executable, str(BENCHMARK), "--again", str(tmp_path / "found.json"), "--page", str(page)]
    subprocess.run(command, check=True)
    text = page.read_text()
    assert "- Slower than our own loop: ['Slow'].\n" in text
    assert "- Not exact: ['Wrong'].\n" in text
    assert "9.00 (8.00-9.50)" in text
