"""Densities against a DP-SGD linear model on the same scattering features, at the same true epsilon.

    python experiments/densities.py DATA --cache FEATURES                       # about 3 hours on one core
    python experiments/densities.py DATA --cache FEATURES --data MNIST --seeds 0 --epsilons 3 --forms moment_density

DATA is the folder of all sources (`evenhand data`). Features are computed once into --cache (ten minutes, 2.4 GB) and
cost no privacy. Runs that are in --lines are not repeated, so several commands can share the work; each then writes
docs/results/densities.md and its pictures from all lines.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import density_page
import lined
import numpy as np
import torch
from numpy.typing import NDArray

import evenhand as eh
from evenhand.data import sources
from evenhand.density import MomentDensity, NoisyEmbeddingDensity, PublishedSmoothing, RandomFeatureDensity
from evenhand.density.published_smoothing import auc_by_class
from evenhand.models.features import extract

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SOURCES = dict(zip(density_page.DATA, ("mnist", "unbalanced-mnist", "cifar10-subset", "ham10000"), strict=True))
DELTA = 1e-5
RATES = (2.0, 8.0, 32.0)
PLAIN_RATES = (0.02, 0.1, 0.5)
HELD_OUT, TUNING_SEED = 0.1, 10_000
Array = NDArray[Any]
Scores = Callable[[Array], Array]


@dataclass(frozen=True)
class Split:
    """Features and labels of a split."""

    inputs: Array
    labels: Array

    def take(self, rows: Array) -> Split:
        """Some of its records."""
        return Split(self.inputs[rows], self.labels[rows])


def features(source: str, data_dir: Path, cache: Path) -> tuple[Split, Split]:
    """Scattering features of training and test records, from the cache or computed into it."""
    splits = []
    for part, data in zip(("train", "test"), sources.load(source, data_dir=data_dir), strict=True):
        if data is None:
            raise ValueError(f"{source} holds nothing out")
        inputs, labels = data.fetch(torch.arange(len(data)))
        file = cache / f"{source}-{part}.npy"
        if not file.exists():
            cache.mkdir(parents=True, exist_ok=True)
            np.save(file, extract("scattering", inputs).flatten(1).numpy())
        splits.append(Split(np.load(file, mmap_mode="r"), labels.numpy()))
    return splits[0], splits[1]


def density(kind: type, train: Split, epsilon: float | None, seed: int, **settings: Any) -> Scores:
    """A density with these settings; without an epsilon almost no noise (multiplier 0.02)."""
    promise = {"noise": 0.02} if epsilon is None else {"epsilon": epsilon}
    made = kind(**promise, delta=DELTA, seed=seed, insecure_seed=seed, **settings)
    found: Scores = made.fit(train.inputs, train.labels).log_densities
    return found


def published(train: Split, epsilon: float | None, seed: int) -> Scores:
    """The paper's own form: it has no epsilon. Three passes of its projection, which takes most of the time."""
    made = PublishedSmoothing(seed=seed, epochs=3, allow_unproven=True)
    found: Scores = made.fit(np.asarray(train.inputs), train.labels).log_densities
    return found


