"""How the digits of one owner learn under IDP-SGD and under INO-SGD: recall of each class, on MNIST with two owners.

    python experiments/owner_curves.py --data-dir FOLDER       # half a minute of one core for each of ten trainings
    python experiments/owner_curves.py --pages                 # page and pictures again from the JSON file alone

The setting of mnist_owners.toml, with the learning rates that tuning chose there. Classes of one owner share its
promise and still differ in how fast they are learned (001, App. D.4.1). Recall is that of the held-out records after
each half epoch; MNIST is public, of private data it could not be shown.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from following import DIGITS, RESULTS, Curve, command, curve, drawn, followed, table, words
from seed_intervals import over_seeds
from torch import nn

from evenhand.comparison import declared_claims, sweep, tuning
from evenhand.data import Data
from evenhand.errors import UsageError
from evenhand.training import evaluate
from evenhand.training.config import Config
from evenhand.training.from_config import planned, read_budgets
from evenhand.training.optimizers import Descent

HERE = Path(__file__).parent
STUDY = "mnist_owners"
BEFORE, AFTER = METHODS = ("idp_sample", "ino_sample")
PARTS = 2
"""Rows in an epoch."""
MOMENTS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Epochs after which the tables look; the nearest row counts."""
CLAIMS = (
    declared_claims.Claim("spread between its classes, points", AFTER, BEFORE, "gap", "lower"),
    declared_claims.Claim("recall of its worst class, %", AFTER, BEFORE, "worst"),
)
"""What the paper says: INO brings the classes of the strict owner closer together, by lifting the slow ones."""


def cells(seeds: int, figures: Path = RESULTS) -> list[sweep.Cell]:
    """The runs of mnist_owners.toml for both methods, with what its tuning chose; only they are looked at here."""
    file = figures / f"{STUDY}.json"
    if not file.exists():
        raise UsageError(f"There is no {file}: run `python experiments/results.py {STUDY}` first, for its tuning.")
    entries = json.loads(file.read_text())["entries"]
    chosen = {(each["method"], each["epsilon"]): tuning.Choice(each["tuning"]["chosen"]) for each in entries}
    made = dataclasses.replace(sweep.from_toml(HERE / f"{STUDY}.toml", {}), seeds=seeds)
    return [cell for cell in made.cells(chosen) if cell.method in METHODS]


def trained(config: Config, train: Data, test: Data) -> list[dict[str, Any]]:
    """One training; after each half epoch the recall of every class on held-out records."""
    model = config.build_model(train.facts)
    plan = planned(config, train.facts, read_budgets(config, train))
    descent = Descent(config.optimizer, config.lr, config.momentum, config.weight_decay, config.lr_schedule)
    optimizer, schedule = descent.build(model, plan.steps)

    def look() -> dict[str, Any]:
        found = evaluate.row(model, test, 0, 0.0)["groups"]
        return {"recall": {name: round(share, DIGITS) for name, share in found.items()}}

    loss = nn.CrossEntropyLoss(reduction="none")
    return followed(model, optimizer, loss, plan, train, look, parts=PARTS, schedule=schedule)


def measured(asked: list[sweep.Cell], data_dir: Path | None) -> dict[str, Any]:
    """Every training, with what it was made with, who owns which class, and what it took."""
    first = asked[0].config
    train, test = dataclasses.replace(first, data_dir=None if data_dir is None else str(data_dir)).load_data()
    if test is None:
        raise UsageError(f"{first.data} has no held-out records, and recall is taken on them.")
    started, runs = time.process_time(), []
    for cell in asked:
        runs.append({"method": cell.method, "seed": cell.seed, "rows": trained(cell.config, train, test)})
        print(f"{cell.name}: {time.process_time() - started:.0f} processor seconds so far", flush=True)
    same = {name: getattr(first, name) for name in ("data", "model", "delta", "epochs", "batch_size")}
    return {
        "settings": {
            **same,
            "records": train.facts.records,
            "bound": first.settings["bound"],
            "budgets": dict(first.budgets),
            "lr": {cell.method: cell.config.lr for cell in asked},
        },
        "seeds": len({cell.seed for cell in asked}),
        "minutes": (time.process_time() - started) / 60,
        "owners": {name: _held(test, code) for code, name in enumerate(test.facts.owner_names)},
        "runs": runs,
    }


def _held(test: Data, owner: int) -> dict[str, int]:
    """Held-out records of an owner by class; classes it holds nothing of are left out."""
    counts = {name: int((test.group[test.owner == owner] == code).sum()) for code, name in enumerate(test.facts.groups)}
    return {name: count for name, count in counts.items() if count}


