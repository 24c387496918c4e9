"""Move the decisions of a finished run, or of any trained model, towards another goal: nothing is trained or spent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.data.dataset import Data, wrap
from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import logits
from evenhand.methods.priors import Prior
from evenhand.runs import released_weights
from evenhand.runs.folder import Folder, as_json, write_durably
from evenhand.runs.ledger import refuse_blocked, refuse_withdrawn
from evenhand.training import evaluate
from evenhand.training.config import PYTHON, of_run
from evenhand.training.goals import parity
from evenhand.training.goals.decision import read
from evenhand.training.goals.decision_sections import remembered
from evenhand.training.goals.goal import Goal, check_tau, declared, refuse_without_prior
from evenhand.training.goals.serve import Serving, held
from evenhand.training.run import Run, load


def adjust(
    run: Run | str | Path,
    *,
    goal: str | Goal = "worst",
    tau: float | str | None = None,
    prior: Prior | Sequence[float] | Mapping[Any, float] | None = None,
    test: Any = None,
    model: nn.Module | str | None = None,
) -> Run:
    """Let a finished run answer for another goal: write its decision, figures, statement and report again.

    The counts were charged with the run, or are public, and the weights stay: nothing further is spent.

    Args:
      run: a run or its folder.
      goal: overall, balanced, worst, or parity:METRIC.
      tau: strength of the offset; default the goal's own; "held-out" chooses it on held-out records.
      prior: publicly known counts, one per label; needed where the run released none.
      test: the held-out data; default those of the run's config.
      model: the architecture, where the run was started with a Python object or a file; see ``load``.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, test=test, out=tempfile.mkdtemp())
      >>> eh.adjust(run, goal="worst", test=test).decision.tau > 0, eh.verify(run.path)["problems"]
      (True, [])
    """
    finished = run if isinstance(run, Run) and run.model is not None else load(_path(run), model=model)
    folder = finished.folder
    reading = folder.ledger()
    refuse_withdrawn(reading)
    refuse_blocked(reading)
    wanted = Goal.parse(goal)
    strength = check_tau(tau, wanted)
    facts = folder.plan().facts
    known = folder.prior() if prior is None else declared(prior, len(facts.labels))
    refuse_without_prior(wanted, strength, known)
    held_out = _held_out(finished, test)
    config = of_run(folder.path, code={"model": model, "features": None})
    if wanted.name == "parity":
        targets = held_out.fetch(torch.arange(len(held_out)))[1]
        kind = evaluate.kind_of(facts, targets[:1])
        truth = targets.tolist() if targets.dim() == 1 else [0] * len(targets)
        shape = (kind, max(len(facts.labels), 2), held_out.group_names(), truth)
        parity.refuse_unsuited(wanted, *shape, config.least_records)
    current = read(folder.path)
    serving = Serving(
        *(wanted, strength, known),
        trained_tau=0.0 if current is None else current.trained_tau,
        groups=tuple(facts.groups),
        least=config.least_records,
    )
    _write(finished, held_out, serving)
    return finished


def _write(finished: Run, held_out: Data, serving: Serving) -> None:
    """Measure the new decision and write what follows from it; a crash in between is mended by asking again."""
    folder, last, plan = finished.folder, finished.folder.last_evaluation(), finished.folder.plan()
    records = held(finished.model, held_out)
    decision, answering = serving.settle(records)
    if decision is None:
        raise UsageError("The run has no counts of labels, so answers are its plain outputs: there is nothing to move.")
    steps = int(last.get("step", plan.steps))
    line = evaluate.row(finished.model, held_out, steps, last.get("epoch", 0.0), answering)
    line |= {key: last[key] for key in ("segment", "followed") if key in last}
    line |= {
        "weights": released_weights.digest_of_file(folder.model_file),
        "goal": str(decision.goal),
        "tau": decision.tau,
        "decision": hashlib.sha256(as_json(decision.to_json())).hexdigest(),
        "frontier": serving.frontier(records, decision),
        **({"before": remembered(last)} if last else {}),
    }
    folder.drop_metrics(steps - 1)
    folder.add_metrics(line, serving.least)
    decision.write(folder)
    folder.write_statement()
    finished.report().save(folder.path / "report.html")
    write_durably(folder.path / "model-card.md", finished.card().encode())


def _held_out(finished: Run, test: Any) -> Data:
    """Return the held-out data that were passed, or those of the run's config; never training records."""
    if test is None:
        config = of_run(finished.path, code={}, remembered=True)
        test = None if config.data == PYTHON else config.load_data()[1]
    if test is None:
        raise UsageError(
            "What the new decision gives is measured on held-out records: pass test=. Nothing was changed."
        )
    data = wrap(test).by_record
    finished.refuse_training_records(data)
    return data


def _path(run: Run | str | Path) -> Path:
    return run.path if isinstance(run, Run) else Folder.existing(run).path


class Adjusted(nn.Module):
    """A model whose outputs have an offset for rare labels taken in; the wrapped model stays the caller's."""

    def __init__(self, model: nn.Module, offset: Sequence[float], single: bool) -> None:
        super().__init__()
        self.model, self._single = model, single
        self.register_buffer("offset", torch.tensor(offset))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the wrapped model's outputs plus the offset."""
        outputs = logits(self.model(*args, **kwargs))
        offset: Tensor = self.get_buffer("offset").to(outputs.dtype)
        if outputs.shape[-1] == len(offset):
            return outputs + offset
        if self._single and (outputs.dim() == 1 or outputs.shape[-1] == 1):
            return outputs + (offset[1] - offset[0])
        raise UsageError(f"The prior is for {len(offset)} labels, and the model has other outputs.")


def adjusted(
    model: nn.Module,
    prior: Prior | Sequence[float] | Mapping[Any, float],
    tau: float = 1.0,
    *,
    trained_tau: float = 0.0,
) -> nn.Module:
    """Return a module that answers for rare labels too, around a model that any library trained.

    Its outputs are ``z - (tau - trained_tau) log prior`` (log odds where a record may have several labels). The model
    is not copied. If the counts are of private data they must come from a private release: exact ones would leak.

    Args:
      model: gives one output per label, or one for two labels.
      prior: counts or shares of the labels.
      tau: strength; 1 is the textbook's value for balanced accuracy, privately trained models need more.
      trained_tau: strength that the loss had.

    Examples:
      >>> adjusted(nn.Identity(), [9, 1])(torch.zeros(1, 2)).argmax(1)
      tensor([1])
    """
    known = prior if isinstance(prior, Prior) else Prior.declared(prior)
    strength = check_tau(tau, Goal("worst"))
    if not isinstance(strength, float):
        raise UsageError("tau takes a number from 0 on.")
    offset = [-(strength - trained_tau) * value for value in known.pooled().offsets()[0]]
    return Adjusted(model, offset, single=known.kind != "each label" and known.labels == 2)
