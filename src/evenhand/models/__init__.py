"""Small networks to start with; every one trains with exact per-record gradients."""

from evenhand.models.basic import build, names

__all__ = ["build", "names"]
