"""Loops written for Opacus: they train as ``attach`` does, to the bit, and what they could spoil is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import evenhand as eh
from evenhand.errors import BatchReuseError, BudgetExhausted, DataError, EvenhandError, ForeignLoaderError, UsageError
from evenhand.integrations.opacus import BatchMemoryManager, PrivacyEngine

INPUTS = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(120) % 3
ENGINES: list[PrivacyEngine] = []


def small(last: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), *([] if last is None else [last]))


def private(
    out: Path, model: nn.Module | None = None, *, batch: int = 40, records: Any = None, **options: Any
) -> tuple[PrivacyEngine, Any, Any, Any]:
    model = small() if model is None else model
    engine = PrivacyEngine(out=out)
    ENGINES.append(engine)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.5)
    records = TensorDataset(INPUTS, LABELS) if records is None else records
    loader = options.pop("data_loader") if "data_loader" in options else DataLoader(records, batch_size=batch)
    given = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": 1.0} | options
    return (engine, *engine.make_private_with_epsilon(module=model, optimizer=optimizer, data_loader=loader, **given))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.pop().close()


Criterion = Callable[[Tensor, Tensor], Tensor]


def loop(model: Any, optimizer: Any, loader: Any, criterion: Criterion | None = None, epochs: int = 2) -> None:
    chosen = criterion or nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = chosen(model(x), y)
            loss.backward()
            optimizer.step()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_loop_of_opacus_trains_as_a_loop_of_ours(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "theirs", noise_generator=seeded(7))
    loop(model, optimizer, loader)
    ours, descent = small(), None
    descent = torch.optim.SGD(ours.parameters(), lr=0.5)
    data = eh.data.wrap(TensorDataset(INPUTS, LABELS))
    criterion = nn.CrossEntropyLoss(reduction="none")
    with eh.attach(ours, descent, criterion, engine.plan, out=tmp_path / "ours", insecure_seed=7) as run:
        for batch in run.batches(data):
            run.step(batch)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, model.state_dict()[f"_module.{name}"]), name
    assert (engine.plan.steps, engine.plan.rates) == (6, (pytest.approx(1 / 3, abs=1e-12),))


def test_the_run_is_released_and_verified_after_its_last_step(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "run")
    assert engine.get_epsilon(1e-3) == 0.0
    loop(model, optimizer, loader)
    checked = eh.verify(engine.folder)
    assert checked["ok"], checked["problems"]
    assert (checked["steps"], checked["planned"]) == (6, 6)
    assert engine.get_epsilon(1e-3) == pytest.approx(checked["epsilon"], abs=2e-3)
    assert 2.9 < checked["epsilon"] <= 3.0
    assert not [note for note in checked["notes"] if "outside of private steps" in note]
    assert "Poisson" in str(eh.load(engine.folder).privacy)
    with pytest.raises(BudgetExhausted, match="All 6 steps"):
        loop(model, optimizer, loader, epochs=1)


def test_a_loop_that_stops_early_releases_by_hand(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "run", epochs=100)
    loop(model, optimizer, loader, epochs=1)
    assert engine.get_epsilon(1e-3) < 3.0
    engine.release()
    checked = eh.verify(engine.folder)
    assert checked["ok"]
    assert checked["epsilon"] > 2.9, "the promise counts the whole plan"


def test_no_epsilon_is_told_of_a_run_whose_records_influenced_each_other(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path)
    loop(model, optimizer, loader, epochs=1)
    assert engine.get_epsilon(1e-3) < 3.0
    assert engine._loop is not None
    assert engine._loop.private is not None
    engine._loop.private._ledger.blocked(2, "records")
    assert engine.get_epsilon(1e-3) == math.inf


def test_no_raw_gradient_reaches_the_parameters(tmp_path: Path) -> None:
    _, model, optimizer, loader = private(tmp_path / "run")
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()


def step(model: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    optimizer.step()


WRONG: dict[str, Callable[[Any, Any, Tensor, Tensor], None]] = {
    "another loss": lambda m, o, x, y: step(m, o, lambda: functional.multi_margin_loss(m(x), y)),
    "a scaled loss": lambda m, o, x, y: step(m, o, lambda: 2 * functional.cross_entropy(m(x), y)),
    "a sum": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x), y, reduction="sum")),
    "class weights in a mean": lambda m, o, x, y: step(
        m, o, lambda: functional.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 3.0]))
    ),
    "other labels": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x), (y + 1) % 3)),
    "outputs centred over the batch": lambda m, o, x, y: step(
        m, o, lambda: functional.cross_entropy((out := m(x)) - out.detach().abs().mean(0) * out, y)
    ),
    "a penalty on weights": lambda m, o, x, y: step(
        m, o, lambda: functional.cross_entropy(m(x), y) + sum(p.square().sum() for p in m.parameters())
    ),
    "no backward": lambda m, o, x, y: o.step(),
    "two losses": lambda m, o, x, y: step(
        m, o, lambda: functional.cross_entropy(m(x), y) + functional.cross_entropy(m(x), y)
    ),
    "inputs centred over the batch": lambda m, o, x, y: step(
        m, o, lambda: functional.cross_entropy(m(x - x.mean(0)), y)
    ),
    "inputs changed in place": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x.sub_(x.mean(0))), y)),
    "labels changed in place": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x), y.fill_(0))),
    "a part of the batch": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x[:3]), y[:3])),
    "rows in another order": lambda m, o, x, y: step(m, o, lambda: functional.cross_entropy(m(x.flip(0)), y.flip(0))),
    "a closure": lambda m, o, x, y: o.step(lambda: functional.cross_entropy(m(x), y)),
    "a skipped part": lambda m, o, x, y: o.signal_skip_step(),
}


@pytest.mark.parametrize("way", WRONG)
def test_a_loop_that_would_train_something_else_is_refused(way: str, tmp_path: Path) -> None:
    _, model, optimizer, loader = private(tmp_path / "run", batch=60)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = next(iter(loader))
    with pytest.raises(EvenhandError):
        WRONG[way](model, optimizer, x, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_batch_is_stepped_exactly_once(tmp_path: Path) -> None:
    _, model, optimizer, loader = private(tmp_path / "run")
    with pytest.raises(BatchReuseError, match="no batch to step"):
        optimizer.step()
    rows = iter(loader)
    x, y = next(rows)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(BatchReuseError, match="no batch to step"):
        optimizer.step()
    next(rows)
    with pytest.raises(BatchReuseError, match="drawn but not stepped"):
        next(rows)


def test_empty_batches_are_ordinary_steps(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "run", batch=1, epochs=0.25, noise_generator=seeded(3))
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        step(model, optimizer, lambda x=x, y=y: functional.cross_entropy(model(x), y))  # type: ignore[misc]
    assert 0 in sizes
    assert len(sizes) == engine.plan.steps == 30
    assert eh.verify(engine.folder)["ok"]


@pytest.mark.parametrize(
    ("last", "criterion", "given"),
    [
        (nn.LogSoftmax(dim=1), nn.NLLLoss(), None),
        (nn.LogSoftmax(dim=1), nn.NLLLoss(), nn.NLLLoss()),
        (None, nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)),
        (None, nn.MultiMarginLoss(), nn.MultiMarginLoss()),
        (None, functional.multi_margin_loss, functional.multi_margin_loss),
    ],
)
def test_criteria(last: nn.Module | None, criterion: Any, given: Any, tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "run", small(last), criterion=given)
    loop(model, optimizer, loader, criterion)
    assert eh.verify(engine.folder)["ok"]


def test_evaluation_and_schedulers_between_steps_change_nothing(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private(tmp_path / "run")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        for x, y in loader:
            model.eval()
            model(INPUTS).sum()
            model.train()
            with torch.no_grad():
                model(INPUTS)
            step(model, optimizer, lambda x=x, y=y: functional.cross_entropy(model(x), y))  # type: ignore[misc]
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)
    assert eh.verify(engine.folder)["notes"] == eh.verify(engine.folder)["notes"][:1], "no foreign change is noted"


def test_an_lstm_evaluated_between_steps_is_not_called_changed(tmp_path: Path) -> None:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0][:, -1]

    records = TensorDataset(INPUTS.unsqueeze(-1), LABELS)
    engine, model, optimizer, loader = private(
        tmp_path / "run", nn.Sequential(Last(1, 3, batch_first=True)), records=records
    )
    loop(model, optimizer, loader)
    assert not [note for note in eh.verify(engine.folder)["notes"] if "outside of private steps" in note]


def test_physical_batches_bound_the_pass_and_leave_the_steps(tmp_path: Path) -> None:
    weights = []
    for size in (None, 7):
        engine, model, optimizer, loader = private(tmp_path / f"{size}", noise_generator=seeded(5))
        for _ in range(2):
            if size is None:
                loop(model, optimizer, loader, epochs=1)
                continue
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
                loop(model, optimizer, parts, epochs=1)
        weights.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
        assert eh.verify(engine.folder)["steps"] == 6
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="fixed with the first batch"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer)


def test_ghost_clipping_returns_the_criterion_too(tmp_path: Path) -> None:
    engine = PrivacyEngine(out=tmp_path / "run")
    given = small()
    model, optimizer, criterion, loader = engine.make_private(
        module=given,
        optimizer=torch.optim.SGD(given.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(INPUTS, LABELS), batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        grad_sample_mode="ghost",
        epochs=1,
    )
    loop(model, optimizer, loader, criterion, epochs=1)
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.max_grad_norm == 0.5
    assert optimizer.expected_batch_size == pytest.approx(40)
    assert eh.verify(engine.folder)["ok"]


def test_adaptive_clipping_is_a_method_whose_count_is_charged(tmp_path: Path) -> None:
    engine, *_ = private(
        tmp_path,
        clipping="adaptive",
        max_grad_norm=2.0,
        target_unclipped_quantile=0.4,
        clipbound_learning_rate=0.3,
        min_clipbound=1.0,
        max_clipbound=20.0,
        unclipped_num_std=5.0,
    )
    settings = engine.plan.rule["settings"]
    assert engine.plan.rule["name"] == "bounded_adaptive"
    assert {name: settings[name] for name in ("quantile", "rate", "least", "most")} == {
        "quantile": 0.4,
        "rate": 0.3,
        "least": 0.5,
        "most": 10.0,
    }
    assert engine.plan.levels[0].queries == (10.0,), "noise of standard deviation 5 over a sensitivity of 1/2"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def padded(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Pad to the longest record of the batch, as collate functions for text often do."""
    rows = nn.utils.rnn.pad_sequence([x[: 1 + int(y)] for x, y in items], batch_first=True)
    return rows, torch.stack([y for _, y in items])


