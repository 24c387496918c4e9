"""Pictures of what evenhand writes, for the gallery: real runs on the embedded digits, in light and in dark.

    python docs/_screenshots.py [FOLDER]     trains into FOLDER (default: a new one), writes docs/images; needs chromium

Pages are photographed as they are; a chart that stands inside a page is taken out of it as an SVG.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from typer.testing import CliRunner

from evenhand.cli import app
from evenhand.reporting.svg import standalone

IMAGES = Path(__file__).parent / "images"
COLOURS = 192
COMMANDS = (
    "train --data digits --epsilon 3 --out {}/first",
    "train --data digits --epsilon 1 --out {}/strict",
    "train --data digits --epsilon 3 --audit quick --out {}/audited",
    "open {}/first {}/strict --export {}/open.html",
    "statement {}/first --html {}/statement.html",
    "compare --data digits --methods dpsgd,dpsgd_f,auto_s --epsilons 1,3 --epochs 15 --seeds 5 --out {}/compared",
)
"""What is typed to get the pages, with the folder for {}; the gallery shows these lines."""
PAGES = {
    "report": ("first/report.html", 1000, 1000),
    "comparison": ("compared/report.html", 1000, 1000),
    "statement": ("statement.html", 900, 1000),
    "open": ("open.html", 1100, 1000),
}
"""By picture: the page in the folder, and the width and height of the window."""
CHARTS = {
    "frontier": ("first/report.html", "Accuracy overall, of the mean class"),
    "audit": ("audited/report.html", "Claimed and certified epsilon"),
}
"""By picture: the page that a chart is taken out of, and how the chart's title begins."""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --hide-scrollbars"
)


def photograph(page: Path, picture: Path, size: tuple[int, int], *, dark: bool) -> None:
    """Write the upper part of a page as a small PNG."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        flags = [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        flags += [f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}"]
        subprocess.run([program, *FLAGS.split(), *flags, page.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(picture) as taken:
        taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def chart(page: Path, title: str) -> str:
    """Return the wide chart of a page whose title begins with these words, as a file of its own."""
    drawings = re.findall(r"<svg.*?</svg>", page.read_text(encoding="utf-8"), re.DOTALL)
    return standalone(next(drawn for drawn in drawings if f"<title>{title}" in drawn))


def main(arguments: Sequence[str]) -> None:
    """Type the commands, then photograph their pages."""
    folder = Path(arguments[0] if arguments else tempfile.mkdtemp()).absolute()
    os.environ["EVENHAND_STATE"] = str(folder / "state")
    for command in COMMANDS:
        done = CliRunner().invoke(app, command.replace("{}", str(folder)).split())
        if done.exit_code:
            raise SystemExit(done.output)
    for name, (page, *size) in PAGES.items():
        for look in ("light", "dark"):
            photograph(folder / page, IMAGES / f"{name}-{look}.png", (size[0], size[1]), dark=look == "dark")
    for name, (page, title) in CHARTS.items():
        (IMAGES / f"{name}.svg").write_text(chart(folder / page, title), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
