"""Released values in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenhand.errors import UsageError


class TensorBoardLogger:
    """Writes released values as scalars; look at them with ``tensorboard --logdir FOLDER``.

    The names of the files it writes hold the name of this computer. ``pip install evenhand[tensorboard]``.

    Args:
      folder: where to write; made with the first values.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed: pip install 'evenhand[tensorboard]'. Nothing was spent."
            ) from None
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point per value; on disk when this returns."""
        if self._writer is None:
            self._writer = self._make(log_dir=str(self._folder))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
