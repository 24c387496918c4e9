"""Make fixtures/random_cases.json: 300 random compositions with dp-accounting's bounds on their epsilon.

Run from the repository root (ten minutes on one core; dp-accounting is needed, evenhand only picks the noise):

    python tests/accounting/make_fixtures.py

Every case stores the recipe of its events, delta and relation, and two bounds that do not depend on evenhand:
``upper`` from the pessimistic connect-the-dots PLD and ``lower`` from the optimistic privacy-buckets PLD. Compositions
with more than ``GROUPS`` levels are bracketed: levels are grouped by noise, ``upper`` uses the smallest noise and the
largest rate of each group, ``lower`` the largest noise and the smallest rate. Rounding noise and rate that way can only
raise (lower) epsilon, so both stay bounds. A case that takes over 60 s is repeated on a four times coarser grid.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
import signal
import time
import warnings
from typing import Any

from dp_accounting.pld import privacy_loss_distribution as dpa
from dp_accounting.privacy_accountant import NeighboringRelation

from evenhand.accounting.calibration import calibrate
from evenhand.accounting.gaussian_profile import directions, loss_at
from evenhand.errors import CalibrationError

CASES, GROUPS, CAP = 300, 16, 60
TARGET = pathlib.Path(__file__).parent / "fixtures" / "random_cases.json"


def events_of(case: dict[str, Any]) -> list[tuple[float, float, int]]:
    """The events of a stored case; the file holds only the recipe of its levels."""
    levels, steps, rates = case["levels"], case["steps"], case["rates"]
    events = []
    for i in range(levels):
        rate = rates[i * len(rates) // levels] * (1 - case["drift"] * i / levels)
        noise = case["scale"] * case["span"] ** (i / levels)
        events.append((rate, noise, steps * (i + 1) // levels - steps * i // levels))
    return events


def draw(rng: random.Random) -> dict[str, Any]:
    """One random composition whose epsilon lies in [.01, 50]."""
    steps = round(math.exp(rng.uniform(0, math.log(100_000))))
    levels = min(steps, rng.choice([1, 1, 2, 3, 5, 10, 20, 100, 1000, 10_000]))
    rates = [math.exp(rng.uniform(math.log(1e-4), 0)) for _ in range(rng.choice([1, 1, 1, 2]))]
    if rng.random() < 0.1:
        rates[-1] = 1.0
    case: dict[str, Any] = {
        "steps": steps,
        "levels": levels,
        "rates": rates,
        "drift": 0.2 if levels == 100 and rng.random() < 0.3 else 0.0,
        "span": rng.choice([1.1, 1.5, 4.0]) ** rng.choice([-1, 1]),
        "scale": 1.0,
        "delta": float(f"{10 ** rng.uniform(-12, -3):.3g}"),
        "relation": "replace_one" if rng.random() < 0.15 else "add_remove",
        "aim": math.exp(rng.uniform(math.log(0.01), math.log(50))),
    }
    case["scale"] = calibrate(events_of(case), case["aim"], case["delta"], relation=case["relation"])
    return case


def bracket(events: list[tuple[float, float, int]], pessimistic: bool) -> list[tuple[float, float, int]]:
    """At most GROUPS levels (per rate, when rates are few) that bound the events from one side."""
    if len({(q, s) for q, s, _ in events}) <= GROUPS:
        return events
    low = math.log(min(s for _, s, _ in events))
    width = (math.log(max(s for _, s, _ in events)) - low) / GROUPS or 1.0
    several = len({q for q, _, _ in events}) > 2
    groups: dict[tuple[float, int], list[tuple[float, float, int]]] = {}
    for q, s, n in events:
        groups.setdefault((0.0 if several else q, int((math.log(s) - low) / width)), []).append((q, s, n))
    pick = (max, min) if pessimistic else (min, max)
    return [
        (pick[0](q for q, _, _ in group), pick[1](s for _, s, _ in group), sum(n for _, _, n in group))
        for group in groups.values()
    ]


def bound(case: dict[str, Any], pessimistic: bool, width: float) -> float:
    """dp-accounting's epsilon on a grid of this width."""
    relation = getattr(NeighboringRelation, "REPLACE_ONE" if case["relation"] == "replace_one" else "ADD_OR_REMOVE_ONE")
    total = None
    for q, s, n in bracket(events_of(case), pessimistic):
        part = dpa.from_gaussian_mechanism(
            s,
            sampling_prob=q,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=width,
            use_connect_dots=pessimistic,
            neighboring_relation=relation,
        ).self_compose(n)
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(case["delta"]))


def grid_width(case: dict[str, Any]) -> float:
    """Fine enough for 5e-5 of epsilon if about 200,000 points per case allow it."""
    events = bracket(events_of(case), True)
    steps = sum(n for _, _, n in events)
    span = 0.0
    for q, s, _ in events:
        direction = directions(case["relation"])[0]
        span += loss_at(1 / s + 9, q, s, direction) - loss_at(-9, q, s, direction)
    order = 2 * math.log(1 / case["delta"]) / case["aim"]
    return max(math.sqrt(12 * 5e-5 * case["aim"] / (steps * (order + 1))), span / 200_000)


def main() -> None:
    """Draw the cases, bound each of them, and write the file as they come."""
    warnings.simplefilter("ignore")

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    rng = random.Random(3)
    cases: list[dict[str, Any]] = []
    while len(cases) < CASES:
        try:
            case = draw(rng)
        except CalibrationError:
            continue
        width, start = grid_width(case), time.perf_counter()
        while True:
            signal.alarm(CAP)
            try:
                case["upper"], case["lower"] = bound(case, True, width), bound(case, False, width)
                break
            except TimeoutError:
                width *= 4
            finally:
                signal.alarm(0)
        case["seconds"] = round(time.perf_counter() - start, 2)
        cases.append(case)
        print(len(cases), case["levels"], case["aim"], case["lower"], case["upper"], case["seconds"], flush=True)
        TARGET.write_text(json.dumps(cases, indent=0))


if __name__ == "__main__":
    main()
