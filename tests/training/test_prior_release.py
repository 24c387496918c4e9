"""A run releases its counts once: after a resume, in a fork, whatever is asked; and verify checks them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evenhand as eh
from evenhand.errors import BatchReuseError, EvenhandError, LedgerError
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.runs.ledger_rows import encode_row, parse
from evenhand.runs.verify import verify
from evenhand.training.attach import Private

N = 200


def data() -> eh.data.Data:
    generator = torch.Generator().manual_seed(0)
    return eh.data.wrap(torch.randn(N, 3, generator=generator), [int(i % 10 == 0) for i in range(N)])


def attached(path: Path, prior: bool = True) -> Private:
    rows, model = data(), torch.nn.Linear(3, 2)
    plan = make_plan(
        "dpsgd", eh.Privacy(3, 1e-4), data=rows.facts, epochs=2, batch_size=40, prior="labels" if prior else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eh.attach(model, optimizer, torch.nn.CrossEntropyLoss(reduction="none"), plan, out=path, compose=False)


def prior_rows(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    return [row for row in rows if row["type"] == "prior"]


def test_a_model_that_is_changed_after_the_counts_is_checked_again(tmp_path: Path) -> None:
    with attached(tmp_path / "run") as private:
        rows = data()
        assert private.release_prior(rows) is not None
        private.model.register_forward_hook(lambda module, inputs, outputs: outputs - outputs.mean(0))
        with pytest.raises(EvenhandError, match="record"):
            next(private.batches(rows))
    assert eh.runs.folder.Folder(tmp_path / "run").ledger().reserved == 0


def test_fit_releases_counts_that_verify_accepts(tmp_path: Path) -> None:
    run = eh.fit(torch.nn.Linear(3, 2), data(), epsilon=3.0, epochs=1, out=tmp_path / "run")
    assert run.prior is not None
    assert run.prior.counts[0][0] > run.prior.counts[0][1]
    assert run.plan.prior is not None
    assert len(prior_rows(tmp_path / "run")) == 1
    assert verify(tmp_path / "run")["problems"] == []
    assert "Counts of labels over all records are released at most once" in str(run.privacy)


def test_without_a_prior_nothing_is_counted(tmp_path: Path) -> None:
    run = eh.fit(torch.nn.Linear(3, 2), data(), epsilon=3.0, epochs=1, prior=False, out=tmp_path / "run")
    assert run.prior is None
    assert run.plan.prior is None
    assert prior_rows(tmp_path / "run") == []


def test_a_second_call_returns_the_counts_of_the_first(tmp_path: Path) -> None:
    with attached(tmp_path / "run") as private:
        first = private.release_prior(data())
        assert first is not None
        assert private.release_prior(data()) == first
        with pytest.raises(LedgerError, match="released before"):
            private._ledger.prior(private._ledger.counts)  # type: ignore[arg-type]
    assert len(prior_rows(tmp_path / "run")) == 1


def test_a_loss_is_replaced_before_the_first_batch_only(tmp_path: Path) -> None:
    with attached(tmp_path / "run") as private:
        prior = private.release_prior(data())
        assert prior is not None
        offset = torch.tensor(prior.offsets()[0])
        private.use_loss(lambda z, y: torch.nn.functional.cross_entropy(z + offset, y, reduction="none"))
        for batch in private.batches(data()):
            private.step(batch)
        with pytest.raises(BatchReuseError, match="before the first batch"):
            private.use_loss(torch.nn.CrossEntropyLoss(reduction="none"))
        private.release()
    assert verify(tmp_path / "run")["problems"] == []


def test_a_resumed_run_has_the_counts_of_its_first_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, rows = torch.nn.Linear(3, 2), data()
    with pytest.raises(KeyboardInterrupt):
        eh.fit(model, rows, epsilon=3.0, epochs=2, batch_size=40, out=path, loss=StopsAfter(3))
    (before,) = prior_rows(path)
    run = eh.resume(path, model=torch.nn.Linear(3, 2), train=rows, loss=torch.nn.CrossEntropyLoss(reduction="none"))
    assert prior_rows(path) == [before]
    assert run.prior is not None
    assert list(run.prior.counts[0]) == before["counts"][0]  # type: ignore[index]
    assert verify(path)["problems"] == []


class StopsAfter:
    """Cross-entropy that is interrupted after a few private steps."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad and len(outputs) > 20:
            self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_run_that_goes_back_keeps_the_counts_it_released(tmp_path: Path) -> None:
    """A fork from the first checkpoint, which was written before the counts, must not release them a second time."""
    from evenhand.training.rebudget import beginning, forked

    with attached(tmp_path / "run") as private:
        private.release_prior(data())
        for batch in private.batches(data()):
            private.step(batch)
    text = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    rows = [json.loads(line) for line in text.splitlines()]
    place = next(i for i, row in enumerate(rows) if row["type"] == "prior")
    start, left = beginning(text, rows[place - 1]["hash"]), parse(text)
    assert parse(start).prior is None
    carried = parse(forked(start, left, position=0, plan="p", steps=3)[0])
    assert carried.prior == left.prior
    assert carried.prior is not None
    assert carried.reserved == 0
    with pytest.raises(LedgerError, match="cut the released counts"):
        forked(start, replace(left, prior_lost=True), position=0, plan="p", steps=3)


