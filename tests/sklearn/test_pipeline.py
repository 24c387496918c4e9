"""Preprocessing: what learns from private records is refused by name, what is declared is applied record by record."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import VotingClassifier
from sklearn.feature_selection import SelectKBest
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import PolynomialCountSketch, RBFSampler, SkewedChi2Sampler
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection

import evenhand as eh
from evenhand.density import MomentDensity, RandomFeatureDensity
from evenhand.errors import DataError, UsageError
from evenhand.sklearn import (
    DeclaredEncoder,
    DeclaredScaler,
    PrivateClassifier,
    PrivatePipeline,
    PrivateRegressor,
    make_private_pipeline,
)
from evenhand.sklearn.pipeline import refuse_learned

pytestmark = pytest.mark.usefixtures("looked_at")
MODEL = PrivateClassifier("linear", epsilon=3.0, epochs=0.5)
DRAWN = (
    *(GaussianRandomProjection(2, random_state=0), SparseRandomProjection(2, random_state=0)),
    *(PolynomialCountSketch(random_state=0), SkewedChi2Sampler(random_state=0), Normalizer(), Binarizer()),
)
SCALED = StandardScaler().fit([[0.0] * 4, [1.0] * 4])


@pytest.mark.parametrize(
    "step",
    [
        *(StandardScaler(), MinMaxScaler(), SimpleImputer(), PCA(), SelectKBest(), OneHotEncoder()),
        OneHotEncoder(categories=[["a", "b"]], min_frequency=2),
        GaussianRandomProjection(),
        RBFSampler(gamma="scale"),
        FrozenEstimator(SCALED),
        make_pipeline(Normalizer(), StandardScaler()),
        FeatureUnion([("part", PCA())]),
        ColumnTransformer([("part", DeclaredScaler(), [0])], remainder=StandardScaler()),
    ],
    ids=lambda step: type(step).__name__,
)
def test_a_step_that_learns_is_refused_by_name_before_anything_is_spent(step: Any, people: Any) -> None:
    with pytest.raises(UsageError, match=r"learn from private records, which no promise pays for: '\w+' \(\w+\)"):
        make_private_pipeline(step, MODEL)
    with pytest.raises(UsageError, match="learn from private records"):
        PrivatePipeline([("step", step), ("model", MODEL)]).fit(*people)
    assert not Path("runs").exists()


def _around(name: str) -> Any:
    scaler = StandardScaler()
    return {
        "a pipeline": make_pipeline(scaler, MODEL),
        "one inside another": make_pipeline(scaler, make_private_pipeline(Normalizer(), MODEL)),
        "a search at its end": make_pipeline(scaler, GridSearchCV(MODEL, {"lr": [0.1]}, cv=2, error_score="raise")),
        "a search around it": GridSearchCV(
            make_pipeline(scaler, MODEL), {"privateclassifier__lr": [0.1]}, cv=2, error_score="raise"
        ),
        "scaled targets": TransformedTargetRegressor(PrivateRegressor("linear", epsilon=3.0), transformer=scaler),
        "a density": make_pipeline(scaler, RandomFeatureDensity(epsilon=3.0)),
        "a search around a density": GridSearchCV(
            make_pipeline(scaler, MomentDensity(epsilon=3.0)), {"momentdensity__epsilon": [1]}, error_score="raise"
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("a pipeline", "one inside another", "a search at its end", "a search around it", "scaled targets"),
        *("a density", "a search around a density"),
    ],
)
def test_what_learned_before_a_private_fit_is_refused_also_in_scikit_learns_own_classes(name: str, people: Any) -> None:
    inputs, labels = people
    with pytest.raises(UsageError, match=r"learn from private records, .*\(StandardScaler\)"):
        _around(name).fit(inputs, inputs[:, 0] if name == "scaled targets" else labels)
    assert not Path("runs").exists()


def test_a_net_of_skorch_may_come_last() -> None:
    net = type("Net", (LogisticRegression,), {"trains_privately": True})()
    assert make_private_pipeline(DeclaredScaler(), net).steps[-1][1] is net
    with pytest.raises(UsageError, match=r"learn from private records, .*\(StandardScaler\)"):
        make_private_pipeline(StandardScaler(), net)


def test_a_plain_pipeline_of_steps_that_learn_nothing_is_fitted(people: Any) -> None:
    assert make_pipeline(DeclaredScaler((-3, 3)), MODEL).fit(*people)[-1].privacy_.this_fit <= 3.0


@pytest.mark.parametrize(
    "step",
    [
        *("passthrough", DeclaredScaler((-3, 3)), Normalizer(), FunctionTransformer(np.tanh), PolynomialFeatures(2)),
        *(RBFSampler(random_state=0), GaussianRandomProjection(2, random_state=0)),
        OneHotEncoder(categories=[["a", "b"]]),
        make_pipeline(Normalizer(), DeclaredScaler((-1, 1))),
        ColumnTransformer([("part", DeclaredScaler((0, 1)), [0])], remainder="passthrough"),
    ],
    ids=lambda step: type(step).__name__,
)
def test_steps_that_learn_nothing_are_taken(step: Any) -> None:
    refuse_learned(Pipeline([("step", step), ("model", MODEL)]))
    refuse_learned(Pipeline([("step", step), ("model", MomentDensity(epsilon=1.0))]))


def test_a_frozen_step_is_taken_where_it_is_declared_to_be_of_public_data(people: Any) -> None:
    pipeline = PrivatePipeline([("scale", FrozenEstimator(SCALED)), ("model", MODEL)], public=["scale"])
    inputs, labels = people
    fitted = pipeline.fit(inputs[:200], labels[:200], test=(inputs[200:], labels[200:]))
    measured = fitted[-1].run_.evaluations[-1]["accuracy"]
    assert measured == pytest.approx(fitted.score(inputs[200:], labels[200:]))


@pytest.mark.parametrize(
    "step", [RBFSampler(random_state=0), PolynomialFeatures(2), *DRAWN], ids=lambda s: type(s).__name__
)
def test_steps_that_are_taken_keep_the_same_numbers_whatever_the_records_hold(step: Any, people: Any) -> None:
    ends = [vars(clone(step).fit(inputs)) for inputs in (people[0], 1000 * people[0] + 1)]
    one, two = (
        {name: value.tolist() if hasattr(value, "tolist") else repr(value) for name, value in e.items()} for e in ends
    )
    assert one == two


def filled(rows: Any) -> Any:
    return np.where(np.isnan(np.asarray(rows)), np.nanmean(np.asarray(rows), axis=0), np.asarray(rows))


def clipped(rows: Any) -> Any:
    values = np.asarray(rows)
    return np.clip(values, values.mean() - 2.5 * values.std(), values.mean() + 2.5 * values.std())


def centred(rows: Any) -> Any:
    return np.asarray(rows) - np.asarray(rows).mean(0)


@pytest.mark.parametrize("mixing", [filled, clipped, centred])
@pytest.mark.parametrize("frame", [False, True], ids=["array", "frame"])
def test_a_function_that_mixes_records_is_refused(mixing: Any, frame: bool, people: Any) -> None:
    inputs, labels = people[0].copy(), people[1]
    if mixing is filled:
        inputs[250, 2] = np.nan
    step = FunctionTransformer(mixing)
    with pytest.raises(UsageError, match="alone than in company"):
        make_private_pipeline(step, MODEL).fit(pd.DataFrame(inputs) if frame else inputs, labels)
    with pytest.raises(UsageError, match="cannot look at that: 'functiontransformer'"):
        make_pipeline(step, MODEL).fit(inputs, labels)
    assert not Path("runs").exists()


def test_functions_of_targets_are_taken_where_they_are_known_to_keep_records_apart(people: Any) -> None:
    inputs, targets = people[0], np.abs(people[0][:, 0])
    form = PrivateRegressor("linear", epsilon=3.0, epochs=0.5)
    scaled = TransformedTargetRegressor(form, func=lambda y: y / y.std(), inverse_func=lambda y: y, check_inverse=False)
    with pytest.raises(UsageError, match="best transformed before fit"):
        scaled.fit(inputs, targets)
    assert not Path("runs").exists()
    known = TransformedTargetRegressor(form, func=np.log1p, inverse_func=np.expm1).fit(inputs, targets)
    assert known.regressor_.privacy_.this_fit <= 3.0


def test_what_learned_before_a_fit_in_another_thread_is_refused(people: Any) -> None:
    voting = VotingClassifier([("one", MODEL), ("two", MODEL)], n_jobs=2)
    with (
        joblib.parallel_backend("threading"),
        pytest.raises(UsageError, match=r"learn from private .*\(StandardScaler\)"),
    ):
        make_pipeline(StandardScaler(), voting).fit(*people)
    assert not Path("runs").exists()


def test_held_out_records_need_steps_that_draw_the_same_again(people: Any) -> None:
    inputs, labels = people
    for state, refused in ((None, True), (0, False)):
        step = GaussianRandomProjection(2, random_state=state)
        with pytest.raises(UsageError, match="random_state") if refused else nullcontext():
            make_private_pipeline(step, MODEL).fit(inputs, labels, test=(inputs[:50] + 0.5, labels[:50]))


def test_the_last_step_must_be_private() -> None:
    with pytest.raises(UsageError, match="LogisticRegression, which is not private"):
        make_private_pipeline(DeclaredScaler(), LogisticRegression())


def test_a_frame_goes_through_declared_columns_with_groups_and_held_out_records() -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": generator.integers(18, 90, 400), "sex": generator.choice(["f", "m"], 400), "note": "free text"}
    )
    labels = np.where(frame["age"] > 50, "ill", "well")
    columns = ColumnTransformer(
        [
            ("age", DeclaredScaler({"age": (0, 100)}), ["age"]),
            ("sex", DeclaredEncoder({"sex": ["f", "m"]}), ["sex"]),
        ]
    )
    pipeline = make_private_pipeline(columns, MODEL)
    test = (frame[300:], labels[300:], frame["sex"][300:].tolist())
    fitted = pipeline.fit(frame[:300], labels[:300], groups=frame["sex"][:300], test=test)
    assert fitted[-1].plan_.facts.groups == ("f", "m")
    assert fitted[-1].n_features_in_ == 3
    assert set(fitted.predict(frame)) <= {"ill", "well"}
    assert eh.verify(fitted[-1].run_.path)["ok"]
    assert fitted.privacy_.runs == 1
    narrower = make_private_pipeline(columns, MODEL).set_params(columntransformer__age__bounds={"age": (0, 120)})
    assert narrower.fit(frame[100:], labels[100:]).privacy_.runs == 2, "the people are told by what was passed in"


def test_declared_steps_clip_fill_and_name_what_they_make() -> None:
    scaler = DeclaredScaler([(0, 10), (0, 1)], missing="middle").fit([[1, 1]])
    assert scaler.transform([[np.nan, 2.0], [5.0, -1.0]]).tolist() == [[0.0, 1.0], [0.0, -1.0]]
    with pytest.raises(ValueError, match="NaN"):
        DeclaredScaler((0, 1)).fit_transform([[np.nan]])
    frame = pd.DataFrame({"sex": ["f", "m", "x"], "smoker": ["no", "no", "yes"]})
    encoder = DeclaredEncoder({"sex": ["f", "m"], "smoker": ["no", "yes"]}, other="other")
    assert encoder.fit_transform(frame).sum(1).tolist() == [2.0, 2.0, 2.0]
    assert encoder.get_feature_names_out().tolist() == [
        *("sex=f", "sex=m", "sex=other", "smoker=no", "smoker=yes", "smoker=other"),
    ]
    strict = DeclaredEncoder([["f", "m"], ["no", "yes"]]).fit(frame)
    with pytest.raises(DataError) as raised:
        strict.transform(frame)
    assert "'x'" not in str(raised.value)
    with pytest.raises(UsageError, match="exactly these columns"):
        DeclaredEncoder({"sex": ["f"]}).fit(frame)
    with pytest.raises(UsageError, match="each of the 2 columns"):
        DeclaredEncoder([["f"]]).fit(frame)
