"""Densities that die after a charge: finished from the noisy sums on disk, or one sentence on what is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import evenhand as eh
from commands import evenhand, result
from evenhand.density import MomentDensity, NoisyEmbeddingDensity, RandomFeatureDensity, noisy_sums, save_run
from evenhand.density.noisy_sums import Sums
from evenhand.errors import BudgetExhausted, LedgerError, PlanMismatchError, UsageError
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Ledger, acquire_lock


class Killed(BaseException):
    """Stands for kill -9."""


KINDS = [RandomFeatureDensity, MomentDensity, NoisyEmbeddingDensity]
TRAIN = ["train", "--data", "digits", "--epsilon", "8", "--delta", "1e-4"]


def arrays(count: int = 300) -> tuple[torch.Tensor, np.ndarray]:
    labels = np.arange(count) % 2
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.tensor(labels)[:, None], labels


def dying(monkeypatch: pytest.MonkeyPatch, where: object, name: str, call: int = 1) -> None:
    """Die instead of the n-th call."""
    real, calls = getattr(where, name), [0]

    def stop(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return real(*given, **named)

    monkeypatch.setattr(where, name, stop)


def fit(kind: type, out: Path, **more: Any) -> Any:
    return kind(epsilon=2.0, delta=1e-4, out=out).fit(*arrays(), **more)


def finished(out: Path) -> list[dict[str, Any]]:
    """All is well, and every release was charged and made once."""
    found = eh.verify(out)
    assert found["ok"], found["problems"]
    reading = Folder(out).ledger()
    assert reading.reserved == reading.committed == reading.steps
    assert len(set(reading.keys)) == len(reading.keys)
    assert not list((out / "private").glob("release-*"))
    rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert sum(row["type"] == "reserve" for row in rows) == reading.steps
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Ledger, "commit"),
        pytest.param(save_run, "publish", marks=pytest.mark.slow),
        pytest.param(Folder, "write_statement", marks=pytest.mark.slow),
    ],
)
def test_a_density_is_finished_from_its_noisy_sums(
    kind: type, where: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(monkeypatch, where, name)
    with pytest.raises(Killed):
        fit(kind, tmp_path)
    monkeypatch.undo()
    before = Folder(tmp_path).ledger()
    kept = {file.name: file.read_bytes() for file in (tmp_path / "private").glob("release-*")}
    assert len(kept) == before.reserved
    read: list[bytes] = []
    monkeypatch.setattr(Sums, "forget", lambda self: read.extend(file.read_bytes() for file in _files(self)))
    fitted = fit(kind, tmp_path)
    monkeypatch.undo()
    assert set(kept.values()) <= set(read), "what was released stays as it was"
    Sums(Folder(tmp_path)).forget()
    rows = finished(tmp_path)
    assert len([row for row in rows if row["type"] == "segment"]) == 2
    again = load_file(tmp_path / "model.safetensors")
    assert all(bool((again[key] == value).all()) for key, value in fitted.model_.state_dict().items())
    assert (Folder(tmp_path).composition() or {})["runs"] is not None


def _files(sums: Sums) -> list[Path]:
    return sorted(sums.folder.private.glob("release-*"))


def test_noisy_rows_keep_their_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret order is drawn anew by the second process: rows on disk must not get other rows' owners."""
    more = {"owners": ["strict", "usual"] * 150, "budgets": {"strict": 0.5, "usual": 8.0}}
    dying(monkeypatch, save_run, "publish")
    with pytest.raises(Killed):
        NoisyEmbeddingDensity(delta=1e-4, out=tmp_path).fit(*arrays(), **more)
    monkeypatch.undo()
    held = load_file(tmp_path / "private" / "release-0.safetensors")
    fitted = NoisyEmbeddingDensity(delta=1e-4, out=tmp_path).fit(*arrays(), **more)
    scales = torch.tensor(fitted.plan_.scales, dtype=torch.float64)[held["owner"]]
    width = fitted.model_.points.shape[1]
    right = (held["noisy"] / scales.unsqueeze(1))[:, :width]
    assert torch.allclose(fitted.model_.points.double(), right, rtol=1e-5)
    assert len(set(fitted.model_.log_weights.tolist())) == 2
    assert torch.allclose(fitted.model_.log_weights.double(), 2 * scales.log(), rtol=1e-5)
    finished(tmp_path)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_release_that_is_lost_is_named_by_every_command(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    dying(monkeypatch, noisy_sums, "release", lost)
    with pytest.raises(Killed):
        evenhand(*TRAIN, "--method", "moment_density", "--out", out)
    monkeypatch.undo()
    assert Folder(out).ledger().reserved == lost
    said = f"release {lost} of 2 ({'mean' if lost == 1 else 'second moments'}) was charged"
    for command in (["resume", out], [*TRAIN, "--method", "moment_density", "--out", out]):
        done = evenhand(*command)
        assert done.returncode == 3
        assert said in done.stderr
        assert "Train again with another --out" in done.stderr
        assert Folder(out).ledger().reserved == lost, "nothing more was charged"
        assert not [*(out / "private").glob("release-*"), *(out / "private").glob("*.part")], "of no use alone"
    assert eh.verify(out)["ok"]


def test_sums_that_another_process_is_making_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, noisy_sums, "release", 2)
    with pytest.raises(Killed):
        fit(MomentDensity, tmp_path)
    monkeypatch.undo()
    sums, plan = Sums(Folder(tmp_path)), Folder(tmp_path).plan()
    with acquire_lock(Folder(tmp_path).ledger_file), pytest.raises(LedgerError, match="Another process"):
        sums.refuse_lost(plan, 2)
    assert sums.read(0) is not None
    with pytest.raises(BudgetExhausted, match="release 2 of 2"):
        sums.refuse_lost(plan, 2)
    assert sums.read(0) is None


