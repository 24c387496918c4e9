"""The pages of matched.py, from docs/results/NAME.json and nothing else.

    python experiments/matched_page.py [NAME ...] [--out docs/results]

Every replica has a split of its own: intervals are those of Nadeau and Bengio, which hold the chance of training and of
the held-out records. Intervals of the claims hold for all claims of a page together.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matched_studies import STUDIES
from matched_study import Claim, Study
from numpy.typing import NDArray
from page_text import lined_up, listed
from scipy import stats

from evenhand.reporting.charts import lines as drawn_lines
from evenhand.reporting.group_metrics import Estimate
from evenhand.reporting.svg import standalone
from evenhand.reporting.uncertainty import LEVEL, Split, distinct, of_values, share_variance

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
LEAST = 1e-6
"""Variance, in squared points, below which no mean is said to be known."""
HEADS = {
    "overall": "overall",
    "balanced": "mean over groups",
    "worst": "worst group",
    "cost": "lost against SGD",
    "cost gap": "difference between groups in accuracy lost",
    "gap of 2 and 8": "difference between 2 and 8 in accuracy lost",
    "auc": "AUC",
}


class Figures:
    """The cells of a study, and every measure of them in percent, replica by replica."""

    def __init__(self, study: Study, table: Mapping[str, Any]) -> None:
        self.study, self.table = study, table
        self.cells = {(cell["arm"], cell["promise"], cell["rate"]): cell for cell in table["cells"]}
        self.sizes = np.atleast_2d(np.array(table["sizes"], float))
        self.split = Split(float(self.sizes.sum(1).mean()) / table["records"])

    def rate(self, arm: str, promise: str) -> float:
        """Return the rate that the trials of an arm chose."""
        promise = self._promise(arm, promise)
        return next(
            rate for (name, at, rate), cell in self.cells.items() if (name, at) == (arm, promise) and cell["tuned"]
        )

    def shares(self, arm: str, promise: str, rate: float) -> NDArray[np.float64]:
        """Return the share of right answers, by replica and group."""
        right = np.array(self.cells[arm, self._promise(arm, promise), rate]["right"], float)
        shares: NDArray[np.float64] = right / self.sizes
        return shares

    def values(self, measure: str, arm: str, promise: str, rate: float) -> NDArray[np.float64]:
        """Return a measure in percent, by replica. Differences between groups are positive in the mean."""
        shares = self.shares(arm, promise, rate)
        if measure == "auc":
            return 100 * np.array(self.cells[arm, self._promise(arm, promise), rate]["auc"])
        if measure in ("cost", "cost gap", "gap of 2 and 8"):
            free = self.study.arms[0].name
            same = rate if rate == self.study.published else self.rate(free, promise)
            lost = self.shares(free, promise, same) - shares
            if measure == "cost":
                return 100 * (lost * self.sizes).sum(1) / self.sizes.sum(1)
            left, right = (0, 1) if measure == "cost gap" else (2, 8)
            apart = lost[:, right] - lost[:, left]
            return 100 * apart * (1 if apart.mean() >= 0 else -1)
        weighted = {
            "overall": (shares * self.sizes).sum(1) / self.sizes.sum(1),
            "balanced": shares.mean(1),
            "worst": shares[:, int(shares.mean(0).argmin())],
            "first": shares[:, self.study.first],
        }
        return 100 * weighted[measure]

    def estimate(self, measure: str, arm: str, promise: str, rate: float) -> Estimate:
        """Return a measure with its interval."""
        values = self.values(measure, arm, promise, rate)
        chance = LEAST
        if measure in ("overall", "worst", "first"):
            place = {"first": self.study.first, "worst": int(self.shares(arm, promise, rate).mean(0).argmin())}
            sizes = self.sizes.sum(1).mean() if measure == "overall" else self.sizes[:, place[measure]].mean()
            chance = 1e4 * share_variance(float(values.mean()) / 100, distinct(float(sizes), len(values), self.split))
        found = self.interval(values, chance, LEVEL)
        return found if chance == LEAST else Estimate(found.value, max(0.0, found.low), found.high, found.count)

    def apart(
        self, measure: str, left: tuple[str, float], right: tuple[str, float], promise: str, level: float
    ) -> Estimate:
        """Return left less right, paired by replica, each an arm at a rate."""
        values = self.values(measure, left[0], promise, left[1]) - self.values(measure, right[0], promise, right[1])
        return self.interval(values, LEAST, level)

    def interval(self, values: NDArray[np.float64], chance: float, level: float) -> Estimate:
        """Return the mean with its interval; replicas whose classes were dealt anew differ by that too.

        Deals are independent of each other, so their part of the variance falls with the number of replicas, while
        that of splits, which overlap, does not: it is what is left among replicas that deal the strictest owner the
        same class, and gets the correction of Nadeau and Bengio.
        """
        deals = np.array(self.table.get("dealt", []))
        if not len(deals):
            return of_values(values.tolist(), chance, 0, self.split, level=level, bounds=(-100.0, 100.0))
        parts = [part for deal in set(deals.tolist()) if len(part := values[deals == deal]) > 1]
        freedom = sum(map(len, parts)) - len(parts)
        if freedom < 1:
            return of_values(values.tolist(), chance, 0, self.split, level=level, bounds=(-100.0, 100.0))
        within = sum(float(((part - part.mean()) ** 2).sum()) for part in parts) / freedom
        between, count = max(0.0, float(values.var(ddof=1)) - within), len(values)
        variance = within * (1 / count + (self.split.ratio or 0.0)) + between / count
        half = stats.t.ppf((1 + level) / 2, freedom) * math.sqrt(max(variance, chance))
        mean = float(values.mean())
        return Estimate(mean, max(-100.0, mean - half), min(100.0, mean + half), count)

    def _promise(self, arm: str, promise: str) -> str:
        return promise if self.study.arm(arm).private else self.study.promises[0].name


def printed(estimate: Estimate, signed: bool = False) -> str:
    """Return an estimate with its interval, to a tenth of a point."""
    sign = "+" if signed else ""
    return f"{estimate.value:{sign}.1f} ({estimate.low:{sign}.1f} to {estimate.high:{sign}.1f})"


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict and the paired difference that it rests on, which holds together with all others."""

    claim: Claim
    verdict: str
    difference: Estimate


