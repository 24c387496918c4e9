from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.errors import UsageError
from evenhand.methods.schedules import Constant, Linear, Phases, Schedule, Step, Table, Time

SHAPES: list[tuple[Schedule, object]] = [
    (Constant(bound=2.0), lambda epoch: 1.0),
    (Linear(decay=0.9), lambda epoch: 0.9 ** (epoch / 2)),
    (Time(decay=0.1), lambda epoch: (1 + 0.1 * epoch) ** -0.5),
    (Step(decay=0.5, every=3), lambda epoch: 0.5 ** ((epoch // 3) / 2)),
]


@given(steps=st.integers(1, 400), per_epoch=st.floats(0.5, 60))
def test_segments_equal_the_pointwise_values(steps: int, per_epoch: float) -> None:
    for schedule, value in SHAPES:
        segments = schedule.segments(steps, per_epoch)
        noises = [level.noise for count, level in segments for _ in range(count)]
        assert len(noises) == steps
        assert all(count > 0 for count, _ in segments)
        for step, noise in enumerate(noises):
            epoch = math.floor(step / per_epoch + 1e-9)
            assert noise == pytest.approx(value(epoch)) or math.isclose(  # type: ignore[operator]
                step % per_epoch, 0, abs_tol=1e-6
            )


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        (Constant(bound=2.0), lambda epoch: 2.0),
        (Linear(bound=2.0), lambda epoch: 2.0),
        (Linear(bound=2.0, bound_decay=0.9), lambda epoch: 2.0 * 0.9**epoch),
        (Time(bound=2.0, bound_decay=0.1), lambda epoch: 2.0 / (1 + 0.1 * epoch)),
        (Step(bound=2.0, every=3, bound_decay=0.5), lambda epoch: 2.0 * 0.5 ** (epoch // 3)),
        (Table.of(lambda epoch: (1.0, 3.0 - epoch / 10), epochs=12), lambda epoch: 3.0 - min(epoch, 11) / 10),
    ],
)
def test_the_clip_bound_decays_on_request(schedule: Schedule, bound: object) -> None:
    bounds = [level.bound for count, level in schedule.segments(150, 10) for _ in range(count)]
    assert bounds == pytest.approx([bound(step // 10) for step in range(150)])  # type: ignore[operator]


def test_the_decay_of_the_bound_leaves_that_of_the_noise() -> None:
    for alone, both in ((Linear(decay=0.9), Linear(decay=0.9, bound_decay=0.7)), (Step(), Step(bound_decay=0.1))):
        noises = [[level.noise for count, level in s.segments(99, 4) for _ in range(count)] for s in (alone, both)]
        assert noises[0] == noises[1]


def test_a_table_takes_any_function_and_is_plain_data() -> None:
    made = Table.of(lambda epoch: (2.0 if epoch % 2 else 1.0, 1.0 + epoch), epochs=5)
    assert made == Table(noise=[1, 2, 1, 2, 1], bound=[1, 2, 3, 4, 5])  # type: ignore[arg-type]
    assert made.segments(4, 2) == Table(noise=(1.0, 2.0), bound=(1.0, 2.0)).segments(4, 2)
    assert sum(count for count, _ in made.segments(1000, 2.7)) == 1000


@given(steps=st.integers(5, 3000), n=st.integers(1, 5), length=st.floats(0.3, 1.0))
def test_phases_grow_in_noise_and_fall_in_bound(steps: int, n: int, length: float) -> None:
    segments = Phases(n=n, length=length, bound=2.0).segments(steps, 10)
    assert sum(count for count, _ in segments) == steps
    assert len(segments) == n
    noises = [level.noise for _, level in segments]
    bounds = [level.bound for _, level in segments]
    assert noises == sorted(noises)
    assert bounds == sorted(bounds, reverse=True)
    assert segments[-1][1].noise == 1.0
    assert segments[-1][1].bound == 2.0


def test_phases_follow_the_papers_lengths() -> None:
    counts = [count for count, _ in Phases(n=3, length=0.5).segments(7000, 10)]
    assert counts == [1000, 2000, 4000]


@pytest.mark.parametrize(
    "construct",
    [
        lambda: Linear(decay=0),
        lambda: Step(decay=0.5, every=0),
        lambda: Time(decay=float("nan")),
        lambda: Constant(bound=0),
        lambda: Phases(n=0),
        lambda: Phases(noise=-1),
        lambda: Phases(n=5).segments(4, 1),
        lambda: Linear(bound_decay=0.0),
        lambda: Table(noise=(), bound=()),
        lambda: Table(noise=(1.0, 2.0)),
        lambda: Table(noise=(0.0,)),
        lambda: Table.of(lambda epoch: (1.0, 1.0), epochs=0),
    ],
)
def test_impossible_shapes_are_refused(construct: object) -> None:
    with pytest.raises(UsageError):
        construct()  # type: ignore[operator]
