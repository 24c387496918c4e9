"""One of two processes that try to train a wrapped model; each begins without what the test imported."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed, nn

import evenhand as eh
from edges.runs_made import planned, records
from evenhand.errors import UnsupportedModelError


def refused(rank: int, folder: str, address: str) -> None:
    """Write down what ``fit`` and ``attach`` say to a wrapped model."""
    os.environ["EVENHAND_STATE"] = f"{folder}/state{rank}"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    said, data, out = [], records(), Path(folder) / "run"
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    loss, optimizer = nn.CrossEntropyLoss(reduction="none"), torch.optim.SGD(model.parameters(), lr=0.1)
    for begin in (
        lambda: eh.fit(model, data, epsilon=3.0, epochs=2, out=out, progress=False),
        lambda: eh.attach(model, optimizer, loss, planned(data), out=out),
    ):
        try:
            begin()
        except UnsupportedModelError as refusal:
            said.append(str(refusal))
    Path(folder, f"said{rank}").write_text("\n".join(said))
    distributed.destroy_process_group()
