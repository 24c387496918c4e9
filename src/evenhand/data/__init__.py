"""Data: what is public about it, which rows a step sees, and where it comes from."""

from evenhand.data.digits import digits
from evenhand.data.sources import load
from evenhand.data.wrapping import Data, wrap

__all__ = ["Data", "digits", "load", "wrap"]
