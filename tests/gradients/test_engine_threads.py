"""Two threads on one model, or on models that share a layer, never see each other's pass."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor, nn

from evenhand.gradients import Engine, per_sample

LOSS = nn.CrossEntropyLoss(reduction="none")


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


def test_two_threads_on_one_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))
    batches = [batch(7) for _ in range(20)]
    expected = [per_sample(model, LOSS, x, y).norm for x, y in batches]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(40):
            x, y = batches[(start + i) % 20]
            if not torch.allclose(per_sample(model, LOSS, x, y).norm, expected[(start + i) % 20]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(s,)) for s in (0, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_evaluation_beside_a_pass_by_kernels() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = batch(7)
    engine, outputs = Engine(model, LOSS), model(x)
    expected = engine.run(x, y).norm
    wrong: list[int] = []

    def evaluate() -> None:
        for i in range(400):
            if not torch.equal(model(x), outputs):
                wrong.append(i)

    thread = threading.Thread(target=evaluate)
    thread.start()
    for i in range(100):
        if not torch.allclose(engine.run(x, y).norm, expected):
            wrong.append(i)
    thread.join()
    assert wrong == []


def test_two_threads_on_models_that_share_a_layer() -> None:
    shared = nn.Linear(4, 4)
    models = [nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 3)) for _ in range(2)]
    x, y = batch(7)
    expected = [per_sample(copy.deepcopy(m), LOSS, x, y).norm for m in models]
    wrong: list[int] = []

    def work(which: int) -> None:
        for i in range(60):
            if not torch.allclose(per_sample(models[which], LOSS, x, y).norm, expected[which]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(s,)) for s in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "forward" not in shared.__dict__
