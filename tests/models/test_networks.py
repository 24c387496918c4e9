"""The papers' networks: sizes, kernels for every layer, records alone as in company, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.gradients import examine, per_sample
from evenhand.models import build, names
from evenhand.types import Facts

RECORDS = 2
LOSS = nn.CrossEntropyLoss(reduction="none")
MNIST, CIFAR, WORDS = "(1, 28, 28) float32", "(3, 32, 32) float32", "(12,) int64"
CASES = {
    "linear": (MNIST, 7_850),
    "logistic": (MNIST, 7_850),
    "mlp": (MNIST, 101_770),
    "cnn": (MNIST, 55_594),
    "tanh_cnn": (MNIST, 26_010),
    "tanh_cnn, colour": (CIFAR, 550_570),
    "mnist_cnn_f": (MNIST, 431_080),
    "mnist_cnn_v2": (MNIST, 20_490),
    "resnet18": ("(3, 8, 8) float32", 11_173_962),
    "shufflenet": ("(3, 28, 28) float32", 9_578),
    "char_lstm": (WORDS, 256 * 64 + 4 * 128 * (64 + 128 + 2) + 1290),
}


def facts(inputs: str) -> Facts:
    return Facts(9, (("all", 9),), labels=tuple(map(str, range(10))), inputs=inputs)


def made(case: str) -> tuple[nn.Module, Tensor]:
    """A network whose last layer is not zero, so that every layer has a gradient, and records for it."""
    torch.manual_seed(0)
    inputs = CASES[case][0]
    model = build(case.partition(",")[0], facts(inputs))
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    assert not last.weight.any()
    assert not last.bias.any()
    nn.init.normal_(last.weight)
    shape = eval(inputs.rpartition(" ")[0])
    return model, torch.randint(256, (RECORDS, *shape)) if inputs == WORDS else torch.randn(RECORDS, *shape)


def test_every_name_is_tried_here() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(names())


@pytest.mark.parametrize("case", CASES)
def test_kernels_serve_every_network(case: str) -> None:
    model, inputs = made(case)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == CASES[case][1]
    found = examine(model, LOSS, inputs, torch.arange(RECORDS), timed=False)
    assert found.trainable, str(found)
    assert found.way == "kernels", str(found)
    assert all(part.kernel and not part.problem for part in found.parts)


@pytest.mark.parametrize("case", [case for case in CASES if case != "resnet18"])
def test_gradients_are_those_of_records_alone(case: str) -> None:
    model, inputs = made(case)
    targets = torch.arange(RECORDS)
    found = per_sample(model, LOSS, inputs, targets)
    for row in (0, RECORDS - 1):
        model.zero_grad()
        LOSS(model(inputs[row : row + 1]), targets[row : row + 1]).sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert found.norm[row].item() == pytest.approx(norm.item(), rel=1e-4, abs=1e-6)  # 1 - p is rounding


def test_padding_changes_nothing_wherever_it_stands() -> None:
    model, _ = made("char_lstm")
    words = torch.tensor([[5, 9, 7, 0, 0, 0], [0, 0, 0, 5, 9, 7], [0, 5, 0, 9, 0, 7]])
    scores = model(words)
    bare = model(torch.tensor([[5, 9, 7]]))
    assert torch.allclose(scores, bare.expand_as(scores), atol=1e-5)
    assert not torch.allclose(model(torch.tensor([[5, 9]])), bare, atol=1e-3)
    norms = per_sample(model, LOSS, words, torch.tensor([1, 1, 1])).norm
    assert torch.allclose(norms, norms[0].expand(3), rtol=1e-4)
    assert model(torch.zeros(2, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("cnn", "(64,) float32", "at least 8 x 8"),
        ("tanh_cnn", "(1, 12, 12) float32", "at least 16 x 16"),
        ("mnist_cnn_f", "(784,) float32", "shape (784,)"),
        ("mnist_cnn_v2", "(1, 6, 6) float32", "use --model mlp"),
        ("resnet18", "(10,) float32", "needs pictures"),
        ("shufflenet", "(3, 4, 4) float32", "shufflenet"),
        ("char_lstm", "(1, 28, 28) int64", "one row of tokens"),
        ("char_lstm", "(12,) float32", "give whole numbers"),
        ("mlp", "(12,) int64", "give floats"),
        ("char_lstmm", "(12,) int64", "Did you mean 'char_lstm'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, inputs: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build(name, facts(inputs))
    assert message in str(refusal.value)


def test_the_smallest_pictures_that_are_allowed_work() -> None:
    for name, side in (("cnn", 8), ("tanh_cnn", 16), ("mnist_cnn_f", 16), ("mnist_cnn_v2", 8), ("shufflenet", 8)):
        model = build(name, facts(f"(2, {side}, {side + 1}) float32"))
        assert model(torch.zeros(3, 2, side, side + 1)).shape == (3, 10)
