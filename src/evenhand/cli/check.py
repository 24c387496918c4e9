"""``evenhand check``: try to show that the rules and queries in a file of yours are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli import options

NAME = "check"
EXAMPLE = "evenhand check my_rule.py"


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="Your file, or a part's name; it is executed.")],
    json: options.Json = False,
) -> None:
    """Run the conformance kit on everything that FILE.py registers, or on the rule or query of that name.

    Exit code 1 if a check fails. The name may be that of a plugin: a part that another package offers.

    Passing is no proof: it means that nothing was found.
    """
    from evenhand.testing.conformance import check
    from evenhand.testing.subjects import subjects_in

    reports = [check(subject) for subject in subjects_in(file)]
    ok = all(each.ok for each in reports)
    options.emit({"ok": ok, "subjects": [each.to_json() for each in reports]}, "\n\n".join(map(str, reports)), json)
    if not ok:
        raise typer.Exit(1)
