"""Data: what is public about it, which rows a step sees, and where it comes from."""

from evenhand.data.columns import Category, Image, Number, Text
from evenhand.data.dataset import Data, wrap
from evenhand.data.fixed_length import Pad, next_words
from evenhand.data.frames import from_frame
from evenhand.data.large.workers import in_workers
from evenhand.data.own_data import read
from evenhand.data.sources import load
from evenhand.data.sources.digits import digits
from evenhand.data.tables import Declaration, Table

__all__ = [
    "Category",
    "Data",
    "Declaration",
    "Image",
    "Number",
    "Pad",
    "Table",
    "Text",
    "digits",
    "from_frame",
    "in_workers",
    "load",
    "next_words",
    "read",
    "wrap",
]