def test_the_command_finishes_a_density(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    dying(monkeypatch, Ledger, "commit")
    with pytest.raises(Killed):
        evenhand(*TRAIN, "--method", "moment_density", "--out", out)
    monkeypatch.undo()
    assert Folder(out).ledger().reserved == 1
    found = result("resume", out)
    assert found["accuracy"] > 0.85
    assert found["epsilon"] <= 8
    rows = finished(out)
    assert [row["key"] for row in rows if row["type"] == "segment"] == list(Folder(out).ledger().keys)
    last = Folder(out).metrics()[-1]
    assert last["segment"] == 1
    assert evenhand("resume", out).returncode == 3


def test_other_settings_or_other_data_do_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, save_run, "publish")
    with pytest.raises(Killed):
        fit(MomentDensity, tmp_path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="holds a run already"):
        MomentDensity(epsilon=1.0, delta=1e-4, out=tmp_path).fit(*arrays())
    inputs, labels = arrays()
    with pytest.raises(PlanMismatchError, match="not the records"):
        MomentDensity(epsilon=2.0, delta=1e-4, out=tmp_path).fit(inputs + 1, labels)
    with pytest.raises(UsageError, match="fitted in Python"):
        eh.resume(tmp_path)
    fit(MomentDensity, tmp_path)
    finished(tmp_path)


def test_a_sum_that_nobody_charged_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    dying(monkeypatch, Ledger, "commit", 1)
    with pytest.raises(Killed):
        fit(MomentDensity, out)
    monkeypatch.undo()
    planted = (out / "private" / "release-0.safetensors").read_bytes()
    (out / "private" / "release-1.safetensors").write_bytes(planted)
    fit(MomentDensity, out)
    finished(out)


def test_a_cut_row_charges_no_more_than_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying(monkeypatch, Ledger, "commit", 2)
    with pytest.raises(Killed):
        fit(RandomFeatureDensity, tmp_path)
    monkeypatch.undo()
    file = tmp_path / "ledger.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    for place, kind in enumerate(kinds):
        start = b"".join(lines[:place])
        charged = kinds[:place].count("reserve")
        for kept in (20, len(lines[place]) - 3):
            file.write_bytes(start + lines[place][:kept])
            if place:
                assert Folder(tmp_path).ledger().reserved == charged + (kind == "reserve")
    file.write_bytes(whole)
    (tmp_path / "private" / "release-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"release-0\.safetensors is damaged"):
        fit(RandomFeatureDensity, tmp_path)
    reserve = kinds.index("reserve")
    file.write_bytes(b"".join(lines[:reserve]) + lines[reserve][:25])
    (tmp_path / "private" / "release-0.safetensors").unlink()
    with pytest.raises(BudgetExhausted, match="release 1 of 3"):
        fit(RandomFeatureDensity, tmp_path)


def test_noisy_sums_go_with_the_next_command_where_a_crash_kept_them(tmp_path: Path) -> None:
    from safetensors.numpy import save

    out = tmp_path / "run"
    assert evenhand(*TRAIN, "--method", "moment_density", "--out", out).returncode == 0
    left = out / "private" / "release-0.safetensors"
    left.write_bytes(save({}))
    assert evenhand("resume", out).returncode == 3
    assert not left.exists()


def test_a_signal_stops_a_density_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sums.write

    def write(self: Sums, *given: Any) -> None:
        real(self, *given)
        signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "write", write)
        stopped = evenhand(*TRAIN, "--method", "moment_density", "--out", out)
    assert stopped.returncode == 128 + signal.SIGTERM
    assert f"evenhand resume {out}" in stopped.stderr
    assert evenhand("resume", out).returncode == 0
    assert evenhand("verify", out).returncode == 0


def test_a_density_that_died_before_its_settings_were_on_disk_is_typed_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert evenhand(*TRAIN, "--method", "moment_density", "--out", out).returncode == 0
    for file in out.iterdir():
        if file.is_file() and file.name not in ("plan.json", "README.md"):
            file.unlink()
    said = evenhand("resume", out)
    assert said.returncode == 2
    assert "with the same --out" in said.stderr
