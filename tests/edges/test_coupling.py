"""Records that touch each other only in larger batches, by rare draws, or late: refused, or stopped and blocked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from coupled_zoo import ZOO
from innocent_zoo import INNOCENTS
from stateful_zoo import late_centring
from torch import nn
from zoo_campaign import counts
from zoo_training import Case, entropy, mlp, table, training

import evenhand as eh
from evenhand.errors import CoupledError, LedgerError, UnsupportedModelError
from evenhand.gradients.doctor.record_coupling import Company, Rows
from evenhand.mechanism.random_streams import Stream
from evenhand.runs.ledger import read
from evenhand.runs.verify import verify
from evenhand.training.attach import Private
from evenhand.training.guards import coupling_guard
from evenhand.training.guards.coupling_guard import Coupling
from evenhand.training.rebudget import rebudget

STEPS = 200


@pytest.mark.parametrize("name", ZOO)
def test_a_coupled_or_stateful_case_is_never_released_without_a_word(name: str) -> None:
    ended = training(ZOO[name], 0)
    assert ended == "stated" if name == "weights_written" else ended in ("refused", "stopped")


@pytest.mark.parametrize("name", INNOCENTS)
def test_an_innocent_case_is_never_blocked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupling_guard, "DRAWS", 8)
    monkeypatch.setattr(coupling_guard, "LOOKS", 4)
    ended = training(INNOCENTS[name], 0, steps=10)
    assert ended == "stated" if name == "annealed temperature" else ended == "released"


@pytest.mark.slow
def test_every_coupled_case_is_found_in_49_of_50_trainings() -> None:
    for name, ended in counts("coupled", range(50)):
        print(name, dict(ended))
        assert ended["released"] <= 1, name


@pytest.mark.slow
def test_no_innocent_case_is_blocked_in_20_trainings() -> None:
    for name, ended in counts("innocent", range(20)):
        print(name, dict(ended))
        assert ended["released"] + ended["stated"] == 20, name


def _all_steps(private: Private, case: Case) -> None:
    for batch in private.batches(case.data):
        private.step(batch)


def stopped(tmp_path: Path) -> None:
    """Train until a secret look finds what begins late."""
    case = late_centring()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=case.data.facts, epochs=20, batch_size=64)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with eh.attach(case.model, optimizer, case.loss, plan, out=tmp_path) as private:
        with pytest.raises(CoupledError, match="other records of its batch were replaced"):
            _all_steps(private, case)
        for leave in (private.checkpoint, private.release):
            with pytest.raises(LedgerError, match="blocked"):
                leave()


def test_a_blocked_run_stays_blocked(tmp_path: Path) -> None:
    stopped(tmp_path)
    reading = read(tmp_path / "ledger.jsonl")
    assert [row["cause"] for row in reading.blocked] == ["records"]
    assert 0 < reading.blocked[0]["position"] < STEPS
    found = verify(tmp_path)
    assert not found["ok"]
    assert found["epsilon"] is None
    assert any("no epsilon holds" in problem for problem in found["problems"])
    case = late_centring()
    with pytest.raises(LedgerError, match="blocked"):
        eh.resume(tmp_path, model=case.model, train=case.data, loss=case.loss, optimizer=torch.optim.SGD)
    with pytest.raises(LedgerError, match="blocked"):
        rebudget(tmp_path, eh.Privacy(4, 1e-4))
    made = eh.runs.folder.Folder(tmp_path).write_statement()
    assert made["guarantee"]["epsilon"] is None
    assert "model.safetensors" in made["sharing"]["must_not_be_shared"]
    words = (tmp_path / "statement.md").read_text()
    assert "No privacy guarantee holds for this run" in words
    assert json.loads((tmp_path / "statement.json").read_text())["covers"] == []


def test_nothing_is_spent_before_records_were_seen_in_a_batch_of_the_real_size(tmp_path: Path) -> None:
    case = ZOO["hard_mining"]()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=case.data.facts, epochs=20, batch_size=64)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with (
        eh.attach(case.model, optimizer, case.loss, plan, out=tmp_path) as private,
        pytest.raises(UnsupportedModelError, match=r"batches of about 64.*Nothing was spent"),
    ):
        next(private.batches(case.data))
    assert read(tmp_path / "ledger.jsonl").reserved == 0


def test_a_look_in_float64_leaves_nothing_of_an_lstm_that_seems_to_move() -> None:
    """torch's recurrent layers list their weights a second time, and the copies in float64 stayed in that list."""
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True), Last(), nn.Linear(4, 2))
    batch, others = (torch.randn(6, 5, 3), torch.arange(6) % 2), (torch.randn(4, 5, 3), torch.arange(4) % 2)
    rows, company = Rows.of(batch, others, torch.tensor([1, 4])), Company(model, entropy)
    finding = company.look(rows, 3, lambda: rows, precise=True)
    assert not finding.coupled
    assert finding.written is None
    assert company.moving == frozenset()
    assert company.snapshot() is None


def test_a_row_that_is_in_both_companies_is_not_taken_for_state_that_every_pass_moves() -> None:
    """A step's own look keeps some rows; a buffer set from one of them is alike in both, whatever it remembers."""
    batch, others = (torch.randn(6, 3), torch.arange(6) % 2), (torch.randn(4, 3), torch.arange(4) % 2)
    rows, company = Rows.of(batch, others, torch.tensor([0, 4])), Company(RemembersFirst(), entropy)
    company.look(rows, 3, lambda: rows, precise=False, learns=False)
    assert company.moving == frozenset()
    company.look(rows, 3, lambda: rows, precise=False)
    assert company.moving == {"model.seen"}, "many looks before training tell"


class RemembersFirst(nn.Module):
    """Keeps the first row of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x[0].detach())
        return self.layer(x)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, outputs: tuple[torch.Tensor, object]) -> torch.Tensor:
        return outputs[0][:, -1]


def test_which_steps_are_looked_at_comes_from_the_key_alone() -> None:
    model = mlp()

    def steps(seed: int, data: eh.data.Data) -> list[int]:
        found = Coupling(Company(model, entropy), Stream.insecure(seed, 0), expected=64, steps=STEPS)
        found.prepare(data)
        found._rate = 0.12
        return [step for step in range(STEPS) if found.due(step)]

    other = eh.data.wrap(torch.zeros(640, 10), [i % 3 for i in range(640)])
    assert steps(1, table()) == steps(1, other) != steps(2, table())
    assert 5 < len(steps(1, table())) < 50


def test_looking_changes_neither_the_run_nor_any_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(looks: int, out: Path) -> list[float]:
        monkeypatch.setattr(coupling_guard, "LOOKS", looks)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=table().facts, epochs=3, batch_size=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with eh.attach(model, optimizer, entropy, plan, out=out, insecure_seed=1, compose=False) as private:
            for batch in private.batches(table()):
                private.step(batch)
        return [*model[0].weight.detach().flatten().tolist(), float(torch.rand(1)), float(np.random.rand())]  # noqa: NPY002

    np.random.seed(4)  # noqa: NPY002 - the global one is meant
    one = weights(0, tmp_path / "a")
    np.random.seed(4)  # noqa: NPY002
    assert one == weights(1000, tmp_path / "b")


def test_a_model_that_insists_on_its_precision_is_looked_at_in_it(tmp_path: Path) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 3)
            self.scale = torch.ones(10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return self.layer(x - x.mean(0) if len(x) > 8 else x)

    assert training(lambda: Case(Single(), entropy), 0) == "refused"
