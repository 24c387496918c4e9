"""The studies at matched rates: owners' steps are the library's, and every page says what its figures say."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.comparison.training_record_figures import by_owner
from evenhand.data import wrap
from evenhand.gradients.microbatches import MicroBatches
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.training.optimizers import Descent
from evenhand.types import Public, State, Stats

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BUDGETS = eh.Budgets({"a": 0.5, "b": 2.0, "c": 4.0}, 1e-4)


def owned() -> Any:
    drawn = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(300, 6, generator=drawn), torch.randint(0, 3, (300,), generator=drawn)
    names = ["abc"[target] for target in targets.tolist()]
    return wrap(inputs, targets, groups=names, owners=names)


@pytest.mark.parametrize("method", ["ino_scale", "ino_sample", "idp_scale"])
def test_steps_of_owners_together_are_the_librarys(modules: Any, method: str) -> None:
    training, data = modules["serving_train"], owned()
    chosen = eh.method(method, {"bound": 0.2})
    plan = eh.plan(chosen, BUDGETS, data=data.facts, epochs=2, batch_size=60)
    recipes = [training.Recipe(plan, chosen, "sgd", rate, momentum=0.5, schedule="constant") for rate in (0.5, 2.0)]
    for made, ours in zip(recipes, training.train_together(recipes, 5, data), strict=True):
        model, stream = nn.Linear(6, 3), Stream.insecure(5, 0)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        mechanism, memory = Mechanism(plan, chosen.rule, chosen.queries, stream), chosen.rule.initial(plan.facts)
        optimizer, _ = Descent("sgd", made.rate, 0.5, None, "constant").build(model, plan.steps)
        sampler = PoissonSampler(data.owner, plan.rates, stream)
        engine = MicroBatches(model, nn.CrossEntropyLoss(reduction="none"))
        for position in range(plan.steps):
            batch = draw(data, sampler, position, 0)
            released = private_gradient(mechanism, engine.run(batch.inputs, batch.targets), batch, memory)
            memory = released.memory
            for name, parameter in model.named_parameters():
                parameter.grad = released.gradient[name].to(parameter.dtype)
            optimizer.step()
        torch.testing.assert_close(ours.model.weight, model.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.model.bias, model.bias, rtol=1e-4, atol=1e-5)


def test_pulls_are_those_of_the_librarys_figures(modules: Any) -> None:
    data, training = owned(), modules["serving_train"]
    chosen = eh.method("idp_scale", {"bound": 0.2})
    plan = eh.plan(chosen, BUDGETS, data=data.facts, epochs=1, batch_size=60)
    team = training.Team([training.Recipe(plan, chosen, "sgd", 1.0)], Stream.insecure(0, 0), data)
    learner = team.learners[0]
    cosine, ratio, shares = modules["matched"].pulls(learner, data, *data.fetch(torch.arange(len(data))))
    figures = by_owner(learner.model, data, plan)
    own, others = figures["length"]["a"], [figures["length"][name] for name in "bc"]
    angle = np.cos(np.radians([figures["angle"][pair] for pair in ("a | b", "a | c", "b | c")]))
    together = np.sqrt(others[0] ** 2 + others[1] ** 2 + 2 * others[0] * others[1] * angle[2])
    assert ratio == pytest.approx(together / own, rel=1e-3)
    assert cosine == pytest.approx((others[0] * angle[0] + others[1] * angle[1]) / together, abs=1e-3)
    assert shares == pytest.approx((figures["pull"]["b"] + figures["pull"]["c"]) / figures["pull"]["a"], rel=1e-3)


def test_plain_sgd_is_trained_without_noise(modules: Any) -> None:
    data, training, chosen = owned(), modules["serving_train"], eh.method("sgd")
    plan = eh.plan(chosen, None, data=data.facts, epochs=1, batch_size=60)
    recipe = training.Recipe(plan, chosen, "sgd", 1.0)
    done = training.train_together([recipe], 0, data)[0]
    assert done.spent is None
    assert torch.isfinite(done.model.weight).all()
    sampler, team = PoissonSampler(data.owner, plan.rates, Stream.insecure(0, 0)), None
    team = training.Team([dataclasses.replace(recipe, momentum=0.0)], Stream.insecure(0, 0), data)
    batch = draw(data, sampler, 0, 0)
    team.step(batch, 0)
    model = nn.Linear(6, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.functional.cross_entropy(model(batch.inputs), batch.targets, reduction="sum").div(60).backward()
    torch.testing.assert_close(team.learners[0].model.weight, -model.weight.grad)


@pytest.fixture(scope="module")
def small(modules: Any) -> Any:
    studies = modules["matched_owners"]
    return dataclasses.replace(
        studies.MAP,
        arms=tuple(arm for arm in studies.MAP.arms if "(Sample)" in arm.name and "0.5" not in arm.name),
        promises=studies.MAP.promises[1:2],
        rates=(1.0, 10.0),
        epochs=2,
        replicas=3,
        trials=1,
        widest=0,
        claims=tuple(claim for claim in studies.MAP.claims if claim.rate != 30.0 and "(Sample)" in claim.left),
    )


def test_a_study_trains_every_cell_and_goes_on_where_it_stopped(
    modules: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched, page = modules["matched"], modules["matched_page"]
    source = modules["matched_data"].pool("digits", None, tmp_path)
    file, steps = tmp_path / "rows.jsonl", matched.seeds(small, source, tmp_path / "rows.jsonl", 2)
    for _ in range(2):
        next(steps)
    before = file.read_text()
    *_, rows = matched.seeds(small, source, file, 2)
    assert file.read_text().startswith(before)
    assert len(rows) == len(small.arms) * 2 * (1 + 2)
    assert all(row["spent"] <= 5.0 for row in rows)
    table = json.loads(json.dumps(matched.gathered(small, source, rows)))
    monkeypatch.setitem(page.STUDIES, small.name, small)
    text = page.page(table)
    assert table["replicas"] == 2
    assert "3 were planned" in text
    assert text.count("**holds**") + text.count("**does not hold**") + text.count("**not decided**") == len(
        small.claims
    )
    assert "<svg" in page.picture(page.Figures(small, table))


def test_replicas_of_an_unmatched_study_train_each_arm_at_its_own_rate_and_for_its_own_rounds(
    modules: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched, page = modules["matched"], modules["matched_page"]
    first, *others = small.arms
    arms = (dataclasses.replace(first, epochs=1, batch=64), *others)
    claims = tuple(claim for claim in small.claims if claim.rate is None)
    study = dataclasses.replace(small, arms=arms, claims=claims, matched=False)
    source = modules["matched_data"].pool("digits", None, tmp_path)
    *_, rows = matched.seeds(study, source, tmp_path / "rows.jsonl", 2)
    replicas = [row for row in rows if not row["trial"]]
    assert len(replicas) == len(arms) * 2
    assert all(row["cell"][2] == matched.best(study, rows, *row["cell"][:2]) for row in replicas)
    facts = source.split(study, 0, False).train.facts
    plans = [matched.planned(study, arm, study.promises[0], facts)[0] for arm in arms[:2]]
    assert plans[0].expected_batch == 64 != plans[1].expected_batch
    assert plans[0].steps == round(facts.records / 64)
    monkeypatch.setitem(page.STUDIES, study.name, study)
    text = page.page(json.loads(json.dumps(matched.gathered(study, source, rows))))
    assert "of every arm at its own rate" in text
    assert "where the arm names no others" in text
    assert "at the same rates" not in text


def test_owners_are_dealt_other_classes_and_records_of_lax_ones_can_be_dropped(modules: Any, tmp_path: Path) -> None:
    study, data = modules["matched_owners"].MAP, modules["matched_data"]
    source = data.pool("digits", None, tmp_path)
    splits = [source.split(study, seed, False) for seed in (0, 1)]
    classes = [set(split.test.fetch(torch.from_numpy(np.flatnonzero(split.part == 0)))[1].tolist()) for split in splits]
    assert [len(labels) for labels in classes] == [1, 1]
    assert classes[0] != classes[1]
    fewer = modules["matched"].lessened(splits[0], 0.5, 0)
    sizes = dict(fewer.train.facts.owners)
    assert sizes["owner 0"] == 140
    assert {size for name, size in sizes.items() if name != "owner 0"} == {70}


def test_every_page_is_what_its_figures_make(modules: Any) -> None:
    page = modules["matched_page"]
    written = [name for name in page.STUDIES if (RESULTS / f"{name}.json").exists()]
    assert written
    for name in written:
        table = json.loads((RESULTS / f"{name}.json").read_text())
        assert (RESULTS / f"{name}.md").read_text() == page.page(table)
        assert all(len(cell["right"]) == table["replicas"] for cell in table["cells"])


def test_the_page_of_the_priors_split_is_what_its_figures_make(modules: Any) -> None:
    table = json.loads((RESULTS / "prior_split.json").read_text())
    text = modules["prior_split"].page(table)
    assert (RESULTS / "prior_split.md").read_text() == text
    assert (text.count("**within**"), text.count("**NOT within**")) == (len(table["promises"]), 0)
    assert all(len(values) == table["replicas"] for promise in table["promises"] for values in promise["balanced"])


def test_pages_of_single_scripts_are_what_their_figures_make(modules: Any) -> None:
    for name in ("knn_distances", "ham_ideas"):
        file = RESULTS / f"{name}.json"
        if file.exists():
            assert (RESULTS / f"{name}.md").read_text() == modules[name].page(json.loads(file.read_text()))
    assert (RESULTS / "papers.md").read_text() == modules["papers"].page(), "run: python experiments/papers.py"


def test_the_replicated_claims_agree_and_their_page_says_so(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parents[1] / "experiments" / "replication"))
    again = importlib.import_module("again")
    rows = json.loads((RESULTS / "replication.json").read_text())
    text = (RESULTS / "replication.md").read_text()
    assert again.page(rows) == text
    assert text.count("**agree**") == len(again.CLAIMS) == 3
    for claim, row in zip(again.CLAIMS, rows, strict=True):
        table = json.loads((RESULTS / f"{claim.FIGURES}.json").read_text())
        assert dataclasses.asdict(claim.published(table)) == pytest.approx(row["page"])
    ordering, plain = importlib.import_module("ordering"), importlib.import_module("plain")
    norms, losses, drawn = np.array([1.0, 2.0, 0.1]), np.array([0.3, 2.0, 0.9]), np.arange(3)
    bounds, places = np.array([0.2, 0.1, 0.4]), torch.arange(3)
    stats = Stats(torch.from_numpy(norms), torch.from_numpy(losses), places, places, places)
    state = State(0, torch.from_numpy(bounds), public=Public(rate=torch.ones(3), expected=torch.ones(3)))
    ours = eh.rules.Ordered(over=eh.rules.Clip(), length=1.0).weights(stats, state).numpy()
    theirs, _ = ordering.ordered(bounds, 1.0, 0.7)(norms, losses, drawn, np.random.default_rng(0))
    np.testing.assert_allclose(theirs, ours, atol=1e-9)
    assert plain.outcome([1.0, 3.0], 0.25).mean == 2.0


def test_the_page_of_the_phases_noise_can_be_computed_again(modules: Any) -> None:
    text, pictures = modules["sad_noise"].page()
    assert (RESULTS / "sad_noise.md").read_text() == text
    assert set(pictures) == {f"sad_noise_{name}.svg" for name in ("beta", "gamma", "n")}
