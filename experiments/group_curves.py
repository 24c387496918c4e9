"""How two groups learn under DP-SGD and under DPSGD-F: loss, gradient norms and clip bound of each sex on Adult.

    python experiments/group_curves.py --data-dir FOLDER       # about a minute
    python experiments/group_curves.py --pages                 # page and pictures again from the JSON file alone

The setting of adult_paper.toml: rate, batches and epochs of Xu et al. 2021 (003) at epsilon 3, nothing tuned. Losses
and gradients are those of the held-out records after each epoch; Adult is public, of private data neither could be
shown. The clip bounds follow from noisy counts that the training paid for, so they may be shown of any data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from following import DIGITS, command, curve, drawn, followed, table, words
from seed_intervals import over_seeds
from torch import Tensor, nn

import evenhand as eh
from evenhand import models
from evenhand.comparison import sweep
from evenhand.data import Data, load
from evenhand.gradients import per_sample
from evenhand.methods import catalogue, registry
from evenhand.methods.rules import GroupClip
from evenhand.reporting.group_metrics import Estimate
from evenhand.training.private import Private
from evenhand.types import Facts, State

HERE = Path(__file__).parent
METHODS = ("dpsgd", "dpsgd_f")
MEASURES = {
    "loss": "mean loss",
    "norm": "mean norm of the gradients",
    "pull": "norm of the mean gradient",
    "bound": "clip bound C_k",
}


@dataclass(frozen=True)
class Remembering(GroupClip):
    """The rule of DPSGD-F; it keeps the bounds of its last step, which follow from noisy answers alone."""

    name = "group_clip_remembering"

    def initial(self, facts: Facts) -> Mapping[str, Any]:
        """No step was taken: every group has the base bound."""
        super().initial(facts)
        return {"factors": torch.ones(len(facts.groups), dtype=torch.float64)}

    def advance(self, state: State) -> Mapping[str, Any]:
        """The bounds of this step, as multiples of the base bound."""
        return {"factors": self.factors(state)}


@dataclass(frozen=True)
class Settings:
    """What all trainings share."""

    epsilon: float
    delta: float
    epochs: float
    batch_size: float
    lr: float
    bound: float

    @classmethod
    def of_paper(cls) -> Settings:
        """Those of adult_paper.toml."""
        found = sweep.table(HERE / "adult_paper.toml")
        same = {name: float(found[name]) for name in ("delta", "epochs", "batch_size", "lr")}
        return cls(epsilon=float(found["epsilons"][0]), bound=float(found["settings"]["bound"]), **same)


def trained(name: str, train: Data, test: Data, settings: Settings, seed: int) -> list[dict[str, Any]]:
    """One training; a row after each epoch: loss, gradient norm and clip bound by group."""
    torch.manual_seed(seed)
    model = models.build("logistic", train.facts)
    method = catalogue.method(name, {"bound": settings.bound})
    if name == "dpsgd_f":
        registry.register(Remembering)
        method = dataclasses.replace(method, rule=Remembering())
    promise = eh.Privacy(settings.epsilon, settings.delta)
    plan = eh.plan(method, promise, data=train.facts, epochs=settings.epochs, batch_size=settings.batch_size)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=settings.lr), nn.CrossEntropyLoss(reduction="none")
    factors: list[Tensor] = []

    def remember(private: Private) -> None:
        factors.append(private.memory.get("factors", torch.ones(len(train.facts.groups))))

    def look() -> dict[str, Any]:
        bounds = settings.bound * torch.stack(factors).mean(0)
        named = {name: round(each, DIGITS) for name, each in zip(train.facts.groups, bounds.tolist(), strict=True)}
        factors.clear()
        return {**held_out(model, loss, test), "bound": named}

    return followed(model, optimizer, loss, plan, train, look, after=remember)


def held_out(model: nn.Module, loss: nn.Module, data: Data) -> dict[str, dict[str, float]]:
    """Mean loss, mean norm of the records' gradients, and norm of their mean gradient, by group."""
    found = per_sample(model, loss, *data.fetch(torch.arange(len(data))))
    rows: dict[str, dict[str, float]] = {"loss": {}, "norm": {}, "pull": {}}
    for code, name in enumerate(data.facts.groups):
        mine = data.group == code
        mean = found.weighted_sum(mine.double() / mine.sum()).values()
        rows["loss"][name], rows["norm"][name] = _mean(found.loss[mine]), _mean(found.norm[mine])
        rows["pull"][name] = round(torch.cat([part.flatten() for part in mean]).norm().item(), DIGITS)
    return rows


