"""How dense the classes lie: mean distances to the five nearest records, by class (figure 1 of 002).

    python experiments/knn_distances.py --data-dir FOLDER [--work FOLDER] [--out docs/results]

Looks at public records directly, without any privacy: it is a picture of the data, not of a method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from page_text import lined_up
from serving_data import records
from torch import Tensor

from evenhand.reporting.charts import lines as drawn_lines
from evenhand.reporting.svg import standalone

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SOURCE, FEATURES, NEIGHBOURS, BINS = "ham10000-200x150", "efficientnet_lite0", 5, 40


def nearest(inputs: Tensor, count: int = NEIGHBOURS) -> NDArray[np.float64]:
    """Return each row's mean Euclidean distance to its nearest other rows.

    >>> nearest(torch.tensor([[0.0], [1.0], [3.0]]), 2).tolist()
    [2.0, 1.5, 2.5]
    """
    squares, found = inputs.square().sum(1), []
    for rows in torch.arange(len(inputs)).split(1024):
        apart = squares[rows].unsqueeze(1) + squares - 2 * inputs[rows] @ inputs.T
        apart[torch.arange(len(rows)), rows] = float("inf")
        found.append(apart.topk(count, largest=False).values.clamp(min=0).sqrt().mean(1))
    return torch.cat(found).double().numpy()


def measured(distances: NDArray[np.float64], labels: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """Return, by class, how many records there are, quartiles, and the shares in equal bins."""
    edges = np.linspace(0, float(np.quantile(distances, 0.999)), BINS + 1)
    classes = []
    for label, name in enumerate(names):
        own = distances[labels == label]
        shares = np.histogram(own, edges)[0] / len(own)
        quartiles = np.quantile(own, (0.25, 0.5, 0.75)).round(3).tolist()
        classes.append({"name": name, "records": len(own), "quartiles": quartiles, "shares": shares.round(5).tolist()})
    return {"edges": edges.round(4).tolist(), "classes": classes}


def page(table: Mapping[str, Any]) -> str:
    """Return the page from its figures."""
    classes = sorted(table["classes"], key=lambda one: one["quartiles"][1])
    middle = [one["quartiles"][1] for one in classes]
    body = [[one["name"], f"{one['records']:,}", *(f"{value:.2f}" for value in one["quartiles"])] for one in classes]
    return (
        "# How dense the diagnoses of HAM10000 lie\n\n"
        "Figure 1 of instance-level smoothing (002) on these data: do classes differ in density, so that one amount of "
        "smoothing cannot suit all?\n\n"
        f"- {classes[0]['name']} lies densest and {classes[-1]['name']} sparsest: half of their records are "
        "nearer to their "
        f"{NEIGHBOURS} nearest than {middle[0]:.2f} and {middle[-1]:.2f}, a ratio of {middle[-1] / middle[0]:.2f}.\n\n"
        "![Share of a class's records by mean distance to the nearest](knn_distances.svg)\n\n"
        f"Mean Euclidean distances of all 10,015 pictures to their {NEIGHBOURS} nearest among all, on "
        "EfficientNet-Lite0 "
        "features. A picture of public data without privacy.\n\n"
        f"{lined_up(['diagnosis', 'records', 'lower quartile', 'median', 'upper quartile'], body)}\n\n"
        "Made by `python experiments/knn_distances.py --data-dir FOLDER`. The figures: "
        "[knn_distances.json](knn_distances.json).\n"
    )


def picture(table: Mapping[str, Any]) -> str:
    """Return the histogram of every class as a line."""
    middles = [(low + high) / 2 for low, high in zip(table["edges"], table["edges"][1:], strict=False)]
    series = {
        one["name"]: [(x, 100 * y) for x, y in zip(middles, one["shares"], strict=True)] for one in table["classes"]
    }
    title = "Share of a class's records by mean distance to the nearest"
    return standalone(drawn_lines(series, title=title, x_label="mean distance", y_label="records of the class, %"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write figures, page and picture."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--work", type=Path, default=Path("runs/serving"))
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args(arguments)
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    source = records(SOURCE, FEATURES, given.data_dir, given.work)
    inputs = source.data.fetch(torch.arange(len(source.labels)))[0]
    table = measured(nearest(inputs), source.labels, source.data.facts.groups)
    (given.out / "knn_distances.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")
    (given.out / "knn_distances.md").write_text(page(table))
    (given.out / "knn_distances.svg").write_text(picture(table))


if __name__ == "__main__":
    main()