UNMAPPED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shuffled batches": ({"poisson_sampling": False}, UsageError, "only Poisson sampling"),
    "batch second": ({"batch_first": False}, UsageError, "first dimension"),
    "sum": ({"loss_reduction": "sum"}, UsageError, "multiply lr"),
    "hooks on the model": ({"wrap_model": False}, UsageError, "calls the returned model"),
    "bounds per layer": ({"max_grad_norm": [1.0, 2.0]}, UsageError, "per layer"),
    "clipping per layer": ({"clipping": "per_layer"}, UsageError, "per layer"),
    "unknown clipping": ({"clipping": "round"}, UsageError, "'flat' and 'adaptive'"),
    "fsdp": ({"grad_sample_mode": "ghost_fsdp"}, UsageError, "one process"),
    "unknown argument": ({"noise": 3}, UsageError, "'noise' has no counterpart"),
    "a stream": ({"data_loader": DataLoader(Stream())}, ForeignLoaderError, "no length"),
    "no loader": ({"data_loader": TensorDataset(INPUTS, LABELS)}, ForeignLoaderError, "DataLoader"),
    "no batch": (
        {"data_loader": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=121, drop_last=True)},
        DataError,
        "no batches",
    ),
    "padding to the longest": (
        {"data_loader": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=40, collate_fn=padded)},
        DataError,
        "Pad all to one length",
    ),
    "dicts": (
        {"data_loader": DataLoader([{"x": INPUTS[0], "y": LABELS[0]}] * 9, batch_size=3)},  # type: ignore[arg-type]
        DataError,
        "eh.attach",
    ),
}


