"""The local server: one machine, one secret address, GET only, no path of a file; and a clean end."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import evenhand
from evenhand.comparison.viewer import page, released
from evenhand.comparison.viewer.server import HOST, Viewer
from viewed_runs import folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("served"), "first", "plain")


@pytest.fixture
def server(runs: dict[str, Path]) -> Iterator[Viewer]:
    with Viewer(list(runs.values())) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def asked(server: Viewer, place: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=30)
    connection.request(method, place, headers=headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), content


def test_only_this_machine_can_ask(server: Viewer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 22  # 128 bits
    with Viewer([]) as other:
        assert other.token != server.token


def test_the_page_comes_with_its_policy_and_is_stored_nowhere(server: Viewer) -> None:
    status, headers, content = asked(server, f"/{server.token}/")
    assert status == 200
    assert content.startswith(b"<!doctype html>")
    rules = headers["Content-Security-Policy"]
    assert rules.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in rules
    assert "connect-src 'self'" in rules
    assert "frame-ancestors 'none'" in rules
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Server"] == "evenhand"
    assert server.token.encode() not in content


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:80", ""])
def test_another_host_name_gets_nothing(server: Viewer, host: str) -> None:
    status, _, content = asked(server, f"/{server.token}/", Host=host)
    assert status == 421
    assert b"dpsgd" not in content
    assert asked(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("place", ["/", "/wrong/", "/wrong/report/0", "//", "/%2e%2e/", "/wrong/plan?run=0", "*"])
def test_without_the_token_there_is_nothing(server: Viewer, place: str) -> None:
    status, _, content = asked(server, place)
    assert status == 404
    assert b"There is nothing here" in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "STEAL"])
def test_only_get_is_answered(server: Viewer, method: str) -> None:
    status, _, content = asked(server, f"/{server.token}/", method)
    assert status == 405
    assert b"dpsgd" not in content


@pytest.mark.parametrize(
    "place",
    [
        "plan.json",
        "report/../plan.json",
        "../../etc/passwd",
        "%2e%2e/private/checkpoint.pt",
        "report/0/../../private",
        "private/checkpoint.pt",
        "report/-1",
        "report/",
        "report/00000",
    ],
)
def test_no_part_of_an_address_is_a_path(server: Viewer, place: str) -> None:
    assert asked(server, f"/{server.token}/{place}")[0] == 404


def test_reports_are_shown_in_a_sandbox_if_they_may_be_shared(server: Viewer, runs: dict[str, Path]) -> None:
    status, headers, content = asked(server, f"/{server.token}/report/0")
    assert (status, content) == (200, (runs["first"] / "report.html").read_bytes())
    assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in headers["Content-Security-Policy"]
    for number in (1, 2):
        assert asked(server, f"/{server.token}/report/{number}")[0] == 400


def test_the_planner_answers_as_the_page_does(server: Viewer, runs: dict[str, Path]) -> None:
    status, headers, content = asked(server, f"/{server.token}/plan?run=0&at=1,2,3&kind=images")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(content) == page.reply(released.read(runs["first"]), [1, 2, 3], "images")


@pytest.mark.parametrize(
    "query",
    ["", "run=0", "run=9&at=1,2,3&kind=table", "run=0&at=1,2&kind=table", "run=0&at=1,2,99&kind=table",
     "run=0&at=1,2,3&kind=secrets", "run=-1&at=1,2,3&kind=table", "run=0&at=1,2,x&kind=table", "run=0&at=" + "9" * 9000,
     "run=1&at=0,0,0&kind=table"],
)  # fmt: skip
def test_what_the_planner_cannot_answer_is_one_sentence(server: Viewer, query: str) -> None:
    status, _, content = asked(server, f"/{server.token}/plan?{query}")
    assert status == 400
    assert set(json.loads(content)) == {"error"}


def test_no_request_brings_the_server_down(server: Viewer) -> None:
    for bytes_sent in (b"\x00\xff\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((HOST, server.server_port), timeout=30) as connection:
            connection.sendall(bytes_sent)
            assert b"dpsgd" not in connection.recv(4096)
    assert asked(server, f"/{server.token}/")[0] == 200


def test_a_run_that_is_damaged_meanwhile_is_named_and_the_others_go_on(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["first"], tmp_path / "copy")
    with Viewer([tmp_path / "copy", runs["first"]]) as server:
        (tmp_path / "copy" / "plan.json").write_text("{")
        readable, failures = server.runs()
    assert list(readable) == [1], "numbers in addresses stay those of the folders"
    assert len(failures) == 1
    assert "plan.json cannot be read" in failures[0]
    assert failures[0] in page.live(readable, failures).replace("&#39;", "'")


def test_a_port_in_use_is_one_line(runs: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        done = evenhand("open", runs["first"], "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is in use by another program. Leave out --port" in done.stderr


def test_ctrl_c_ends_it(runs: dict[str, Path]) -> None:
    line = [sys.executable, "-m", "evenhand", "open", str(runs["first"])]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    address = re.fullmatch(r"Open http://127\.0\.0\.1:(\d+)/([\w-]{22})/\n", process.stdout.readline())
    assert address is not None
    connection = http.client.HTTPConnection(HOST, int(address[1]), timeout=30)  # stays open
    connection.request("GET", f"/{address[2]}/")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    connection.close()
    assert process.returncode == 0
    assert (out, "Ended." in err, "Traceback" in err) == ("", True, False)
