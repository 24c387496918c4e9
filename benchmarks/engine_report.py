"""The tables of the engine's benchmark, and what they say about the bars that we set ourselves."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_models import CASES

MORE_THREADS, LEAN_MEMORY, LEAN_TIME = 0.15, 1.5, 1.25
RESOLVED_MB = 4.0
"""Where plain SGD's resident peak is lower than that, pages are too coarse to compare with it."""
APART = "SGD, without ours"
Row = dict[str, Any]
Cells = dict[tuple[str, int, int], dict[str, Row]]


def machine() -> Row:
    """What the figures depend on: processor, cores, versions. No name of the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found: Row = {"processor": names[0] if names else platform.machine(), "cores": os.cpu_count()}
    for package in ("torch", "numpy", "evenhand", "opacus"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def by_cell(rows: list[Row]) -> Cells:
    """Rows by (model, batch, threads), then by competitor."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault((row["model"], row["batch"], row["threads"]), {})[row["competitor"]] = row
    return cells


def joined(parts: list[Row]) -> Row:
    """What was measured in parts, such as peers apart; of a competitor that ran twice the first figures count.

    A ratio is one to SGD in the same process, whichever part it is from. SGD of a later part, where no run of ours
    keeps memory, is shown beside that of the first.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    for part in parts:
        for row in part["rows"]:
            cell = row["model"], row["batch"], row["threads"]
            before = rows.setdefault((*cell, row["competitor"]), row)
            if row["competitor"] == "SGD" and before is not row:
                ratio = clock(row, row["threads"]) / clock(before, row["threads"])
                rows[*cell, APART] = row | {"competitor": APART, "ratio": ratio, "quartiles": None}
    rounds = " or ".join(dict.fromkeys(str(part["rounds"]) for part in parts))
    return {**parts[0], "rounds": rounds, "rows": list(rows.values())}


def markdown(found: Row) -> str:
    """The tables and what they were measured on."""
    cells, facts = by_cell(found["rows"]), found["machine"]
    peers = list(dict.fromkeys(name for here in cells.values() for name in here if name != "SGD"))
    head = ["model", "batch", "threads", "SGD ms", *peers]
    times = [
        [model, str(batch), str(threads), f"{clock(here['SGD'], threads):.2f}", *(_ratio(here.get(p)) for p in peers)]
        for (model, batch, threads), here in cells.items()
    ]
    parts = ["Time of a step, as a multiple of plain SGD's (quartiles over the rounds).", _table(head, times)]
    for field, digits, said in _WEIGHED:
        weighed = {key: here for key, here in cells.items() if field in here["SGD"]}
        if weighed:
            able = [peer for peer in peers if any(field in here.get(peer, {}) for here in weighed.values())]
            peaks = [
                [model, str(batch), f"{here['SGD'][field]:.{digits}f}"]
                + [_peak(here.get(peer), here["SGD"], field, digits) for peer in able]
                for (model, batch, _), here in weighed.items()
            ]
            parts += [said, _table(["model", "batch", "SGD MB", *(f"{peer} MB" for peer in able)], peaks)]
    packages = ", ".join(f"{name} {facts[name]}" for name in ("torch", "evenhand", "opacus") if facts[name])
    where = f"{facts['processor']}, {facts['cores']} cores, {packages}"
    missed = misses(found["rows"])
    parts.append("\n".join([f"Bars of our own that are missed: {len(missed)}.", *(f"- {line}" for line in missed)]))
    return "\n\n".join([*parts, f"Measured in {found['rounds']} rounds on {where}."])


def clock(row: Row, threads: int) -> float:
    """The milliseconds that count: of the processor with one thread, on the wall with more."""
    return float(row["cpu_ms" if threads == 1 else "wall_ms"])


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def _ratio(row: Row | None) -> str:
    if row is None or "ratio" not in row:
        return "-"
    ends = row["quartiles"]
    return f"{row['ratio']:.2f}" + ("" if ends is None else f" ({ends[0]:.2f}-{ends[1]:.2f})")


_WEIGHED = (
    ("peak_mb", 1, "Peak of the resident memory above the loaded model and data, and as a multiple of SGD's."),
    ("live_mb", 2, "Peak of the live bytes in a step, once the first is done, and as a multiple of SGD's."),
    ("live_setup_mb", 2, "The same over setting up and the first step, the cost of the code included."),
)


def _peak(row: Row | None, plain: Row, field: str, digits: int) -> str:
    if row is None or field not in row:
        return "-"
    times = f" ({row[field] / plain[field]:.2f})" if plain[field] else ""
    return f"{row[field]:.{digits}f}{times}"


def misses(rows: list[Row]) -> list[str]:
    """Every bar that a measured cell does not reach, in words."""
    found = []
    for (model, batch, threads), here in by_cell(rows).items():
        where = f"{model}, batch {batch}, {threads} thread(s)"
        mine = here.get("ours", {})
        if "ratio" not in mine:
            found.append(f"{where}: ours did not run: {mine.get('error', 'left out')}")
            continue
        case = CASES[model]
        bar = case.bar + (MORE_THREADS if threads > 1 else 0.0)
        if batch == case.bar_batch and mine["ratio"] > bar:
            found.append(f"{where}: {mine['ratio']:.2f} times SGD, the bar is {bar:.2f}")
        found += [
            f"{where}: {clock(mine, threads):.2f} ms, {name} {clock(here[name], threads):.2f} ms"
            for name in ("Opacus hooks", "Opacus ghost")
            if "ratio" in here.get(name, {}) and clock(here[name], threads) <= clock(mine, threads)
        ]
        lean = here.get("ours, memory mode", {})
        if "ratio" in lean and lean["ratio"] > LEAN_TIME * mine["ratio"]:
            times = lean["ratio"] / mine["ratio"]
            found.append(f"{where}: memory mode takes {times:.2f} times as long, the bar is {LEAN_TIME}")
        found += [f"{where}: {text}" for text in _heavy(lean, here["SGD"])]
    return found


def _heavy(lean: Row, plain: Row) -> list[str]:
    """Where memory mode needs too much: of live bytes in a step, and of resident memory if pages can tell."""
    found = []
    for field, said in (("live_mb", "live bytes"), ("peak_mb", "resident memory")):
        resolved = field == "live_mb" or "live_mb" not in lean or plain["peak_mb"] >= RESOLVED_MB
        if field in lean and resolved and lean[field] > LEAN_MEMORY * plain[field]:
            times = lean[field] / plain[field]
            found.append(f"memory mode needs {times:.2f} times SGD's {said}, the bar is {LEAN_MEMORY}")
    return found


def paste(text: str, page: Path, name: str = "benchmark") -> None:
    """Put the tables between the marks of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
