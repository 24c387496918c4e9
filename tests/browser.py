"""Drives a real browser: headless chromium through the DevTools protocol, over two pipes, without a port or a library.

``with Browser() as browser: page = browser.open(url)`` gives a page that can be clicked, typed into, asked and printed.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
WAIT = 60.0
FAINT = """
(() => {
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {  // also of oklch(), color-mix() and the like
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
    const v = c[i] / 255;
    return sum + w * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      if (at instanceof SVGElement && at.localName !== "svg") continue;
      layers.push(rgba(getComputedStyle(at).backgroundColor));
      if (layers[layers.length - 1][3] === 1) break;
    }
    const page = getComputedStyle(document.documentElement).colorScheme.includes("dark")
      && matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return layers.reverse().reduce((below, layer) => over(layer, below), page);
  };
  const faint = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, style = getComputedStyle(e), svg = e instanceof SVGElement;
    const words = walk.currentNode.data.trim();
    if (!words || ["SCRIPT", "STYLE", "NOSCRIPT", "title", "desc"].includes(e.nodeName)) continue;
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const box = e.getBoundingClientRect();
    if (box.width < 2 || box.height < 2 || e.closest("[disabled],[aria-disabled=true]")) continue;
    const colour = rgba(svg ? style.fill : style.color), ground = behind(e);
    for (let at = e; at; at = at.parentElement) colour[3] *= Number(getComputedStyle(at).opacity);
    if (svg) colour[3] *= Number(style.fillOpacity);
    const [a, b] = [light(over(colour, ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    if (ratio < (size >= 24 || (bold && size >= 18.66) ? 3 : 4.5))
      faint.push([Math.round(100 * ratio) / 100, words.slice(0, 40), e.nodeName, e.getAttribute("class")]);
  }
  return faint;
})()
"""
"""Texts whose contrast to what is behind them is below WCAG's AA: 4.5, and 3 for large letters."""
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "Home": 36, "End": 35}


def program() -> str:
    """The chromium of this machine; the test is skipped without one, in CI it fails."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have chromium (Debian: apt-get install chromium)")
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    return path


class Browser:
    """One browser process; ``with`` ends it."""

    def __init__(self) -> None:
        path = program()
        self._profile = tempfile.TemporaryDirectory(prefix="evenhand-browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # chromium reads commands from descriptor 3 and writes to 4
        line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", path, *FLAGS.split(), f"--user-data-dir={self._profile.name}"],
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._rest, self.events = itertools.count(1), b"", []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its helpers too, which write to the profile
        self._process.wait(WAIT)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def send(self, method: str, parameters: Mapping[str, Any], session: str | None = None) -> dict[str, Any]:
        """Send one command and return its result; what the browser reports meanwhile goes to ``events``."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read(WAIT)
            assert answer is not None, f"chromium did not answer {method}"
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, None if there is none for so long; events are kept too."""
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            part = os.read(self._in, 1 << 16)
            assert part, "chromium ended"
            self._rest += part
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        if "id" not in message:
            self.events.append(message)
        return message

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open an address in a new tab and wait until it has loaded."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        page = Page(self, self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.look(width, height, dark=dark)
        page.go(address)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, parameters, self._session)

    def events(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    def look(self, width: int, height: int = 900, *, dark: bool = False, media: str = "screen") -> None:
        """Give the window a size, a light or dark screen, or the look of a printer."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def go(self, address: str) -> None:
        before = len(self.events("Page.loadEventFired"))
        self.send("Page.navigate", url=address)
        end = time.monotonic() + WAIT
        while len(self.events("Page.loadEventFired")) == before:
            assert time.monotonic() < end, f"{address} did not load"
            self._browser.read(1.0)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true, also of a page that another one is just taking the place of."""
        end = time.monotonic() + WAIT
        while not self._holds(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.ask(expression))
        except AssertionError as error:
            if any(word in str(error) for word in ("context", "navigated")):
                return False
            raise

    def text(self, selector: str) -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        where = self.ask(
            f"(e=>{{e.scrollIntoView({{block:'center',behavior:'instant'}});const b=e.getBoundingClientRect();"
            f"return [b.x+b.width/2,b.y+b.height/2]}})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def controls(self) -> list[tuple[str, str]]:
        """Role and name of whatever a screen reader can focus, in order."""
        self.send("Accessibility.enable")
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
            and any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", ()))
            and node["role"]["value"] != "RootWebArea"
        ]

    def faint(self) -> list[list[Any]]:
        """Ratio, text and element of whatever has less contrast than AA asks for."""
        found: list[list[Any]] = self.ask(FAINT)
        return found

    def complaints(self) -> list[str]:
        """What the console was told: errors, warnings, exceptions and blocked content."""
        told = [entry["entry"]["text"] for entry in self.events("Log.entryAdded")]
        told += [
            str(error["exceptionDetails"].get("exception", error)) for error in self.events("Runtime.exceptionThrown")
        ]
        called = [call for call in self.events("Runtime.consoleAPICalled") if call["type"] in ("error", "warning")]
        return told + [str(call["args"]) for call in called]

    def weight(self) -> int:
        """Bytes of everything that the page loaded."""
        return int(sum(done["encodedDataLength"] for done in self.events("Network.loadingFinished")))

    def requests(self) -> list[str]:
        return [sent["request"]["url"] for sent in self.events("Network.requestWillBeSent")]

    def picture(self, file: Path, *, whole: bool = False) -> None:
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))

    def printed(self) -> bytes:
        """The page as a PDF on A4."""
        return base64.b64decode(self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
