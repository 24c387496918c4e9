"""The one door to ``gradients/fast``, whose speed paths are optional: every function here returns None without them.

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
    from evenhand.gradients.layer_recorder import Call
    from evenhand.gradients.layers.recurrent_cells import Steps
    from evenhand.gradients.layers.recurrent_gradients import Grams
    from evenhand.gradients.model_layout import Layout
    from evenhand.gradients.norms_and_sums import PerRecordGradients

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


@functools.cache
def _fast() -> Any:
    """Import the folder; None if it is not there."""
    try:
        return importlib.import_module(_FOLDER)
    except ModuleNotFoundError as error:
        if error.name != _FOLDER:
            raise
        return None


def path_for(layout: Layout) -> FastPath | None:
    """Return a quicker way to differentiate this model, or None."""
    fast = _fast()
    path: FastPath | None = None if fast is None else fast.DenseChain.of(layout)
    return path


def bounded_weights(weights: Tensor, norm: Tensor, owner: Tensor, sensitivity: Tensor, most: float) -> Tensor | None:
    """Return ``0 <= weight <= sensitivity / norm`` from compiled loops, or None if they cannot do these columns."""
    fast = _fast()
    bounded: Tensor | None = None if fast is None else fast.bounded_weights(weights, norm, owner, sensitivity, most)
    return bounded


def lstm_steps(like: Tensor) -> Steps | None:
    """Return compiled steps of an LSTM for tensors like this one, or None."""
    fast = _fast()
    steps: Steps | None = None if fast is None else fast.lstm_steps(like)
    return steps


def grams(x: Tensor, grad: Tensor, ones: int, most: float) -> Grams | None:
    """Return norms from Gram matrices over time by compiled loops, or None if they cannot do these tensors."""
    fast = _fast()
    norms: Grams | None = None if fast is None else fast.grams(x, grad, ones, most)
    return norms


def compiled() -> bool:
    """Return whether the compiled loops of the folder are there and compute what they should."""
    fast = _fast()
    return fast is not None and bool(fast.compiled())