@pytest.mark.parametrize("case", UNMAPPED)
def test_what_cannot_be_mapped_says_so_before_anything_exists(case: str, tmp_path: Path) -> None:
    options, kind, message = UNMAPPED[case]
    with pytest.raises(kind, match=message):
        private(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_engine_says_what_it_lacks(tmp_path: Path) -> None:
    model = small()
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    with pytest.raises(UsageError, match="Nothing is private yet"):
        engine.get_epsilon(1e-5)
    with pytest.raises(UsageError, match="how many epochs"):
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    for name in ("is_compatible", "validate", "save_checkpoint", "load_checkpoint"):
        with pytest.raises(UsageError, match=f"PrivacyEngine.{name} has no counterpart"):
            getattr(engine, name)
    with pytest.raises(UsageError, match="'prv', 'rdp' or 'gdp'"):
        PrivacyEngine(accountant="moments")
    with pytest.raises(UsageError, match="secure_mode"):
        PrivacyEngine(secure_mode=True).make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            epochs=1,
            noise_generator=seeded(1),
        )
    fixed = PrivacyEngine.get_compatible_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert isinstance(fixed[1], nn.GroupNorm)
    engine, *_ = private(tmp_path / "run")
    with pytest.raises(UsageError, match="has its training"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )


def test_several_inputs_and_own_attributes(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.size = 5

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.layer(x + shift)

    class Records(Dataset[Any]):
        def __len__(self) -> int:
            return len(INPUTS)

        def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
            return INPUTS[number], INPUTS[number] * 0.1, LABELS[number]

    engine, model, optimizer, loader = private(tmp_path / "run", Two(), records=Records())
    assert (model.size, model._module.size, len(loader)) == (5, 5, 3)
    for _ in range(2):
        for x, shift, y in loader:
            functional.cross_entropy(model(x, shift), y).backward()
            optimizer.step()
    assert eh.verify(engine.folder)["ok"]
