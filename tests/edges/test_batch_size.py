"""Line 12: what a record gives does not depend, to the last bit, on how many others its batch has, or on its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from evenhand.gradients import microbatches
from evenhand.gradients.engine import Engine
from evenhand.gradients.microbatches import MicroBatches, least_rows

LOSS = nn.CrossEntropyLoss(reduction="none")
SIZES = (1, 2, 3, 4, 7, 8, 11, 12, 15, 16, 17, 31, 33, 64, 127, 256)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(12, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0][:, -1])
        return out


class Folded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).flatten(1)
        return out


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "logistic regression": (lambda: nn.Sequential(nn.Linear(64, 4)), lambda n: torch.randn(n, 64)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(104, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4)),
        lambda n: torch.randn(n, 104),
    ),
    "odd and narrow": (
        lambda: nn.Sequential(nn.Linear(17, 10), nn.ReLU(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 4)),
        lambda n: torch.randn(n, 17),
    ),
    "one output, on a tape": (lambda: Folded(nn.Linear(61, 1)), lambda n: torch.randn(n, 4, 61)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
        ),
        lambda n: torch.randn(n, 1, 16, 16),
    ),
    "wide convolution": (
        lambda: nn.Sequential(nn.Conv2d(32, 64, 3), nn.GroupNorm(4, 64), nn.Flatten(), nn.Linear(256, 4)),
        lambda n: torch.randn(n, 32, 4, 4),
    ),
    "lstm": (Recurrent, lambda n: torch.randint(12, (n, 6))),
    "transformer": (Attentive, lambda n: torch.randn(n, 5, 16)),
}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def differing(run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], every: Tensor, labels: Tensor) -> list[int]:
    """Sizes of batches in which one record more, in front or within, changes a bit of another record's numbers."""
    found = []
    for size in SIZES:
        before = run(every[:size], labels[:size])
        for at in (0, size):
            order = torch.cat([torch.arange(at), torch.tensor([len(every) - 1]), torch.arange(at, size)])
            after = run(every[order], labels[order])
            common = torch.cat([torch.arange(at), torch.arange(at + 1, size + 1)])
            if not all(torch.equal(a, b[common]) for a, b in zip(before, after, strict=True)):
                found.append(size)
                break
    return found


HEAVY = ("wide convolution", "cnn", "lstm", "transformer")
"""Two threads that wait for each other on busy cores take many times as long: these run with two behind -m slow."""
CASES = [
    pytest.param(name, count, marks=[pytest.mark.slow] if count == 2 and name in HEAVY else [], id=f"{count}-{name}")
    for count in (1, 2)
    for name in MODELS
]


@pytest.mark.parametrize(("name", "threads"), CASES, indirect=["threads"])
def test_a_record_gives_the_same_bits_in_every_batch(name: str, threads: int) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    engine = MicroBatches(build(), LOSS)
    every, labels = draw(max(SIZES) + 1), torch.randint(4, (max(SIZES) + 1,))
    engine.run(every[:20], labels[:20])  # a single record cannot show that kernels may be used

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = engine.run(x, y)
        return result.norm, result.loss

    assert differing(run, every, labels) == []


def kinked() -> tuple[nn.Module, Tensor]:
    """A model and a record whose hidden unit lies at the kink of a ReLU: which side is decided by rounding."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(1, 512)
    with torch.no_grad():
        model[0].bias -= model[0](x)[0]  # type: ignore[operator]
    return model, x


def test_at_the_kink_of_a_relu_a_fourth_record_no_longer_turns_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reviewer's pattern; without filling up it shows, so this test can fail."""
    model, x = kinked()
    others = torch.randn(3, 512)
    labels = torch.zeros(4, dtype=torch.long)

    def norms(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
        three = torch.cat([x, others[:2]])
        return float(run(three, labels[:3])[0]), float(run(torch.cat([three, others[2:]]), labels)[0])

    monkeypatch.setattr(Engine, "_due", lambda self: False)  # plain autograd has few rows too, so it may differ
    filled = MicroBatches(model, LOSS)
    filled.run(others, labels[:3])
    before, after = norms(lambda a, b: filled.run(a, b).norm)
    assert before == after
    monkeypatch.setattr(microbatches, "least_rows", lambda: 1)
    before, after = norms(lambda a, b: filled.run(a, b).norm)
    if before == after:
        pytest.skip("this machine's matrix products of three rows round as those of four")


def test_copies_that_fill_a_batch_enter_no_sum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    x, y = torch.randn(3, 6), torch.tensor([0, 1, 2])
    result, plain = MicroBatches(model, LOSS).run(x, y), Engine(model, LOSS).run(x, y)
    assert len(result.norm) == len(result.loss) == 3
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    expected = plain.weighted_sum(weights)
    for sums in (result.weighted_sum(weights), result.last_sum(weights)):
        for name, value in sums.items():
            torch.testing.assert_close(value, expected[name])


def test_a_record_that_is_not_finite_may_fill_a_batch() -> None:
    x = torch.randn(3, 6)
    x[1, 2] = torch.inf
    result = MicroBatches(nn.Sequential(nn.Linear(6, 3)), LOSS).run(x, torch.tensor([0, 1, 2]))
    sums = result.last_sum(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    assert all(bool(torch.isfinite(value).all()) for value in sums.values())


def test_batches_are_filled_up_to_a_number_that_grows_with_the_threads(threads: int) -> None:
    assert least_rows() >= 8 * threads
