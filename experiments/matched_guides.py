"""What ``evenhand recommend`` reads of the studies at matched rates: each arm at its own rate, named as it is typed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matched_page
import numpy as np
from matched_data import FEATURES, PROJECTED, PROJECTS
from matched_studies import STUDIES
from matched_study import Arm, Promise

from evenhand.reporting.uncertainty import LEVEL


def packaged(out: Path) -> list[dict[str, Any]]:
    """Return the studies that say which method to take, one for every promise, of all figures in ``out``."""
    found = []
    for name, study in sorted(STUDIES.items()):
        file = out / f"{name}.json"
        if study.guides and file.exists():
            table = json.loads(file.read_text())
            figures = matched_page.Figures(study, table)
            found += [_entry(figures, table, promise) for promise in study.promises]
    return found


def _entry(figures: matched_page.Figures, table: Mapping[str, Any], promise: Promise) -> dict[str, Any]:
    study = figures.study
    arms = {study.arm(name).method: study.arm(name) for name in study.guides}
    sizes = figures.sizes.mean(0)
    owners = study.order or tuple(sorted(table["groups"]))
    measures = {"accuracy": "overall", "worst_owner" if study.owned else "worst": "worst"}
    return {
        "experiment": study.name,
        "kind": study.kind,
        "data": study.source,
        "records": table["records"],
        "groups": len(table["groups"]),
        "labels": table["labels"],
        "majority": table["majority"],
        "split": "resampled",
        "smallest_share": float(sizes.min() / sizes.sum()),
        "model": "linear",
        "features": FEATURES.get(study.source, ""),
        "columns": PROJECTED if study.source in PROJECTS else None,
        "parameters": table["parameters"],
        "epsilon": promise.epsilon * promise.ratio,
        "delta": study.delta,
        "budgets": promise.budgets(owners, 0.0) if study.owned else {},
        "best": {name: _best(figures, arms, measure, promise.name) for name, measure in measures.items()},
        "methods": {name: _method(figures, arm, promise.name) for name, arm in arms.items()},
    }


def _best(figures: matched_page.Figures, arms: Mapping[str, Arm], measure: str, promise: str) -> dict[str, Any]:
    """Return the method with the best mean, and those that paired intervals do not tell from it."""
    rates = {name: figures.rate(arm.name, promise) for name, arm in arms.items()}
    means = {name: float(figures.values(measure, arm.name, promise, rates[name]).mean()) for name, arm in arms.items()}
    first = max(means, key=lambda name: means[name])
    top = figures.estimate(measure, arms[first].name, promise, rates[first])
    tied = []
    for name, arm in arms.items():
        if name != first:
            pair = (arms[first].name, rates[first]), (arm.name, rates[name])
            if figures.apart(measure, *pair, promise, LEVEL).low <= 0:
                tied.append(name)
    ends = {"low": round(top.low, 2), "high": round(top.high, 2)}
    return {"method": first, "value": round(top.value, 2), **ends, "tied": tied, "seeds": figures.table["replicas"]}


def _method(figures: matched_page.Figures, arm: Arm, promise: str) -> dict[str, Any]:
    rate, study = figures.rate(arm.name, promise), figures.study
    shares = figures.shares(arm.name, promise, rate).mean(0)
    overall = float(np.mean(figures.values("overall", arm.name, promise, rate)))
    settings: dict[str, Any] = {
        "method": arm.method,
        "model": "linear",
        "epochs": float(study.epochs),
        "batch_size": float(study.batch),
    }
    descent = {"momentum": study.momentum, "lr_schedule": study.schedule, "average": study.average or None}
    if study.source in FEATURES and study.source not in PROJECTS:
        settings["features"] = FEATURES[study.source]
    return {
        "accuracy": round(overall, 2),
        "worst": round(100 * float(shares.min()), 2),
        "gap": round(100 * float(shares.max() - shares.min()), 2),
        "settings": {
            **settings,
            "lr": rate,
            **{name: value for name, value in descent.items() if value is not None},
            "settings": dict(arm.settings),
        },
    }