def _mean(values: Tensor) -> float:
    return round(values.mean().item(), DIGITS)


def measured(seeds: int, data_dir: Path | None) -> dict[str, Any]:
    """Every training, with what it was made with and what it took."""
    settings = Settings.of_paper()
    train, test = load("adult", data_dir=data_dir)
    if test is None:
        raise ValueError("Adult has held-out records")
    started, runs = time.process_time(), []
    for name in METHODS:
        for seed in range(seeds):
            runs.append({"method": name, "seed": seed, "rows": trained(name, train, test, settings, seed)})
            print(f"{name}, seed {seed}: {time.process_time() - started:.0f} processor seconds so far", flush=True)
    seconds = (time.process_time() - started) / len(runs)
    held = {name: int((test.group == code).sum()) for code, name in enumerate(test.facts.groups)}
    return {
        "settings": dataclasses.asdict(settings),
        "seeds": seeds,
        "seconds": seconds,
        "held_out": held,
        "runs": runs,
    }


def apart(found: Mapping[str, Any], measure: str, method: str) -> Estimate:
    """How far the groups are apart after the last epoch: the largest minus the smallest, over seeds."""
    last = [run["rows"][-1][measure].values() for run in found["runs"] if run["method"] == method]
    return over_seeds([max(values) - min(values) for values in last])


def page(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The page, and its pictures by file name."""
    used = Settings(**found["settings"])
    groups = ", ".join(f"{name} {count:,}" for name, count in found["held_out"].items())
    differing = [name for name in MEASURES if name != "bound"]
    parts = [
        "# How the sexes learn on Adult: DP-SGD and DPSGD-F",
        "What does a clip bound per group do to the loss and to the gradients of each group while it trains?",
        f"Epsilon {used.epsilon:g} per record, add/remove, delta {used.delta:g}; logistic regression, {used.epochs:g} "
        f"epochs of batches of {used.batch_size:g}, plain SGD at rate {used.lr:g}, base bound {used.bound:g}: the "
        f"paper's choices, nothing tuned. Means over {found['seeds']} seeds on the held-out records ({groups}), which "
        "no epsilon covers: Adult is public, and these are research figures.",
        "After the last epoch the groups are apart by (means with 95 % t-intervals over seeds):",
        table(
            ["method", *(MEASURES[name] for name in differing)],
            [[method, *(words(apart(found, name, method)) for name in differing)] for method in METHODS],
        ),
        "The norm of the mean gradient says how far a group is from its own best model, whatever its records disagree "
        "about. Clip bounds are means over the steps of each epoch; DP-SGD has the base bound for all.",
    ]
    pictures: dict[str, str] = {}
    last: dict[tuple[str, str], Estimate] = {}
    for measure, meaning in MEASURES.items():
        names = METHODS[1:] if measure == "bound" else METHODS
        series = {
            f"{name}, {group}": curve(found, name, measure, group) for name in names for group in found["held_out"]
        }
        title = f"{meaning[0].upper()}{meaning[1:]} of each group over the epochs"
        file = f"group_curves_{measure}.svg"
        pictures[file] = drawn(series, title, meaning)
        last |= {(name, measure): points[-1][1] for name, points in series.items()}
        parts += [f"![{title}]({file})"]
    rows = [
        [name, *(words(last.get((name, measure))) for measure in MEASURES)]
        for name in dict.fromkeys(name for name, _ in last)
    ]
    parts += [
        "Each group after the last epoch:",
        table(["method and group", *MEASURES.values()], rows),
        f"Made by `python experiments/group_curves.py --data-dir FOLDER`; {found['seconds']:.1f} processor seconds a "
        "training. The figures: [group_curves.json](group_curves.json).",
    ]
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    command("group_curves", __doc__, measured, page)
