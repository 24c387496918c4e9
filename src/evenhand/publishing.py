"""A model file gets its name only after the ledger has its release, so that none can be out without a row."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from evenhand import weights
from evenhand.privacy.ledger import Ledger
from evenhand.run_files import put_in_place, sha256, waiting


def publish(model: nn.Module, file: Path, ledger: Ledger) -> None:
    """Write a model's weights to a file of the run folder: in private first, on disk, then the rows, then the name."""
    from safetensors.torch import save_file

    beside = waiting(file)
    tensors, left_out = weights.stored(model)
    save_file(tensors, str(beside), metadata=left_out or None)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    ledger.release(sha256(beside))
    put_in_place(file, ledger)