def judged(figures: Figures) -> list[Judged]:
    """Return all claims of a study with their verdicts, at intervals that hold for them together."""
    level = 1 - (1 - LEVEL) / max(1, len(figures.study.claims))
    return [_judged(figures, claim, level) for claim in figures.study.claims]


def _judged(figures: Figures, claim: Claim, level: float) -> Judged:
    rates = [
        figures.rate(name, claim.promise) if claim.rate is None else claim.rate for name in (claim.left, claim.right)
    ]
    found = figures.apart(claim.measure, (claim.left, rates[0]), (claim.right, rates[1]), claim.promise, level)
    verdict = "holds" if found.low > claim.least else "does not hold" if found.high < claim.least else "not decided"
    return Judged(claim, verdict, found)


def verdicts(figures: Figures) -> list[str]:
    """Return all claims of a study in words."""
    lines = []
    for each in judged(figures):
        above = "" if each.claim.least == 0 else f", to be above {each.claim.least:+g}"
        found = f"{printed(each.difference, signed=True)} points{above}"
        lines.append(f"{each.claim.text} ({each.claim.promise}): **{each.verdict}**; {found}.")
    return lines


def _tuned(figures: Figures, promise: str) -> str:
    study = figures.study
    first = figures.table["groups"][study.first]
    body = []
    for arm in study.arms:
        rate = figures.rate(arm.name, promise)
        end = " (end of the grid)" if rate in (figures.table["rates"][0], figures.table["rates"][-1]) else ""
        shown = [printed(figures.estimate(measure, arm.name, promise, rate)) for measure in study.measures]
        body.append([arm.name, f"{rate:g}{end}", *shown])
    return lined_up(["arm", "rate", *(HEADS.get(measure, first) for measure in study.measures)], body)


def _matched(figures: Figures, promise: str) -> str:
    """Return means of overall and of the focus at every rate, all arms side by side."""
    study, focus, rates = figures.study, figures.study.measures[-1], figures.table["rates"]
    if focus == "auc":
        focus = "first"
    body = [
        [
            arm.name,
            *(
                f"{figures.values('overall', arm.name, promise, rate).mean():.1f} / "
                f"{figures.values(focus, arm.name, promise, rate).mean():.1f}"
                for rate in rates
            ),
        ]
        for arm in study.arms
    ]
    return lined_up(["arm", *(f"rate {rate:g}" for rate in rates)], body)


