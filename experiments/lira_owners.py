"""Do stricter owners leak less? LiRA on the digits with three owners, IDP-SGD beside INO-SGD (001, App. D.4.5).

    python experiments/lira_owners.py [--seeds 5]      # about two minutes of one core an attack, three attacks a seed
    python experiments/lira_owners.py --pages          # page and picture again from the JSON file alone

Every record belongs to one of three owners by a coin of its own, dealt anew with every seed. 256 models are trained on
random halves of the records, a quarter of them is attacked. The digits are public, so the figures may be shown.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from following import Curve, command, drawn, table, words
from seed_intervals import over_seeds

import evenhand as eh
from evenhand.reporting.group_metrics import Estimate
from evenhand.training.config import PYTHON, Config

BUDGETS = {"1": 1.0, "10": 10.0, "100": 100.0}
METHODS = ("sgd", "idp_sample", "ino_sample")
MODELS, EPOCHS, BATCH, DELTA = 256, 100, 200, 1e-5
MARGIN = 0.02
"""The smallest difference of an AUC that matters."""
ALARMS = "0.01"
"""The rate of false alarms of the second table."""


def attacked(method: str, seed: int) -> tuple[dict[str, Any], int]:
    """Attack one method, and return the figures of every owner and how many records took part."""
    train = eh.data.digits()[0]
    inputs, targets = train.fetch(torch.arange(len(train)))
    names = np.random.default_rng(seed).choice(list(BUDGETS), len(train))
    settings = Config(data=PYTHON, method=method, epochs=EPOCHS, batch_size=BATCH, momentum=0.9, delta=DELTA)
    promise: dict[str, Any] = {"delta": None} if method == "sgd" else {"budgets": BUDGETS}
    audit = eh.audit(
        dataclasses.replace(settings, **promise),
        kind="lira",
        models=MODELS,
        train=eh.data.wrap(inputs, targets, owners=names),
        public=True,
    )
    owners = {name: audit.details["parts"][f"owner {name}"] for name in BUDGETS}
    bounds = {name: bound.lower for name, bound in audit.per_owner.items()}
    figures = {
        name: {
            "auc": round(part["auc"][0], 5),
            "hits": round(part["tpr_at_fpr"][ALARMS][0], 5),
            "bound": round(bounds[name], 4),
            "curve": part["curve"],
        }
        for name, part in owners.items()
    }
    return figures, len(train)


def measured(seeds: int, data_dir: Path | None) -> dict[str, Any]:
    """Attack every method with every deal of the owners; the digits come with scikit-learn, so no folder is needed."""
    started, runs, records = time.process_time(), [], 0
    for seed in range(seeds):
        for method in METHODS:
            owners, records = attacked(method, seed)
            runs.append({"method": method, "seed": seed, "owners": owners})
            print(f"{method}, deal {seed}: {time.process_time() - started:.0f} processor seconds so far", flush=True)
    return {"records": records, "seeds": seeds, "minutes": (time.process_time() - started) / 60, "runs": runs}


def series(found: Mapping[str, Any], method: str, owner: str, measure: str) -> list[float]:
    """Return one figure of an owner in every deal."""
    return [run["owners"][owner][measure] for run in found["runs"] if run["method"] == method]


def differences(found: Mapping[str, Any], left: tuple[str, str], right: tuple[str, str]) -> Estimate:
    """Return the difference of two AUCs, deal by deal; each side is a method and an owner."""
    pairs = zip(series(found, *left, "auc"), series(found, *right, "auc"), strict=True)
    return over_seeds([one - other for one, other in pairs])


def verdict(found: Estimate) -> str:
    """Return what an interval says of a difference that should be above 0.

    Examples:
      >>> verdict(Estimate(0.1, 0.05, 0.15, 5)), verdict(Estimate(0.0, -0.01, 0.01, 5)), verdict(Estimate(0, -1, 1, 5))
      ('holds', 'too small to matter', 'not decided')
    """
    if found.low > -MARGIN and found.high < MARGIN:
        return "too small to matter"
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "not decided"


def claims(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each claim: text, difference, verdict."""
    rows = []
    for method in METHODS[1:]:
        for lax, strict in (("10", "1"), ("100", "10")):
            gap = differences(found, (method, lax), (method, strict))
            rows.append([f"{method}: owner {lax} leaks more than owner {strict}", words(gap, "+.3f"), verdict(gap)])
    for owner in BUDGETS:
        gap = differences(found, (METHODS[2], owner), (METHODS[1], owner))
        text = f"owner {owner}: {METHODS[2]} leaks more than {METHODS[1]}"
        rows.append([text, words(gap, "+.3f"), verdict(gap)])
    return rows


def roc(found: Mapping[str, Any], method: str) -> dict[str, Curve]:
    """Return the mean curve of every owner: hits over false alarms, both in percent."""
    curves_by_owner: dict[str, Curve] = {}
    for owner in BUDGETS:
        known = [run["owners"][owner]["curve"] for run in found["runs"] if run["method"] == method]
        fewest = min(map(len, known))  # at few false alarms a deal with fewer records has no point
        curves = np.array([curve[-fewest:] for curve in known])
        mean = 100 * curves.mean(0)
        name = f"owner {owner}"
        curves_by_owner[name] = [(float(x), Estimate(float(y), float(y), float(y), len(curves))) for x, y in mean]
    return curves_by_owner


def page(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the page, and its pictures by file name."""
    cells = [
        [
            f"{method}, owner {owner}",
            words(over_seeds(series(found, method, owner, "auc")), ".3f"),
            words(over_seeds([100 * value for value in series(found, method, owner, "hits")]), ".2f"),
            f"{max(series(found, method, owner, 'bound')):.2f}",
        ]
        for method in METHODS
        for owner in BUDGETS
    ]
    parts = [
        "# Do stricter owners leak less? LiRA per owner",
        "Figure 22 of INO-SGD (Tian et al. 2026, App. D.4.5) on the digits: owners with epsilon 1, 10 and 100 under "
        "IDP-SGD and INO-SGD, and the same training without privacy.",
        f"{found['records']:,} training records, each dealt to one of the three owners by chance, anew in each of "
        f"{found['seeds']} deals; the network `{Config.model}`, {EPOCHS} epochs, batches of {BATCH}, momentum .9, "
        f"delta {DELTA:g}. "
        f"In every deal {MODELS} models are trained on random halves of the records and {MODELS // 4} of them are "
        "attacked by the likelihood-ratio attack of Carlini et al. (2022), online. Means over deals with 95 % "
        "t-intervals. The lower bound is the largest over deals of what is certified with 95 % confidence in each.",
        "An owner with a laxer promise is drawn more often, so that its records can leak more than in the training "
        "without privacy, which draws all alike.",
        table(["training", "AUC", f"hits in % at {100 * float(ALARMS):g} % false alarms", "certified epsilon"], cells),
        f"Declared before: differences of AUC, deal by deal; a difference below {MARGIN:g} either way is too small to "
        "matter.",
        table(["claim", "difference of AUC", "verdict"], claims(found)),
    ]
    pictures = {}
    for method in METHODS:
        title = f"{method}: hits over false alarms, %"
        file = f"lira_owners_{method}.svg"
        pictures[file] = drawn(roc(found, method), title, "hits, %", x_label="false alarms, %")
        parts.append(f"![{title}]({file})")
    parts.append(
        f"Made by `python experiments/lira_owners.py`; {found['minutes']:.1f} processor minutes. The figures: "
        "[lira_owners.json](lira_owners.json)."
    )
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    command("lira_owners", __doc__, measured, page)