def linear(train: Split, epsilon: float | None, seed: int, rate: float) -> Scores:
    """A linear model by DP-SGD, or by plain SGD: large batches, momentum, bound 0.1 (Tramer & Boneh 2021)."""
    model = torch.nn.Linear(train.inputs.shape[1], int(train.labels.max()) + 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    private = {"epsilon": epsilon, "delta": DELTA, "method": "dpsgd", "settings": {"bound": 0.1}}
    eh.fit(
        model,
        (torch.from_numpy(np.array(train.inputs)), train.labels),
        epochs=20,
        batch_size=min(4096, len(train.labels) // 10),
        lr=rate,
        out=tempfile.mkdtemp(),
        insecure_seed=seed,
        compose=False,
        progress=False,
        **(private if epsilon is not None else {"method": "sgd"}),
    )
    return lambda inputs: model(torch.from_numpy(np.array(inputs))).detach().numpy()


def best_rate(train: Split, epsilon: float | None) -> dict[str, Any]:
    """The rate of the linear model that serves a tenth of the training records best, by balanced accuracy."""
    started = time.perf_counter()
    held = np.random.default_rng(TUNING_SEED).random(len(train.labels)) < HELD_OUT
    part, rest = train.take(np.flatnonzero(held)), train.take(np.flatnonzero(~held))
    rates = PLAIN_RATES if epsilon is None else RATES
    scores = [np.mean(by_class(linear(rest, epsilon, TUNING_SEED, rate)(part.inputs), part.labels)) for rate in rates]
    return {"rate": rates[int(np.argmax(scores))], "seconds": {"tuning": time.perf_counter() - started}}


DENSITIES: dict[str, Callable[[Split, float | None, int], Scores]] = {
    "moment_density": lambda *given: density(MomentDensity, *given),
    "random_feature_density": lambda *given: density(RandomFeatureDensity, *given),
    "random_feature_density, smoothing 1": lambda *given: density(RandomFeatureDensity, *given, smoothing=1.0),
    "noisy_embedding_density (add/remove)": lambda *given: density(
        NoisyEmbeddingDensity, *given, adjacency="add/remove"
    ),
    density_page.PUBLISHED: published,
}
FORMS = [*DENSITIES, density_page.LINEAR]


def by_class(scores: Array, labels: Array) -> list[float]:
    """Per cent right of each class."""
    right = scores.argmax(1) == labels
    return [100 * float(right[labels == label].mean()) for label in range(scores.shape[1])]


@contextmanager
def memory() -> Iterator[list[float]]:
    """The most memory of the process's own above what it holds now, in MB; 0 where the system does not tell.

    Files that are only read through, such as the features, are not counted.
    """
    status, stop, seen = Path("/proc/self/status"), threading.Event(), [0.0]

    def held() -> float:
        lines = status.read_text().splitlines() if status.exists() else ["RssAnon: 0 kB"]
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000

    def watch(before: float) -> None:
        while not stop.wait(0.02):
            seen[0] = max(seen[0], held() - before)

    watcher = threading.Thread(target=watch, args=(held(),), daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def run(fit: Callable[[], Scores], test: Split) -> dict[str, Any]:
    """Fit and predict once."""
    with memory() as most:
        started = time.perf_counter()
        score = fit()
        fitted = time.perf_counter()
        scores = np.concatenate([score(part) for part in np.array_split(test.inputs, 4)])
        done = time.perf_counter()
    return {
        "accuracy": 100 * float((scores.argmax(1) == test.labels).mean()),
        "classes": by_class(scores, test.labels),
        "auc": auc_by_class(torch.from_numpy(scores), torch.from_numpy(test.labels)),
        "seconds": {"fit": fitted - started, "predict": (done - fitted) * 10_000 / len(test.labels)},
        "memory": most[0],
    }


def train_all(given: argparse.Namespace) -> None:
    """Run what is missing."""
    for name in given.data:
        started = time.perf_counter()
        train, test = features(SOURCES[name], given.folder, given.cache)
        taken = {"seconds": {"features": time.perf_counter() - started}}
        lined.once(given.lines, {"data": name, "features": "scattering"}, lambda taken=taken: taken)
        for seed, epsilon, form in itertools.product(given.seeds, given.epsilons, given.forms):
            promise, where = epsilon or None, {"data": name, "epsilon": epsilon}
            if form == density_page.PUBLISHED and (promise is not None or seed != given.seeds[0]):
                continue
            if form == density_page.LINEAR:
                lined.once(given.lines, where | {"tuned": form}, functools.partial(best_rate, train, promise))
                found = next(row for row in lined.read(given.lines) if (where | {"tuned": form}).items() <= row.items())
                fit = functools.partial(linear, train, promise, seed, found["rate"])
            else:
                fit = functools.partial(DENSITIES[form], train, promise, seed)
            lined.once(given.lines, where | {"form": form, "seed": seed}, functools.partial(run, fit, test))


def main() -> None:
    """Run what is missing, then write the page."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--cache", type=Path, required=True, help="where the features are kept")
    asked.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    asked.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0, 0.0], help="0: no privacy")
    asked.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    asked.add_argument("--data", nargs="+", choices=density_page.DATA, default=list(density_page.DATA))
    asked.add_argument("--lines", type=Path, default=Path("runs/densities.jsonl"), help="one line of JSON per run")
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args()
    train_all(given)
    rows = lined.read(given.lines)
    minutes = sum(sum(row["seconds"].values()) for row in rows) / 60
    text, pictures = density_page.page([row for row in rows if "form" in row], DELTA, minutes)
    for name, content in {"densities.md": text, **pictures}.items():
        (given.out / name).write_text(content)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
