"""Line 2 of the edges: what a Dataset, an augmentation or a model draws at random comes from secret seeds."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenhand as eh
from evenhand import generators
from evenhand.data import Data, wrap
from evenhand.errors import DataError, UnsupportedModelError, UsageError
from evenhand.gradients import pass_context
from evenhand.mechanism.make_plan import Plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.model_io import Shared
from evenhand.training import evaluate
from evenhand.training.augment import Views, random_flip, random_shift
from evenhand.training.guards.coupling_guard import Handed

LOSS = nn.CrossEntropyLoss(reduction="none")
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(1)),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - the global generators are the subject
    "numpy-normal": lambda: float(np.random.randn()),  # noqa: NPY002
    "random": random.random,
}


def public(seed: int) -> None:
    """Set every global generator as somebody who wants reproducible runs does."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def next_public() -> tuple[float, ...]:
    return tuple(drawn() for drawn in DRAWS.values())


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves the process looking after every generator, and none moves those of others."""
    before = generators.Snapshot()
    monkeypatch.setattr(pass_context, "_every", False)
    yield
    before.restore()


class Digits(Dataset[Any]):
    """128 digits, each brightened and turned at random in ``__getitem__``."""

    def __init__(self, drawn: Callable[[], float], only: Callable[[int], bool] = lambda _: True) -> None:
        train, _ = eh.data.digits()
        self.inputs, self.targets = train.fetch(torch.arange(128))
        self.drawn, self.only, self.batched = drawn, only, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        turn = int(64 * self.drawn()) if self.only(index) else 0
        return self.inputs[index].roll(turn), self.targets[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batched += 1
        return [self[index] for index in indices]


class Chosen(PoissonSampler):
    """A sampler whose coins fell so that these rows are drawn."""

    def __init__(self, data: Data, rows: list[int], seed: int = 0) -> None:
        super().__init__(data.owner, [1.0], Stream.insecure(seed, 0))
        self._rows = rows

    def draw(self, step: int) -> tuple[Tensor, NDArray[np.uint64]]:
        return torch.tensor(self._rows), np.arange(len(self._rows), dtype=np.uint64)


def drawn_batch(data: Data, rows: list[int], step: int = 0, seed: int = 0) -> Tensor:
    return draw(data, Chosen(data, rows, seed), step, 1).inputs


def clipped_sum(model: nn.Linear, inputs: Tensor, targets: Tensor) -> Tensor:
    found = torch.zeros(model.weight.numel() + model.bias.numel())
    for row, target in zip(inputs, targets, strict=True):
        gradients = torch.autograd.grad(LOSS(model(row[None]), target[None]).sum(), [model.weight, model.bias])
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        found += flat * min(1.0, 1.0 / float(flat.norm()))
    return found


@pytest.mark.parametrize("kind", DRAWS)
def test_a_record_more_leaves_the_rows_of_all_others_as_they_were(kind: str) -> None:
    data = wrap(Digits(DRAWS[kind]))
    every, without = list(range(128)), [row for row in range(128) if row != 3]
    public(42)
    here = drawn_batch(data, every)
    public(42)
    there = drawn_batch(data, without)
    assert torch.equal(here[without], there)


def test_removing_one_of_128_digits_moves_the_clipped_sum_by_its_bound_at_most() -> None:
    torch.manual_seed(0)
    model, dataset = nn.Linear(64, 10), Digits(DRAWS["torch"])
    data, rows = wrap(dataset), [row for row in range(128) if row != 3]
    public(42)
    whole = clipped_sum(model, drawn_batch(data, list(range(128))), dataset.targets)
    public(42)
    part = clipped_sum(model, drawn_batch(data, rows), dataset.targets[rows])
    assert float((whole - part).norm()) <= 1.0 + 1e-4


def test_with_public_draws_in_a_row_it_would_move_by_many_times_its_bound() -> None:
    torch.manual_seed(0)
    model, dataset = nn.Linear(64, 10), Digits(DRAWS["torch"])
    sums = []
    for rows in (list(range(128)), [row for row in range(128) if row != 3]):
        public(42)
        inputs = torch.stack([dataset[row][0] for row in rows])
        sums.append(clipped_sum(model, inputs, dataset.targets[rows]))
    assert float((sums[0] - sums[1]).norm()) > 5.0


def test_draws_of_a_record_are_secret_and_new_in_every_step() -> None:
    data = wrap(Digits(DRAWS["torch"]))
    public(42)
    one = drawn_batch(data, [5] * 8, step=0)
    public(42)
    assert not torch.equal(drawn_batch(data, [5] * 8, step=1), one)
    public(42)
    assert not torch.equal(drawn_batch(data, [5] * 8, step=0, seed=1), one)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_dataset_that_draws_for_some_records_only_is_covered(kind: str) -> None:
    data = wrap(Digits(DRAWS[kind], only=lambda index: index in (60, 90)))
    drawn_batch(data, [1, 2, 3])
    public(42)
    here = drawn_batch(data, [1, 60, 90])
    public(42)
    assert torch.equal(drawn_batch(data, [1, 90])[1], here[2])


def test_the_generators_of_the_user_go_on_as_if_nothing_had_been_drawn() -> None:
    for kind in DRAWS:
        data = wrap(Digits(DRAWS[kind]))
        public(7)
        np.random.randn()  # noqa: NPY002 - leaves the second normal of a pair behind
        expected = next_public()
        public(7)
        np.random.randn()  # noqa: NPY002
        drawn_batch(data, [1, 2, 3])
        assert next_public() == expected


def test_records_that_draw_are_fetched_alone_once_that_is_known() -> None:
    dataset = Digits(DRAWS["torch"])
    data = wrap(dataset)
    assert dataset.batched == 1  # it drew, so nothing of that was used
    drawn_batch(data, [1, 2, 3])
    assert dataset.batched == 1


def test_records_that_draw_nothing_are_fetched_together() -> None:
    dataset = Digits(lambda: 0.0)
    drawn_batch(wrap(dataset), [1, 2, 3])
    assert dataset.batched == 2


def test_a_fetch_of_ones_own_that_draws_for_a_whole_batch_is_covered_too() -> None:
    from dataclasses import replace

    made = wrap(torch.arange(128.0)[:, None], [0, 1] * 64)
    data = replace(made, fetch=lambda rows: (rows[:, None] + torch.rand(len(rows), 1), rows % 2))
    public(42)
    here = drawn_batch(data, [1, 2, 3])
    public(42)
    assert torch.equal(drawn_batch(data, [1, 3]), here[[0, 2]])


OWN = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)


@pytest.mark.parametrize(
    "own",
    [
        lambda: float(torch.rand(1, generator=OWN[0])),
        lambda: float(OWN[1].random()),
        lambda: OWN[2].random(),
    ],
    ids=["torch", "numpy", "random"],
)
def test_a_generator_that_a_dataset_holds_itself_is_refused_before_spending(
    own: Callable[[], float], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="generator of its own"):
        eh.fit(nn.Linear(64, 10), wrap(Digits(own)), epsilon=3.0, epochs=1, out=tmp_path)
    assert eh.runs.folder.Folder(tmp_path).ledger().reserved == 0


def test_targets_and_records_that_remember_the_one_before_are_refused(tmp_path: Path) -> None:
    class Targets(Digits):
        generator = random.Random(0)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index], torch.tensor(int(10 * self.generator.random()))

    class Before(Digits):
        last = 0.0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.last, before = float(self.inputs[index].sum()), self.last
            return self.inputs[index] + before, self.targets[index]

    for kind in (Targets, Before):
        with pytest.raises(DataError, match="Reading the same records twice"):
            eh.fit(nn.Linear(64, 10), wrap(kind(lambda: 0.0)), epsilon=3.0, epochs=1, out=tmp_path / kind.__name__)


def test_evaluation_is_repeatable_and_leaves_the_generators_alone() -> None:
    data, model = wrap(Digits(DRAWS["numpy"])), nn.Linear(64, 10)
    public(3)
    expected = next_public()
    public(3)
    scores = evaluate.compute_scores(model, data)[0]
    assert next_public() == expected
    assert torch.equal(evaluate.compute_scores(model, data)[0], scores)


def planned(data: Data) -> Plan:
    return eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=data.facts, epochs=2, batch_size=20)


def views_seen(draws: Callable[[Tensor], Tensor], out: Path, **options: Any) -> list[Tensor]:
    """The views of every step, with public generators that start anew before each."""
    data = wrap(torch.arange(80.0)[:, None].repeat(1, 4), [0, 1] * 40)

    def augment(inputs: Tensor) -> Tensor:
        SEEN.append(inputs + draws(inputs))
        return SEEN[-1]

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with eh.attach(model, optimizer, LOSS, planned(data), out=out, augment=augment, compose=False, **options) as run:
        for batch in run.batches(data):
            public(42)
            run.step(batch)
            found.append(SEEN[-1])
    return found


SEEN: list[Tensor] = []
"""Views, where no look for state that records leave behind comes by."""
AUGMENTS = {
    "numpy": lambda inputs: torch.from_numpy(np.random.rand(len(inputs), 1)).float(),  # noqa: NPY002
    "random": lambda inputs: torch.tensor([[random.random()] for _ in range(len(inputs))]),
    "torch": lambda inputs: torch.rand(len(inputs), 1),
}


@pytest.mark.parametrize("kind", AUGMENTS)
def test_what_an_augmentation_draws_comes_from_the_secret_of_the_run(kind: str, tmp_path: Path) -> None:
    once, again = (views_seen(AUGMENTS[kind], tmp_path / name, insecure_seed=1) for name in "ab")
    assert all(torch.equal(one, two) for one, two in zip(once, again, strict=True))
    fractions = [views % 1 for views in once]
    assert not any(torch.equal(one[:5], two[:5]) for one, two in itertools.pairwise(fractions))


def test_a_step_leaves_numpys_and_pythons_generators_as_they_were_once_an_augmentation_draws(tmp_path: Path) -> None:
    data, model = wrap(torch.randn(80, 4), [0, 1] * 40), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def augment(inputs: Tensor) -> Tensor:
        return inputs + AUGMENTS["numpy"](inputs) + AUGMENTS["random"](inputs)

    with eh.attach(model, optimizer, LOSS, planned(data), out=tmp_path, augment=augment) as run:
        for number, batch in enumerate(run.batches(data)):
            public(7)
            expected = next_public()
            public(7)
            run.step(batch)
            assert number == 0 or next_public() == expected


def test_parts_that_are_run_again_draw_what_they_drew_before_from_every_generator() -> None:
    pass_context.every()
    state = pass_context.RandomState(nn.Linear(1, 1))
    first = next_public()
    state.restore()
    assert next_public() == first


def test_a_seed_has_more_than_the_32_bits_that_torch_takes_of_a_number() -> None:
    stream = Stream.insecure(0, 0)
    secret = stream.seed(0)
    other = secret[:8] + bytes([secret[8] ^ 1]) + secret[9:]
    assert generators.number(secret) == generators.number(other)
    drawn = []
    for each in (secret, other):
        generators.seed_torch(each)
        drawn.append(torch.rand(2000))
    assert not torch.equal(drawn[0], drawn[1])
    words = np.frombuffer(secret[: 4 * 624], "<u4")
    twister = np.random.RandomState()
    twister.set_state(("MT19937", words, 624))
    expected = (twister.randint(0, 2**32, 5, dtype=np.uint32) & (2**24 - 1)) / 2**24
    assert drawn[0][:5].tolist() == expected.tolist()


def test_seeds_of_records_and_steps_never_share_bits() -> None:
    stream = Stream.insecure(0, 0)
    seeds = [stream.seed(0), stream.seed(1), *stream.record_seeds(0, range(100)), *stream.record_seeds(1, range(100))]
    assert all(len(seed) == generators.SECRET for seed in seeds)
    blocks = [seed[at : at + 16] for seed in seeds for at in range(0, len(seed), 16)]
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize(
    "augment",
    [
        lambda rows: rows * (1 + torch.rand(len(rows), 1)) / len(rows),
        lambda rows: rows.flip(-1) if len(rows) % 2 else rows,
        lambda rows: rows + torch.randn(len(rows), 1) * len(rows) ** 2,
    ],
    ids=["scaled", "parity", "spread"],
)
def test_a_view_whose_law_depends_on_the_number_of_rows_is_refused(augment: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="how many records"):
        Views(augment).check(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    "augment",
    [
        random_flip,
        random_shift,
        lambda rows: rows + torch.randn(rows.shape),
        lambda rows: rows * (torch.rand(len(rows), 1, 1, 1) < 0.02),
        lambda rows: rows + random.random(),
        lambda rows: rows + torch.from_numpy(np.random.standard_cauchy((len(rows), 1, 1, 1))).float(),  # noqa: NPY002
    ],
    ids=["flip", "shift", "noise", "rare", "one-for-all", "heavy-tails"],
)
def test_innocent_views_pass(augment: Callable[[Tensor], Tensor]) -> None:
    for seed in range(5):
        Views(augment).check(torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(seed)))


def test_a_batch_that_a_users_loop_changes_at_random_is_refused_and_nothing_is_released(tmp_path: Path) -> None:
    data, model = wrap(torch.randn(80, 4), [0, 1] * 40), nn.Linear(4, 2)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.clone()
    with eh.attach(model, optimizer, LOSS, planned(data), out=tmp_path) as run:
        batch = next(run.batches(data))
        batch.inputs.add_(torch.rand(batch.inputs.shape))
        with pytest.raises(UsageError, match="augment="):
            run.step(batch)
    assert torch.equal(model.weight, before)


def standardised(batch: Any) -> Any:
    batch.inputs.sub_(batch.inputs.mean(0))
    return batch


def filled(batch: Any) -> Any:
    return replace(batch, inputs=torch.where(batch.inputs.isnan(), batch.inputs.nanmean(0), batch.inputs))


def in_order(batch: Any) -> Any:
    rows = batch.inputs[:, 0].argsort()
    return replace(batch, inputs=batch.inputs[rows], targets=batch.targets[rows])


def one_for_all(batch: Any) -> Any:
    return replace(batch, inputs=batch.inputs[:1].expand(len(batch), -1))


@pytest.mark.parametrize("change", [standardised, filled, in_order, one_for_all, lambda b: replace(b, inputs=2 * b[0])])
def test_a_batch_that_a_users_loop_changes_is_refused_and_nothing_is_released(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A change cannot be run again among other records, so nobody can tell whether it keeps them apart."""
    inputs = torch.randn(80, 4)
    inputs[::2, 1] = torch.nan
    data, model = wrap(inputs, [0, 1] * 40), nn.Linear(4, 2)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.clone()
    with eh.attach(model, optimizer, LOSS, planned(data), out=tmp_path, allow_not_finite=True) as run:
        batch = next(run.batches(data))
        with pytest.raises(UsageError, match="augment="):
            run.step(change(batch))
    assert torch.equal(model.weight, before)


