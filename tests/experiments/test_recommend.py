"""``evenhand recommend``: the nearest study decides; where nothing is near it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import evenhand, result
from evenhand.comparison import recommend as recommending
from evenhand.comparison.recommend import Facts, distance, recommend
from evenhand.errors import UsageError


def study(**changes: Any) -> dict[str, Any]:
    best = {"method": "naive", "value": 80.0, "low": 78.0, "high": 82.0, "tied": ["dpsgd_f"], "seeds": 5}
    used = {"settings": {"lr": 0.5, "settings": {"bound": 0.1}}}
    return {
        "experiment": "made",
        "kind": "table",
        "data": "made",
        "records": 10_000,
        "groups": 2,
        "smallest_share": 0.1,
        "model": "linear",
        "parameters": 100,
        "epsilon": 3.0,
        "delta": 1e-5,
        "budgets": {},
        "best": {"worst": best, "accuracy": {**best, "method": "psac", "tied": ["dpsgd", "naive"]}},
        "methods": dict.fromkeys(("naive", "dpsgd_f", "psac", "dpsgd"), used),
        **changes,
    }


KNOWN = {"provenance": "made by a test", "studies": [study(), study(experiment="owners", budgets={"a": 1.0})]}


def test_the_best_of_the_nearest_study() -> None:
    found = recommend(Facts(20_000, 3.0, 0.1), known=KNOWN)
    assert (found.method, found.study, found.measured) == ("naive", "made", True)
    assert found.settings["lr"] == 0.5
    assert found.others == ("dpsgd_f",)
    assert "80.0 (78.0 to 82.0), 5 seeds" in found.reasons[0]


def test_a_variant_is_named_by_what_can_be_typed() -> None:
    best = {"method": "sad, reversed", "value": 80.0, "low": None, "high": None, "tied": [], "seeds": 1}
    used = {"settings": {"method": "sad", "settings": {"growth": 1.0}}}
    known = {"studies": [study(best={"worst": best, "accuracy": best}, methods={"sad, reversed": used})]}
    found = recommend(Facts(10_000, 3.0, 0.1), known=known)
    assert (found.method, found.settings["settings"]) == ("sad", {"growth": 1.0})
    assert "sad, reversed is a variant of sad" in " ".join(found.reasons)


def test_every_packaged_study_names_methods_that_can_be_typed() -> None:
    from evenhand import density
    from evenhand.methods import catalogue

    known = {recipe.name for recipe in catalogue.catalogue()} | set(density.METHODS)
    for found in recommending.table()["studies"]:
        assert {line["settings"]["method"] for line in found["methods"].values()} <= known


def test_the_simplest_of_equals() -> None:
    found = recommend(Facts(10_000, 3.0, 0.1), "accuracy", known=KNOWN)
    assert found.method == "dpsgd"
    assert "simplest" in " ".join(found.reasons)


def test_owners_with_budgets_are_another_question() -> None:
    assert recommend(Facts(10_000, 3.0, 0.1, budgets=True), known=KNOWN).study == "owners"
    only = {**KNOWN, "studies": [study()]}
    found = recommend(Facts(10_000, 3.0, 0.1, budgets=True), known=only)
    assert (found.method, found.measured) == ("idp_sample", False)


def test_nothing_similar_is_said() -> None:
    for known in (KNOWN, {"studies": []}):
        found = recommend(Facts(10**9, 3.0, 1e-5), known=known)
        assert (found.measured, found.method) == (False, "dpsgd")
        assert "Nothing similar was measured" in found.reasons[0]


def test_differences_are_told() -> None:
    found = recommend(Facts(60_000, 3.0, 0.02), known=KNOWN)
    words = " ".join(found.reasons)
    assert found.measured
    assert "tune the learning rate anew" in words
    assert "smallest group was 10 %" in words


def test_kinds_of_data_are_never_crossed() -> None:
    for kind in ("images", "text", "other"):
        found = recommend(Facts(10_000, 3.0, 0.1, kind=kind), known=KNOWN)
        assert (found.measured, found.sure) == (False, "none")
    for one in recommending.table()["studies"]:
        for kind in {"table", "images", "text", "other"} - {one["kind"]}:
            asked = Facts(one["records"], one["epsilon"], one["smallest_share"], bool(one["budgets"]), kind)
            advice = recommend(asked)
            kinds = {study["kind"] for study in recommending.table()["studies"] if study["experiment"] == advice.study}
            assert not advice.measured or kinds == {kind}


def test_a_poor_study_advises_nothing() -> None:
    bad = {"method": "naive", "value": 1.7, "low": 0.5, "high": 3.0, "tied": [], "seeds": 5}
    known = {"studies": [study(best={"worst": bad, "accuracy": {**bad, "value": 80.0}}, labels=7)]}
    found = recommend(Facts(10_000, 3.0, 0.1), "accuracy", known=known)
    assert not found.measured
    assert "even the best worst group has 1.7 % right" in found.reasons[0]
    common = {"studies": [study(majority=0.79)]}
    assert "most common label" in recommend(Facts(10_000, 3.0, 0.1), known=common).reasons[0]


def test_it_says_how_sure_it_is() -> None:
    clear = {"method": "naive", "value": 80.0, "low": 78.0, "high": 82.0, "tied": [], "seeds": 100}
    good = study(best={"worst": clear, "accuracy": clear}, split="Every seed holds out other records.", labels=2)
    assert recommend(Facts(10_000, 3.0, 0.1), known={"studies": [good]}).sure == "high"
    found = recommend(Facts(10_000, 3.0, 0.1), known=KNOWN)
    assert found.sure == "moderate"
    assert "not told apart from others" in found.reasons[-1]
    assert recommend(Facts(120_000, 3.0, 0.1), known=KNOWN).sure == "low"


def test_distance_is_zero_only_for_the_same_setting() -> None:
    assert distance(Facts(10_000, 3.0, 0.1, parameters=100), study()) == 0
    assert distance(Facts(10_000, 30.0, 0.1), study()) == pytest.approx(1.0)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommending, "table", lambda: KNOWN)
    told = evenhand("recommend", "--records", "20000", "--smallest", "0.1")
    assert told.returncode == 0, told.stderr
    assert "method: naive" in told.stdout
    assert "--set bound=0.1" in told.stdout
    assert "made by a test" in told.stdout
    body = result("recommend", "--records", "10000", "--budgets", "strict=1,open=3")
    assert body["study"] == "owners"
    assert evenhand("recommend", "--records", "0").returncode == 2
    assert evenhand("recommend", "--records", "9", "--goal", "luck").returncode == 2


def test_facts_are_checked() -> None:
    for wrong in ({"records": 0}, {"records": 9, "share": 1.5}, {"records": 9, "kind": "sound"}):
        with pytest.raises(UsageError):
            Facts(**wrong)


def test_the_packaged_figures_have_a_source() -> None:
    known = recommending.table()
    results = Path(__file__).parents[2] / "docs" / "results"
    for found in known["studies"]:
        assert (results / f"{found['experiment']}.json").exists(), found["experiment"]
    assert not known["studies"] or "experiments/results.py" in known["provenance"]
    json.dumps(known)


PIXELS = {"mnist": 784, "unbalanced-mnist": 784, "cifar10-subset": 3072, "ham10000": 2352, "ham10000-200x150": 90000}


def test_a_study_whose_model_did_not_see_the_pixels_says_what_it_saw() -> None:
    """Advice that leaves the features out is five points worse than its figures, with the same settings."""
    for found in recommending.table()["studies"]:
        if found["model"] == "linear" and found["data"] in PIXELS:
            own = found["labels"] * (PIXELS[found["data"]] + 1)
            assert bool(found["features"]) == (found["parameters"] != own), found["experiment"]
            typed = {one["settings"].get("features", "") for one in found["methods"].values()}
            assert typed == {"" if found["columns"] else found["features"]}, found["experiment"]
    advice = recommend(Facts(51_044, 8.0, kind="images"), "accuracy")
    assert "linear on scattering features, which a public random matrix takes to 512 columns" in advice.reasons[0]
    assert advice.sure != "high"
