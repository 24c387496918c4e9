"""Promises per owner on MNIST: DP-SGD at the strictest budget beside idp_sample and idp_scale (Boenisch et al. 2024).

    python experiments/idp_mnist.py FOLDER [--methods dpsgd,idp_sample] [--seeds 0,1,2] [--steps 9375]

FOLDER holds the four official files of MNIST (idx, gzipped). Budgets 1, 2 and 3 go to 34, 43 and 23 % of the records,
at random; tanh CNN, expected batch 512, plain SGD at rate 0.6, clip bound 0.2, delta 1e-5. Noise and sampling are
secret and fresh. dpsgd:3 is DP-SGD as if everybody had promised 3: the most that promises per owner can win. A seed
only fixes initial weights and who owns which record. A run takes about a quarter of an hour of one core. Runs that are
in --lines are not repeated, so two commands with different methods or seeds can share the work. Then the page is
written from all of them, docs/results/idp_mnist.md, and their figures as JSON.

    python experiments/idp_mnist.py FOLDER --as-code --methods dpsgd,idp_sample,idp_scale --seeds 0,1,2,3,4

takes what the published code does beside the paper: momentum 0.5, pixels standardised and padding 2 in the first layer;
its page is docs/results/idp_mnist_code.md. Other rates are taken with --rates 2,5. With --pages the page is written
again from its JSON file, and nothing is run.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lined
import numpy as np
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.uncertainty import Split, difference, over_replicas, verdict
from evenhand.types import Facts

RESULTS = Path(__file__).parents[1] / "docs" / "results"

BUDGETS = {"strict": 1.0, "usual": 2.0, "open": 3.0}
SHARES = {"strict": 0.34, "usual": 0.43, "open": 0.23}
BATCH, RATE, BOUND, DELTA, STEPS = 512, 0.6, 0.2, 1e-5, 9375
GOAL, GAIN = 97.5, 0.7
"""Accuracy to reach, and the smallest gain that matters, in points: declared before the first run."""
PICTURES = 10_000


@dataclass(frozen=True)
class Setting:
    """How models are trained: by the paper's text, or as its published code does."""

    page: str
    told: str
    rates: tuple[float, ...] = (RATE,)
    momentum: float = 0.0
    padding: int = 3
    mean: float = 0.0
    std: float = 1.0

    @property
    def command(self) -> str:
        """The command that makes the page."""
        if self.page == "idp_mnist":
            return "python experiments/idp_mnist.py FOLDER"
        methods = "--methods dpsgd,idp_sample,idp_scale --seeds 0,1,2,3,4"
        return f"python experiments/idp_mnist.py FOLDER --as-code {methods}"

    def pixels(self, images: Tensor) -> Tensor:
        """Pictures as the network sees them."""
        return (images[:, None].float() / 255 - self.mean) / self.std


TEXT = Setting("idp_mnist", "the settings are the paper's; pixels are divided by 255")
CODE = Setting(
    "idp_mnist_code",
    "momentum 0.5, pixels standardised and padding 2 are those of the published code, and 0.6 is the paper's rate; "
    "higher ones were looked at first, with DP-SGD alone and one or two seeds (`--rates 2,5,10 --methods dpsgd`)",
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


def run(folder: Path, method: str, seed: int, steps: int, rate: float, setting: Setting = TEXT) -> dict[str, Any]:
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
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=setting.momentum),
            compose=False,
            out=Path(out) / "run",
        )
        spent = dict(zip(train.facts.owner_names, found.plan.epsilons, strict=True))
    images, labels = read(folder, "t10k-images-idx3-ubyte"), read(folder, "t10k-labels-idx1-ubyte").long()
    with torch.no_grad():
        right = (model.eval()(setting.pixels(images)).argmax(1) == labels).float().mean()
    minutes = round((time.time() - started) / 60, 1)
    return {"accuracy": float(right), "spent": spent, "minutes": minutes}


@dataclass(frozen=True)
class Claim:
    """A claim that was declared before the runs, with what they say: points, at a level for all claims together."""

    text: str
    points: Estimate
    verdict: str
    seeds: int


