"""Every formula of the table, against a slow implementation of its own, and the bound that goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import column, rows, state
from torch.func import vmap

from evenhand.errors import UsageError
from evenhand.methods.rules import AutoS, Clip, Global, GlobalAdapt, GlobalAdaptV2, Nsgd, Psac, SampleRule
from evenhand.types import Public, State, Stats

NORMS = [0.0, 1e-300, 1e-9, 0.01, 0.3, 0.7499, 0.75, 0.7501, 1.0, 2.9, 3.0, 3.1, 49.0, 50.0, 51.0, 1e9, 1e200]


def v2(n: float, c: float) -> float:
    z = 3.0 * 0.5 ** math.floor(23 / 10)
    return c / z if n <= z else c / (n + 0.1 / (n + 0.1))


SLOW: list[tuple[SampleRule, Callable[[float, float], float]]] = [
    (Clip(), lambda n, c: min(1.0, c / n) if n else 1.0),
    (AutoS(gamma=0.02), lambda n, c: c / (n + 0.02)),
    (Nsgd(gamma=0.05), lambda n, c: c / (n + 0.05)),
    (Psac(r=0.03), lambda n, c: c / (n + 0.03 / (n + 0.03))),
    (Global(threshold=3.0), lambda n, c: c / 3.0 if n <= 3.0 else 0.0),
    (GlobalAdapt(), lambda n, c: c / 3.0 if n <= 3.0 else c / n),
    (GlobalAdaptV2(), v2),
]


@pytest.mark.parametrize(("rule", "slow"), SLOW, ids=lambda part: getattr(part, "name", ""))
def test_the_formula(rule: SampleRule, slow: Callable[[float, float], float]) -> None:
    """Two owner classes of different bound; epoch 23 of ten steps each; a threshold of 3 in memory."""
    here = state((0.5, 2.0), memory={"threshold": 3.0}, step=239, steps_per_epoch=10.0)
    stats = rows(NORMS * 2, owner=[0] * len(NORMS) + [1] * len(NORMS))
    found = rule.weight(stats, here)
    expected = [slow(n, c) for c in (0.5, 2.0) for n in NORMS]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert rule.sensitivity(here).tolist() == [0.5, 2.0]
    moved = found * stats.norm
    assert (moved <= column([0.5] * len(NORMS) + [2.0] * len(NORMS)) * (1 + 1e-12)).all(), "w n <= C for any n"
    assert (found >= 0).all()


@pytest.mark.parametrize(("rule", "slow"), SLOW, ids=lambda part: getattr(part, "name", ""))
def test_a_row_alone_gives_what_the_column_gives(rule: SampleRule, slow: object) -> None:
    here = state((0.5,), memory={"threshold": 3.0}, step=239, steps_per_epoch=10.0)
    stats = rows(NORMS)
    columns = (stats.norm, stats.loss, stats.group, stats.owner, stats.record)
    alone = vmap(lambda *row: rule.weight(Stats(*row), here))(*columns)
    assert torch.equal(alone, rule.weight(stats, here))
    assert rule.weight(rows([]), here).shape == (0,)


@settings(max_examples=100, deadline=None)
@given(norm=st.floats(0, 1e150), bound=st.floats(1e-6, 1e6), z=st.floats(1e-6, 1e6), r=st.floats(1e-6, 1e3))
def test_the_bound_holds_for_any_setting(norm: float, bound: float, z: float, r: float) -> None:
    here = state((bound,), memory={"threshold": z})
    for rule in (AutoS(r), Psac(r), Global(z), GlobalAdapt(z), GlobalAdaptV2(threshold=z, r=r)):
        assert float(rule.weight(rows([norm]), here)[0]) * norm <= bound * (1 + 1e-12)


def test_the_threshold_of_global_adapt_follows_the_noisy_count_and_the_expected_batch() -> None:
    rule = GlobalAdapt(threshold=50.0, rate=0.1)
    z, slow = dict(rule.initial(None)), 50.0  # type: ignore[arg-type]
    for count in (256.0, 20.0, -31.5, 0.0, 400.0):
        z = dict(rule.advance(state(answers={"exceedance": [count]}, memory=z, batch=256.0)))
        slow *= math.exp(-0.1 + count / 256.0)
        assert z["threshold"] == pytest.approx(slow, rel=1e-12)
    for count in (1e9, -1e9):
        moved = rule.advance(state(answers={"exceedance": [count]}, memory=z, batch=1.0))["threshold"]
        assert 0 < moved < math.inf, "a wild count leaves a usable threshold"


@pytest.mark.parametrize(
    ("shape", "slow"),
    [
        ("no", lambda e: 3.0),
        ("linear", lambda e: 3.0 * 0.8**e),
        ("time", lambda e: 3.0 / (1 + 0.8 * e)),
        ("step", lambda e: 3.0 * 0.8 ** (e // 4)),
    ],
)
def test_the_threshold_of_v2_decays_by_epochs(shape: str, slow: Callable[[int], float]) -> None:
    rule = GlobalAdaptV2(rate=0.8, every=4, shape=shape)
    for step in range(0, 300, 7):
        here = State(step, column([1.0]), public=Public(steps_per_epoch=12.5))
        assert rule.z(here) == pytest.approx(slow(math.floor(step / 12.5)), rel=1e-12)
    assert GlobalAdaptV2(floor=1.0).z(state(step=10**6)) == 1.0, "the paper's c_0, on request"


def test_epochs_of_rules_are_those_of_schedules() -> None:
    from evenhand.methods.schedules import Linear

    for per_epoch in (0.7, 1.0, 2.3, 7.0, 31.3):
        noises = [level.noise for count, level in Linear(decay=0.5).segments(200, per_epoch) for _ in range(count)]
        for step, noise in enumerate(noises):
            here = State(step, column([1.0]), public=Public(steps_per_epoch=per_epoch))
            assert noise**2 == pytest.approx(0.5**here.epoch, rel=1e-9)


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: AutoS(gamma=0.0), "greater than 0"),
        (lambda: Psac(r=-1.0), "greater than 0"),
        (lambda: Global(threshold=math.inf), "finite"),
        (lambda: GlobalAdapt(rate=math.nan), "finite"),
        (lambda: GlobalAdaptV2(shape="stpe"), "Did you mean 'step'"),
        (lambda: GlobalAdaptV2(every=0), "at least 1"),
        (lambda: GlobalAdaptV2(floor=-0.1), "at least 0"),
    ],
)
def test_impossible_settings_are_refused(construct: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        construct()
