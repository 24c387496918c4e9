"""Three claims of docs/results computed by other code: its own NumPy loop, and evenhand's accountant only.

    python experiments/replication/again.py --data-dir FOLDER [--replicas 20] [--out docs/results]

Writes docs/results/replication.md and .json beside the pages whose figures it reads.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import group_bounds
import moved_answers
import ordering
import plain

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
CLAIMS = (moved_answers, ordering, group_bounds)


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page from its figures."""
    lines = []
    for row in rows:
        theirs, ours = (plain.Outcome(**row[name]) for name in ("page", "again"))
        agree = "**agree**" if theirs.overlaps(ours) else "**do NOT agree**"
        shown = [f"{one.mean:+.2f} ({one.low:+.2f} to {one.high:+.2f}), {one.replicas}" for one in (theirs, ours)]
        lines.append(
            f"| {row['title']} | [{row['figures']}]({row['figures']}.md) | {shown[0]} | {shown[1]} | {agree} |"
        )
    return (
        "# Three claims computed again by other code\n\n"
        "Does a claim survive when sampling, clipping, noise, optimizer and rules are written anew? The scripts of "
        "experiments/replication/ use NumPy and evenhand's accountant, and nothing else of its mechanism; splits and "
        "draws are their own.\n\n"
        "Points, means over replicas with 95 % intervals (Nadeau and Bengio 2003); two figures agree where their "
        "intervals "
        "overlap.\n\n"
        "| claim | page | the page's figure, replicas | computed again, replicas | |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n\nMade by `python experiments/replication/again.py --data-dir FOLDER`. The figures: "
        "[replication.json](replication.json).\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute all three claims again and write the page."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--replicas", type=int, default=20)
    asked.add_argument("--out", type=Path, default=RESULTS)
    given = asked.parse_args(arguments)
    if given.data_dir:
        os.environ["EVENHAND_DATA"] = str(given.data_dir.resolve())
    rows = []
    for claim in CLAIMS:
        table = json.loads((given.out / f"{claim.FIGURES}.json").read_text())
        rows.append(
            {
                "title": claim.TITLE,
                "figures": claim.FIGURES,
                "page": asdict(claim.published(table)),
                "again": asdict(claim.replicated(table, given.replicas)),
            }
        )
        print(rows[-1], flush=True)
    (given.out / "replication.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "replication.md").write_text(page(rows))


if __name__ == "__main__":
    main()