def rewritten(path: Path, change: dict[str, object]) -> None:
    """Write the ledger anew with valid hashes and another row about counts."""
    head, lines = "0" * 64, []
    for line in (path / "ledger.jsonl").read_text().splitlines():
        row = {key: value for key, value in json.loads(line).items() if key not in ("hash", "prev")}
        row = {**row, **change} if row["type"] == "prior" else row
        encoded, head = encode_row(row, head)
        lines.append(encoded)
    (path / "ledger.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"std": 0.5}, "less noise than planned"),
        ({"sensitivity": 0.5, "std": 1e6}, "less noise than planned"),
        ({"counts": [[1.0, 2.0, 3.0]]}, "not those that the plan names"),
        ({"kind": "labels by group"}, "not those that the plan names"),
        ({"kind": "people"}, "damaged or edited"),
        ({"counts": []}, "damaged or edited"),
        ({"counts": [["a", "b"]]}, "damaged or edited"),
    ],
)
def test_verify_notices_other_counts(change: dict[str, object], said: str, tmp_path: Path) -> None:
    with attached(tmp_path / "run") as private:
        private.release_prior(data())
    rewritten(tmp_path / "run", change)
    assert any(said in problem for problem in verify(tmp_path / "run")["problems"])


def test_verify_notices_counts_that_no_plan_charges(tmp_path: Path) -> None:
    with attached(tmp_path / "run", prior=False) as private:
        assert private.release_prior(data()) is None
    path = tmp_path / "run" / "ledger.jsonl"
    row = {"type": "prior", "kind": "labels", "sensitivity": 1.0, "std": 9.0, "counts": [[1.0, 2.0]]}
    path.write_bytes(path.read_bytes() + encode_row(row, parse(path.read_bytes()).head)[0])
    assert any("does not charge" in problem for problem in verify(tmp_path / "run")["problems"])


def test_counts_whose_row_was_cut_short_are_not_released_again(tmp_path: Path) -> None:
    with attached(tmp_path / "run"):
        pass
    path = tmp_path / "run" / "ledger.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"prior","kind":"labels","counts":[[18')
    plan = make_plan("dpsgd", eh.Privacy(3, 1e-4), data=data().facts, epochs=2, batch_size=40, prior="labels")
    from evenhand.runs.folder import Folder
    from evenhand.training.attach import start

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = Folder.existing(tmp_path / "run")
    with start(model, optimizer, torch.nn.CrossEntropyLoss(reduction="none"), plan, folder, compose=False) as private:
        assert private.release_prior(data()) is None
    assert prior_rows_of_whole_lines(path) == []
    assert verify(tmp_path / "run")["problems"] == []


def prior_rows_of_whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line.startswith('{"type":"prior"') and line.endswith("}")]


@pytest.mark.parametrize("targets", ["each label", "numbers", "sgd"])
def test_other_targets_and_methods(targets: str, tmp_path: Path) -> None:
    x = torch.randn(60, 3)
    if targets == "each label":
        rows, model = eh.data.wrap(x, (x[:, :2] > 0).float(), labels=["p", "q"]), torch.nn.Linear(3, 2)
    elif targets == "numbers":
        rows, model = eh.data.wrap(x, x[:, 0]), torch.nn.Linear(3, 1)
    else:
        rows, model = data(), torch.nn.Linear(3, 2)
    promise = {} if targets == "sgd" else {"epsilon": 3.0}
    method = "sgd" if targets == "sgd" else "dpsgd"
    run = eh.fit(model, rows, method=method, epochs=1, out=tmp_path / "run", **promise)  # type: ignore[arg-type]
    if targets == "numbers":
        assert run.prior is None
    elif targets == "sgd":
        assert run.prior is None, "exact counts would stand in a ledger that may be shared"
    else:
        assert run.prior is not None
        assert run.prior.kind == "each label"
        assert run.prior.records == 60
    assert verify(tmp_path / "run")["problems"] == []
