"""Classifier and regressor as people use them: what they take, answer, store and refuse."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone, is_classifier, is_regressor

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.sklearn import PrivateClassifier, PrivateRegressor

KNOWN: dict[str, Any] = {"epsilon": 3.0, "epochs": 2, "bounds": (-3, 3)}


def classifier(**settings: Any) -> Any:
    return PrivateClassifier("linear", **{**KNOWN, **settings})


def nothing_was_spent() -> bool:
    ledgers = [file for file in Path("runs").rglob("ledger.jsonl") if '"reserve"' in file.read_text()]
    return not ledgers and not (Path(os.environ["EVENHAND_STATE"]) / "datasets").exists()


def test_a_fit_answers_in_the_words_of_y_and_leaves_a_run_that_verifies(people: Any) -> None:
    inputs, labels = people
    fitted = classifier(insecure_seed=0).fit(inputs, labels)
    assert is_classifier(fitted)
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert fitted.score(inputs, labels) > 0.8
    likely = fitted.predict_proba(inputs)
    np.testing.assert_allclose(likely.sum(1), 1.0)
    np.testing.assert_array_equal(fitted.classes_[likely.argmax(1)], fitted.predict(inputs))
    np.testing.assert_array_equal(fitted.decision_function(inputs) > 0, fitted.predict(inputs) == "yes")
    found = eh.verify(fitted.run_.path)
    assert found["ok"]
    assert 2.9 < found["epsilon"] <= 3.0
    assert fitted.run_.path.parent == Path("runs")
    assert fitted.plan_.facts.derived == ("labels",), "classes that nobody declared are named as a fact"
    assert fitted.privacy_.epsilon == fitted.privacy_.this_fit == found["epsilon"]
    loaded = eh.load(fitted.run_.path).model
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), fitted.model_.parameters(), strict=True))


def test_a_fitted_estimator_can_be_pickled_and_holds_no_secret(people: Any) -> None:
    inputs, labels = people
    fitted = classifier().fit(inputs, labels)
    stored = pickle.dumps(fitted)
    np.testing.assert_array_equal(pickle.loads(stored).predict(inputs), fitted.predict(inputs))
    secrets = [file.read_bytes() for file in Path(os.environ["EVENHAND_STATE"]).rglob("records/*.json")]
    names = [text.split(b'"')[3] for text in secrets]
    assert names
    assert all(name not in stored for name in names)
    assert inputs[0].astype(np.float32).tobytes() not in stored
    assert inputs[0].tobytes() not in stored
    assert not hasattr(clone(fitted), "model_")


@pytest.mark.usefixtures("looked_at")
def test_columns_of_a_frame_are_told_by_name(people: Any) -> None:
    inputs, labels = people
    frame = pd.DataFrame(inputs, columns=["a", "b", "c", "d"]).astype({"a": "float32"})
    bounds = {"d": (-3, 3), "a": (-2, 2), "b": (-3, 3), "c": (-3, 3)}
    fitted = classifier(bounds=bounds, insecure_seed=0).fit(frame, pd.Series(labels))
    assert fitted.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="same order"):
        fitted.predict(frame[["b", "a", "c", "d"]])
    with pytest.raises(UsageError, match="column 'd' has no bounds"):
        classifier(bounds=dict.fromkeys("abc", (0, 1))).fit(frame, labels)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("kind", [np.int8, np.float16, np.float64])
def test_numbers_of_any_type_are_taken(people: Any, kind: Any) -> None:
    inputs = (3 * people[0]).astype(kind)
    fitted = classifier(insecure_seed=0, epochs=0.2).fit(inputs, np.arange(300) % 2)
    assert fitted.predict(inputs).dtype == np.arange(300).dtype


@pytest.mark.usefixtures("looked_at")
def test_any_module_or_function_is_a_model_and_stays_as_it_is(people: Any) -> None:
    inputs, labels = people
    module = torch.nn.Linear(4, 2)
    before = module.weight.detach().clone()
    assert PrivateClassifier(module, **KNOWN).fit(inputs, labels).model_ is not module
    assert torch.equal(module.weight, before)
    made = PrivateClassifier(lambda facts: torch.nn.Linear(4, len(facts.labels)), **KNOWN).fit(inputs, labels)
    assert made.predict_proba(inputs).shape == (300, 2)
    pictures = PrivateClassifier("cnn", epsilon=3.0, epochs=0.2, shape=(1, 8, 8))
    assert pictures.fit(np.tile(inputs, 16), labels).predict(np.tile(inputs, 16)).shape == (300,)


@pytest.mark.usefixtures("looked_at")
def test_classes_of_any_type_are_told_by_their_value(people: Any) -> None:
    inputs = people[0]
    for labels, classes in ((inputs[:, 0] > 0, [False, True]), ((inputs[:, 0] > 0).astype(float), [0, 1])):
        fitted = classifier(classes=classes, epochs=0.1).fit(inputs, labels)
        np.testing.assert_array_equal(fitted.classes_, classes)
        assert set(fitted.predict(inputs).tolist()) <= set(classes)


@pytest.mark.usefixtures("looked_at")
def test_the_public_seed_decides_how_the_model_starts_and_leaves_the_global_generator(people: Any) -> None:
    inputs, labels = people
    state = torch.random.get_rng_state()
    fits = [
        PrivateClassifier("mlp", seed=seed, insecure_seed=0, **{**KNOWN, "epochs": 0.1}).fit(inputs, labels)
        for seed in (0, 0, 1)
    ]
    weights = [fitted.model_[1].weight for fitted in fits]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("looked_at")
def test_groups_owners_budgets_goal_and_held_out_records(people: Any) -> None:
    inputs, labels = people
    groups, owners = (
        np.where(inputs[:, 1] > 0, "old", "young"),
        np.array(["strict", "usual", "usual"])[np.arange(300) % 3],
    )
    form = classifier(
        epsilon=None,
        privacy=eh.Budgets({"strict": 1.0, "usual": 3.0}, delta=1e-4),
        method="idp_sample",
        goal="balanced",
        classes=["yes", "no"],
        least_records=1,
    )
    train, test = slice(0, 200), slice(200, 300)
    fitted = form.fit(
        inputs[train],
        labels[train],
        groups=groups[train],
        owners=owners[train],
        test=(inputs[test], labels[test], groups[test]),
    )
    assert fitted.classes_.tolist() == ["yes", "no"]
    assert fitted.plan_.facts.derived == ("groups",)
    assert dict(zip(fitted.plan_.facts.owner_names, fitted.plan_.epsilons, strict=True))["strict"] <= 1.0
    last = fitted.run_.evaluations[-1]
    assert set(last["groups"]) == {"old", "young"}
    assert last["accuracy"] == pytest.approx(fitted.score(inputs[test], labels[test]))
    assert fitted.decision_ is not None
    assert fitted.run_.report().save("report.html").exists()


@pytest.mark.usefixtures("looked_at")
def test_numbers_are_predicted_in_the_unit_of_y() -> None:
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1, 1, (500, 2))
    numbers = 1000 + 50 * inputs[:, 0]
    fitted = PrivateRegressor("linear", epsilon=8.0, target_bounds=(900, 1100), insecure_seed=0).fit(inputs, numbers)
    assert is_regressor(fitted)
    assert fitted.score(inputs, numbers) > 0.5
    assert 900 < fitted.predict(inputs).mean() < 1100
    assert eh.verify(fitted.run_.path)["ok"]


REFUSED = [
    ("requires y to be passed", {}, lambda X, y: (X, None)),
    ("one class only", {}, lambda X, y: (X, ["a"] * len(X))),
    ("contains NaN, infinity", {}, lambda X, y: (1e300 * X, y)),
    ("Complex data not supported: pass", {}, lambda X, y: (X + 1j, y)),
    ("Expected 2D array, with one row", {}, lambda X, y: (X[:, 0], y)),
    ("not a number: encode", {}, lambda X, y: (pd.DataFrame({"when": [pd.Timestamp(0)] * len(X), "size": 1.5}), y)),
    ("not all names, or some are missing", {}, lambda X, y: (X, [None, *y[1:]])),
    ("Some labels in y are missing", {}, lambda X, y: (X, [*y[1:], None])),
    ("Some labels in y are missing,", {}, lambda X, y: (X, pd.Series([pd.NA, *y[1:]], dtype="string"))),
    ("contains NaN", {}, lambda X, y: (np.where(X > 2, np.nan, X), y)),
    ("is not a number", {}, lambda X, y: (np.where(X > 0, "Ann", "Bo"), y)),
    ("dense data is required", {}, lambda X, y: (scipy.sparse.csr_array(X), y)),
    ("3 dimensions", {}, lambda X, y: (X.reshape(-1, 2, 2), y)),
    ("inconsistent numbers of samples", {}, lambda X, y: (X, y[:9])),
    ("Unknown label type", {}, lambda X, y: (X, X[:, 0])),
    ("more than 100 classes", {}, lambda X, y: (X, np.arange(len(X)) % 101)),
    ("say what was promised", {"epsilon": None}, lambda X, y: (X, y)),
    ("one of epsilon, noise and privacy", {"privacy": eh.Privacy(3.0)}, lambda X, y: (X, y)),
    ("not among the declared", {"classes": ["no", "maybe"]}, lambda X, y: (X, y)),
    ("low below high", {"bounds": (1, 0)}, lambda X, y: (X, y)),
    ("a pair for each of the 4 columns", {"bounds": [(0, 1)] * 3}, lambda X, y: (X, y)),
    ("does not have the 4 numbers", {"shape": (1, 3, 3)}, lambda X, y: (X, y)),
    ("Did you mean 'dpsgd'", {"method": "dpsdg"}, lambda X, y: (X, y)),
    ("Did you mean 'linear'", {"model": "liner"}, lambda X, y: (X, y)),
    ("cannot take inputs of shape", {"model": torch.nn.Linear(9, 2)}, lambda X, y: (X, y)),
    ("takes a name such as 'mlp'", {"model": 3}, lambda X, y: (X, y)),
]


@pytest.mark.parametrize(("message", "settings", "changed"), REFUSED, ids=[row[0] for row in REFUSED])
def test_wrong_input_is_one_line_before_anything_is_spent(
    message: str, settings: dict[str, Any], changed: Any, people: Any
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        classifier().set_params(**settings).fit(*changed(*people))
    assert "\n" not in str(raised.value)
    assert not any(name in str(raised.value) for name in ("Ann", "Bo"))
    assert nothing_was_spent()


def test_other_arguments_are_refused_with_the_reason(people: Any) -> None:
    with pytest.raises(UsageError, match="sample_weight is refused: a record of weight w"):
        classifier().fit(*people, sample_weight=np.ones(300))
    with pytest.raises(UsageError, match="fit takes no argument 'wieght'"):
        classifier().fit(*people, wieght=np.ones(300))
    with pytest.raises(UsageError, match=r"test takes held-out records as \(X, y\)"):
        classifier().fit(*people, test=people[0])
    with pytest.raises(UsageError, match="hold training records"):
        classifier().fit(*people, test=people)
    with pytest.raises(ValueError, match="1d array"):
        PrivateRegressor("linear", epsilon=3.0).fit(people[0], people[0])
    with pytest.raises(ValueError, match="numbers"):
        PrivateRegressor("linear", epsilon=3.0).fit(*people)
    assert nothing_was_spent()


@pytest.mark.usefixtures("looked_at")
def test_other_widths_are_refused_at_predict(people: Any) -> None:
    fitted = classifier(epochs=0.1).fit(*people)
    with pytest.raises(ValueError, match="expecting 4 features"):
        fitted.predict(people[0][:, :2])
    with pytest.raises(ValueError, match="contains NaN"):
        fitted.predict(np.full((1, 4), np.nan))
