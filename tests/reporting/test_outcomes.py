"""Every metric equals scikit-learn and fairlearn called by hand, for each kind of targets, overall and per group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fairlearn import metrics as fair
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from evenhand.errors import EvenhandError
from evenhand.reporting import metrics, run_findings
from evenhand.reporting.group_metrics import measure, measure_outcomes
from evenhand.reporting.outcomes import BINS, Outcomes, by_group, losses_of, values


def classes(number: int, records: int = 400, seed: int = 0, kind: str = "classes") -> tuple[Outcomes, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, number, records)
    logits = rng.normal(size=(records, number)).round(1) + 1.5 * np.eye(number)[truth]  # rounded: scores have ties
    likely = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    outcomes = Outcomes(kind, truth, likely.argmax(1), likely, losses_of(truth, likely), classes=number)
    return outcomes, rng.integers(0, 3, records)


def calibration_by_hand(right: np.ndarray, confidence: np.ndarray) -> float:
    shares, means = calibration_curve(right, confidence, n_bins=BINS, strategy="uniform")
    sizes = np.histogram(confidence, bins=np.linspace(0, 1, BINS + 1))[0]
    return float(np.abs(shares - means) @ sizes[sizes > 0] / len(right))


@pytest.mark.parametrize("number", [2, 5])
def test_classes(number: int) -> None:
    every, code = classes(number)
    found, parts = values(every), by_group(every, code, ("a", "b", "c"))
    for got, part in ((found, every), *((place, every.take(code == place)) for place in range(3))):
        one = got if isinstance(got, dict) else {name: parts[name]["abc"[got]] for name in parts}
        truth, guess, likely = part.truth, part.guess, part.probabilities
        score, onehot = (likely[:, 1], truth) if number == 2 else (likely, np.eye(number)[truth])
        average = "binary" if number == 2 else "macro"
        expected = {
            "accuracy": sk.accuracy_score(truth, guess),
            "balanced_accuracy": sk.balanced_accuracy_score(truth, guess),
            "mcc": sk.matthews_corrcoef(truth, guess),
            "roc_auc": sk.roc_auc_score(truth, score, multi_class="ovr"),
            "pr_auc": sk.average_precision_score(onehot, score),
            "brier": sk.brier_score_loss(truth, likely if number > 2 else score),
            "log_loss": sk.log_loss(truth, likely, labels=range(number)),
            "calibration_error": calibration_by_hand(truth == guess, likely.max(1)),
            "tpr": sk.recall_score(truth, guess, average=average),
            "precision": sk.precision_score(truth, guess, average=average),
        }
        if number == 2:
            expected |= {
                "fpr": fair.false_positive_rate(truth, guess),
                "tnr": fair.true_negative_rate(truth, guess),
                "selection_rate": fair.selection_rate(truth, guess),
                "base_rate": truth.mean(),
            }
        assert {name: one[name] for name in expected} == pytest.approx(expected)


def test_differences_are_those_of_fairlearn() -> None:
    every, code = classes(2)
    groups = [f"g{place}" for place in code]
    found = measure(every.truth, every.guess, groups=groups, probabilities=every.probabilities).across
    arguments = {"y_true": every.truth, "y_pred": every.guess, "sensitive_features": groups}
    for name in ("demographic_parity", "equalized_odds", "equal_opportunity"):
        for kind in ("difference", "ratio"):
            by_hand = getattr(fair, f"{name}_{kind}")(**arguments)
            assert found[f"{name}_{kind}"] == pytest.approx(by_hand), name
    frame = fair.MetricFrame(metrics={"fpr": fair.false_positive_rate, "tnr": fair.true_negative_rate}, **arguments)
    row = {"group_metrics": by_group(every, code, ("g0", "g1", "g2"))}
    for name in ("fpr", "tnr"):
        assert found[f"{name}_difference"] == pytest.approx(frame.difference()[name])
        assert metrics.value(row, f"{name}_difference") == pytest.approx(frame.difference()[name])
        assert metrics.value(row, f"{name}_ratio") == pytest.approx(frame.ratio()[name])


def test_ordered_classes_know_how_far_off_they_are() -> None:
    every, _ = classes(5, kind="ordinal")
    assert values(every)["rank_mae"] == pytest.approx(sk.mean_absolute_error(every.truth, every.guess))
    assert "rank_mae" not in values(classes(5)[0])


def test_several_labels() -> None:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 2, (300, 3)).astype(float)
    likely = 1 / (1 + np.exp(-(rng.normal(size=truth.shape) + truth)))
    truth[:, 2] = 0.0
    every = Outcomes("labels", truth, (likely > 0.5).astype(float), likely, np.zeros(300), labels=("x", "y", "z"))
    found = values(every)
    for place, name in enumerate("xy"):
        assert found[f"roc_auc[{name}]"] == pytest.approx(sk.roc_auc_score(truth[:, place], likely[:, place]))
        assert found[f"pr_auc[{name}]"] == pytest.approx(sk.average_precision_score(truth[:, place], likely[:, place]))
    assert math.isnan(found["roc_auc[z]"])
    assert found["roc_auc"] == pytest.approx((found["roc_auc[x]"] + found["roc_auc[y]"]) / 2)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, every.guess))
    assert found["label_accuracy"] == pytest.approx(1 - sk.hamming_loss(truth, every.guess))


def test_real_numbers() -> None:
    rng = np.random.default_rng(2)
    truth = rng.normal(size=200)
    guess = truth + rng.normal(size=200) / 2 + 0.3
    code = rng.integers(0, 2, 200)
    parts = by_group(Outcomes("numbers", truth, guess), code, ("a", "b"))
    for place, name in enumerate("ab"):
        t, g = truth[code == place], guess[code == place]
        expected = (sk.mean_absolute_error(t, g), sk.root_mean_squared_error(t, g), sk.r2_score(t, g), (g - t).mean())
        assert [parts[metric][name] for metric in ("mae", "rmse", "r2", "bias")] == pytest.approx(expected)
    found = measure_outcomes(Outcomes("numbers", truth, guess), groups=[("a", "b")[place] for place in code])
    assert found.worst_group == max("ab", key=lambda name: parts["mae"][name])
    assert found.across["mae_difference"] == pytest.approx(abs(parts["mae"]["a"] - parts["mae"]["b"]))


def test_tokens_count_by_their_number() -> None:
    every = Outcomes("tokens", np.empty(0), np.array([1.0, 4.0]), losses=np.array([2.0, 4.0]), tokens=np.array([1, 5]))
    found = values(every)
    assert found["log_loss"] == 1.0
    assert found["perplexity"] == pytest.approx(math.e)
    assert found["token_accuracy"] == pytest.approx(5 / 6)


def test_a_group_without_negatives_has_no_false_positive_rate() -> None:
    every = Outcomes("classes", np.array([1, 1, 0]), np.array([1, 0, 0]), classes=2)
    parts = by_group(every, np.array([0, 0, 1]), ("a", "b"))
    assert math.isnan(parts["fpr"]["a"])
    assert math.isnan(parts["tpr"]["b"])
    assert metrics.differences("fpr", parts["fpr"].values())["fpr_difference"] == 0


def test_the_interval_of_a_gap_covers() -> None:
    rng, inside, lower = np.random.default_rng(5), 0, 0
    true = np.array([0.5, 0.4, 0.2, 0.2])
    sizes = np.array([400, 300, 100, 12])
    for _ in range(400):
        shares = rng.binomial(sizes, true) / sizes
        row = {"groups": dict(zip("abcd", shares, strict=True)), "group_records": dict(zip("abcd", sizes, strict=True))}
        gap = run_findings.gaps(row)["accuracy_difference"]
        inside += gap.low <= 0.3 <= gap.high
        lower += gap.low > 0
    assert inside >= 372  # 95 % of 400, less 2.3 standard deviations
    assert lower >= 390


def test_names_of_metrics() -> None:
    assert metrics.listed("fpr,equalized_odds_difference") == ("fpr", "equalized_odds_difference")
    with pytest.raises(EvenhandError, match="balanced_accuracy"):
        metrics.known("balanced_acuracy")
    with pytest.raises(EvenhandError, match="--metric takes names"):
        metrics.listed(" , ")
    assert not metrics.higher_is_better("brier")
    assert metrics.higher_is_better("demographic_parity_ratio")


def test_metrics_of_several_classes_are_undefined_where_a_group_has_one() -> None:
    truth = np.arange(60) % 3
    likely = np.full((60, 3), 1 / 3)
    outcomes = Outcomes("classes", truth, (truth + (np.arange(60) < 6)) % 3, likely, classes=3)
    of_classes = by_group(outcomes, truth, ("a", "b", "c"))
    assert all(math.isnan(value) for name in ("mcc", "precision", "fpr") for value in of_classes[name].values())
    assert of_classes["accuracy"] == {"a": 0.9, "b": 0.9, "c": 0.9}
    mixed = by_group(outcomes, np.arange(60) // 30, ("first", "second"))
    assert mixed["precision"]["second"] == 1.0
