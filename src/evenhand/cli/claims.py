"""``evenhand claims``: every privacy claim of the five papers, computed beside what holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand._numbers import shown_down
from evenhand.cli import options
from evenhand.terminal import note, progress_bar

if TYPE_CHECKING:
    from evenhand.comparison.paper_claims import Claim
    from evenhand.mechanism.audit.result import Bound

NAME = "claims"
EXAMPLE = "evenhand claims --json"


def run(
    audit: Annotated[bool, typer.Option("--audit", help="Attack each claim that can be played: minutes.")] = False,
    json: options.Json = False,
) -> None:
    """Regenerate the table of claims: what each speaks of, claimed epsilon, true epsilon, factor, why."""
    from evenhand.comparison.paper_claims import claims

    with progress_bar("claims") as told:
        all_claims = claims(told)
    bounds = audited(all_claims) if audit else {}
    options.emit([row(claim, bounds.get(claim)) for claim in all_claims], table(all_claims, bounds), json)


def audited(claims: Sequence[Claim]) -> dict[Claim, Bound]:
    """Attack the claims whose steps, or whose classifier, can be played; return what was certified of each."""
    from evenhand.auditing import published_claims

    played = [claim for claim in claims if claim.claimed and (claim.events or claim.paper.startswith("002"))]
    note(
        f"This attacks {len(played)} of {len(claims)} claims on made-up records, about five seconds each: the last "
        f"{published_claims.STEPS:,} steps of a training at most, or repeated fits of the classifier of paper 002. "
        "What the trials can show at most is beside each bound."
    )
    bounds = {}
    with progress_bar("audits") as told:
        for number, claim in enumerate(played):
            told(number, len(played))
            assert claim.claimed is not None
            bounds[claim] = (
                published_claims.audit_published_smoothing(claim.claimed, claim.delta)
                if claim.events is None
                else published_claims.audit_steps(claim.events, claim.delta, claim.claimed)
            )
        told(len(played), len(played))
    return bounds


def row(claim: Claim, bound: Bound | None = None) -> dict[str, Any]:
    """Return a claim as data; ``true`` is null where no finite epsilon is established.

    ``audit`` is there only where the claim was attacked.
    """
    return {
        "paper": claim.paper,
        "speaks_of": claim.speaks_of,
        "setting": claim.setting,
        "claimed": claim.claimed,
        "true": claim.true,
        "factor": claim.factor,
        "delta": claim.delta,
        "why": claim.why,
        **({} if bound is None else {"audit": bound.to_json()}),
    }


def table(claims: Sequence[Claim], bounds: Mapping[Claim, Bound] | None = None) -> str:
    """Return the claims as a Markdown table; with ``bounds``, what an attack certified of each claim that it played."""
    certified = " certified | trials can show |" if bounds else ""
    lines = [
        "Epsilon per record, add/remove, Poisson sampling.",
        *(["Certified: at least that much is spent, at confidence 0.99 for each line by itself."] if bounds else []),
        "",
        f"| paper | speaks of | setting | delta | claimed | true | factor |{certified} why |",
        "|---|---|---|---|---|---|---|---|" + ("---|---|" if bounds else ""),
    ]
    for claim in claims:
        true = "not established" if claim.true is None else _number(claim.true)
        factor = "" if claim.factor is None else _number(claim.factor)
        claimed = "" if claim.claimed is None else f"{claim.claimed:.3g}"
        bound = (bounds or {}).get(claim)
        shown = "not attacked | " if bound is None else f"{shown_down(bound.lower)} | {shown_down(bound.ceiling)}"
        played = f"{shown} | " if bounds else ""
        lines.append(
            f"| {claim.paper} | {claim.speaks_of} | {claim.setting} | {claim.delta:g} | {claimed} | {true} | {factor} "
            f"| {played}{claim.why} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
