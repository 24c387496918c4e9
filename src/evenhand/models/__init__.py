"""The papers' networks and small ones to start with; every one trains with exact per-record gradients."""

from evenhand.models.build import build, names

__all__ = ["build", "names"]