def _pairs(figures: Figures, promise: str) -> str:
    """Return, for every pair of a claim, how far they are apart at every rate."""
    study, rates = figures.study, figures.table["rates"]
    pairs = {(claim.left, claim.right, claim.measure): None for claim in study.claims}
    body = [
        [
            f"{left} less {right}",
            HEADS.get(measure, figures.table["groups"][study.first]),
            *(
                printed(figures.apart(measure, (left, rate), (right, rate), promise, LEVEL), signed=True)
                for rate in rates
            ),
        ]
        for left, right, measure in pairs
    ]
    return lined_up(["pair", "measure", *(f"rate {rate:g}" for rate in rates)], body)


def _pulls(figures: Figures, promise: str) -> str:
    """Return what conditions 1 and 2 say over training, for the arms that were looked at."""
    body = []
    for (arm, at, rate), cell in figures.cells.items():
        if at == promise and "seen" in cell and len(cell["seen"][0]) == 4 and figures.study.owned:
            slowest = rate == min(figures.table["rates"])
            if cell["tuned"] or slowest:
                shown = [
                    f"{cosine:+.2f} {1 / length:.2f} {cosine + 1 / length:+.2f}"
                    for _, cosine, length, _ in cell["seen"]
                ]
                kind = "its own" if cell["tuned"] else "slowest"
                body.append([arm, f"{rate:g} ({kind})", f"{cell['seen'][0][3]:g}", *shown])
    if not body:
        return ""
    shares = [f"{100 * share:g} %" for share in figures.study.watch]
    return lined_up(["arm", "rate", "N q C of the others over its own", *shares], body)


def _steep(figures: Figures, promise: str) -> str:
    """Return mean loss and mean norm of the gradients by group, for each arm at the paper's rate or its own."""
    study, body = figures.study, []
    for arm in study.arms:
        rate = study.published or figures.rate(arm.name, promise)
        values = np.array(figures.cells[arm.name, promise if arm.private else study.promises[0].name, rate]["steep"])
        found = [
            of_values(values[:, kind, place].tolist(), LEAST, 0, figures.split)
            for kind in (0, 1)
            for place in range(len(study.norms))
        ]
        shown = [f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})" for one in found]
        body.append([arm.name, f"{rate:g}", *shown])
    names = [figures.table["groups"][place] for place in study.norms]
    return lined_up(["arm", "rate", *(f"{kind}, {name}" for kind in ("loss", "norm") for name in names)], body)


def _curves(figures: Figures, promise: str) -> str:
    """Return how right the largest and the smallest group are answered over training."""
    names, study = figures.table["groups"], figures.study
    sizes = figures.sizes.mean(0)
    most, rarest = int(sizes.argmax()), int(sizes.argmin())
    body = []
    for arm in study.curves:
        cell = figures.cells[arm, promise, study.published or figures.rate(arm, promise)]
        for place in (most, rarest):
            shares = [100 * seen[1 + place] / sizes[place] for seen in cell["seen"]]
            body.append([arm, f"{names[place]} ({sizes[place]:.0f} held out)", *(f"{share:.1f}" for share in shares)])
    return lined_up(["arm", "group", *(f"{100 * share:g} %" for share in study.watch)], body)


def picture(figures: Figures) -> str:
    """Return the focus of every arm over the rates, for the promise of the first claim."""
    study, promise = figures.study, figures.study.claims[0].promise
    focus = "first" if "first" in study.measures else study.measures[1]
    name = HEADS.get(focus, figures.table["groups"][study.first])
    series = {
        arm.name: [
            (math.log10(rate), float(figures.values(focus, arm.name, promise, rate).mean()))
            for rate in figures.table["rates"]
        ]
        for arm in study.arms
    }
    title = f"{name} at every learning rate, {promise}: mean over replicas"
    highlight = study.claims[0].left
    return standalone(
        drawn_lines(series, title=title, x_label="log10 of the rate", y_label=f"{name}, %", highlight=highlight)
    )


def _at_equal_rates(figures: Figures) -> list[str]:
    """Return the part of the page on all arms at every rate."""
    study = figures.study
    parts = ["## All arms at the same rates", f"![Every arm over the rates]({study.name}.svg)"]
    second = study.measures[-1] if study.measures[-1] != "auc" else "first"
    parts += [f"Overall / {HEADS.get(second, figures.table['groups'][study.first])}, means in percent."]
    for promise in study.promises:
        parts += [
            f"{promise.name}:",
            _matched(figures, promise.name),
            "Pairs, at equal rates:",
            _pairs(figures, promise.name),
        ]
    return parts


