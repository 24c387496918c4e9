"""``evenhand audit``: attack the promise of a run, or of settings before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli import options
from evenhand.terminal import note

if TYPE_CHECKING:
    from evenhand.mechanism.audit.result import Audit, Bound

NAME = "audit"
EXAMPLE = "evenhand audit runs/first --kind mechanism --json"


def run(
    target: Annotated[Path, typer.Argument(metavar="RUN|CONFIG.toml", help="A run folder, or settings.")],
    kind: Annotated[str, typer.Option("--kind", help="mechanism (no data), canary, or lira (many models).")] = (
        "mechanism"
    ),
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the audit: confidence=0.99.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Write the outcome into the run folder, if there is one.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Print the epsilon that an attack can certify beside the promised one; exit code 1 if it is above it.

    The mechanism audit of a run becomes a part of its statement and report; other audits stay in its private folder.
    """
    from evenhand.auditing.audit import audit, read, write
    from evenhand.training.run import Run

    attacked = read(target)
    outcome = audit(attacked, kind, **options.parsed(settings, example="confidence=0.99"))
    options.emit(outcome.to_json(), table(outcome), json)
    if record and isinstance(attacked, Run) and attacked.folder.begun:
        note(f"written to {write(attacked, outcome)}")
    if not outcome.ok:
        raise typer.Exit(1)


def table(outcome: Audit) -> str:
    """Return the outcome for a person: what was attacked and how, a line per owner and group, and the verdict."""
    from evenhand._numbers import delta

    attacked = [(f"owner {name!r}", bound) for name, bound in outcome.per_owner.items()]
    attacked += [(f"group {name!r}", bound) for name, bound in outcome.per_group.items()]
    verdict = "no lower bound exceeds its claim" if outcome.ok else "BROKEN: a lower bound exceeds its claim"
    return "\n".join(
        [
            f"Audit ({outcome.kind}). Attacker: {outcome.threat_model}",
            f"Method: {outcome.method}",
            f"Data: {outcome.data}",
            *(_line(name, bound) for name, bound in attacked),
            f"{verdict} (together at confidence {outcome.confidence:g}, delta {delta(outcome.delta)})",
            *(["These figures follow from private records: do not share them."] if outcome.private else []),
        ]
    )


def _line(name: str, bound: Bound) -> str:
    """Return what was shown of one owner or group."""
    from evenhand._numbers import rounded_up, shown_down

    claim = "no epsilon is claimed" if bound.claim is None else f"claimed {rounded_up(bound.claim)}"
    mark = "" if bound.ok else "  <-- ABOVE THE CLAIM"
    return (
        f"  {name}: epsilon is at least {shown_down(bound.lower)}, {claim}; {bound.trials:,} trials can show at most "
        f"{shown_down(bound.ceiling)}{mark}"
    )
