"""The catalogue: every method plans and steps, compositions of one's own too, and what cannot be is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenhand.accounting import renyi
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy
from evenhand.accounting.plan import Plan
from evenhand.cli.methods import rows
from evenhand.density import PublishedSmoothing
from evenhand.errors import UsageError
from evenhand.mechanism.make_plan import plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, private_gradient, rehearse
from evenhand.methods.catalogue import DENSITIES, RECIPES, Method, catalogue, method
from evenhand.methods.queries import Exceedance, GroupCounts, GroupSizes
from evenhand.methods.rules import Clip, GlobalAdapt, GroupClip, Ordered, Psac
from evenhand.methods.schedules import Linear, Phases, Step, Table
from evenhand.types import Batch, Facts, Pass

ROOT = Path(__file__).parents[2]
FACTS = Facts(2000, (("strict", 800), ("open", 1200)), groups=("a", "b", "c"), labels=("0", "1"))
OWNERS = Budgets({"strict": 1.0, "open": 4.0}, 1e-5)
NAMES = [recipe.name for recipe in catalogue()]
PUBLISHED = ["dpsgd", "auto_s", "nsgd", "psac", "global", "global_adapt", "global_adapt_v2", "dpsgd_f", "naive"]
PUBLISHED += ["idp_sample", "idp_scale", "ino_sample", "ino_scale", "auto_dpsgd_l", "auto_dpsgd_s", "sad"]
PUBLISHED += ["ino_psac", "sgd"]
LOST = Method(Clip(), (Exceedance(share=0.1),))
OWN = [
    Method(Ordered(over=Psac(r=0.05)), schedule=Phases(bound=0.5), sampling="owner"),
    Method(Ordered(over=Psac(), tail="step", order="owner"), schedule=Linear(bound_decay=0.9), bounds="owner"),
    Method(Ordered(over=GroupClip()), (GroupCounts(share=0.05),), sampling="owner"),
    Method(Ordered(over="global_adapt"), (Exceedance(noise=30.0),), bounds="owner"),
    Method(GroupClip(), (GroupCounts(noise=30.0), GroupSizes(noise=50.0)), bounds="owner"),
    Method(GlobalAdapt(), (Exceedance(share=0.1),), Table.of(lambda e: (1 + e, 2 - e / 9), epochs=9)),
]


def made(chosen: str | Method) -> Plan:
    private = chosen != "sgd"
    return plan(chosen, OWNERS if private else None, data=FACTS, epochs=3, batch_size=100)


def mechanism(found: Plan, chosen: Method) -> Mechanism:
    return Mechanism(found, chosen.rule, chosen.queries, Stream.insecure(0, 0))


def step(parts: Mechanism, gradients: torch.Tensor, position: int, memory: object) -> tuple[torch.Tensor, object]:
    count = gradients.shape[0]
    random = torch.Generator().manual_seed(position)
    batch = Batch(
        None,
        None,
        group=torch.randint(0, 3, (count,), generator=random),
        owner=torch.randint(0, 2, (count,), generator=random),
        record=torch.arange(count),
        position=position,
        token=0,
    )
    found = Pass(
        loss=torch.rand(count, generator=random),
        norm=gradients.norm(dim=1),
        weighted_sum=lambda w: {"p": (gradients * w[:, None]).sum(0)},
    )
    released = private_gradient(parts, found, batch, memory)  # type: ignore[arg-type]
    return released.gradient["p"], released.memory


def test_every_method_of_the_papers_is_there() -> None:
    assert set(NAMES) >= set(PUBLISHED)
    assert NAMES[: len(PUBLISHED)] == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_method_plans_within_its_promise(name: str) -> None:
    found = made(name)
    assert json.loads(json.dumps(found.to_json()))["method"] == name
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    for epsilon, budget in zip(found.epsilons, (1.0, 4.0), strict=True):
        if name == "sgd":
            assert epsilon is None
        else:
            assert epsilon is not None
            assert epsilon <= budget
            if name.startswith(("idp", "ino")):
                assert epsilon >= 0.997 * budget, "owners spend their own budgets"


@pytest.mark.parametrize("chosen", [*PUBLISHED, *OWN], ids=lambda chosen: getattr(chosen, "name", chosen))
def test_every_method_steps_and_an_empty_batch_is_ordinary(chosen: str | Method) -> None:
    parts = mechanism(made(chosen), method(chosen))
    rehearse(parts)
    memory: object = parts.rule.initial(FACTS)
    random = torch.Generator().manual_seed(1)
    for position, count in enumerate((100, 0, 1, 90)):
        gradients = torch.randn(count, 7, generator=random, dtype=torch.float64) * 3
        released, memory = step(parts, gradients, position, memory)
        assert torch.isfinite(released).all()
        json.dumps(memory)


def test_the_tail_of_ino_is_a_share_of_the_expected_clip_mass() -> None:
    """Through the step: 100 records expected, all with equal bounds, half of them in the tail."""
    chosen = method("ino_sample")
    found = plan(chosen, FixedNoise(1.0, 1e-5), data=FACTS, epochs=3, batch_size=100)
    found = replace(found, levels=(replace(found.levels[0], noise=1e-9),))
    released, _ = step(mechanism(found, chosen), torch.full((100, 1), 9.0, dtype=torch.float64), 0, {})
    assert float(released[0]) * 100 == pytest.approx(50 + 25, abs=0.01)


def test_golden_plan_of_sad() -> None:
    found = plan("sad", Privacy(3, 1e-3), data=Facts(8012, (("all", 8012),)), epochs=20, batch_size=256)
    assert [level.noise for level in found.levels] == pytest.approx([0.919, 1.148, 1.435], rel=3e-3)
    assert [level.bound for level in found.levels] == pytest.approx([1.44, 1.2, 1.0])


def test_golden_rates_of_idp_sample_by_rdp() -> None:
    """MNIST, B 512, T 9375, shares 34/43/23 %: one sigma at which each rate spends its own budget."""
    rates = (0.00481, 0.00906, 0.01305)
    for rate, budget in zip(rates, (1, 2, 3), strict=True):
        assert renyi.epsilon([(rate, 2.029, 9375)], 1e-5) == pytest.approx(budget, rel=3e-3)
    assert sum(share * rate for share, rate in zip((0.34, 0.43, 0.23), rates, strict=True)) == pytest.approx(
        512 / 60_000, rel=3e-3
    )


def test_golden_plans_of_individual_budgets() -> None:
    """Computed with PLD: tighter than the RDP numbers of the papers."""
    facts = Facts(60_000, (("a", 32_400), ("b", 22_200), ("c", 5_400)))
    budgets = Budgets({"a": 1, "b": 2, "c": 3}, 1e-5)
    sample, scale = (plan(name, budgets, data=facts, epochs=30, batch_size=512) for name in ("ino_sample", "ino_scale"))
    assert sample.levels[0].noise == pytest.approx(1.4793, rel=3e-3)
    assert sample.rates == pytest.approx((0.005785, 0.010836, 0.015558), rel=3e-3)
    assert scale.levels[0].noise == pytest.approx(1.5285, rel=3e-3)
    assert scale.scales == pytest.approx((0.749, 1.233, 1.552), rel=3e-3)


def test_settings_reach_the_parts() -> None:
    assert method("global_adapt_v2", {"decay": "step", "bound": 2.0}).schedule == Step(decay=0.5, every=10, bound=2.0)
    assert method("global_adapt_v2", {"decay": "linear", "noise_decay": 0.9}).schedule == Linear(decay=0.9)
    assert method("dpsgd_f", {"noise": 10.0}).queries == (GroupCounts(noise=10.0),)
    assert method("naive", {"share": 0.2}).queries == (GroupSizes(share=0.2),)
    assert method("ino_scale", {"over": "psac", "tail": [0.5, 0.1]}).rule == Ordered(over=Psac(), tail=(0.5, 0.1))
    for recipe in catalogue():
        if recipe.name in PUBLISHED:
            assert method(recipe.name).name == recipe.name
            assert method(recipe.name, dict(recipe.defaults)) == method(recipe.name)


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: Method(GroupClip()), "reads the noisy answer of the side query 'group_counts'"),
        (lambda: Method(Ordered(over="group_reweight")), "side query 'group_sizes'"),
        (lambda: Method(GlobalAdapt(), (GroupSizes(share=0.1),)), "side query 'exceedance'"),
        (lambda: Method(GroupClip(), (GroupCounts(share=0.1),), bounds="owner"), "needs a fixed noise="),
        (lambda: method("group_clip"), "side query 'group_counts'"),
        (lambda: method("global_adapt_v2", {"decay": "stpe"}), "Did you mean 'step'"),
        (lambda: method("global_adapt_v2", {"noise_decay": 0.9}), "decay=linear, time or step"),
        (lambda: method("ino_sample", {"over": "identity"}), "bounds it"),
        (lambda: method("moment_density"), "evenhand.density.MomentDensity with fit"),
        (lambda: method("published_smoothing"), "No guarantee is established"),
        (lambda: rehearse(mechanism(made(LOST), LOST)), "this rule keeps none"),
    ],
)
def test_what_cannot_be_composed_is_refused_with_the_reason(construct: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        construct()  # type: ignore[operator]


@pytest.mark.parametrize("name", [*PUBLISHED, *DENSITIES])
def test_every_method_has_reference_entry_and_page(name: str) -> None:
    (row,) = [row for row in rows() if row["name"] == name]
    bibtex = DENSITIES[name].source.bibtex if name in DENSITIES else RECIPES[name].bibtex
    assert row["reference"]
    if name != "sgd":
        assert re.fullmatch(r"@(inproceedings|misc)\{\w+,\n(  \w+ = \{.+\},?\n)+\}", bibtex)
        title = row["reference"].split(", ", 1)[1]
        assert f"title = {{{title}}}" in bibtex
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert bibtex in page
    assert f"Guarantee: {row['guarantee']}." in page
    settings = PublishedSmoothing().get_params() if name == "published_smoothing" else row["settings"]
    for key, default in settings.items():
        assert f"| `{key}` | `{default}` |" in page, "the page says what each setting does, and its default"
    assert f"]({name}.md)" in (ROOT / "docs" / "methods" / "index.md").read_text()
