"""Rules whose bounds and weights follow noisy answers: the papers' formulas, memories, and bounds that hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows, state

from evenhand.accounting.budgets import Budgets, Privacy
from evenhand.errors import UsageError
from evenhand.mechanism.describe_plan import warnings
from evenhand.mechanism.make_plan import plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods import averages
from evenhand.methods.catalogue import method, split_name
from evenhand.methods.queries import GroupLosses, Unclipped
from evenhand.methods.rules import (
    AdaptiveClip,
    BoundedAdaptive,
    GlobalAdapt,
    GroupClip,
    GroupDro,
    GroupReweight,
    SoftAdaClip,
    bounded_by_owner,
)
from evenhand.methods.schedules import Phases, Step, Time
from evenhand.types import Batch, Facts, Pass

ANY = st.floats(-1e12, 1e12)
GROUPED = Facts(54_649, (("all", 54_649),), groups=tuple("0123456789"))


@given(answer=ANY, factor=st.floats(1e-6, 1e6), batch=st.floats(1, 1e5))
@settings(max_examples=100, deadline=None)
def test_the_bound_follows_the_quantile_and_stays_in_its_range(answer: float, factor: float, batch: float) -> None:
    here = state((0.5, 2.0), {"unclipped": [answer]}, {"factor": factor}, batch=batch)
    share = 0.5 + answer / batch
    expected = math.log(factor) - 0.3 * (share - 0.7)
    for rule, (low, high) in (
        (AdaptiveClip(quantile=0.7, rate=0.3), (1e-6, 1e6)),
        (BoundedAdaptive(quantile=0.7, rate=0.3, least=0.25, most=4.0), (0.25, 4.0)),
    ):
        moved = rule.advance(here)["factor"]
        assert moved == pytest.approx(math.exp(min(max(expected, math.log(low)), math.log(high))), rel=1e-9)
    assert AdaptiveClip().sensitivity(here).tolist() == pytest.approx([0.5 * factor, 2.0 * factor])
    assert AdaptiveClip(normalize=True).sensitivity(here) is here.bound


@pytest.mark.parametrize("normalize", [False, True])
def test_hard_and_soft_clipping_at_the_adaptive_bound(normalize: bool) -> None:
    here = state((1.0,), {}, {"factor": 2.0})
    stats = rows([0.0, 1.0, 2.0, 8.0])
    scale = 0.5 if normalize else 1.0
    hard = AdaptiveClip(normalize=normalize).weight(stats, here) * stats.norm
    soft = SoftAdaClip(normalize=normalize).weight(stats, here) * stats.norm
    assert hard.tolist() == pytest.approx([scale * length for length in (0, 1, 2, 2)])
    assert soft.tolist() == pytest.approx([scale * 2 * math.tanh(norm / 2) for norm in (0, 1, 2, 8)])
    assert float(SoftAdaClip(normalize=normalize).weight(rows([0.0]), here)[0]) == pytest.approx(scale)


def test_the_count_is_centred_and_of_records_at_most_at_the_bound() -> None:
    here = state((1.0, 3.0), {}, {"factor": 2.0})
    values = Unclipped(noise=1.0).value(rows([2.0, 2.1, 5.9, 6.1], owner=[0, 0, 1, 1]), here)
    assert values.tolist() == [[0.5], [-0.5], [0.5], [-0.5]]
    with pytest.raises(UsageError, match="this rule keeps none"):
        Unclipped(noise=1.0).value(rows([1.0]), state())


def test_the_noise_and_the_ledger_follow_the_adapted_bound() -> None:
    """A quarter of the bound: a quarter of the noise, at the planned multiplier."""
    chosen = method("adaptive_clip")
    found = plan(chosen, Privacy(3, 1e-5), data=Facts(2000, (("all", 2000),)), epochs=2, batch_size=100)
    parts = Mechanism(found, chosen.rule, chosen.queries, Stream.insecure(0, 0))
    gradients = torch.full((50, 4), 9.0, dtype=torch.float64)
    zero = torch.zeros(50, dtype=torch.long)
    batch = Batch(None, None, zero, zero, torch.arange(50), position=0, token=0)
    result = Pass(gradients[:, 0], gradients.norm(dim=1), lambda w: {"p": (gradients * w[:, None]).sum(0)})
    whole, quarter = (private_gradient(parts, result, batch, {"factor": factor}).commit for factor in (1.0, 0.25))
    assert quarter.std == pytest.approx(whole.std / 4, rel=1e-6)
    assert quarter.sensitivity[0] == pytest.approx(whole.sensitivity[0] / 4, rel=1e-6)
    assert quarter.std / quarter.sensitivity[0] == pytest.approx(found.levels[0].noise)
    assert quarter.queries == whole.queries


def test_group_dro_raises_the_group_with_the_highest_loss_and_never_above_one() -> None:
    rule, memory = GroupDro(rate=0.5, least=0.2, memory="none"), GroupDro().initial(GROUPED)
    sums = [1.0] * 9 + [4.0] + [10.0] * 10
    for _ in range(20):
        here = state((1.0,), {"group_losses": sums}, memory, groups=10)
        memory = rule.advance(here)
        weights = rule.factors(state((1.0,), {}, memory, groups=10)).tolist()
        assert max(weights) == weights[9] == 1.0
        assert min(weights) >= 0.2 - 1e-12
    assert weights[0] == pytest.approx(0.2)
    first = rule.advance(state((1.0,), {"group_losses": sums}, rule.initial(GROUPED), groups=10))["logs"]
    assert first[0] == pytest.approx(0.5 * (0.1 - 0.4))
    stats = rows([4.0, 0.5], group=[9, 0])
    here = state((1.0,), {}, memory, groups=10)
    assert (rule.weight(stats, here) * stats.norm).tolist() == pytest.approx([1.0, 0.1])
    assert rule.sensitivity(here) is here.bound


def test_group_losses_are_bounded_and_counted_by_group() -> None:
    here = state((1.0,), groups=2)
    values = GroupLosses(noise=1.0, cap=4.0).value(rows([1.0] * 3, loss=[1.0, 9.0, -3.0], group=[0, 1, 1]), here)
    assert values.tolist() == [[0.25, 0, 1, 0], [0, 1.0, 0, 1], [0, 0, 0, 1]]
    assert float(values.norm(dim=1).max()) == pytest.approx(GroupLosses.sensitivity)


@pytest.mark.parametrize(("memory", "decay"), [("none", 0.0), ("full", 1.0), (0.8, 0.8)])
def test_averages_are_those_of_all_answers_so_far(memory: str | float, decay: float) -> None:
    answers = [[3.0, 7.0], [-5.0, 2.0], [8.0, 1.0], [0.5, 4.0]]
    kept: dict[str, object] = {}
    for step, answer in enumerate(answers):
        here = state((1.0,), {"q": answer}, kept)
        weights = [decay ** (step - earlier) if step > earlier else 1.0 for earlier in range(step + 1)]
        for place in range(2):
            mean = sum(w * a[place] for w, a in zip(weights, answers, strict=False)) / sum(weights)
            assert averages.averaged(here, "q", memory)[place] == pytest.approx(mean)
        kept = dict(averages.remembered(here, "q", memory))


def test_what_averaging_leaves_of_the_noise() -> None:
    noise = torch.randn(2000, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for memory in ("none", "full", 0.9):
        decay = averages.decay_of(memory)
        weights = torch.tensor([decay**age if age else 1.0 for age in range(60)], dtype=torch.float64)
        measured = float((noise * weights).sum(1).std() / weights.sum())
        assert averages.noise_left(memory, 60) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("rule", "query", "low", "high"),
    [
        (GroupClip, "group_counts", [0.0, 2.0, 0.0, 0.0], [20.0, 2.0, 0.0, 20.0]),
        (GroupReweight, "group_sizes", [2.0, 10.0], [20.0, 10.0]),
    ],
)
def test_group_rules_with_memory_use_the_mean_of_the_counts(
    rule: type[GroupClip], query: str, low: list[float], high: list[float]
) -> None:
    mean = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    full, none = rule(memory="full"), rule()
    first = state((1.0,), {query: low}, batch=20.0, groups=2)
    second = state((1.0,), {query: high}, full.advance(first), batch=20.0, groups=2)
    assert full.factors(second).tolist() == none.factors(state((1.0,), {query: mean}, batch=20.0, groups=2)).tolist()
    assert none.advance(first) == {}
    assert none.factors(second).tolist() == none.factors(state((1.0,), {query: high}, batch=20.0, groups=2)).tolist()


def test_global_adapt_with_memory_moves_by_the_mean_count() -> None:
    rule = GlobalAdapt(memory="full")
    first = rule.advance(state((1.0,), {"exceedance": [2.0]}, {"threshold": 4.0}, batch=10.0))
    second = rule.advance(state((1.0,), {"exceedance": [6.0]}, first, batch=10.0))
    assert second["threshold"] == pytest.approx(4.0 * math.exp(0.2 - 0.1) * math.exp(0.4 - 0.1))


def test_the_plan_says_which_groups_the_noise_hides() -> None:
    def about_groups(name: str, batch: int) -> list[str]:
        found = plan(name, Privacy(3, 1e-6), data=GROUPED, epochs=20, batch_size=batch)
        return [text for text in warnings(found) if "treated by noise" in text]

    (words,) = about_groups("dpsgd_f:memory=none", 1024)
    assert "memory=full" in words
    size = int(words.split("fewer than ")[1].split()[0])
    noise = plan("dpsgd_f", Privacy(3, 1e-6), data=GROUPED, epochs=20, batch_size=1024).levels[0].queries[0]
    assert size == math.ceil(noise / 1024 * 54_649)
    assert about_groups("dpsgd_f:memory=full", 1024) == []
    assert about_groups("dpsgd_f:memory=none", 16_384) == []
    assert len(about_groups("naive", 256)) == 1
    assert about_groups("dpsgd", 256) == []


@pytest.mark.parametrize("name", ["idp_sample", "idp_scale", "ino_sample", "ino_scale"])
def test_budgets_per_owner_go_over_any_rule_bounded_by_its_owner(name: str) -> None:
    facts = Facts(2000, (("strict", 800), ("open", 1200)), groups=("a", "b"))
    for over in ("auto_s", "psac", "global", "global_adapt_v2", "nsgd"):
        chosen = method(f"{name}:over={over}")
        assert chosen.name == f"{name}:over={over}"
        assert (chosen.sampling, chosen.bounds) == (method(name).sampling, method(name).bounds)
    found = plan(
        f"{name}:over=auto_s", Budgets({"strict": 1.0, "open": 4.0}, 1e-5), data=facts, epochs=2, batch_size=100
    )
    assert (
        found.epsilons
        == plan(name, Budgets({"strict": 1, "open": 4}, 1e-5), data=facts, epochs=2, batch_size=100).epsilons
    )
    for over in ("group_clip", "group_reweight", "adaptive_clip", "identity", "ordered", "global_adapt"):
        with pytest.raises(UsageError, match="bounds it by the C_k"):
            method(f"{name}:over={over}")


def test_settings_in_a_name_are_checked_like_others() -> None:
    assert split_name("dpsgd:bound=0.5") == ("dpsgd", {"bound": 0.5})
    assert method("dpsgd:bound=0.5").schedule == method("dpsgd", {"bound": 0.5}).schedule
    for name, words in (
        ("dpsgd:over=psac", "no setting of dpsgd called 'over'"),
        ("dpsgd:bound", "KEY=VALUE"),
        ("dpsdg:bound=1", "Did you mean 'dpsgd'"),
        ("idp_sample:over=pscac", "Did you mean 'psac'"),
    ):
        with pytest.raises(UsageError, match=words):
            method(name)
    with pytest.raises(UsageError, match="in the method's name and beside it"):
        method("dpsgd:bound=0.5", {"bound": 1.0})
    assert bounded_by_owner({"name": "psac", "settings": {"r": 0.2}}).r == 0.2  # type: ignore[attr-defined]


def test_v2_s_has_one_rate_and_one_number_of_epochs() -> None:
    chosen = method("global_adapt_v2_s", {"rate": 0.25, "every": 3})
    assert chosen.schedule == Step(decay=0.25, every=3)
    for epoch, factor in ((0, 1.0), (3, 0.25), (6, 0.0625)):
        assert chosen.rule.z(state(step=epoch, steps_per_epoch=1.0)) == pytest.approx(3.0 * factor)  # type: ignore[attr-defined]
        assert chosen.schedule.level(epoch).noise ** 2 == pytest.approx(factor)  # type: ignore[attr-defined]


def test_the_printed_rate_of_time_decay_is_the_first_noise_over_the_steps() -> None:
    chosen = method("global_adapt_v2", {"decay": "time", "noise_decay": "sigma_0/T"})
    facts = Facts(2000, (("all", 2000),))
    found = plan(chosen, Privacy(3, 1e-5), data=facts, epochs=10, batch_size=100)
    rate = found.schedule["settings"]["decay"]
    assert rate == pytest.approx(found.levels[0].noise / found.steps, rel=1e-5)
    again = plan(
        method("global_adapt_v2", {"decay": "time", "noise_decay": rate}),
        Privacy(3, 1e-5),
        data=facts,
        epochs=10,
        batch_size=100,
    )
    assert again.levels == found.levels
    with pytest.raises(UsageError, match="make a plan"):
        Time(decay="sigma_0/T").segments(10, 1)
    with pytest.raises(UsageError, match="sigma_0/T"):
        Time(decay="sigma0")


def test_phases_that_do_not_fit_are_refused_with_what_to_do() -> None:
    for phases, steps in ((Phases(n=3), 2), (Phases(n=4, length=10.0), 4), (Phases(n=5, length=0.3), 4)):
        with pytest.raises(UsageError, match="take more epochs or a smaller batch size, or fewer phases"):
            phases.segments(steps, 1.0)
    for steps in range(3, 12):
        counts = [count for count, _ in Phases(n=3, length=0.9).segments(steps, 1.0)]
        assert sum(counts) == steps
        assert min(counts) >= 1


def test_settings_that_cannot_be_are_refused() -> None:
    for construct, words in (
        (lambda: GroupClip(memory="all"), "'none'"),
        (lambda: GroupClip(memory=1.0), "memory=1 cannot be used"),
        (lambda: AdaptiveClip(quantile=1.0), "quantile"),
        (lambda: BoundedAdaptive(least=2.0), "least= from 1e-6 to 1"),
        (lambda: BoundedAdaptive(most=1e7), "bounds nothing"),
        (lambda: GroupDro(least=1.5), "highest is 1"),
    ):
        with pytest.raises(UsageError, match=words):
            construct()
