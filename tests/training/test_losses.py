"""Losses by name: one value per record, against torch and the formulas, and conforming under the probe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evenhand as eh
from commands import evenhand, result
from evenhand.data import Data
from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients import per_sample, probe
from evenhand.runs.folder import Folder
from evenhand.training.config import from_toml
from evenhand.training.losses import Binary, ClassWeighted, CrossEntropy, Focal, MeanSquared, named

torch.manual_seed(0)
OUTPUTS = torch.randn(6, 3, dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])
SEVERAL = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]], dtype=torch.float64)
REAL = torch.randn(6, 3, dtype=torch.float64)
P = OUTPUTS.softmax(1)[torch.arange(6), CLASSES]
S = OUTPUTS.sigmoid()
WEIGHTS = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
HOT = functional.one_hot(CLASSES, 3).double()

CASES = {
    "cross_entropy": (CLASSES, -P.log()),
    "cross_entropy:smoothing=0.3": (
        CLASSES,
        0.7 * -P.log() + 0.3 * -OUTPUTS.log_softmax(1).mean(1),
    ),
    "focal": (CLASSES, -((1 - P) ** 2) * P.log()),
    "focal:gamma=0.5,alpha=0.25": (CLASSES, -0.25 * (1 - P) ** 0.5 * P.log()),
    "focal:gamma=0": (CLASSES, -P.log()),
    "binary": (SEVERAL, -(SEVERAL * S.log() + (1 - SEVERAL) * (1 - S).log()).mean(1)),
    "mse": (REAL, (OUTPUTS - REAL).square().mean(1)),
    "class_weighted:weights=[1,5,0.5]": (CLASSES, -WEIGHTS[CLASSES] * P.log()),
    "class_weighted:weights=[1,5,0.5],loss=focal": (CLASSES, -WEIGHTS[CLASSES] * (1 - P) ** 2 * P.log()),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula(name: str) -> None:
    targets, expected = CASES[name]
    torch.testing.assert_close(named(name)(OUTPUTS, targets), expected, rtol=1e-12, atol=1e-12)


def test_class_numbers_are_every_class_against_the_rest() -> None:
    torch.testing.assert_close(Binary()(OUTPUTS, CLASSES), Binary()(OUTPUTS, HOT))
    torch.testing.assert_close(Binary()(OUTPUTS[:, 0], CLASSES // 2), Binary()(OUTPUTS[:, :1], CLASSES // 2))


def test_places_within_a_record_are_averaged_within_it() -> None:
    outputs, targets = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    each = torch.stack([functional.cross_entropy(o[None], t[None]) for o, t in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(CrossEntropy()(outputs, targets), each)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_per_record_and_pass_the_probe(name: str) -> None:
    torch.manual_seed(1)
    model, loss, targets = nn.Linear(4, 3).double(), named(name), CASES[name][0]
    inputs = torch.randn(6, 4, dtype=torch.float64)
    probe(model, loss, inputs, targets)
    result = per_sample(model, loss, inputs, targets)
    total = result.weighted_sum(torch.eye(6, dtype=torch.float64)[2])
    alone = torch.autograd.grad(loss(model(inputs[2:3]), targets[2:3]).sum(), model.weight)[0]
    torch.testing.assert_close(total["weight"], alone, rtol=1e-9, atol=1e-12)


def test_a_record_that_fits_perfectly_has_a_finite_focal_gradient() -> None:
    outputs = torch.tensor([[60.0, 0.0], [0.0, 60.0], [1e4, 0.0]], requires_grad=True)
    for gamma in (0.5, 1.0, 2.0):
        loss = Focal(gamma)(outputs, torch.tensor([0, 0, 0]))
        (gradient,) = torch.autograd.grad(loss.sum(), outputs)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_a_weighted_mean_over_the_batch_is_refused() -> None:
    model, inputs = nn.Linear(4, 3), torch.randn(6, 4)

    def weighted_mean(outputs: Tensor, targets: Tensor) -> Tensor:
        weights = WEIGHTS.float()[targets]
        return weights * functional.cross_entropy(outputs, targets, reduction="none") / weights.sum()

    with pytest.raises(UnsupportedModelError, match="depends on the other records"):
        probe(model, weighted_mean, inputs, CLASSES)
    probe(model, ClassWeighted([1, 5, 0.5]), inputs, CLASSES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("focall", "Did you mean 'focal'"),
        ("focal:gama=2", "Did you mean 'gamma'"),
        ("focal:2", "KEY=VALUE"),
        ("focal:gamma=-1", "at least 0"),
        ("focal:gamma=two", "must be a number"),
        ("cross_entropy:smoothing=1", "less than 1"),
        ("class_weighted", "needs weights"),
        ("class_weighted:weights=[]", "one number per class"),
        ("class_weighted:weights=[1,-1]", "greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_exists(text: str, words: str, tiny: Data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, loss=text, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_class_weights_are_refused_before_spending(tiny: Data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one weight per class"):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, loss="class_weighted:weights=[1,2,3]", out=tmp_path)
    assert Folder(tmp_path).ledger().reserved == 0


def test_one_output_for_more_than_two_classes_is_refused(tmp_path: Path) -> None:
    three = eh.data.wrap(torch.randn(60, 3), [0, 1, 2] * 20)
    with pytest.raises(UsageError, match="one output per class"):
        eh.fit(nn.Linear(3, 1), three, epsilon=3.0, loss="binary", test=three.take(torch.arange(4)), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_command_line_takes_a_loss_and_keeps_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ("train", "--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "1", "--out", out)
    assert result(*short, "--loss", "focal:gamma=1")["epsilon"] <= 3
    assert from_toml(out / "config.toml").loss == "focal:gamma=1"
    done = evenhand(*short[:-1], tmp_path / "other", "--loss", "focal:gama=1")
    assert done.returncode == 2
    assert "gamma" in done.stderr


def test_a_loss_of_ones_own_must_be_passed_again(tiny: Data, tmp_path: Path) -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return MeanSquared()(outputs[:, 0], targets.float())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, epochs=1, loss=own, out=tmp_path, on_start=stop)
    with pytest.raises(UsageError, match="pass loss= again"):
        eh.resume(tmp_path, model=nn.Linear(3, 2), train=tiny)
    model = nn.Linear(3, 2)
    before = model.weight.detach()[1].clone()
    eh.resume(tmp_path, model=model, train=tiny, loss=own)
    assert not torch.equal(before, model.weight[1])


@pytest.mark.parametrize(("places", "words"), [(5, 9), (6, 6), (9, 5)])
def test_losses_and_metrics_read_tokens_in_one_order(places: int, words: int) -> None:
    """With as many places as words, the loss once read (record, word, place) and the report (record, place, word)."""
    from evenhand.training.evaluate import measure_model

    torch.manual_seed(0)
    scores, tokens = torch.randn(4, places, words), torch.randint(0, words, (4, places))
    tokens[0, 0] = words - 1

    class Fixed(torch.nn.Module):
        def __init__(self, transposed: bool) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.transposed = transposed

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            given = scores[rows[:, 0].long()] * self.scale
            return given.mT if self.transposed else given

    for transposed in (False, True) if places != words else (False,):
        model = Fixed(transposed)
        inputs = torch.arange(4.0).unsqueeze(1)
        data = eh.data.wrap(inputs, tokens.numpy())
        mean = CrossEntropy()(model(inputs), tokens).mean().item()
        by_hand = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        outcomes = measure_model(model, data)
        assert mean == pytest.approx(by_hand.item(), rel=1e-5)
        assert outcomes.losses.sum() / outcomes.tokens.sum() == pytest.approx(by_hand.item(), rel=1e-5)
