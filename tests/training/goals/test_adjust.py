"""Finished runs are moved to another goal: nothing is trained or spent, and the folder verifies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.runs.verify import verify


def data(seed: int) -> eh.data.Data:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(400) % 8 == 0).long()
    return eh.data.wrap(torch.randn(400, 3, generator=generator) + labels.unsqueeze(1), labels)


def test_a_run_is_moved_and_back_without_spending(tmp_path: Path) -> None:
    test = data(1)
    run = eh.fit(nn.Linear(3, 2), data(0), epsilon=3.0, epochs=3, test=test, out=tmp_path / "run")
    before, plain = verify(run.path), run.folder.last_evaluation()
    weights = (run.path / "model.safetensors").read_bytes()
    moved = eh.adjust(run, goal="worst", tau=4.0, test=test)
    after, last = verify(run.path), run.folder.last_evaluation()
    assert after["problems"] == []
    assert (after["epsilon"], after["steps"]) == (before["epsilon"], before["steps"])
    assert (run.path / "model.safetensors").read_bytes() == weights
    assert last["tau"] == 4.0
    chosen = next(row for row in last["frontier"] if row["tau"] == 4.0)
    assert last["accuracy"] == pytest.approx(chosen["accuracy"])
    answers = moved.predict(test.fetch(torch.arange(400))[0])
    assert (torch.tensor([name == "1" for name in answers.labels]).double().mean()) > 0.2
    page = (run.path / "report.html").read_text().replace("\u00a0", " ")
    assert "Whom other decisions would serve" in page
    assert "chosen: tau 4" in page, "the strength in use is marked in the picture"
    assert f"Against always answering the largest class: accuracy {100 * last['accuracy']:.1f} % instead of" in page
    was, points = 100 * plain["accuracy"], 100 * (last["accuracy"] - plain["accuracy"])
    told = f"(goal overall): accuracy {100 * last['accuracy']:.1f} % instead of {was:.1f} % ({points:+.1f} points)"
    assert f"Against the decision before {told}" in page
    eh.adjust(run.path, goal="overall", test=test, model=nn.Linear(3, 2))
    again = run.folder.last_evaluation()
    assert again["accuracy"] == plain["accuracy"]
    assert len([line for line in run.folder.metrics() if line["step"] == again["step"]]) == 1
    assert verify(run.path)["problems"] == []


def test_what_cannot_be_moved_says_why_and_changes_nothing(tmp_path: Path) -> None:
    run = eh.fit(nn.Linear(3, 2), data(0), epsilon=3.0, epochs=1, prior=False, out=tmp_path / "run")
    with pytest.raises(UsageError, match="no counts of labels"):
        eh.adjust(run, goal="worst", test=data(1))
    with pytest.raises(UsageError, match="pass test="):
        eh.adjust(run, goal="worst", prior=[350, 50])
    with pytest.raises(UsageError, match="hold training records"):
        eh.adjust(run, goal="worst", prior=[350, 50], test=data(0))
    with pytest.raises(UsageError, match="no goal called"):
        eh.adjust(run, goal="fair", test=data(1))
    assert not (run.path / "decision.json").exists()
    eh.adjust(run, goal="balanced", prior=[350, 50], test=data(1))
    assert verify(run.path)["problems"] == []


@pytest.mark.parametrize("outputs", [1, 2])
def test_any_model_is_moved_by_a_wrapper(outputs: int) -> None:
    model = nn.Linear(3, outputs)
    x = torch.randn(50, 3)
    moved = eh.adjusted(model, [90, 10], tau=2.0)(x)
    gap = 2.0 * torch.log(torch.tensor(9.0))
    expected = model(x) + gap if outputs == 1 else model(x)
    if outputs == 1:
        torch.testing.assert_close(moved, expected)
    else:
        torch.testing.assert_close(moved[:, 1] - moved[:, 0], expected[:, 1] - expected[:, 0] + gap)
    with pytest.raises(UsageError, match="other outputs"):
        eh.adjusted(nn.Linear(3, 5), [90, 10])(x)
