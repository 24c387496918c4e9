"""A model file gets its name only after the ledger has its release, so that none can be out without a row."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from evenhand import weights
from evenhand.privacy.ledger import Ledger
from evenhand.run_files import put_in_place


def publish(model: nn.Module, file: Path, ledger: Ledger) -> None:
    """Write a model's weights to a file of the run folder: in private first, on disk, then the rows, then the name."""
    from safetensors.torch import save

    tensors, left_out = weights.stored(model)
    data = save(tensors, left_out or None)
    put_in_place(file, ledger, lambda out: out.write(data), ledger.release)
