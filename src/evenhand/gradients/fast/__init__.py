"""Optional speed paths; the engine is complete without this folder, which only ``fast_paths.py`` imports."""

from evenhand.gradients.fast.dense_chain import DenseChain
from evenhand.gradients.fast.dense_native import bounded_weights
from evenhand.gradients.fast.dense_native import loops as dense_loops
from evenhand.gradients.fast.lstm_native import compiled as lstm_loops
from evenhand.gradients.fast.lstm_native import grams, lstm_steps

path_for = DenseChain.of


def compiled() -> bool:
    """Return whether all compiled loops are there and compute what they should."""
    return dense_loops() is not None and lstm_loops() is not None


__all__ = ["bounded_weights", "compiled", "grams", "lstm_steps", "path_for"]
