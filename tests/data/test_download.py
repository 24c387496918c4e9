"""Downloads, from a server of our own since tests have no network: what is kept is whole and checked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from commands import evenhand, result
from evenhand.data import load, sources
from evenhand.data.sources import base as download
from evenhand.data.sources.base import File, Place, Source, data_folder
from evenhand.errors import DataError, UsageError

CONTENT = b"some published bytes" * 50_000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "one.gz").write_bytes(CONTENT)
    (tmp_path / "served" / "two").write_bytes(b"two")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def source(base: str, digest: str = hashlib.sha256(CONTENT).hexdigest()) -> Source:
    two = hashlib.md5(b"two", usedforsecurity=False).hexdigest()
    files = (File("one", f"{base}/one.gz", f"sha256:{digest}"), File("two", f"{base}/two", f"md5:{two}"))
    return Source("made-up", lambda place: None, "2", "none", "none", (files,))  # type: ignore[arg-type, return-value]


def test_files_are_fetched_checked_and_not_fetched_twice(server: str, tmp_path: Path) -> None:
    place, seen = Place(tmp_path / "data" / "made-up"), []
    written = download.fetch(source(server), place, lambda *told: seen.append(told))
    assert [file.name for file in written] == ["one.gz", "two"]
    assert (place.folder / "one.gz").read_bytes() == CONTENT
    assert seen[-2] == ("one.gz", len(CONTENT), len(CONTENT))
    assert len(seen) > 3, "progress is told while it goes on"
    assert download.fetch(source("http://127.0.0.1:1"), place) == []


def test_another_file_than_the_published_one_is_not_kept(server: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "data")
    with pytest.raises(DataError, match="sha256 checksum differs, so nothing was kept"):
        download.fetch(source(server, "0" * 64), place)
    assert list(place.folder.iterdir()) == []


@pytest.mark.parametrize("base", ["http://127.0.0.1:1", "served"])
def test_without_the_file_the_error_says_what_to_put_where(server: str, tmp_path: Path, base: str) -> None:
    (tmp_path / "served" / "one.gz").unlink()
    place = Place(tmp_path / "data")
    with pytest.raises(UsageError, match=r"one, two \(gzipped or not\) into .*data"):
        download.fetch(source(server if base == "served" else base), place)
    assert list(place.folder.iterdir()) == []


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    class Short(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")

    with ThreadingHTTPServer(("127.0.0.1", 0), Short) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,)).start()
        place = Place(tmp_path / "data")
        with pytest.raises(UsageError):
            download.fetch(source(f"http://127.0.0.1:{running.server_address[1]}"), place)
        running.shutdown()
    assert list(place.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["ham10000", "chexpert", "dutch", "thinwall", "pneumonia"])
def test_licensed_data_are_not_downloaded(name: str, tmp_path: Path) -> None:
    done = evenhand("data", "fetch", name, "--data-dir", tmp_path)
    assert done.returncode == 2
    assert "does not download" in done.stderr
    assert str(tmp_path / name) in done.stderr


def test_the_command_fetches_by_name(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.SOURCES, "made-up", source(server))
    asked = ("data", "fetch", "made-up", "--data-dir", tmp_path / "data")
    assert result(*asked)["written"] == ["one.gz", "two"]
    assert "there already" in evenhand(*asked).stdout
    assert evenhand("data", "get", "made-up").returncode == 2
    assert "Did you mean 'mnist'" in evenhand("data", "fetch", "mnst").stderr


def test_the_command_lists_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_DATA", str(tmp_path))
    (tmp_path / "dutch").mkdir()
    (tmp_path / "dutch" / "dutch.csv.gz").touch()
    done = evenhand("data", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == set(sources.SOURCES)
    assert [name for name, row in rows.items() if row["present"]] == ["digits", "dutch"]
    assert {name for name, row in rows.items() if not row["public"]} == {"pneumonia", "thinwall", "chexpert"}
    assert rows["unbalanced-mnist"]["options"][:3] == ["minority", "kept", "share"]
    lines = evenhand("data").stdout.splitlines()
    assert len(lines) == len(rows)
    assert any(line.startswith("dutch") and "there" in line for line in lines)


def test_the_folder_is_the_flag_the_variable_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EVENHAND_DATA", raising=False)
    assert data_folder() == tmp_path / "evenhand" / "data"
    monkeypatch.setenv("EVENHAND_DATA", "elsewhere")
    assert data_folder() == Path("elsewhere")
    assert data_folder("given") == Path("given")


def test_every_checksum_and_address_is_complete() -> None:
    for found in sources.SOURCES.values():
        for file in (file for files in found.files for file in files if file.url or file.digest):
            kind, _, digest = file.digest.partition(":")
            assert len(digest) == {"sha256": 64, "md5": 32}[kind]
            assert file.url.startswith("https://")
            assert Path(file.url).name.removesuffix(".gz") == file.name.removesuffix(".gz")


def test_an_unknown_source_gives_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'adult'"):
        load("adlut")
