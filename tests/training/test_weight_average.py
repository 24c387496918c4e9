"""The average of the weights: what it is, that it is released and evaluated, and that it survives a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import evenhand as eh
from commands import result
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.runs.folder import sha256
from evenhand.runs.verify import verify
from evenhand.training.private import Private
from evenhand.training.weight_average import EMA, Average

LAST = "model-last.safetensors"


@pytest.fixture
def iterates(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weight after every update, noted outside of the average."""
    seen: list[Tensor] = []
    update = Private._update

    def noted(self: Private, gradient: dict[str, Tensor]) -> None:
        if not seen:
            seen.append(self.model.weight.detach().clone())
        update(self, gradient)
        seen.append(self.model.weight.detach().clone())

    monkeypatch.setattr(Private, "_update", noted)
    return seen


def by_hand(iterates: list[Tensor], decay: float, warm_up: bool = True) -> Tensor:
    average = iterates[0].double()
    for update, weights in enumerate(iterates[1:]):
        keep = min(decay, (1 + update) / (10 + update)) if warm_up else decay
        average = keep * average + (1 - keep) * weights.double()
    return average.float()


@pytest.mark.parametrize("average", [0.9, EMA(0.9, warm_up=False)])
def test_the_average_is_released_with_the_last_weights_beside_it(
    average: float | EMA, iterates: list[Tensor], tiny: Data, tmp_path: Path
) -> None:
    run = eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, epochs=3, average=average, out=tmp_path)
    assert len(iterates) == run.plan.steps + 1
    expected = by_hand(iterates, 0.9, warm_up=not isinstance(average, EMA))
    released, last = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / LAST)
    torch.testing.assert_close(released["weight"], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(last["weight"], iterates[-1])
    assert torch.equal(run.model.weight, released["weight"])
    assert torch.equal(eh.load(tmp_path, model=nn.Linear(3, 2)).model.weight, released["weight"])
    reading = run.folder.ledger()
    assert set(reading.released) == {
        sha256(tmp_path / "model.safetensors"),
        sha256(tmp_path / LAST),
    }
    assert reading.foreign == (), "showing the average must not count as a change of the weights"
    assert verify(tmp_path)["ok"], verify(tmp_path)["problems"]


def test_the_average_is_what_is_evaluated(iterates: list[Tensor], tiny: Data, tmp_path: Path) -> None:
    test = eh.data.wrap(torch.randn(30, 3, generator=torch.Generator().manual_seed(5)), [0, 1] * 15)
    run = eh.fit(
        nn.Linear(3, 2), tiny, epsilon=3.0, epochs=3, lr=5.0, average=0.95, test=test, insecure_seed=1, out=tmp_path
    )
    inputs, targets = test.fetch(torch.arange(30))
    found = run.evaluations[-1]["log_loss"]
    average = nn.functional.cross_entropy(run.model(inputs), targets).item()
    last = nn.Linear(3, 2)
    last.load_state_dict(load_file(tmp_path / LAST))
    assert found == pytest.approx(average, rel=1e-5)
    assert found != pytest.approx(nn.functional.cross_entropy(last(inputs), targets).item(), rel=1e-5)
    assert run.folder.ledger().foreign == ()


def test_averaging_changes_neither_noise_nor_training(tiny: Data, tmp_path: Path) -> None:
    weights = []
    for name, average in (("without", None), ("with", 0.9)):
        torch.manual_seed(0)
        options = {"epsilon": 3.0, "epochs": 2, "insecure_seed": 1, "compose": False, "out": tmp_path / name}
        eh.fit(nn.Linear(3, 2), tiny, average=average, **options)
        weights.append(load_file(tmp_path / name / ("model.safetensors" if average is None else LAST))["weight"])
    assert torch.equal(*weights)
    assert not (tmp_path / "without" / LAST).exists()


def test_an_average_survives_a_stop_and_a_resume(
    iterates: list[Tensor], tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    stop_at(7, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        eh.fit(model, tiny, epsilon=3.0, epochs=3, average=0.9, out=tmp_path)
    monkeypatch.undo()
    marker = json.loads((tmp_path / "private" / "checkpoint.json").read_text())
    again: list[Tensor] = []
    update = Private._update

    def noted(self: Private, gradient: dict[str, Tensor]) -> None:
        update(self, gradient)
        again.append(self.model.weight.detach().clone())

    monkeypatch.setattr(Private, "_update", noted)
    run = eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)
    expected = by_hand([*iterates[: marker["position"] + 1], *again], 0.9)
    torch.testing.assert_close(run.model.weight.detach(), expected, rtol=1e-5, atol=1e-6)
    assert verify(tmp_path)["ok"]


def test_an_average_of_ones_own_must_be_passed_again(
    tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, average=EMA(0.9, warm_up=False), out=tmp_path)
    with pytest.raises(UsageError, match="pass average= again"):
        eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)


def stop_at(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at ``position`` and a crash right after it."""
    step = Private.step

    def crashing(self: Private, batch: object) -> Tensor:
        if self.position == position:
            self.checkpoint()
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Private, "step", crashing)


def test_few_digits_are_averaged_with_more() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    average = Average(model, EMA(0.999, warm_up=False))
    with torch.no_grad():
        model.weight.fill_(1.0)
    start = average.state_dict()["values"]["weight"].clone()
    for _ in range(100):
        average.update()
    torch.testing.assert_close(average.state_dict()["values"]["weight"], 1 + (start - 1) * 0.999**100)
    with average.shown():
        assert model.weight.dtype == torch.bfloat16


def test_a_failure_while_it_is_shown_gives_the_weights_back() -> None:
    model = nn.Linear(2, 2)
    average = Average(model, EMA(0.5, warm_up=False))
    before, place = model.weight.detach().clone(), model.weight.data_ptr()
    with torch.no_grad():
        model.weight.add_(1.0)
    version = model.weight._version
    average.update()
    with average.shown():
        torch.testing.assert_close(model.weight.detach(), before + 0.5)
    with pytest.raises(ZeroDivisionError), average.shown():
        raise ZeroDivisionError
    torch.testing.assert_close(model.weight.detach(), before + 1.0)
    assert (model.weight.data_ptr(), model.weight._version) == (place, version)


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "0.9"])
def test_decays_that_cannot_be_are_refused(decay: object, tiny: Data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="average"):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, average=decay, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_averages(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ("train", "--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "1", "--out", out)
    assert result(*short, "--average", "0.8")["epsilon"] <= 3
    assert (out / LAST).exists()
    assert result("verify", out)["ok"]
