"""Many fits on the same people are added up, whatever meta-estimator makes them; a search keeps one promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score

import evenhand as eh
from evenhand.accounting import accountant
from evenhand.errors import UsageError
from evenhand.sklearn import (
    DeclaredScaler,
    PrivateClassifier,
    PrivateGridSearch,
    PrivateRegressor,
    make_private_pipeline,
)
from evenhand.sklearn.search import _scores_plan

pytestmark = pytest.mark.usefixtures("looked_at")
BOUNDS = (-3, 3)


def classifier(**settings: Any) -> Any:
    return PrivateClassifier("linear", **{"epochs": 0.5, "delta": 1e-4, "prior": False, **settings})


def test_grid_search_of_scikit_learn_is_charged_for_every_fit(people: Any) -> None:
    inputs, labels = people
    search = GridSearchCV(classifier(epsilon=1.0, bounds=BOUNDS), {"lr": [0.1, 1.0]}, cv=2).fit(inputs, labels)
    privacy = search.best_estimator_.privacy_
    assert privacy.runs == 5, "two points, two folds, and the final fit: folds of two share no record, but all with it"
    assert privacy.this_fit <= 1.0
    half = classifier().set_params(epsilon=1.0)
    events = 4 * _events(half, 150) + _events(half, 300)
    assert privacy.epsilon == pytest.approx(accountant.epsilon(events, 1e-4), rel=1e-6)
    assert "over 5 runs on these records. This fit alone: epsilon 1.000." in str(privacy).splitlines()[0]


def _events(form: Any, records: int) -> list[Any]:
    from evenhand.types import Facts

    return form.planned(Facts(records, (("all", records),)), eh.Privacy(1.0, 1e-4)).events()


def test_cross_validation_and_later_fits_add_up_with_each_other_and_with_fit(people: Any) -> None:
    inputs, labels = people
    cross_val_score(classifier(epsilon=1.0), inputs, labels, cv=KFold(3, shuffle=True, random_state=0))
    fitted = classifier(epsilon=1.0).fit(inputs, labels)
    assert fitted.privacy_.runs == 4
    run = eh.fit(torch.nn.Linear(4, 2), (inputs, labels), epsilon=1.0, delta=1e-4, epochs=0.5, prior=False, out="fit")
    assert (run.folder.composition() or {})["runs"] == 5, "eh.fit on the same arrays is counted with them"
    alone = classifier(epsilon=1.0, compose=False).fit(inputs, labels).privacy_
    assert (alone.runs, alone.epsilon) == (None, alone.this_fit)
    assert "not counted (compose=False)" in str(alone)
    other = classifier(epsilon=1.0).fit(np.random.default_rng(9).normal(size=(100, 4)), labels[:100])
    assert other.privacy_.runs == 1, "other people are other data"


def test_a_search_spends_no_more_than_its_one_promise(people: Any) -> None:
    inputs, labels = people
    pipeline = make_private_pipeline(DeclaredScaler(BOUNDS), classifier(prior=True))
    grid = {"privateclassifier__lr": [1e-6, 0.5], "declaredscaler__bounds": [(-3, 3)]}
    groups = np.where(inputs[:, 1] > 0, "old", "young")
    search = PrivateGridSearch(pipeline, grid, epsilon=4.0, delta=1e-4).fit(inputs, labels, groups=groups)
    assert search.privacy_.runs == 4, "two trials, their scores, and the final fit"
    assert search.privacy_.uncounted == 0
    assert 3.9 < search.privacy_.epsilon <= 4.0
    assert search.privacy_.this_fit == pytest.approx(search.epsilon_, rel=1e-3)
    assert search.best_score_ == max(search.cv_results_["mean_test_score"])
    assert search.best_params_ == search.cv_results_["params"][search.best_index_]
    assert search.best_estimator_[-1].lr == search.best_params_["privateclassifier__lr"]
    assert search.score(inputs, labels) == search.best_estimator_.score(inputs, labels)
    assert search.predict_proba(inputs).shape == (300, 2)
    assert "_counted_as" not in vars(search.best_estimator_)
    assert eh.verify(search.best_estimator_[-1].run_.path)["ok"]


@pytest.mark.parametrize("wins", [0, 1])
def test_a_search_keeps_its_promise_whatever_plan_wins(people: Any, monkeypatch: pytest.MonkeyPatch, wins: int) -> None:
    """Plans of equal epsilon compose differently, and the scores choose between them."""
    inputs, labels = people
    monkeypatch.setattr(PrivateGridSearch, "_released", lambda self, answers, *_: np.eye(len(answers))[wins])
    grid = [{"batch_size": [200], "epochs": [1]}, {"batch_size": [2], "epochs": [0.1]}]
    search = PrivateGridSearch(classifier(bounds=BOUNDS), grid, epsilon=1.0, delta=1e-4).fit(inputs, labels)
    assert search.best_index_ == wins
    scores = _scores_plan(2, 60, search.epsilon_, 1e-4).events()
    plans = [eh.load(run).plan for run in Path("runs").iterdir()]
    assert len(plans) == 3
    events = [event for plan in plans for event in plan.events()]
    assert 0.8 < accountant.epsilon([*events, *scores], 1e-4) <= 1.0


def test_trials_say_that_their_labels_were_read_off_the_data(people: Any) -> None:
    PrivateGridSearch(classifier(bounds=BOUNDS), {"lr": [0.1]}, epsilon=1.0).fit(*people)
    assert [eh.load(run).plan.facts.derived for run in Path("runs").iterdir()] == [("labels",)] * 2


def test_scores_of_a_search_are_noisy_and_of_regressors_too() -> None:
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1, 1, (300, 2))
    form = PrivateRegressor("linear", target_bounds=(-1, 1), epochs=0.5, insecure_seed=0)
    search = PrivateGridSearch(form, {"lr": [0.1, 0.5]}, epsilon=3.0, validation=0.5).fit(inputs, inputs[:, 0])
    scores = search.cv_results_["mean_test_score"]
    held_out = np.random.default_rng(0).random(300) < 0.5
    exact = 1 - np.abs(search.predict(inputs[held_out]) - inputs[held_out, 0]).mean() / 2
    assert abs(scores.max() - exact) < 0.2
    counts = scores * held_out.sum()
    assert (counts != counts.round()).all()
    assert not hasattr(search, "predict_proba")


def test_what_a_search_cannot_pay_for_is_refused_before_anything_is_spent(people: Any) -> None:
    inputs, labels = people
    for estimator, grid, message in (
        (classifier(epsilon=1.0), {"lr": [1.0]}, "the search pays"),
        (classifier(), {"epsilon": [1.0, 2.0]}, "epsilon cannot be searched"),
        (classifier(method="sgd"), {"lr": [1.0]}, "no epsilon to share"),
        (PrivateRegressor(), {"lr": [1.0]}, "need public bounds"),
    ):
        with pytest.raises(UsageError, match=message):
            PrivateGridSearch(estimator, grid, epsilon=1.0).fit(inputs, labels)
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    with pytest.raises(UsageError, match="takes a PrivateClassifier"):
        PrivateGridSearch(LogisticRegression(), {"C": [1.0]}, epsilon=1.0).fit(inputs, labels)
    with pytest.raises(UsageError, match="takes a PrivatePipeline"):
        PrivateGridSearch(make_pipeline(classifier()), {}, epsilon=1.0).fit(inputs, labels)
    with pytest.raises(UsageError, match="target y is None"):
        PrivateGridSearch(classifier(), {}, epsilon=1.0).fit(inputs)
    assert not Path("runs").exists()


def test_runs_whose_seed_is_public_are_in_no_total(people: Any) -> None:
    fitted = classifier(epsilon=1.0, insecure_seed=0).fit(*people)
    again = classifier(epsilon=1.0, insecure_seed=0).fit(*people)
    assert (fitted.privacy_.uncounted, again.privacy_.runs, again.privacy_.uncounted) == (0, 2, 1)
    assert "1 of them are in no total" in str(again.privacy_)
