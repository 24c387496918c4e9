"""Telling whether two runs used the same data, so that their budgets can be added up."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from evenhand.data.wrapping import Data

ROWS = 512


def fingerprint(data: Data) -> str:
    """Hash of the number of records and of up to 512 evenly spaced ones.

    It depends on private records, so it must stay on the trainer's machine: whoever knows all records but one could
    test guesses for that one against it.

    Examples:
      >>> from evenhand.data import wrap
      >>> one, two = wrap(torch.ones(3, 2), [0, 1, 0]), wrap(torch.ones(3, 2), [0, 1, 1])
      >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(two)
      (True, False)
    """
    count = len(data)
    rows = torch.unique(torch.linspace(0, count - 1, min(ROWS, count)).round().long())
    digest = hashlib.sha256(str(count).encode())
    _feed(digest, data.fetch(rows))
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            _feed(digest, part)
    else:
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
