"""One small run of every kind that a statement speaks about differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.runs.folder import Folder

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "</title></style><iframe src=//evil.example/>",
    '" onload="alert(1)',
    "[link](javascript:alert(1)) &lt;b&gt; \u202e\x00\n# heading",
]


def data(owners: list[str] | None = None, records: int = 60, seed: int = 3) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return wrap(
        torch.randn(records, 3, generator=generator),
        [i % 2 for i in range(records)],
        groups=["a", "b", "b"] * (records // 3),
        owners=owners,
    )


def _fit(out: Path, train: Data, **options: object) -> None:
    eh.fit(nn.Linear(3, 2), train, epochs=2, batch_size=20, out=out, test=data(seed=4), progress=False, **options)


def dpsgd(out: Path) -> None:
    _fit(out, data(), epsilon=3.0, delta=1e-3)


def sgd(out: Path) -> None:
    _fit(out, data(), method="sgd")


def owners(out: Path) -> None:
    budgets = eh.Budgets({"strict": 1, "open": 8}, 1e-3)
    _fit(out, data(["strict", "open"] * 30), privacy=budgets, method="idp_sample")


def insecure(out: Path) -> None:
    _fit(out, data(), epsilon=3.0, insecure_seed=7)


def alone(out: Path) -> None:
    _fit(out, data(), epsilon=3.0, compose=False)


def fixed_noise(out: Path) -> None:
    _fit(out, data(), noise=2.0, delta=0.05)


def hostile(out: Path) -> None:
    _fit(out, data(HOSTILE * 12), privacy=eh.Budgets(dict.fromkeys(HOSTILE, 3.0), 1e-3))


def started(out: Path, steps: int) -> eh.attachment.Private:
    train = data()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=train.facts, epochs=2, batch_size=20)
    model = nn.Linear(3, 2)
    loss = nn.CrossEntropyLoss(reduction="none")
    private = eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, plan, out=out)
    for _, batch in zip(range(steps), private.batches(train), strict=False):
        private.step(batch)
    private.checkpoint()
    return private


def resumed(out: Path) -> None:
    started(out, 2).close()
    eh.resume(out, model=nn.Linear(3, 2), train=data(), test=data(seed=4), progress=False)


def early(out: Path) -> None:
    with started(out, 2) as private:
        private.release()


def unreleased(out: Path) -> None:
    started(out, 2).close()


KINDS: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (dpsgd, sgd, owners, insecure, alone, fixed_noise, hostile, resumed, early, unreleased)
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """A run folder by kind."""
    found = {}
    for name, make in KINDS.items():
        out = tmp_path_factory.mktemp(name)
        make(out)
        found[name] = Folder.existing(out)
    return found


@pytest.fixture(params=list(KINDS))
def folder(request: pytest.FixtureRequest, folders: dict[str, Folder]) -> Folder:
    """Each run folder in turn."""
    return folders[request.param]