def strict(found: Mapping[str, Any]) -> str:
    """The owner with the smallest budget."""
    budgets: Mapping[str, float] = found["settings"]["budgets"]
    return min(budgets, key=lambda name: budgets[name])


def moments(found: Mapping[str, Any]) -> dict[int, float]:
    """The rows that the tables look at, with their epoch; every row once, also where a short training has few."""
    epochs = [row["epoch"] for row in found["runs"][0]["rows"]]
    nearest = (min(range(len(epochs)), key=lambda at: abs(epochs[at] - moment)) for moment in MOMENTS)
    return {at: epochs[at] for at in nearest}


def evaluations(found: Mapping[str, Any], at: int) -> dict[str, declared_claims.Rows]:
    """What a claim is judged by at one row: the strict owner's classes as groups, by method and seed."""
    mine = found["owners"][strict(found)]
    rows: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in METHODS}
    for run in found["runs"]:
        recall = run["rows"][at]["recall"]
        rows[run["method"]][run["seed"]] = {"groups": {name: recall[name] for name in mine}}
    return dict(rows)


def judged(found: Mapping[str, Any], claim: declared_claims.Claim) -> list[list[str]]:
    """A row of the table per moment: both methods, the paired difference, and whether the paper's direction holds."""
    lined = []
    for at, epoch in moments(found).items():
        rows = evaluations(found, at)
        both = [over_seeds(list(declared_claims.series(claim.measure, rows[name]).values()), low=0) for name in METHODS]
        verdict = claim.judged(rows, {})
        shown = [*(words(each, ".1f") for each in both), words(verdict.difference, "+.1f")]
        lined.append([f"{epoch:g}", *shown, verdict.verdict])
    return lined


def recalls(found: Mapping[str, Any]) -> list[list[str]]:
    """A row of the table per method and class of the strict owner: recall in % at every moment."""
    lined = []
    for method in METHODS:
        for name in found["owners"][strict(found)]:
            series = [declared_claims.series(f"group:{name}", evaluations(found, at)[method]) for at in moments(found)]
            shown = [words(over_seeds(list(each.values()), low=0, high=100), ".1f") for each in series]
            lined.append([f"{method}, {name}", *shown])
    return lined


def page(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The page, and its pictures by file name."""
    used, owner = found["settings"], strict(found)
    budgets = ", ".join(f"{name} {epsilon:g}" for name, epsilon in used["budgets"].items())
    held = ", ".join(f"{name} {count:,}" for name, count in found["owners"][owner].items())
    rates = ", ".join(f"{name} {lr:g}" for name, lr in used["lr"].items())
    parts = [
        "# How the classes of one owner learn on MNIST: IDP-SGD and INO-SGD",
        f"The digits of owner {owner} share one promise, the strictest. Does INO-SGD bring them closer together while "
        "it trains, by lifting those that are learned late (Tian et al. 2026, App. D.4.1)?",
        f"Owners and their epsilon: {budgets}, per record, add/remove, delta {used['delta']:g}. {used['model']}, "
        f"{used['records']:,} records, {used['epochs']:g} epochs of batches of {used['batch_size']:g}, clip bound "
        f"{used['bound']:g}, learning rates as tuned ({rates}): the setting of [two owners on MNIST]({STUDY}.md), "
        f"which names the choices that are ours. Means over {found['seeds']} seeds with 95 % t-intervals, on held-out "
        f"records of the owner ({held}), which no epsilon covers: MNIST is public, and these are research figures.",
    ]
    for claim in CLAIMS:
        head = ["epoch", *METHODS, "difference by seed", "as the paper says"]
        parts += [f"Owner {owner}, {claim.text}:", table(head, judged(found, claim))]
    parts.append(
        "While none of its classes is learned, none is ahead of another: a small spread is good news only where the "
        "worst class is learned too."
    )
    pictures: dict[str, str] = {}
    for method in METHODS:
        title = f"Recall of each class of owner {owner} over the epochs, {method}"
        file = f"owner_curves_{method}.svg"
        series: dict[str, Curve] = {name: curve(found, method, "recall", name) for name in found["owners"][owner]}
        pictures[file] = drawn(series, title, "recall, %", 100)
        parts.append(f"![{title}]({file})")
    parts += [
        f"Recall in % of every class of owner {owner}, after so many epochs:",
        table(["method and class", *(f"{epoch:g}" for epoch in moments(found).values())], recalls(found)),
        f"Made by `python experiments/owner_curves.py --data-dir FOLDER`; {found['minutes']:.1f} processor minutes. "
        "The figures: [owner_curves.json](owner_curves.json).",
    ]
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    command("owner_curves", __doc__, lambda seeds, data_dir: measured(cells(seeds), data_dir), page)
