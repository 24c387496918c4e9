"""The one small script in a real browser: groups are chosen, values are shown, and the page works without it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from comparison_samples import NAMES, page_data

from evenhand.reporting.comparison_page import render_comparison
from evenhand.reporting.run_page import ReportData, render

Browse = Callable[..., subprocess.CompletedProcess[str]]
PROBE = """
<pre id="found"></pre>
<script>
const found = {};
function look(frame) {
  const page = frame.contentDocument, all = (query) => [...page.querySelectorAll(query)];
  const off = () => all("svg [data-off]").length, button = all("button[data-g='0']")[0];
  const seen = { shown: !page.querySelector(".choose").hidden, before: off(), name: button.textContent };
  button.click(); seen.one = off(); seen.pressed = button.getAttribute("aria-pressed");
  seen.faint = frame.contentWindow.getComputedStyle(page.querySelector("svg [data-off]")).opacity;
  button.click(); seen.again = off();
  page.querySelector("button[data-all='0']").click(); seen.none = off();
  page.querySelector("button[data-all='1']").click(); seen.all = off();
  const tip = page.querySelector(".tip"), tell = (node, x, y) => {
    node.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", { bubbles: true, clientX: x, clientY: y }));
    return tip.hidden ? "" : tip.textContent;
  };
  const row = all("figure svg [data-n]").filter((node) => node.getClientRects().length)[0];
  const box = row.getBoundingClientRect();
  seen.row = tell(row, box.x + 5, box.y + 5);
  const chart = all("svg[data-axes]").filter((node) => node.getClientRects().length)[0];
  if (chart) {
    const line = chart.querySelector("[data-n] polyline"), last = line.points[line.points.length - 1];
    const at = new DOMPoint(last.x, last.y).matrixTransform(chart.getScreenCTM());
    seen.point = tell(chart, at.x, at.y);
  }
  found[frame.name] = seen;
  document.getElementById("found").textContent = JSON.stringify(found);
}
</script>
"""


def test_groups_are_chosen_and_values_shown(tmp_path: Path, browse: Browse, digits: ReportData) -> None:
    (tmp_path / "run.html").write_text(render(digits), encoding="utf-8")
    (tmp_path / "sweep.html").write_text(render_comparison(page_data(NAMES)), encoding="utf-8")
    frames = "".join(
        f'<iframe name="{name} {room}" src="{name}.html" width="{room}" height="700" onload="look(this)"></iframe>'
        for name in ("run", "sweep")
        for room in (1200, 360)
    )
    (tmp_path / "all.html").write_text(f'<!doctype html><meta charset="utf-8">{PROBE}{frames}', encoding="utf-8")
    done = browse(tmp_path / "all.html", "--allow-file-access-from-files", "--window-size=1400,900", "--dump-dom")
    assert [row for row in done.stderr.splitlines() if ":CONSOLE" in row] == []
    match = re.search('<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None
    found: dict[str, dict[str, Any]] = json.loads(unescape(match[1]))
    assert len(found) == 4
    for name, seen in found.items():
        assert seen["shown"], name
        assert seen["name"] == "class 8", name
        assert (seen["before"], seen["again"], seen["all"]) == (0, 0, 0), name
        assert 0 < seen["one"] < seen["none"], name
        assert seen["pressed"] == "false", name
        assert float(seen["faint"]) < 0.2, name
        assert seen["row"].startswith("class 8: "), name
        if name.startswith("run"):
            assert re.fullmatch(r".+: about [\d.]+ at (epoch|step) [\d.]+", seen["point"]), name


@pytest.mark.parametrize("room", [1280, 700, 360])
def test_the_comparison_fits(tmp_path: Path, browse: Browse, room: int) -> None:
    (tmp_path / "page.html").write_text(render_comparison(page_data(NAMES)), encoding="utf-8")
    probe = (
        '<pre id="found"></pre><script>function look(f){const p=f.contentDocument,c=[...p.querySelectorAll("svg")]'
        ".filter((n)=>n.checkVisibility());document.getElementById('found').textContent=JSON.stringify({"
        "room:p.documentElement.clientWidth,needed:p.documentElement.scrollWidth,charts:c.length,"
        "labelled:c.every((n)=>n.querySelector('title')&&n.querySelector('desc')),"
        "letters:Math.min(...c.map((n)=>13*n.getScreenCTM().a)),"
        "spilled:c.flatMap((n)=>[...n.querySelectorAll('text')].filter((t)=>{const b=t.getBBox(),v=n.viewBox.baseVal;"
        "return b.x<-1||b.x+b.width>v.width+1||b.y+b.height>v.height+2}).map((t)=>t.textContent))})}</script>"
    )
    frame = f'<iframe src="page.html" width="{room}" height="800" onload="look(this)"></iframe>'
    (tmp_path / "all.html").write_text(f'<!doctype html><meta charset="utf-8">{probe}{frame}', encoding="utf-8")
    done = browse(tmp_path / "all.html", "--allow-file-access-from-files", "--window-size=1400,900", "--dump-dom")
    assert [row for row in done.stderr.splitlines() if ":CONSOLE" in row] == []
    match = re.search('<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None
    seen = json.loads(unescape(match[1]))
    assert seen["needed"] <= seen["room"]
    assert seen["charts"] == 2
    assert seen["labelled"]
    assert seen["letters"] >= 10.5
    assert seen["spilled"] == []
