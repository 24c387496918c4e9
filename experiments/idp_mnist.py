"""Promises per owner on MNIST: DP-SGD at the strictest budget beside idp_sample and idp_scale (Boenisch et al. 2024).

    python experiments/idp_mnist.py FOLDER [--methods dpsgd,idp_sample] [--seeds 0,1,2] [--steps 9375]

FOLDER holds the four official files of MNIST (idx, gzipped). Budgets 1, 2 and 3 go to 34, 43 and 23 % of the records,
at random; tanh CNN, expected batch 512, plain SGD at rate 0.6, clip bound 0.2, delta 1e-5. Noise and sampling are
secret and fresh. dpsgd:3 is DP-SGD as if everybody had promised 3: the most that promises per owner can win. A seed
only fixes initial weights and who owns which record. A run takes about a quarter of an hour of one core. Runs that are
in --lines are not repeated, so two commands with different methods can share the work. Then docs/results/idp_mnist.md
is written from all of them.

    python experiments/idp_mnist.py FOLDER --as-code --methods dpsgd,idp_sample,idp_scale

takes what the published code does beside the paper: momentum 0.5, pixels standardised, padding 2 in the first layer,
and rate 10, too high for the strictest budget's noise; its page is docs/results/idp_mnist_code.md.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lined
import numpy as np
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.types import Facts

ROOT = Path(__file__).parents[1]

BUDGETS = {"strict": 1.0, "usual": 2.0, "open": 3.0}
SHARES = {"strict": 0.34, "usual": 0.43, "open": 0.23}
BATCH, RATE, BOUND, DELTA, STEPS = 512, 0.6, 0.2, 1e-5, 9375
GOAL, GAIN = 97.5, 0.7


@dataclass(frozen=True)
class Setting:
    """How models are trained: by the paper's text, or as its published code does."""

    page: str
    told: str
    rate: float = RATE
    momentum: float = 0.0
    padding: int = 3
    mean: float = 0.0
    std: float = 1.0

    def pixels(self, images: Tensor) -> Tensor:
        """Pictures as the network sees them."""
        return (images[:, None].float() / 255 - self.mean) / self.std


TEXT = Setting("idp_mnist", "the settings are the paper's; pixels are divided by 255")
CODE = Setting(
    "idp_mnist_code",
    "momentum 0.5, pixels standardised and padding 2 are those of the published code, the rate is ours",
    rate=10.0,
    momentum=0.5,
    padding=2,
    mean=0.1307,
    std=0.3081,
)
PAPER = {"dpsgd": 96.75, "idp_sample": 97.81, "idp_scale": 97.78}


def read(folder: Path, name: str) -> Tensor:
    """One official file; the fourth byte of its header says how many dimensions follow."""
    raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def network(padding: int = TEXT.padding) -> nn.Module:
    """The tanh CNN of the DP-SGD papers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=padding), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def owned(seed: int, records: int) -> list[str]:
    """Who owns which record: the shares, shuffled."""
    names = [name for name, share in SHARES.items() for _ in range(round(share * records))]
    order = np.random.default_rng(seed).permutation(records)
    return [names[min(i, len(names) - 1)] for i in order]


def promised(everybody: str = "") -> eh.Budgets:
    """Each owner's own budget, or the same for all."""
    return eh.Budgets({owner: float(everybody or budget) for owner, budget in BUDGETS.items()}, DELTA)


def noise(method: str, records: int = 60_000) -> float:
    """The noise multiplier of a method's plan."""
    name, _, everybody = method.partition(":")
    facts = Facts(records, tuple((owner, round(share * records)) for owner, share in SHARES.items()))
    plan = eh.plan(name, promised(everybody), data=facts, epochs=STEPS * BATCH / records, batch_size=BATCH)
    return plan.levels[0].noise


def run(folder: Path, method: str, seed: int, steps: int, setting: Setting = TEXT) -> dict[str, Any]:
    """Train once; accuracy on the official test images, and what each owner spent."""
    x, y = read(folder, "train-images-idx3-ubyte"), read(folder, "train-labels-idx1-ubyte").long()
    train = eh.data.wrap(setting.pixels(x), y, owners=owned(seed, len(y)), labels=[str(i) for i in range(10)])
    name, _, everybody = method.partition(":")
    torch.manual_seed(seed)
    model = network(setting.padding)
    started = time.time()
    with tempfile.TemporaryDirectory() as out:
        found = eh.fit(
            model,
            train,
            method=name,
            settings={"bound": BOUND},
            privacy=promised(everybody),
            epochs=steps * BATCH / len(y),
            batch_size=BATCH,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=setting.rate, momentum=setting.momentum),
            compose=False,
            out=Path(out) / "run",
        )
        spent = dict(zip(train.facts.owner_names, found.plan.epsilons, strict=True))
    images, labels = read(folder, "t10k-images-idx3-ubyte"), read(folder, "t10k-labels-idx1-ubyte").long()
    with torch.no_grad():
        right = (model.eval()(setting.pixels(images)).argmax(1) == labels).float().mean()
    minutes = round((time.time() - started) / 60, 1)
    return {"accuracy": float(right), "spent": spent, "minutes": minutes}


