"""The picture on every method's page, computed from the method itself with its default settings.

python docs/_plots.py          writes docs/methods/plots/NAME.svg for every method
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.accounting.plan import Plan
from evenhand.density import PublishedSmoothing
from evenhand.mechanism.make_plan import plan
from evenhand.methods import catalogue
from evenhand.methods.catalogue import DENSITIES
from evenhand.methods.composition import Method
from evenhand.reporting.charts import lines
from evenhand.reporting.svg import standalone
from evenhand.training.config import Config
from evenhand.training.from_config import planned
from evenhand.types import Facts, Public, State, Stats

FOLDER = Path(__file__).parent / "methods" / "plots"
Series = dict[str, list[tuple[float, float]]]
NORMS = torch.linspace(0.0, 8.0, 161, dtype=torch.float64)[1:]
EPSILON, DELTA, RECORDS, EPOCHS, BATCH = 3.0, 1e-5, 60_000, 30, 512
OWNED = Facts(RECORDS, tuple((f"owner {k}", RECORDS // 8) for k in range(1, 9)))
GROUPS = ("usual group", "other group")
ANSWERS = {
    "group_counts": torch.tensor([100.0, 40.0, 300.0, 10.0], dtype=torch.float64),
    "group_sizes": torch.tensor([400.0, 50.0], dtype=torch.float64),
}
"""Example answers of the side queries for a batch of about 450: 400 usual records, 50 of the other group."""


@dataclass(frozen=True)
class Plot:
    """What to draw: lines by name, and the words around them."""

    title: str
    x_label: str
    y_label: str
    series: Series
    highlight: str | None = None

    def drawn(self) -> str:
        """The picture as an SVG file."""
        axes = {"x_label": self.x_label, "y_label": self.y_label}
        return standalone(lines(self.series, title=self.title, **axes, highlight=self.highlight))


def contribution(
    name: str, variants: Mapping[str, Mapping[str, Any]] | None = None, settings: Mapping[str, Any] | None = None
) -> Plot:
    """How long a record's weighted gradient is, by the length of its gradient; DP-SGD beside it."""
    method = catalogue.method(name, settings)
    series = {words: _lengths(method, **dict(state)) for words, state in (variants or {name: {}}).items()}
    if name not in ("dpsgd", "sgd"):
        series["dpsgd"] = _lengths(catalogue.method("dpsgd"))
    title = f"What a record adds to the sum under {name}, by the length of its gradient (clip bound 1)"
    return Plot(title, "length of the record's gradient", "length of what it adds", series, next(iter(series)))


def _lengths(method: Method, group: int = 0, epoch: int = 0, **memory: Any) -> list[tuple[float, float]]:
    count = len(NORMS)
    zero = torch.zeros(count, dtype=torch.long)
    rows = Stats(NORMS, NORMS, zero + group, zero, torch.arange(count))
    facts = Facts(RECORDS, (("all", RECORDS),), groups=GROUPS)
    public = Public(batch=450.0, steps_per_epoch=1.0, groups=2)
    state = State(epoch, torch.ones(1, dtype=torch.float64), ANSWERS, {**method.rule.initial(facts), **memory}, public)
    length = method.rule.weight(rows, state) * NORMS  # type: ignore[attr-defined]
    return list(zip(NORMS.tolist(), length.tolist(), strict=True))


def importance(name: str) -> Plot:
    """The weight of a record by its place in the order of losses, for records that are all clipped to the bound."""
    method = catalogue.method(name)
    count = 100
    zero = torch.zeros(count, dtype=torch.long)
    norm = torch.full((count,), 4.0, dtype=torch.float64)
    rows = Stats(norm, torch.arange(count, 0, -1, dtype=torch.float64), zero, zero, torch.arange(count))
    state = State(
        0,
        torch.ones(1, dtype=torch.float64),
        public=Public(batch=float(count), expected=torch.tensor([float(count)], dtype=torch.float64)),
    )
    length = (method.rule.weights(rows, state) * norm).tolist()  # type: ignore[attr-defined]
    series = {name: [(float(place), value) for place, value in enumerate(length, 1)]}
    series["without the order"] = [(1.0, 1.0), (float(count), 1.0)]
    title = (
        f"What a record adds to the sum under {name}, by its place from the highest loss to the lowest (100 records)"
    )
    return Plot(title, "place by loss, highest first", "length of what it adds", series, name)


def by_budget(name: str, what: str, column: Callable[[Plan], Sequence[float]]) -> Plot:
    """What an owner with a larger budget gets, from a plan for eight owners of equal size."""
    budgets = Budgets({owner: float(k) for k, owner in enumerate(OWNED.owner_names, 1)}, DELTA)
    made = plan(catalogue.method(name), budgets, data=OWNED, epochs=EPOCHS, batch_size=BATCH)
    alike = plan(catalogue.method("dpsgd"), budgets, data=OWNED, epochs=EPOCHS, batch_size=BATCH)
    series = {
        words: [(float(k), value) for k, value in enumerate(column(found), 1)]
        for words, found in ((name, made), ("dpsgd", alike))
    }
    title = f"{what} of owners with budgets 1 to 8 under {name} (60,000 records, 30 epochs)"
    return Plot(title, "budget of the owner (epsilon)", what, series, name)


