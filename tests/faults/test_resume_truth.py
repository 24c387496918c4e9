"""What a run says after a crash: figures are of the released model, and nothing that was lost is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from commands import evenhand
from evenhand.data import Data
from evenhand.errors import BudgetExhausted
from evenhand.runs import checkpoints
from evenhand.runs import ledger as ledgers
from evenhand.runs.folder import Folder, write_durably
from evenhand.runs.ledger_rows import encode_row
from evenhand.runs.released_weights import digest_of_file
from evenhand.training import loop
from evenhand.training.evaluate import row


class Killed(BaseException):
    """Stands for kill -9: nothing in the code under test catches it."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def train(out: Path, data: tuple[Data, Data], **more: Any) -> eh.Run:
    return eh.fit(model(), data[0], epsilon=3.0, epochs=3, batch_size=64, test=data[1], out=out, **more)


def killed_when(monkeypatch: pytest.MonkeyPatch, when: Callable[[Mapping[str, Any]], bool]) -> None:
    real = checkpoints.save

    def save(folder: Folder, state: Mapping[str, Any], *, keep: bool = True) -> None:
        if when(state):
            raise Killed
        real(folder, state, keep=keep)

    monkeypatch.setattr(checkpoints, "save", save)


def check_truth(out: Path, held_out: Data) -> dict[str, Any]:
    """The last evaluation is that of the file which was released, and verify says so."""
    found = eh.verify(out)
    assert found["ok"], found["problems"]
    folder = Folder(out)
    last = folder.metrics()[-1]
    assert last["weights"] == digest_of_file(folder.model_file)
    again = row(eh.load(out, model=model()).model, held_out, 0, 0.0)
    assert last["groups"] == again["groups"]
    assert json.loads(folder.statement_file.read_text())["groups"] == again["groups"]
    steps = [line["step"] for line in folder.metrics()]
    assert steps == sorted(set(steps))
    return last


