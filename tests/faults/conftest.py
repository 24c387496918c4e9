from __future__ import annotations

collect_ignore = ["campaign.py"]
"""A program, and another folder of tests has one of this name."""