def verdict(accuracy: dict[str, dict[int, float]]) -> list[str]:
    """What the paper claims and what these runs say, in words."""
    said = []
    for method in ("idp_sample", "idp_scale", "dpsgd:3"):
        both = sorted(set(accuracy.get(method, {})) & set(accuracy.get("dpsgd", {})))
        if not both:
            continue
        gains = [accuracy[method][seed] - accuracy["dpsgd"][seed] for seed in both]
        if ":" in method:
            said.append(
                f"If everybody had promised {method.partition(':')[2]}, DP-SGD would gain {lined.said(gains)} points: "
                "no method with promises per owner can be expected to gain more."
            )
            continue
        mean = float(np.mean(list(accuracy[method].values())))
        reached = "reaches" if mean >= GOAL else "does not reach"
        holds = "at least" if np.mean(gains) >= GAIN else "less than"
        said.append(
            f"`{method}` {reached} {GOAL} %: {mean:.2f} %. Over DP-SGD at the strictest budget, by seed: "
            f"{lined.said(gains)} points, {holds} {GAIN}."
        )
    return said


def page(rows: list[dict[str, Any]], setting: Setting = TEXT) -> str:
    """The page of docs/results, from the lines of all whole runs."""
    accuracy: dict[str, dict[int, float]] = {}
    for row in rows:
        accuracy.setdefault(row["method"], {})[row["seed"]] = 100 * row["accuracy"]
    spent = {row["method"]: row["spent"] for row in rows}
    head = [
        "method",
        "seeds",
        "accuracy, %",
        "noise multiplier",
        *(f"epsilon spent, budget {budget:g}" for budget in BUDGETS.values()),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method, by_seed in sorted(accuracy.items()):
        cells = [method, str(len(by_seed)), lined.said(list(by_seed.values())), f"{noise(method):.3f}"]
        lines.append("| " + " | ".join([*cells, *(f"{spent[method][name]:.4f}" for name in BUDGETS)]) + " |")
    return "\n\n".join(
        [
            "# MNIST with three budgets: what individual promises are worth",
            "Does it pay to use each owner's own budget instead of the strictest for all (Boenisch et al. 2024)? "
            f"{STEPS} steps of {BATCH} records, tanh CNN, rate {setting.rate:g}, clip bound {BOUND}, delta {DELTA:g}. "
            f"Nothing was tuned: {setting.told}.",
            "\n".join(f"- {line}" for line in verdict(accuracy)),
            f"The paper reports {PAPER['dpsgd']} % for DP-SGD at the strictest budget, {PAPER['idp_sample']} % for "
            f"Sample and {PAPER['idp_scale']} % for Scale, on a looser accountant.",
            "\n".join(lines),
            f"Made by `python experiments/idp_mnist.py FOLDER{' --as-code' if setting is CODE else ''}`; "
            f"{sum(row['minutes'] for row in rows):.0f} minutes of "
            "runs on shared cores.\n",
        ]
    )


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default="dpsgd,idp_sample,idp_scale,dpsgd:3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lines", type=Path, default=Path("runs/idp_mnist.jsonl"), help="one line of JSON per run")
    parser.add_argument("--as-code", action="store_true", help="the published code's settings")
    options = parser.parse_args()
    setting = CODE if options.as_code else TEXT
    lines = options.lines.with_name(f"{setting.page}.jsonl") if options.as_code else options.lines
    for seed, method in itertools.product(map(int, options.seeds.split(",")), options.methods.split(",")):
        key = {"method": method, "seed": seed, "steps": options.steps}
        lined.once(lines, key, functools.partial(run, options.folder, method, seed, options.steps, setting))
    if options.steps == STEPS:
        (ROOT / "docs" / "results" / f"{setting.page}.md").write_text(
            page([row for row in lined.read(lines) if row["steps"] == STEPS], setting)
        )


if __name__ == "__main__":
    main()
