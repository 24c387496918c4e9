"""Frozen features: what a record becomes before training, computed from that record alone, so that nothing is spent."""

from evenhand.features.extracting import extract, names

__all__ = ["extract", "names"]
