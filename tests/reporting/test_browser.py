"""The page in a real browser: it renders under its own policy, fits a phone, and hostile names stay inert."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from evenhand.reporting.group_metrics import estimate
from evenhand.reporting.run_page import ReportData, render

Make = Callable[..., ReportData]
HOSTILE = [
    f"{payload}{n}"
    for n in range(40)
    for payload in (
        "</text></svg><script>document.title='owned'</script>",
        "<img src=x onerror=document.title='owned'>",
        '" onload="alert(1)" x="',
        "</style></title><iframe src=//evil.example/>",
        "\u202e<svg><foreignObject><b>\x00",
    )
]
PROBE = """
<pre id="found"></pre>
<script>
const found = {};
function look(frame) {
  const page = frame.contentDocument, nodes = [...page.querySelectorAll("*")];
  for (const part of page.querySelectorAll("details")) part.open = true;
  const charts = [...page.querySelectorAll("svg")].filter((chart) => chart.getClientRects().length);
  found[frame.name] = {
    room: page.documentElement.clientWidth, needed: page.documentElement.scrollWidth,
    styled: getComputedStyle(page.querySelector("main")).maxWidth, title: page.title,
    tags: [...new Set(nodes.map((node) => node.localName))].sort(),
    handlers: nodes.filter((node) => node.getAttributeNames().some((name) => name.startsWith("on"))).length,
    charts: charts.length, scripts: page.querySelectorAll("script").length,
    smallest: Math.min(...charts.map((chart) => 13 * chart.getScreenCTM().a)),
    spilled: charts.flatMap((chart) => [...chart.querySelectorAll("text")].filter((text) => {
      const box = text.getBBox(), all = chart.viewBox.baseVal;
      return box.x < -1 || box.x + box.width > all.width + 1 || box.y < -2 || box.y + box.height > all.height + 2;
    }).map((text) => text.textContent)),
  };
  document.getElementById("found").textContent = JSON.stringify(found);
}
</script>
"""


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page made the browser's console say."""
    return [row for row in done.stderr.splitlines() if ":CONSOLE" in row]


def reports(make_report: Make, digits: ReportData) -> dict[str, ReportData]:
    """Pages that could look wrong."""
    many = {f"site {i}": estimate(round((0.7 + 0.005 * i) * (5 + i)) / (5 + i), 5 + i) for i in range(60)}
    odd = {
        "\u0645\u062c\u0645\u0648\u0639\u0629 \u0627\u0644\u0645\u0631\u0636\u0649": estimate(0.8, 20),
        "x" * 200: estimate(0.9, 40),
        "a name that goes on and on " * 8: estimate(0.95, 120_000),
        "M" * 40: estimate(0.97, 10),
        "": estimate(math.nan, 0),
    }
    budgets = {"strict": 1.0, "usual": 3.0, "W" * 200: 8.0}
    spending = {
        owner: [(step, limit * step / 5e5) for step in range(0, 500_001, 1000)] for owner, limit in budgets.items()
    }
    return {
        "digits": digits,
        "hostile": make_report(
            {name: estimate((50 + i % 50) / 100, 100) for i, name in enumerate(HOSTILE)}, title=HOSTILE[0]
        ),
        "many": make_report(many, spending=spending, budgets=budgets),
        "odd": make_report(odd, title="T" * 200, warnings=["w" * 300], facts={"k" * 90: "v" * 300}, research=True),
        "public": make_report({"all": estimate(0.91, 450)}, curves=[], spending={}, budgets={}, reproduce="r" * 300),
    }


def test_pages_fit_and_stay_inert(
    tmp_path: Path, browse: Callable[..., subprocess.CompletedProcess[str]], make_report: Make, digits: ReportData
) -> None:
    frames = ""
    for name, data in reports(make_report, digits).items():
        (tmp_path / f"{name}.html").write_text(render(data), encoding="utf-8")
        for room in (1280, 700, 360):
            place = f'name="{name} {room}" src="{name}.html" width="{room}" height="600"'
            frames += f'<iframe {place} onload="look(this)"></iframe>'
    (tmp_path / "all.html").write_text(f'<!doctype html><meta charset="utf-8">{PROBE}{frames}', encoding="utf-8")
    done = browse(tmp_path / "all.html", "--allow-file-access-from-files", "--window-size=1400,900", "--dump-dom")
    assert complaints(done) == []
    match = re.search('<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None
    found: dict[str, dict[str, Any]] = json.loads(unescape(match[1]))
    assert len(found) == 15
    for name, seen in found.items():
        assert seen["needed"] <= seen["room"], f"{name} scrolls sideways"
        assert seen["styled"] == "900px", f"{name}: the policy blocked the style"
        assert seen["spilled"] == [], name
        assert seen["handlers"] == 0, name
        assert not {"img", "iframe", "foreignObject", "b"} & set(seen["tags"]), name
        assert seen["scripts"] == 1, name
        assert seen["title"] != "owned", name
        assert seen["charts"] == (1 if name.startswith("public") else 3), name
        assert seen["smallest"] >= 10.5, f"{name}: letters of {seen['smallest']:.1f} pixels"


def test_the_console_would_tell(
    tmp_path: Path, browse: Callable[..., subprocess.CompletedProcess[str]], digits: ReportData
) -> None:
    page = render(digits).replace(
        "<main>", "<main><script>document.title='owned'</script><img src='https://evil.example'>"
    )
    (tmp_path / "bad.html").write_text(page, encoding="utf-8")
    done = browse(tmp_path / "bad.html", "--dump-dom")
    assert len([row for row in complaints(done) if "Content Security Policy" in row]) == 2
    assert "<title>digits, dpsgd</title>" in done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshot(
    tmp_path: Path, browse: Callable[..., subprocess.CompletedProcess[str]], digits: ReportData, scheme: str
) -> None:
    (tmp_path / "page.html").write_text(render(digits), encoding="utf-8")
    flags = ["--window-size=1000,800", f"--screenshot={tmp_path / 'page.png'}"]
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    assert complaints(browse(tmp_path / "page.html", *flags, setting)) == []
    picture = (tmp_path / "page.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1000, 800)
    assert len(picture) > 20_000, "the picture is nearly empty"
