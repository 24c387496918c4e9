"""Data: what is public about it, which rows a step sees, and where it comes from."""

from evenhand.data.columns import Category, Image, Number
from evenhand.data.digits import digits
from evenhand.data.own import read
from evenhand.data.sources import load
from evenhand.data.tables import Declaration, Table, from_frame
from evenhand.data.wrapping import Data, wrap

__all__ = [
    "Category",
    "Data",
    "Declaration",
    "Image",
    "Number",
    "Table",
    "digits",
    "from_frame",
    "load",
    "read",
    "wrap",
]