def over_time(name: str, what: str = "noise multiplier") -> Plot:
    """The noise of every step when the whole schedule spends epsilon 3; the constant noise of DP-SGD beside it."""
    series = {words: _noise(catalogue.method(words)) for words in (name, "dpsgd")}
    title = f"Noise of {name} over the training at epsilon {EPSILON:g}, delta {DELTA:g}, unit one record, add/remove"
    return Plot(title, "epoch", what, series, name)


def _noise(method: Method) -> list[tuple[float, float]]:
    facts = Facts(RECORDS, (("all", RECORDS),))
    made = plan(method, Privacy(EPSILON, DELTA), data=facts, epochs=EPOCHS, batch_size=BATCH)
    points, start = [], 0
    for level in made.levels:
        ends = (start * EPOCHS / made.steps, (start + level.count) * EPOCHS / made.steps)
        points += [(epoch, level.noise) for epoch in ends]
        start += level.count
    return points


def releases(name: str, variants: Mapping[str, Mapping[str, Any]] | None = None) -> Plot:
    """The noise of each release of a density by what is promised; of its one release, for each of some settings."""
    facts = Facts(RECORDS, (("all", RECORDS),))
    series: Series = {}
    for words, settings in (variants or {"": {}}).items():
        config = Config(method=name, settings=settings)
        for epsilon in range(1, 9):
            levels = planned(config, facts, Privacy(float(epsilon), DELTA)).levels
            for what, level in zip(DENSITIES[name].releases, levels, strict=True):
                series.setdefault(words or what, []).append((float(epsilon), level.noise))
    title = f"Noise of each release of {name} by the epsilon promised (delta {DELTA:g}, unit one record)"
    return Plot(title, "epsilon promised", "noise multiplier", series, next(iter(series)))


def printed_noise(dimensions: Sequence[int]) -> Plot:
    """The noise that paper 002 prints, by the bandwidth of its kernel, as a power of ten."""
    bandwidths = torch.linspace(0.1, 2.0, 96, dtype=torch.float64)
    series: Series = {}
    for dimension in dimensions:
        alike = [PublishedSmoothing().smoothing_noise((h**2).expand(RECORDS), dimension)[0] for h in bandwidths]
        points = torch.stack([bandwidths, torch.stack(alike).log10()], dim=1).tolist()
        series[f"{dimension} dimensions"] = [(h, power) for h, power in points]
    title = f"Noise of published_smoothing on a record by the bandwidth of its kernel, {RECORDS} records (rho 1)"
    return Plot(title, "bandwidth h", "standard deviation, as a power of ten", series, next(iter(series)))


_GROUPED = {words: {"group": place} for place, words in enumerate(GROUPS)}
_FACTORS = {f"C_t = {factor:g}": {"factor": factor} for factor in (0.5, 1.5, 4.0)}
_LOSSES = ("low loss", "high loss")
PLOTS: dict[str, Callable[[], Plot]] = {
    "sgd": lambda: contribution("sgd"),
    "dpsgd": lambda: contribution("dpsgd"),
    "auto_s": lambda: contribution("auto_s"),
    "nsgd": lambda: contribution("nsgd"),
    "psac": lambda: contribution("psac"),
    "global": lambda: contribution("global", {"threshold 4": {}}, {"threshold": 4.0}),
    "global_adapt": lambda: contribution("global_adapt", {f"Z = {z}": {"threshold": float(z)} for z in (8, 4, 2)}),
    "global_adapt_v2": lambda: contribution("global_adapt_v2", {f"epoch {e}": {"epoch": e} for e in (0, 10, 20)}),
    "dpsgd_f": lambda: contribution("dpsgd_f", _GROUPED),
    "naive": lambda: contribution("naive", _GROUPED),
    "idp_sample": lambda: by_budget("idp_sample", "sampling rate", lambda made: made.rates),
    "idp_scale": lambda: by_budget("idp_scale", "clip bound", lambda made: made.scales),
    "ino_sample": lambda: importance("ino_sample"),
    "ino_scale": lambda: importance("ino_scale"),
    "ino_psac": lambda: importance("ino_psac"),
    "auto_dpsgd_l": lambda: over_time("auto_dpsgd_l"),
    "auto_dpsgd_s": lambda: over_time("auto_dpsgd_s"),
    "sad": lambda: over_time("sad"),
    "adaptive_clip": lambda: contribution("adaptive_clip", _FACTORS),
    "bounded_adaptive": lambda: contribution("bounded_adaptive", _FACTORS),
    "soft_ada_clip": lambda: contribution("soft_ada_clip", _FACTORS),
    "group_dro": lambda: contribution(
        "group_dro",
        {words: {"group": place, "logs": [math.log(0.3), 0.0]} for place, words in enumerate(_LOSSES)},
    ),
    "global_adapt_v2_s": lambda: contribution("global_adapt_v2_s", {f"epoch {e}": {"epoch": e} for e in (0, 10, 20)}),
    "sad_auto_s": lambda: over_time("sad_auto_s"),
    "moment_density": lambda: releases("moment_density"),
    "random_feature_density": lambda: releases("random_feature_density"),
    "noisy_embedding_density": lambda: releases(
        "noisy_embedding_density", {kind: {"adjacency": kind} for kind in ("replace one", "add/remove")}
    ),
    "published_smoothing": lambda: printed_noise((64, 8)),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in PLOTS.items():
        (FOLDER / f"{name}.svg").write_text(make().drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
