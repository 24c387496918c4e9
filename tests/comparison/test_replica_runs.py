"""Comparisons whose seeds are trained together: ordinary run folders, figures of single runs, charges before steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import evenhand as eh
from evenhand import durable
from evenhand.comparison import sweep
from evenhand.comparison.compare import compare
from evenhand.comparison.replica_runs import grouped
from evenhand.comparison.run_cell import plan_task
from evenhand.errors import UsageError
from evenhand.mechanism.replicas import Replicas
from evenhand.runs.ledger import read
from evenhand.runs.verify import verify

SMALL = {"data": "digits", "model": "linear", "epochs": 1, "methods": ["dpsgd"], "epsilons": [3.0]}


def numbers(row: Any, name: str = "") -> dict[str, float]:
    """All numbers of an evaluation, by their path in it."""
    if isinstance(row, Mapping):
        return {key: value for part in row for key, value in numbers(row[part], f"{name}/{part}").items()}
    return {name: float(row)} if isinstance(row, int | float) else {}


def test_a_comparison_of_replicas_is_that_of_single_runs(tmp_path: Path) -> None:
    values = {**SMALL, "insecure_seed": 7, "average": 0.9, "reference": True}
    one, many = (
        compare(sweep.sweep({**values, "seeds": seeds, "replicas": mode}), tmp_path / mode, executor="here")
        for mode, seeds in (("off", 1), ("on", 2))
    )
    assert not one.failed
    assert not many.failed
    stacked = {(result.task.cell.method, result.task.cell.seed): result for result in many.results}
    assert len(stacked) == 4
    for single in one.results:
        replica = stacked[single.task.cell.method, single.task.cell.seed]
        for name in ("model.safetensors", "model-last.safetensors"):
            mine, other = (load_file(result.task.path / name) for result in (single, replica))
            assert max(float((mine[key] - other[key]).abs().max()) for key in mine) < 1e-5
        assert single.epsilon == replica.epsilon
        assert single.steps_charged == replica.steps_charged
        mine, other = (numbers({k: v for k, v in r.last.items() if k != "followed"}) for r in (single, replica))
        assert mine.keys() == other.keys()
        assert mine == pytest.approx(other, abs=1e-4)
    for replica in stacked.values():
        checked = verify(replica.task.path)
        assert checked["ok"], checked["problems"]
    (replica.task.path / "metrics.jsonl").write_text("{}\n")
    assert not verify(replica.task.path)["ok"], "every replica is checked by its own files"


def test_every_step_is_charged_on_disk_before_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, bool]]] = []
    step, sync, synced = Replicas.step, durable._sync_disk, list[int]()

    def watched(self: Replicas, parameters: dict[str, torch.Tensor], position: int) -> object:
        seen.append(
            [
                (read(file).reserved, (file.parent / "model.safetensors").exists())
                for file in tmp_path.rglob("ledger.jsonl")
            ]
        )
        if len(seen) == 1:
            assert synced or sync is None, "the charges are on disk"
            raise KeyboardInterrupt
        return step(self, parameters, position)

    def noted(handle: int) -> None:
        assert sync is not None
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(Replicas, "step", watched)
    monkeypatch.setattr(durable, "_sync_disk", sync and noted)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    chosen = sweep.sweep({**SMALL, "seeds": 2, "replicas": "on"})
    with pytest.raises(KeyboardInterrupt, match="what they charged stays charged"):
        compare(chosen, tmp_path / "out", executor="here")
    done = compare(chosen, tmp_path / "out", executor="here")
    steps = done.results[0].task.plan.steps
    assert seen[0] == [(steps, False)] * 2
    assert not done.failed
    assert len(done.results) == 2
    aside = sorted(path.name for path in (tmp_path / "out").glob("*-cut-short-1"))
    assert len(aside) == 2
    assert all(read(tmp_path / "out" / name / "ledger.jsonl").reserved == steps for name in aside)
    counts = [json.loads((result.task.path / "composition.json").read_text())["runs"] for result in done.results]
    assert counts == [4, 4], "those that were cut short are counted too"
    again = compare(chosen, tmp_path / "out", executor="here")
    assert again.reused == 2


def test_private_data_say_what_all_replicas_spend_together(tmp_path: Path) -> None:
    inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    data = eh.data.wrap(inputs, (inputs[:, 0] > 0).long())
    compared = eh.compare(
        data, ["dpsgd"], [1.0], seeds=5, model="linear", epochs=1, replicas="auto", out=tmp_path / "compared"
    )
    assert set(compared.table["n"]) == {5}
    statements = [json.loads(file.read_text()) for file in (tmp_path / "compared").glob("*/statement.json")]
    assert [one["accounting"]["runs_composed"] for one in statements] == [5] * 5
    totals = {one["accounting"]["epsilon_all_runs"] for one in statements}
    assert len(totals) == 1
    assert totals.pop() > 1.5
    page = (tmp_path / "compared" / "report.html").read_text()
    assert "each is a release of its own" in page
    assert "Whoever sees the results of all 5 private runs" in page
    keys = {key for file in (tmp_path / "compared").glob("*/ledger.jsonl") for key in read(file).keys}
    assert len(keys) == 5, "every replica has a key of its own"


def test_models_that_cannot_be_stacked_are_refused_or_run_alone(tmp_path: Path) -> None:
    code = "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.LayerNorm(10))\n"
    (tmp_path / "nets.py").write_text(code)
    chosen = {**SMALL, "model": f"{tmp_path / 'nets.py'}:net", "seeds": 2}
    with pytest.raises(UsageError, match=r"LayerNorm.*--replicas auto"):
        compare(sweep.sweep({**chosen, "replicas": "on"}), tmp_path / "on", executor="here")
    assert not list((tmp_path / "on").rglob("ledger.jsonl"))
    stacks, alone = grouped([plan_task(cell, tmp_path) for cell in sweep.sweep(chosen).cells()], "auto")
    assert stacks == {}
    assert len(alone) == 2
    with pytest.raises(UsageError, match="way to train replicas"):
        sweep.sweep({**chosen, "replicas": "perhaps"})
