"""Data: what is public about it, which rows a step sees, and where it comes from."""

from evenhand.data.columns import Category, Image, Number, Text
from evenhand.data.dataset import Data, wrap
from evenhand.data.own_data import read
from evenhand.data.sources import load
from evenhand.data.sources.digits import digits
from evenhand.data.tables import Declaration, Table, from_frame

__all__ = [
    "Category",
    "Data",
    "Declaration",
    "Image",
    "Number",
    "Table",
    "Text",
    "digits",
    "from_frame",
    "load",
    "read",
    "wrap",
]