def page(table: Mapping[str, Any]) -> str:
    """Return the page of a study from its figures."""
    study = STUDIES[table["study"]]
    figures = Figures(study, table)
    count, sizes = table["replicas"], figures.sizes.mean(0)
    asked = "" if count >= study.replicas else f" {study.replicas} were planned; the run was stopped for time."
    groups = ", ".join(f"{name} {size:.0f}" for name, size in zip(table["groups"], sizes, strict=True))
    setting = [
        f"Paper: {study.paper}.",
        f"Data: {study.source}, {table['records']:,} training records; held out: {groups}; split anew in every "
        "replica.",
        f"Linear model; batches of {study.batch:,} expected, {study.epochs:g} epochs"
        f"{' where the arm names no others' if any(arm.epochs or arm.batch for arm in study.arms) else ''}, "
        f"momentum {study.momentum:g}, "
        f"{study.schedule} rate, "
        f"{f'weights averaged with decay {study.average:g}' if study.average else 'last weights'}. "
        f"True epsilon, add/remove one record, delta {study.delta:g}.",
        f"{count} replicas of every {'cell' if study.matched else 'arm at its own rate'}.{asked} All arms of a "
        "replica share split and draws. The rate that is an arm's "
        f"own is the best by {HEADS[study.score]} in {table['trials']} trials on a fifth of what the same seed "
        "would train on, "
        "from one grid for all arms, which grows where an end was chosen.",
        *study.choices,
    ]
    parts = [f"# {study.title}", study.question, "## Answer", study.answer]
    parts += ["Claims declared before the replicas, with intervals that hold for all of them together:"]
    parts += [listed(verdicts(figures)), "## Setting", listed(setting), "## Each arm at its own rate"]
    parts += [f"Percent, or points, with 95 % intervals (Nadeau and Bengio 2003{DEALS if study.dealt else ''})."]
    for promise in study.promises:
        parts += [f"{promise.name}:", _tuned(figures, promise.name)]
    if study.matched:
        parts += _at_equal_rates(figures)
    if study.owned and study.watch:
        parts += ["## Conditions 1 and 2", CONDITIONS]
        parts += [part for p in study.promises for part in (f"{p.name}:", _pulls(figures, p.name))]
    if study.curves:
        parts += [
            "## Over training",
            "Right answers in percent, the largest group and the smallest, by share of the steps done; "
            f"{'at the rate of the paper' if study.published else 'each arm at its own rate'}.",
        ]
        parts += [part for p in study.promises for part in (f"{p.name}:", _curves(figures, p.name))]
    if study.norms:
        parts += ["## Loss and gradients after training", "Means over the held-out records of a group."]
        parts += [part for p in study.promises for part in (f"{p.name}:", _steep(figures, p.name))]
    parts += ["## Again", f"{table['minutes']:g} processor minutes, features not counted."]
    parts += [f"```text\npython experiments/matched.py {study.name} --data-dir FOLDER\n```"]
    parts += [f"The figures: [{study.name}.json]({study.name}.json)."]
    return "\n\n".join(part for part in parts if part) + "\n"


DEALS = (
    "; the part of the variance that comes from dealing classes is averaged, since deals are independent, and only the "
    "rest is corrected, a refinement that was made after the first look at these figures"
)
CONDITIONS = (
    "Between the strictest owner's expected sum of clipped gradients in a step and that of all others together: "
    "the cosine, how "
    "long its own is beside theirs, and the sum of both. Where the sum is below 0, a small step along the "
    "expected update raises the "
    "strictest owner's loss (condition 1 of the paper, with its sampling rates and bounds in the sums, as "
    "condition 2 has them; the "
    "paper's constant for clipping is not known). At the start all weights are 0. Columns are shares of the "
    "steps; research, "
    "which no epsilon covers."
)


def write(table: Mapping[str, Any], out: Path) -> None:
    """Write figures, page and picture of a study."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{table['study']}.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")
    (out / f"{table['study']}.md").write_text(page(table))
    figures = Figures(STUDIES[table["study"]], table)
    if figures.study.matched:
        (out / f"{table['study']}.svg").write_text(picture(figures))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write pages again from their figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*")
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args(arguments)
    for name in given.names or sorted(STUDIES):
        file = given.out / f"{name}.json"
        if file.exists():
            write(json.loads(file.read_text()), given.out)


if __name__ == "__main__":
    main()
