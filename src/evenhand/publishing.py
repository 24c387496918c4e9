"""A model file gets its name only after the ledger has its release, so that none can be out without a row."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from evenhand.privacy.ledger import Ledger, sync_folder
from evenhand.runs import Folder, sha256


def publish(model: nn.Module, file: Path, folder: Folder, ledger: Ledger) -> None:
    """Write a model's weights to a file of the run folder: in private first, on disk, then the row, then the name."""
    from safetensors.torch import save_model

    beside = folder.private / f"{file.name}.part"
    save_model(model, str(beside))
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    ledger.release(sha256(beside))
    os.replace(beside, file)
    sync_folder(file.parent)
