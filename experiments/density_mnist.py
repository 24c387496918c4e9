"""Densities against a DP-SGD linear model on the same MNIST scattering features, at the same true epsilon.

    python experiments/density_mnist.py FOLDER --cache FEATURES                 # about 3 hours on one core
    python experiments/density_mnist.py FOLDER --cache FEATURES --seeds 0 --epsilons 3 --forms moment_density

FOLDER holds the official files of MNIST. Features (3,969 a record) are computed once into --cache (six minutes, 1.1 GB)
and cost no privacy. Runs that are in --lines are not repeated, so several commands can share the work; each then writes
docs/results/density_mnist.md from all lines: balanced, and with class 8 cut to 500 records.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import density_page
import lined
import numpy as np
import torch
from numpy.typing import NDArray

import evenhand as eh
from evenhand.density import MomentDensity, NoisyEmbeddingDensity, RandomFeatureDensity
from evenhand.features.scattering import scattering

PAGE = Path(__file__).parents[1] / "docs" / "results" / "density_mnist.md"
DELTA, CUT, SMALL = 1e-5, 8, 500
RATES = (2.0, 8.0, 32.0)
PLAIN_RATES = (0.02, 0.1, 0.5)
HELD_OUT, TUNING_SEED = 0.1, 10_000
Array = NDArray[Any]
Predict = Callable[[Array], Array]


@dataclass(frozen=True)
class Split:
    """Features and labels of a split."""

    inputs: Array
    labels: Array

    def take(self, rows: Array) -> Split:
        """Some of its records."""
        return Split(self.inputs[rows], self.labels[rows])


def features(name: str, folder: Path, cache: Path) -> Split:
    """Scattering features of a split, from the cache or computed into it."""
    file = cache / f"{name}.npy"
    labels = np.frombuffer(gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8)
    if not file.exists():
        raw = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        pictures = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, 1, 28, 28).copy())
        parts = [scattering(part.float() / 255).flatten(1).numpy() for part in torch.split(pictures, 1000)]
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, np.concatenate(parts))
    return Split(np.load(file, mmap_mode="r"), labels.astype(np.int64))


def unbalanced(train: Split) -> Split:
    """Class 8 cut to its first 500 records."""
    small = np.flatnonzero(train.labels == CUT)
    return train.take(np.setdiff1d(np.arange(len(train.labels)), small[SMALL:]))


def density(kind: type, train: Split, epsilon: float | None, seed: int, **settings: Any) -> Predict:
    """A density with these settings; without an epsilon almost no noise (multiplier 0.02)."""
    promise = {"noise": 0.02} if epsilon is None else {"epsilon": epsilon}
    made = kind(**promise, delta=DELTA, seed=seed, insecure_seed=seed, **settings)
    predict: Predict = made.fit(train.inputs, train.labels).predict
    return predict


def linear(train: Split, epsilon: float | None, seed: int, rate: float) -> Predict:
    """A linear model by DP-SGD, or by plain SGD: large batches, momentum, bound 0.1 (Tramer & Boneh 2021)."""
    model = torch.nn.Linear(train.inputs.shape[1], 10)
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
    return lambda inputs: model(torch.from_numpy(np.array(inputs))).argmax(1).numpy()


def best_rate(train: Split, epsilon: float | None) -> dict[str, float]:
    """The rate of the linear model that serves a tenth of the training records best, by balanced accuracy."""
    held = np.random.default_rng(TUNING_SEED).random(len(train.labels)) < HELD_OUT
    part, rest = train.take(np.flatnonzero(held)), train.take(np.flatnonzero(~held))
    rates = PLAIN_RATES if epsilon is None else RATES
    scores = [np.mean(by_class(linear(rest, epsilon, TUNING_SEED, rate), part)) for rate in rates]
    return {"rate": rates[int(np.argmax(scores))]}


DENSITIES: dict[str, Callable[[Split, float | None, int], Predict]] = {
    "moment_density": lambda *given: density(MomentDensity, *given),
    "random_feature_density": lambda *given: density(RandomFeatureDensity, *given),
    "random_feature_density, smoothing 1": lambda *given: density(RandomFeatureDensity, *given, smoothing=1.0),
    "noisy_embedding_density (add/remove)": lambda *given: density(
        NoisyEmbeddingDensity, *given, adjacency="add/remove"
    ),
}

FORMS = [*DENSITIES, density_page.LINEAR]


def by_class(predict: Predict, test: Split) -> list[float]:
    """Per cent right of each class."""
    right = np.concatenate([predict(part) for part in np.array_split(test.inputs, 4)]) == test.labels
    return [100 * float(right[test.labels == label].mean()) for label in range(10)]


def run(fit: Callable[[], Predict], test: Split) -> dict[str, Any]:
    """Fit and predict once."""
    started = time.perf_counter()
    predict = fit()
    fitted = time.perf_counter()
    classes = by_class(predict, test)
    sizes = np.bincount(test.labels, minlength=10) / len(test.labels)
    seconds = {"fit": fitted - started, "predict": time.perf_counter() - fitted}
    return {"accuracy": float(np.dot(classes, sizes)), "classes": classes, "seconds": seconds}


def main() -> None:
    """Run what is missing, then write the page."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--cache", type=Path, required=True, help="where the features are kept")
    asked.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    asked.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0, 0.0], help="0: no privacy")
    asked.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    asked.add_argument("--data", nargs="+", choices=density_page.DATA, default=list(density_page.DATA))
    asked.add_argument("--lines", type=Path, default=Path("runs/density_mnist.jsonl"), help="one line of JSON per run")
    asked.add_argument("--out", type=Path, default=PAGE)
    given = asked.parse_args()
    test, whole = features("t10k", given.folder, given.cache), features("train", given.folder, given.cache)
    for name in given.data:
        train = whole if name == density_page.DATA[0] else unbalanced(whole)
        for seed, epsilon, form in itertools.product(given.seeds, given.epsilons, given.forms):
            promise, where = epsilon or None, {"data": name, "epsilon": epsilon}
            if form == density_page.LINEAR:
                lined.once(given.lines, where | {"tuned": form}, functools.partial(best_rate, train, promise))
                found = next(row for row in lined.read(given.lines) if (where | {"tuned": form}).items() <= row.items())
                fit = functools.partial(linear, train, promise, seed, found["rate"])
            else:
                fit = functools.partial(DENSITIES[form], train, promise, seed)
            lined.once(given.lines, where | {"form": form, "seed": seed}, functools.partial(run, fit, test))
    given.out.write_text(density_page.page([row for row in lined.read(given.lines) if "form" in row], DELTA))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
