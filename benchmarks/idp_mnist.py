"""Promises per owner on MNIST: DP-SGD at the strictest budget beside idp_sample and idp_scale (Boenisch et al. 2024).

    python benchmarks/idp_mnist.py FOLDER [--methods dpsgd,idp_sample,idp_scale] [--seeds 0,1,2] [--steps 9375]

FOLDER holds the four official files of MNIST (idx, gzipped). Budgets 1, 2 and 3 go to 34, 43 and 23 % of the records,
at random; tanh CNN, expected batch 512, plain SGD at rate 0.6, clip bound 0.2, delta 1e-5. Noise and sampling are
secret and fresh; a seed only fixes initial weights and who owns which record. One line of JSON per run, which takes
about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import evenhand as eh

BUDGETS = {"strict": 1.0, "usual": 2.0, "open": 3.0}
SHARES = {"strict": 0.34, "usual": 0.43, "open": 0.23}
BATCH, RATE, BOUND, DELTA = 512, 0.6, 0.2, 1e-5


def read(folder: Path, name: str) -> Tensor:
    """One official file; the fourth byte of its header says how many dimensions follow."""
    raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def network() -> nn.Module:
    """The tanh CNN of the DP-SGD papers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def owned(seed: int, records: int) -> list[str]:
    """Who owns which record: the shares, shuffled."""
    names = [name for name, share in SHARES.items() for _ in range(round(share * records))]
    order = np.random.default_rng(seed).permutation(records)
    return [names[min(i, len(names) - 1)] for i in order]


def run(folder: Path, method: str, seed: int, steps: int) -> dict[str, object]:
    """Train once; accuracy on the official test images, and what each owner spent."""
    x, y = read(folder, "train-images-idx3-ubyte"), read(folder, "train-labels-idx1-ubyte").long()
    pixels = x[:, None].float() / 255
    train = eh.data.wrap(pixels, y, owners=owned(seed, len(y)), labels=[str(i) for i in range(10)])
    torch.manual_seed(seed)
    model = network()
    started = time.time()
    with tempfile.TemporaryDirectory() as out:
        found = eh.fit(
            model,
            train,
            method=method,
            settings={"bound": BOUND},
            privacy=eh.Budgets(BUDGETS, DELTA),
            epochs=steps * BATCH / len(y),
            batch_size=BATCH,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            compose=False,
            out=Path(out) / "run",
        )
        spent = dict(zip(train.facts.owner_names, found.plan.epsilons, strict=True))
    images, labels = read(folder, "t10k-images-idx3-ubyte"), read(folder, "t10k-labels-idx1-ubyte").long()
    with torch.no_grad():
        right = (model.eval()(images[:, None].float() / 255).argmax(1) == labels).float().mean()
    minutes = round((time.time() - started) / 60, 1)
    return {
        "method": method,
        "seed": seed,
        "steps": steps,
        "accuracy": float(right),
        "spent": spent,
        "minutes": minutes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default="dpsgd,idp_sample,idp_scale")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=9375)
    options = parser.parse_args()
    for seed in options.seeds.split(","):
        for method in options.methods.split(","):
            print(json.dumps(run(options.folder, method, int(seed), options.steps)), flush=True)


if __name__ == "__main__":
    main()
