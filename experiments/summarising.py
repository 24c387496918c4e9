"""What ``evenhand recommend`` needs of every experiment: what the data were like, and how each method did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import judging

import evenhand


def packaged(tables: Sequence[Mapping[str, Any]], further: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The file that comes with the package, with where its figures are from.

    ``further`` studies, which resample their splits, take the place of those on the same data at the same promise.
    """
    covered = {(study["data"], study["epsilon"]) for study in further}
    return {
        "schema": 1,
        "provenance": (
            f"Written by experiments/results.py of evenhand {evenhand.__version__} from docs/results/*.json. Every "
            "figure is a mean over seeds on the held-out records of public data."
        ),
        "studies": [
            *further,
            *(
                study
                for table in tables
                if judging.guides(table)
                for study in studies(table)
                if (study["data"], study["epsilon"]) not in covered
            ),
        ],
    }


def studies(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One study per promise: the setting, who is best in what, and every private method's figures."""
    setting, least = table["setting"], judging.smallest(table["setting"])
    found = []
    for at in judging.promises(table):
        entries = [entry for entry in table["entries"] if entry["private"] and judging.promise(entry) == at]
        best = {measure: judging.best(table, measure, at) for measure in judging.measures(table)}
        found.append(
            {
                "experiment": table["experiment"],
                "kind": table["study"].get("kind", "other"),
                "data": setting["data"],
                "records": setting["records"],
                "groups": setting["groups"],
                "labels": setting.get("labels"),
                "majority": max((entry.get("majority") or 0.0 for entry in entries), default=0.0) or None,
                "split": table.get("split", ""),
                "smallest_share": None if least is None else least[1],
                "model": setting["model"],
                "features": entries[0]["settings"].get("features", ""),
                "columns": None,
                "parameters": setting["parameters"],
                "epsilon": entries[0]["epsilon"],
                "delta": table["delta"],
                "budgets": setting.get("budgets", {}),
                "best": {
                    measure: {
                        "method": one.method,
                        "value": round(one.value, 2),
                        "low": None if one.low != one.low else round(one.low, 2),
                        "high": None if one.high != one.high else round(one.high, 2),
                        "tied": list(one.tied),
                        "seeds": one.seeds,
                    }
                    for measure, one in best.items()
                    if one is not None
                },
                "methods": {entry["method"]: _method(entry) for entry in entries},
            }
        )
    return found


def _method(entry: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {
        name: round(100 * entry["metrics"][key]["value"], 2)
        for name, key in (("accuracy", "accuracy"), ("worst", "accuracy_group_min"), ("gap", "accuracy_difference"))
        if key in entry["metrics"]
    }
    return {**metrics, "settings": entry["settings"]}
