"""Serves the page of runs to one person on this machine, until Ctrl-C.

Guarantees:
    * Only this machine is listened to (127.0.0.1), and only requests that name it as their host are answered: a page
      of another site whose name is made to point here (DNS rebinding) gets nothing.
    * The address has a random token of 128 bits. A request without it is told nothing, not even that runs are here.
    * Only GET. What is asked for is matched with a fixed list; no part of an address becomes a path of a file.
    * Answers carry a content policy, are stored nowhere and may be framed by nobody. A report is shown in a sandbox of
      its own: a script that somebody put into it runs neither with the address of this page nor at all.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

from evenhand.comparison import recommend
from evenhand.comparison.viewer import page, released
from evenhand.comparison.viewer.released import ReleasedRun
from evenhand.errors import EvenhandError, UsageError
from evenhand.reporting.page import policy

HOST = "127.0.0.1"
_WAIT = 20.0
"""Seconds that a request may take to arrive."""
_REPORT = re.compile(r"report/(\d{1,4})")
_NUMBERS = re.compile(r"\d{1,3}(,\d{1,3}){0,11}")
_NEVER = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Viewer(ThreadingHTTPServer):
    """The server of one set of runs, bound to a port of this machine; ``with`` closes it.

    Args:
      folders: run folders, read anew for every view, so that a run that goes on is shown as it is.
      port: 0 takes any free one.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.folders = tuple(folders)
        self.token = secrets.token_urlsafe(16)
        self.planning = threading.Lock()
        try:
            super().__init__((HOST, port), _Request)
        except OSError as error:
            why = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
            raise UsageError(f"Port {port} {why}. Leave out --port to take any free one.") from None

    @property
    def address(self) -> str:
        """Return the address of the page, with its token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> set[str]:
        """Return what the Host header may say."""
        return {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}

    def runs(self) -> tuple[dict[int, ReleasedRun], list[str]]:
        """Return the runs that can be read now, by their place among the folders, and a sentence for each other one."""
        runs, failures = {}, []
        for number, folder in enumerate(self.folders):
            try:
                runs[number] = released.read(folder)
            except EvenhandError as error:
                failures.append(str(error))
        return runs, failures

    def run(self, number: str) -> ReleasedRun:
        """Return the run with this number as it is now; raise UsageError if there is none."""
        if not number.isdecimal() or len(number) > 4 or int(number) >= len(self.folders):
            raise UsageError("There is no such run: load the page again.")
        return released.read(self.folders[int(number)])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that left in the middle of an answer."""


class _Request(BaseHTTPRequestHandler):
    """One request; see the guarantees above."""

    server: Viewer
    timeout = _WAIT
    protocol_version = "HTTP/1.1"
    kinds: ClassVar = {"html": "text/html; charset=utf-8", "json": "application/json"}

    def do_GET(self) -> None:
        """Answer what is on the list."""
        place, _, query = self.path.partition("?")
        start, _, rest = place.removeprefix("/").partition("/")
        if self.headers.get("Host") not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "This server answers on this machine only.")
        elif not secrets.compare_digest(start.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here. Use the address that evenhand printed.")
        else:
            try:
                self._answer(rest, query)
            except EvenhandError as error:
                self._refuse(HTTPStatus.BAD_REQUEST, str(error))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server refuses, other methods than GET among it, in the words of this server."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is answered.")
        else:
            self._refuse(HTTPStatus(code), "This is no request that a browser sends.")

    def _answer(self, place: str, query: str) -> None:
        if place == "":
            rules = policy(page.STYLE, page.SCRIPT, "'self'")
            self._send(page.live(*self.server.runs()).encode(), "html", f"{rules}; frame-ancestors 'none'")
        elif place == "plan":
            asked = parse_qs(query, max_num_fields=3)
            run = self.server.run(asked.get("run", [""])[0])
            at, kind = asked.get("at", [""])[0], asked.get("kind", [""])[0]
            if not _NUMBERS.fullmatch(at) or kind not in recommend.KINDS:
                raise UsageError("The planner is asked with run=, at= and kind=, as its page does.")
            with self.server.planning:
                reply = page.reply(run, [int(index) for index in at.split(",")], kind)
            self._send(json.dumps(reply).encode(), "json", f"default-src 'none'; {_NEVER}")
        elif match := _REPORT.fullmatch(place):
            report = self.server.run(match[1]).report()
            if report is None:
                raise UsageError("This run has no report that may be shared.")
            hashed = next(part for part in policy().split("; ") if part.startswith("script-src"))
            sandbox = f"sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; {hashed}; {_NEVER}"
            self._send(report, "html", sandbox)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _send(self, content: bytes, kind: str, rules: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {"Content-Type": self.kinds[kind], "Content-Length": str(len(content)), **_HEADERS}
        for name, value in {**headers, "Content-Security-Policy": rules}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self.close_connection = True
        self._send(json.dumps({"error": words}).encode(), "json", f"default-src 'none'; {_NEVER}", status)

    def version_string(self) -> str:
        """Return the name of the program alone."""
        return "evenhand"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log: addresses hold the token."""
