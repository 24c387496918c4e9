"""One training of a made-up case, and how it ended: refused, stopped, stated or released."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.errors import EvenhandError
from evenhand.runs.ledger import read
from evenhand.runs.verify import verify

FEATURES, CLASSES, RECORDS, BATCH = 10, 3, 640, 64


def entropy(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out, y, reduction="none")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


@cache
def table() -> Data:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=draw)
    return wrap(x, (x[:, :CLASSES] + 0.5 * torch.randn(RECORDS, CLASSES, generator=draw)).argmax(1).tolist())


@cache
def pictures() -> Data:
    draw = torch.Generator().manual_seed(2)
    return wrap(torch.rand(RECORDS, 1, 8, 8, generator=draw), [i % CLASSES for i in range(RECORDS)])


@cache
def sentences() -> Data:
    """Ten words of twenty, 0 is padding."""
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(1, 20, (RECORDS, 10), generator=draw)
    lengths = torch.randint(2, 11, (RECORDS, 1), generator=draw)
    return wrap(words * (torch.arange(10) < lengths), [i % CLASSES for i in range(RECORDS)])


@dataclass(frozen=True)
class Case:
    """A model and a loss, what augments, and what somebody does between two steps with the batch's inputs."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    augment: Callable[[Any], Any] | None = None
    views: int = 1
    data: Data = field(default_factory=table)
    between: Callable[[int, Any], None] | None = None
    stated: bool = False


def training(make: Callable[[], Case], seed: int, steps: int = 200) -> str:
    """Train once and release; say how that ended.

    "refused": before anything was spent. "stopped": during training, and nothing can be released afterwards. "stated":
    released with a warning in the statement. "released": without a word.
    """
    torch.manual_seed(seed)
    case = make()
    out = Path(tempfile.mkdtemp())
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-4), data=case.data.facts, epochs=steps * BATCH / RECORDS, batch_size=BATCH)
    trained = [p for p in case.model.parameters() if p.requires_grad]
    options = {} if case.augment is None else {"augment": case.augment, "views": case.views}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    private = eh.attach(case.model, optimizer, case.loss, plan, out=out, compose=False, **options)
    try:
        for batch in private.batches(case.data):
            if case.between is not None:
                case.between(private.position, batch.inputs)
            private.step(batch)
        private.checkpoint()
        private.release()
    except EvenhandError:
        reading = read(out / "ledger.jsonl")
        if not reading.reserved:
            return "refused"
        assert _nothing_leaves(private, out), "the release is not blocked"
        return "stopped"
    finally:
        private.close()
    assert verify(out)["ok"]
    return "stated" if read(out / "ledger.jsonl").foreign else "released"


def _nothing_leaves(private: Any, out: Path) -> bool:
    for leave in (private.checkpoint, private.release):
        try:
            leave()
        except EvenhandError:
            continue
        return False
    if read(out / "ledger.jsonl").blocked:
        found = verify(out)
        return not found["ok"] and found["epsilon"] is None
    return not (out / "model.safetensors").exists()
