"""All studies of matched.py by name."""

from __future__ import annotations

from matched_groups import ADAPT, HAM, SEXES
from matched_owners import FRONTIER, MAPS, PARTS
from matched_settings import SETTINGS

STUDIES = {study.name: study for study in (*MAPS, PARTS, FRONTIER, *SEXES, HAM, ADAPT, SETTINGS)}
