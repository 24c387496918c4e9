"""Held-out records are people too: how many of them count for an interval, and whose figures are left out."""
