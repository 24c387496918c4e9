"""The engine without gradients/fast: deleting the folder costs time, and nothing but its own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import tempfile, torch
from torch import nn
import evenhand as eh
from evenhand.gradients import fast_paths, per_sample

assert isinstance(fast_paths.fast(), fast_paths._WithoutFolder) and not fast_paths.fast().compiled()

class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)
    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
cnn = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
loss = nn.CrossEntropyLoss(reduction="none")
for model, shape in ((mlp, (6,)), (cnn, (1, 6, 6)), (Letters(), (4, 3))):
    x, y = torch.randn(40, *shape), torch.arange(40) % 2
    result, own = per_sample(model, loss, x, y), []
    for i in range(40):
        rows = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        own.append(torch.cat([row.flatten() for row in rows]).double())
    torch.testing.assert_close(result.norm, torch.stack(own).norm(dim=1), rtol=1e-5, atol=1e-7)
    weights = torch.rand(40, dtype=torch.float64)
    total = torch.cat([part.flatten() for part in result.weighted_sum(weights).values()]).double()
    torch.testing.assert_close(total, weights @ torch.stack(own), rtol=1e-4, atol=1e-5)
    data = eh.data.wrap(x, y, labels=[0, 1])
    plan = eh.plan(eh.Method(eh.rules.Clip()), eh.Privacy(3, 1e-5), data=data.facts, epochs=2, batch_size=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with eh.attach(model, optimizer, loss, plan, out=tempfile.mkdtemp(), compose=False) as private:
        for batch in private.batches(data):
            private.step(batch)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
print("trained")
"""


def without_fast(folder: Path, *more: str) -> dict[str, str]:
    """A copy of the package without its speed paths, and the environment that imports it."""
    for name in ("src", *more):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    shutil.rmtree(folder / "src" / "evenhand" / "gradients" / "fast")
    places = os.pathsep.join([str(folder / "src"), str(folder / "tests")])
    return {**os.environ, "PYTHONPATH": places, "EVENHAND_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}


def test_small_models_train_and_their_gradients_are_those_of_autograd(tmp_path: Path) -> None:
    environment = without_fast(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("trained"), done.stderr


@pytest.mark.slow
def test_the_other_tests_stay_green(tmp_path: Path) -> None:
    """All of them but those of the folder itself, and those that look at the whole source or its documents."""
    environment = without_fast(
        tmp_path, "tests", "benchmarks", "experiments", "docs", "pyproject.toml", "hatch_build.py"
    )
    shutil.rmtree(tmp_path / "tests" / "gradients" / "fast")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "tests"]
    left = ("tests/house", "tests/docs", "tests/methods/test_proofs.py", "tests/gradients/test_without_fast.py")
    line += [f"--ignore={name}" for name in left if (tmp_path / name).exists()]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
