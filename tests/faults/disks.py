"""Sizes of full disk: a small tmpfs where root allows it, else room for some bytes; and limits on a file's size."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import shim
from checker import WORDLESS, Finding
from host import Place
from scenarios import Scenario
from tally import Outcome

if TYPE_CHECKING:
    from campaign import Campaign

PAGE = 4096
_LARGE = "size=64m"
_LIMITS_EVERY = 4
"""One in so many is a limit on the size of a file instead of on the disk."""


def outcomes(campaign: Campaign, chosen: Sequence[Scenario], count: int) -> Iterator[Outcome]:
    """Yield what came of each size, spread evenly from no room to more than enough, over the commands that train."""
    trained = [scenario for scenario in chosen if scenario.command[0] in ("train", "resume", "compare", "attach")]
    limits = [count // _LIMITS_EVERY, count - count // _LIMITS_EVERY]
    grown = {scenario.name: _growth(campaign, scenario) for scenario in trained}
    seen = [0, 0]
    for number in range(count):
        kind = 0 if number % _LIMITS_EVERY == 0 else 1
        scenario = trained[seen[kind] % len(trained)]
        share = seen[kind] / max(1, limits[kind] - 1)
        seen[kind] += 1
        started = time.monotonic()
        if kind == 0:
            size = int(256 * (1 << 10) ** share)
            label, (end, found) = f"no file above {size} bytes", _limited(campaign, scenario, size)
        else:
            size = int(share * 1.05 * grown[scenario.name])
            label, (end, found) = f"disk full after {size} bytes", _full(campaign, scenario, size)
        yield Outcome(scenario.name, label, "disk", end, tuple(found), time.monotonic() - started)


def _growth(campaign: Campaign, scenario: Scenario) -> int:
    """Return how many bytes of whole pages an undisturbed command adds."""
    place = campaign.stage.fresh(scenario, campaign.room / "case")
    before = _used(place)
    campaign.stage.run(place, scenario.command)
    return _used(place) - before


def _used(place: Place) -> int:
    files = [file for top in place.watched for file in top.rglob("*") if file.is_file()]
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)


def _limited(campaign: Campaign, scenario: Scenario, size: int) -> tuple[str, list[Finding]]:
    place = campaign.stage.fresh(scenario, campaign.room / "case")
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    ended = campaign.stage.run(place, scenario.command, setup=limit)
    end, findings = campaign.look(place, scenario, ended)
    full = len(ended.err.encode()) >= size  # standard error is a file too: a sentence that it has no room for is cut
    return end, [finding for finding in findings if not (full and finding.kind == WORDLESS)]


def _full(campaign: Campaign, scenario: Scenario, size: int) -> tuple[str, list[Finding]]:
    place = campaign.stage.fresh(scenario, campaign.room / "case")
    small = _moved(place, size)
    if small is None:
        ended = campaign.stage.run(place, scenario.command, fault=shim.Fault("full", room=size))
        return campaign.look(place, scenario, ended)
    try:
        ended = campaign.stage.run(small, scenario.command)
        _mount("-o", f"remount,{_LARGE}", str(small.disk))
        return campaign.look(small, scenario, ended)
    finally:
        subprocess.run(["umount", str(small.disk)], check=True)


def _moved(place: Place, room: int) -> Place | None:
    """Move the folders to a tmpfs with so many bytes left; None where mounting is not allowed."""
    disk = place.root / "disk"
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", _LARGE, "tmpfs", str(disk)):
        return None
    small = Place(place.root, disk)
    for old, new in zip(place.watched, small.watched, strict=True):
        if old.exists():
            shutil.move(old, new)
    status = os.statvfs(disk)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    _mount("-o", f"remount,size={max(PAGE, used + room // PAGE * PAGE)}", str(disk))
    return small


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
