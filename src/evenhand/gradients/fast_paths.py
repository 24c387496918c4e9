"""The one door to ``gradients/fast``, whose speed paths are optional: without them every function returns None.

The folder is imported on first use, since it is built on the modules that ask here. Deleting it costs time and nothing
else: each caller then computes with torch what it asked for.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from evenhand.gradients.batch_utils import LossFn
    from evenhand.gradients.layers.recurrent_cells import Steps
    from evenhand.gradients.layers.recurrent_gradients import Grams
    from evenhand.gradients.model_layout import Call, Layout
    from evenhand.gradients.record_blocks import PerRecordGradients

_FOLDER = "evenhand.gradients.fast"


class UnsuitedError(Exception):
    """The loss looks at more than the outputs, or fails: the layer recorder must run this model."""


class FastPath(Protocol):
    """A quicker way to differentiate one model, valid as long as its layout is."""

    def suits(self, inputs: Any, targets: Any) -> bool:
        """Return whether this batch can be run that way, as things are now."""

    def differentiate(self, loss_fn: LossFn, inputs: Any, targets: Any, size: int) -> tuple[Tensor, list[Call]]:
        """Return one loss per record, and what every layer saw; raises `UnsuitedError` if only a recorder can tell."""

    def measure(self, loss: Tensor, calls: list[Call]) -> PerRecordGradients | None:
        """Return norms and sums from what `differentiate` gave; None if compiled loops cannot do these tensors."""


class SpeedPaths(Protocol):
    """Functions of the folder. Each returns None where it cannot do what is asked."""

    def path_for(self, layout: Layout) -> FastPath | None:
        """Return a quicker way to differentiate this model, or None."""

    def bounded_weights(
        self, weights: Tensor, norm: Tensor, owner: Tensor, sensitivity: Tensor, most: float
    ) -> Tensor | None:
        """Return ``0 <= weight <= sensitivity / norm`` from compiled loops, or None if they cannot do these columns."""

    def lstm_steps(self, like: Tensor) -> Steps | None:
        """Return compiled steps of an LSTM for tensors like this one, or None."""

    def grams(self, x: Tensor, grad: Tensor, ones: int, most: float) -> Grams | None:
        """Return norms from Gram matrices over time by compiled loops, or None if they cannot do these tensors."""

    def compiled(self) -> bool | None:
        """Return whether the compiled loops are there and compute what they should."""


class _WithoutFolder:
    """Answers None to everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@functools.cache
def fast() -> SpeedPaths:
    """Return the functions of the folder, imported once; without it, functions that return None."""
    try:
        paths: SpeedPaths = importlib.import_module(_FOLDER)
    except ModuleNotFoundError as error:
        if error.name != _FOLDER:
            raise
        return _WithoutFolder()
    return paths