@pytest.mark.parametrize(
    ("number", "average"),
    [(-1, None), (4, 0.9), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, None), (2, 0.9), (-1, 0.9)))],
)
def test_what_a_resumed_run_reports_is_what_it_releases(
    number: int, average: float | None, digit_data: tuple[Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def at(state: Mapping[str, Any]) -> bool:
        calls.append(state["position"])
        return len(calls) == number or (number == -1 and state["position"] == steps)

    steps = eh.plan("dpsgd", eh.Privacy(3.0), data=digit_data[0].facts, epochs=3, batch_size=64).steps
    killed_when(monkeypatch, at)
    with pytest.raises(Killed):
        train(tmp_path, digit_data, average=average)
    monkeypatch.undo()
    held = json.loads((tmp_path / "private" / "checkpoint.json").read_text())["position"]
    charged = Folder(tmp_path).ledger().reserved
    assert charged > held, "something is lost"
    assert charged - held <= steps / 10
    eh.resume(tmp_path, model=model(), train=digit_data[0], test=digit_data[1])
    last = check_truth(tmp_path, digit_data[1])
    assert last["segment"] == 1
    reading = Folder(tmp_path).ledger()
    assert reading.lost == ((held, charged),)
    assert f"{charged - held} of the {steps} charged steps are in no weights" in (tmp_path / "statement.md").read_text()


def test_an_untrained_model_is_released_only_when_it_is_asked_for(
    digit_data: tuple[Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash of issue 20: every step is charged, and the only checkpoint is from before the first."""
    out = tmp_path / "run"
    monkeypatch.setattr(loop.Saving, "save_if_due", lambda _: None)
    killed_when(monkeypatch, lambda state: state["position"] > 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        evenhand("train", "--data", "digits", "--epochs", "2", "--epsilon", "3", "--out", out)
    monkeypatch.undo()
    assert Folder(out).metrics()[-1]["accuracy"] > 0.3, "the dead process had learnt something"
    refused = evenhand("resume", out)
    assert refused.returncode == 3
    assert "--release-untrained" in refused.stderr
    assert not (out / "model.safetensors").exists()
    with pytest.raises(BudgetExhausted, match="none of them is in a checkpoint"):
        eh.resume(out)
    agreed = evenhand("resume", out, "--release-untrained", "--json")
    assert agreed.returncode == 0, agreed.stderr
    assert json.loads(agreed.stdout.splitlines()[-1])["accuracy"] < 0.3
    found = eh.verify(out)
    assert found["ok"], found["problems"]
    assert len(Folder(out).metrics()) == 1, "the lines of the dead process are gone"
    words = (out / "model-card.md").read_text()
    assert f"{found['planned']} of the {found['planned']} charged steps are in no weights" in words


@pytest.mark.parametrize("place", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_crash_between_a_checkpoint_and_its_marker(
    place: int, digit_data: tuple[Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    real = checkpoints.write_json

    def write(path: Path, data: Mapping[str, Any]) -> None:
        calls.append(path)
        if len([call for call in calls if call.name == "checkpoint.json"]) == place:
            raise Killed
        real(path, data)

    monkeypatch.setattr(checkpoints, "write_json", write)
    with pytest.raises(Killed):
        train(tmp_path, digit_data)
    monkeypatch.undo()
    assert eh.verify(tmp_path)["ok"]
    inside = checkpoints.read(tmp_path / "private" / "checkpoint.pt")["position"]
    charged = Folder(tmp_path).ledger().reserved
    eh.resume(tmp_path, model=model(), train=digit_data[0], test=digit_data[1])
    check_truth(tmp_path, digit_data[1])
    assert Folder(tmp_path).ledger().lost == (((inside, charged),) if inside < charged else ())


def test_without_test_data_nothing_is_said_of_a_model_that_was_not_measured(
    digit_data: tuple[Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when(monkeypatch, lambda state: state["position"] > 30)
    with pytest.raises(Killed):
        train(tmp_path, digit_data)
    monkeypatch.undo()
    eh.resume(tmp_path, model=model(), train=digit_data[0])
    found = eh.verify(tmp_path)
    assert found["ok"], found["problems"]
    assert any("was not evaluated" in note for note in found["notes"])
    assert json.loads((tmp_path / "statement.json").read_text())["groups"] == {}
    assert "Nothing was measured" in (tmp_path / "model-card.md").read_text()


def test_verify_finds_figures_of_another_model(digit_data: tuple[Data, Data], tmp_path: Path) -> None:
    train(tmp_path / "a", digit_data)
    folder = Folder(tmp_path / "a")
    last = folder.metrics()[-1]
    page = (folder.path / "report.html").read_bytes()
    folder.add_metrics({**last, "weights": "0" * 64}, 1)
    (problem,) = eh.verify(folder.path)["problems"]
    assert "last line of metrics.jsonl measured other weights" in problem
    folder.write_statement()
    assert json.loads(folder.statement_file.read_text())["groups"] == {}, "no figures of another model"
    write_durably(folder.metrics_file, (json.dumps(last) + "\n").encode())
    folder.write_statement()
    assert eh.verify(folder.path)["ok"]
    shown = json.loads(folder.statement_file.read_text())["model_sha256"][:16].encode()
    for name in ("report.html", "model-card.md"):
        good = (folder.path / name).read_bytes()
        write_durably(folder.path / name, good.replace(shown, b"0" * 16))
        assert any(name in problem and "evenhand report" in problem for problem in eh.verify(folder.path)["problems"])
        write_durably(folder.path / name, good)
    assert page.count(shown) == 1
    stripped = {key: value for key, value in last.items() if key != "weights"}
    write_durably(folder.metrics_file, (json.dumps(stripped) + "\n").encode())
    assert any("does not say which weights" in problem for problem in eh.verify(folder.path)["problems"])


def test_folders_of_an_earlier_version_are_read_and_what_is_not_checked_is_said(
    digit_data: tuple[Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.add_metrics
    monkeypatch.setattr(ledgers, "FORMAT", 1)
    monkeypatch.setattr("evenhand.runs.released_weights.FACT", "Another fact")
    monkeypatch.setattr(
        Folder,
        "add_metrics",
        lambda self, line, **how: real(self, {k: v for k, v in line.items() if k not in ("weights", "segment")}, **how),
    )
    train(tmp_path, digit_data)
    monkeypatch.undo()
    found = eh.verify(tmp_path)
    assert found["ok"], found["problems"]
    assert sum("an earlier version wrote" in note for note in found["notes"]) == 3
    assert eh.load(tmp_path, model=model()).evaluations[-1]["accuracy"] > 0.3


def test_a_folder_of_a_later_version_says_which_one_reads_it(tmp_path: Path) -> None:
    opened = {"type": "open", "plan": "p", "steps": 9, "format": 7, "evenhand": "9.4"}
    (tmp_path / "ledger.jsonl").write_bytes(encode_row(opened, ledgers.GENESIS)[0])
    with pytest.raises(eh.errors.LedgerError, match=r"format 7.*use evenhand 9\.4, which wrote it"):
        Folder(tmp_path).ledger()
    (tmp_path / "ledger.jsonl").write_bytes(encode_row({**opened, "evenhand": "\x1b[2J"}, ledgers.GENESIS)[0])
    with pytest.raises(eh.errors.LedgerError, match="use a later evenhand"):
        Folder(tmp_path).ledger()