def test_another_precision_a_copy_or_a_part_of_a_batch_is_no_change() -> None:
    rows, labels = torch.randn(5, 4), torch.arange(5)
    rows[3, 1] = torch.nan
    handed = Handed({"a": rows, "b": labels}, labels)
    for kind in (torch.float64, torch.bfloat16):
        handed.check({"a": rows.to(kind), "b": labels.clone()}, labels)
    handed.check(rows, labels.int())
    for changed in (rows.nan_to_num(), rows.flip(0), rows[:, :2], rows.t()):
        with pytest.raises(UsageError, match="changed"):
            handed.check(changed, labels)
    for more in (Shared(rows.nanmean(0)), 0.25, UserDict(x=rows.flip(0)), object()):
        with pytest.raises(UsageError, match="changed"):
            handed.check({"a": rows, "more": more}, labels)
    handed.check(UserDict(a=rows.clone()), labels)
    labels.add_(1)
    with pytest.raises(UsageError, match="changed"):
        handed.check(rows, labels)


def test_a_copy_of_a_batch_is_stepped(tmp_path: Path) -> None:
    data, model = wrap(torch.randn(80, 4), [0, 1] * 40), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, planned(data), out=tmp_path) as run:
        for batch in run.batches(data):
            run.step(replace(batch, inputs=batch.inputs.clone()))
    assert run.remaining == 0
