"""Optimizers and learning rates: the rate of every step is that of its position in the plan, also after a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import evenhand as eh
from commands import evenhand, result
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.runs import recorder
from evenhand.training.config import from_toml
from evenhand.training.optimizers import OPTIMIZERS, SCHEDULES, Descent
from evenhand.training.private import Private

Rates = dict[int, float]
STEPS = 25
LR = 0.4


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """The rate that every update used, by its position in the plan."""
    seen: Rates = {}
    update = Private._update

    def noted(self: Private, gradient: dict[str, Tensor]) -> None:
        assert self.position - 1 not in seen
        seen[self.position - 1] = self.optimizer.param_groups[0]["lr"]
        update(self, gradient)

    monkeypatch.setattr(Private, "_update", noted)
    return seen


def trained(data: Data, out: Path, **options: object) -> eh.Plan:
    run = eh.fit(nn.Linear(3, 2), data, epsilon=3.0, epochs=5, batch_size=8, lr=LR, compose=False, out=out, **options)
    assert run.plan.steps == STEPS
    return run.plan


FORMULAS: dict[str, Callable[[int], float]] = {
    "linear": lambda t: LR * (1 - t / STEPS),
    "constant": lambda t: LR,
    "cosine": lambda t: LR * (1 + math.cos(math.pi * t / STEPS)) / 2,
    "step": lambda t: LR * 0.1 ** (t // 9),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_rates_follow_the_formula(name: str, rates: Rates, tiny: Data, tmp_path: Path) -> None:
    trained(tiny, tmp_path, scheduler=name)
    assert list(rates) == list(range(STEPS))
    assert list(rates.values()) == pytest.approx([FORMULAS[name](t) for t in range(STEPS)])


def test_one_cycle_rises_to_the_rate_and_falls(rates: Rates, tiny: Data, tmp_path: Path) -> None:
    trained(tiny, tmp_path, scheduler="one-cycle", optimizer="adam")
    top = max(rates, key=lambda t: rates[t])
    assert rates[top] == pytest.approx(LR, rel=0.02)
    assert rates[0] == pytest.approx(LR / 25)
    assert 0 < top < STEPS // 2
    assert rates[STEPS - 1] < LR / 1000


def test_the_default_is_momentum_and_a_falling_rate(rates: Rates, tiny: Data, tmp_path: Path) -> None:
    trained(tiny, tmp_path)
    assert list(rates.values()) == pytest.approx([FORMULAS["linear"](t) for t in range(STEPS)])
    held, schedule = Descent().build(nn.Linear(3, 2), 5)
    assert isinstance(held, torch.optim.SGD)
    assert held.defaults["momentum"] == 0.9
    assert schedule is not None


def test_ones_own_optimizer_keeps_its_rate(rates: Rates, tiny: Data, tmp_path: Path) -> None:
    trained(tiny, tmp_path, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    assert set(rates.values()) == {0.01}


OWN: dict[str, Callable[..., lr_scheduler.LRScheduler]] = {
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 9, 20], gamma=0.5),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=steps),
    "warm up": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, steps - 5)],
        milestones=[5],
    ),
}


def by_torch(factory: Callable[..., lr_scheduler.LRScheduler], name: str) -> list[float]:
    held = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=LR, momentum=0.9)
    scheduler = factory(held, STEPS) if name in ("one cycle", "warm up") else factory(held)
    found = []
    for _ in range(STEPS):
        found.append(held.param_groups[0]["lr"])
        held.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", OWN)
def test_a_crash_leaves_every_step_the_rate_of_its_place(
    name: str, rates: Rates, tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position = crashed(tiny, tmp_path, monkeypatch, scheduler=OWN[name])
    with pytest.raises(UsageError, match="pass scheduler= again"):
        eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)
    eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny, scheduler=OWN[name])
    expected = by_torch(OWN[name], name)
    assert max(rates) == STEPS - 1
    assert set(range(position, STEPS)) <= set(rates), "no step of the rest was left out"
    assert rates == pytest.approx({t: expected[t] for t in rates})


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_named_schedule_is_found_again(
    name: str, rates: Rates, tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Descent(lr=LR, scheduler=name).build(nn.Linear(3, 2), STEPS)
    position = crashed(tiny, tmp_path, monkeypatch, scheduler=name)
    eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)
    assert set(range(position, STEPS)) <= set(rates)
    for t in range(STEPS):
        assert whole[1] is not None
        whole[1].catch_up(t)
        if t in rates:
            assert rates[t] == pytest.approx(whole[0].param_groups[0]["lr"])


def crashed(data: Data, out: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> int:
    """A checkpoint after three steps, and a crash after eleven: eight are lost. Returns where it goes on."""
    step = Private.step

    def crashing(self: Private, batch: object) -> Tensor:
        losses = step(self, batch)
        if self.position == 11:
            raise ZeroDivisionError
        return losses

    def before_the_step(self: Private, batch: object) -> Tensor:
        if self.position == 3:
            self.checkpoint()
        return crashing(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Private, "step", before_the_step)
        patch.setattr(recorder, "BLOCK_SECONDS", 1e-9)  # one step is charged at a time
        patch.setattr("evenhand.training.loop.CHECKPOINT_SECONDS", 1e9)
        patch.setattr("evenhand.training.loop.LOST", 1e-9)  # the number of steps asks for no checkpoint either
        with pytest.raises(ZeroDivisionError):
            trained(data, out, **options)
    assert json.loads((out / "private" / "checkpoint.json").read_text())["position"] == 3
    assert eh.verify(out)["steps"] == 11
    return 11


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_named_optimizer_trains_and_resumes(
    name: str, tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(tiny, tmp_path, monkeypatch, optimizer=name, weight_decay=0.01, scheduler="one-cycle")
    model = nn.Linear(3, 2)
    run = eh.resume(tmp_path, model=model, train=tiny)
    assert torch.isfinite(model.weight).all()
    assert run.folder.ledger().reserved == STEPS


def test_the_state_of_the_optimizer_is_restored(tiny: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed(tiny, tmp_path, monkeypatch, optimizer="adam")
    kept = torch.load(tmp_path / "private" / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
    started: list[float] = []
    update = Private._update

    def noted(self: Private, gradient: dict[str, Tensor]) -> None:
        started.append(float(self.optimizer.state[self.model.weight]["step"]))
        update(self, gradient)

    monkeypatch.setattr(Private, "_update", noted)
    eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)
    assert started[0] == float(kept[0]["step"]) == 3


class Falling:
    """A callable object, whose attributes torch keeps in the scheduler's state."""

    def __init__(self) -> None:
        self.kept = Path("rate")

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adan"}, "Did you mean 'ada"),
        ({"scheduler": "cosin"}, "Did you mean 'cosine'"),
        ({"optimizer": "adam", "momentum": 0.9}, "no momentum"),
        ({"momentum": 1.0}, "less than 1"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"optimizer": torch.optim.Adam, "weight_decay": 0.1}, "would be ignored"),
        ({"scheduler": lambda optimizer: None}, "LRScheduler"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "follows a metric"),
        ({"scheduler": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Falling())}, "could not be resumed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_exists(
    options: dict, words: str, tiny: Data, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_short_plans_have_every_schedule(name: str, steps: int) -> None:
    held, schedule = Descent(scheduler=name).build(nn.Linear(3, 2), steps)
    for t in range(steps + 1):
        held.step()
        if schedule is not None:
            schedule.go_to(t)
    assert math.isfinite(held.param_groups[0]["lr"])


def test_the_command_line_takes_them_and_keeps_them(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ("train", "--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "1", "--out", out)
    asked = ("--optimizer", "rmsprop", "--momentum", "0.5", "--weight-decay", "0.01", "--lr-schedule", "cosine")
    assert result(*short, *asked, "--lr", "0.01")["epsilon"] <= 3
    kept = from_toml(out / "config.toml")
    assert (kept.optimizer, kept.momentum, kept.weight_decay, kept.lr_schedule) == ("rmsprop", 0.5, 0.01, "cosine")
    done = evenhand(*short[:-1], tmp_path / "other", "--optimizer", "sdg")
    assert done.returncode == 2
    assert "Did you mean 'sgd'" in done.stderr
    assert not (tmp_path / "other").exists()