def by_method(rows: Sequence[Mapping[str, Any]], rate: float) -> dict[str, dict[int, float]]:
    """Accuracy of every run at a rate, by method and seed."""
    accuracy: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["rate"] == rate:
            accuracy.setdefault(row["method"], {})[row["seed"]] = row["accuracy"]
    return accuracy


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Judge what the paper claims by these runs, at each rate that has at least two seeds.

    Intervals hold training and test pictures, for all claims at once; "holds" asks for the whole interval above 0 and
    its upper end at least at what matters, see `uncertainty.verdict`.
    """
    pairs = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        accuracy = by_method(rows, rate)
        for method in ("idp_sample", "idp_scale"):
            seeds = sorted(set(accuracy.get(method, {})) & set(accuracy.get("dpsgd", {})))
            if len(seeds) > 1:
                columns = ([accuracy[name][seed] for seed in seeds] for name in (method, "dpsgd"))
                pairs.append((rate, method, len(seeds), *columns))
    level, split, judged = 1 - 0.05 / max(1, 2 * len(pairs)), Split(), list[Claim]()
    for rate, method, count, mine, plain in pairs:
        gain = _points(difference(mine, plain, PICTURES, split, level=level))
        text = f"At rate {rate:g} `{method}` is more accurate than DP-SGD at the strictest budget"
        judged.append(Claim(text, gain, verdict(gain.low, gain.high, GAIN), count))
        reached = _points(over_replicas(mine, PICTURES, split, level=level), GOAL)
        text = f"At rate {rate:g} `{method}` is above {GOAL} %"
        judged.append(Claim(text, reached, verdict(reached.low, reached.high, 0), count))
    return judged


def _points(share: Estimate, less: float = 0.0) -> Estimate:
    return Estimate(100 * share.value - less, 100 * share.low - less, 100 * share.high - less, share.count)


def printed(points: Estimate) -> str:
    """Points with their interval."""
    return f"{points.value:+.2f} ({points.low:+.2f} to {points.high:+.2f})"


def told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims in words, and how much could be won at most, where that was run."""
    lines = [f"**{each.verdict}**: {each.text}: {printed(each.points)} points." for each in claims(rows)]
    for rate in dict.fromkeys(row["rate"] for row in rows):
        accuracy = by_method(rows, rate)
        seeds = sorted(set(accuracy.get("dpsgd:3", {})) & set(accuracy.get("dpsgd", {})))
        if seeds:
            gains = [100 * (accuracy["dpsgd:3"][seed] - accuracy["dpsgd"][seed]) for seed in seeds]
            lines.append(
                f"If everybody had promised 3, DP-SGD would gain {lined.said(gains)} points at rate {rate:g}: no "
                "method with promises per owner can be expected to gain more."
            )
    return lines


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy, noise and what each owner spent, by rate and method."""
    head = ["rate", "method", "seeds", "accuracy, %", "noise multiplier"]
    head += [f"epsilon spent, budget {budget:g}" for budget in BUDGETS.values()]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for rate in sorted({row["rate"] for row in rows}):
        for method, by_seed in sorted(by_method(rows, rate).items()):
            spent = next(row["spent"] for row in rows if row["rate"] == rate and row["method"] == method)
            accuracy = lined.said([100 * value for value in by_seed.values()])
            cells = [f"{rate:g}", method, str(len(by_seed)), accuracy, f"{noise(method):.3f}"]
            lines.append("| " + " | ".join([*cells, *(f"{spent[name]:.4f}" for name in BUDGETS)]) + " |")
    return "\n".join(lines)


def page(rows: Sequence[Mapping[str, Any]], setting: Setting = TEXT) -> str:
    """The page of docs/results, from the lines of all whole runs."""
    baseline = [
        "The settings were not chosen for DP-SGD, and a weaker baseline makes the gain larger: compare its accuracy by "
        "the text's settings, [idp_mnist](idp_mnist.md)."
    ]
    return "\n\n".join(
        [
            "# MNIST with three budgets: what individual promises are worth"
            + (", with the settings of the published code" if setting is CODE else ""),
            "Does it pay to use each owner's own budget instead of the strictest for all (Boenisch et al. 2024)? "
            f"{STEPS} steps of {BATCH} records, tanh CNN, clip bound {BOUND}, delta {DELTA:g}. "
            f"Nothing was tuned: {setting.told}.",
            "\n".join(f"- {line}" for line in told(rows)),
            "Intervals of these claims hold for all of them together, and hold the chance of training and of the "
            f"{PICTURES:,} test pictures; a gain of less than {GAIN} points does not matter here. Those of the "
            "table are of training alone.",
            *(baseline if setting is CODE else []),
            f"The paper reports {PAPER['dpsgd']} % for DP-SGD at the strictest budget, {PAPER['idp_sample']} % for "
            f"Sample and {PAPER['idp_scale']} % for Scale, on a looser accountant.",
            table(rows),
            f"Made by `{setting.command}`; {sum(row['minutes'] for row in rows):.0f} minutes of runs on shared "
            "cores.\n",
        ]
    )


def write(rows: Sequence[Mapping[str, Any]], setting: Setting) -> None:
    """Write the page and its figures."""
    ordered = sorted(rows, key=lambda row: (row["rate"], row["method"], row["seed"]))
    (RESULTS / f"{setting.page}.json").write_text(json.dumps({"runs": ordered}, indent=1) + "\n")
    (RESULTS / f"{setting.page}.md").write_text(page(ordered, setting))


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--methods", default="dpsgd,idp_sample,idp_scale,dpsgd:3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", help="learning rates; default those of the settings")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lines", type=Path, default=Path("runs/idp_mnist.jsonl"), help="one line of JSON per run")
    parser.add_argument("--as-code", action="store_true", help="the published code's settings")
    parser.add_argument("--pages", action="store_true", help="write the page again from its JSON file; run nothing")
    options = parser.parse_args()
    setting = CODE if options.as_code else TEXT
    if options.pages:
        write(json.loads((RESULTS / f"{setting.page}.json").read_text())["runs"], setting)
        return
    lines = options.lines.with_name(f"{setting.page}.jsonl") if options.as_code else options.lines
    rates = setting.rates if options.rates is None else tuple(map(float, options.rates.split(",")))
    seeds, methods = map(int, options.seeds.split(",")), options.methods.split(",")
    for rate, seed, method in itertools.product(rates, seeds, methods):
        key = {"method": method, "seed": seed, "steps": options.steps, "rate": rate}
        lined.once(lines, key, functools.partial(run, options.folder, method, seed, options.steps, rate, setting))
    if options.steps == STEPS:
        write([row for row in lined.read(lines) if row["steps"] == STEPS], setting)


if __name__ == "__main__":
    main()
