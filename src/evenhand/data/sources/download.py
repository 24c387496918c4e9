"""Getting the files of a source from their official place: checked, and all or nothing."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from evenhand import durable
from evenhand.data.sources.base import File, Place, Source
from evenhand.errors import DataError, UsageError

CHUNK = 2**18
TIMEOUT = 30.0
Watch = Callable[[str, int, int | None], None]
"""Told the file, the bytes so far, and how many there will be if the server says so."""


def fetch(source: Source, place: Place, watch: Watch = lambda name, done, total: None) -> list[Path]:
    """Download what is missing; returns the files that were written.

    A file gets its name only when it is complete and its checksum is the published one. Data whose licence asks for
    more than a download, or whose checksum is not known, are not downloaded.
    """
    if source.present(place):
        return []
    if not source.fetchable:
        raise UsageError(
            f"evenhand does not download {source.name}: its terms ask you to get it yourself, or no published checksum "
            f"is known. {source.absent(place)}"
        )
    try:
        durable.make_folder(place.folder, parents=True)
    except OSError as error:
        raise UsageError(f"{place.folder} cannot be made ({error.strerror}): choose another --data-dir.") from None
    return [_download(file, source, place, watch) for file in source.files[0] if not place.find(file.name)]


def _download(file: File, source: Source, place: Place, watch: Watch) -> Path:
    """One file, written aside and renamed."""
    name = file.url.rpartition("/")[2]
    target = place.folder / name
    kind, _, wanted = file.digest.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    try:
        with urllib.request.urlopen(_request(file.url), timeout=TIMEOUT) as reply, durable.writing(target) as out:
            length = reply.headers.get("Content-Length")
            total, done = int(length) if length and length.isdigit() else None, 0
            while chunk := reply.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                watch(name, done, total)
            if digest.hexdigest() != wanted:
                raise DataError(
                    f"{file.url} is not the published file: its {kind} checksum differs, so nothing was kept. The "
                    f"download was cut short or the file was changed. Try again, or put {name} into {place.folder} "
                    "yourself."
                )
        return target
    except (urllib.error.URLError, HTTPException, OSError) as error:
        raise UsageError(
            f"{file.url} cannot be fetched ({_reason(error)}). Without a network: put "
            f"{', '.join(entry.name for entry in source.files[0])} (gzipped or not) into {place.folder}."
        ) from None


def _request(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"User-Agent": "evenhand"})


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or type(error).__name__)
