"""``evenhand claims``: every privacy claim of the five papers, computed beside what holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evenhand.cli import options
from evenhand.terminal import progress_bar

if TYPE_CHECKING:
    from evenhand.comparison.paper_claims import Claim

NAME = "claims"
EXAMPLE = "evenhand claims --json"


def run(json: options.Json = False) -> None:
    """Regenerate the table of claims: what each speaks of, claimed epsilon, true epsilon, factor, why."""
    from evenhand.comparison.paper_claims import claims

    with progress_bar("claims") as told:
        all_claims = claims(told)
    options.emit([row(claim) for claim in all_claims], table(all_claims), json)


def row(claim: Claim) -> dict[str, Any]:
    """Return a claim as data; ``true`` is null where no finite epsilon is established."""
    return {
        "paper": claim.paper,
        "speaks_of": claim.speaks_of,
        "setting": claim.setting,
        "claimed": claim.claimed,
        "true": claim.true,
        "factor": claim.factor,
        "delta": claim.delta,
        "why": claim.why,
    }


def table(claims: Sequence[Claim]) -> str:
    """Return the claims as a Markdown table."""
    lines = [
        "Epsilon per record, add/remove, Poisson sampling.",
        "",
        "| paper | speaks of | setting | delta | claimed | true | factor | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        true = "not established" if claim.true is None else _number(claim.true)
        factor = "" if claim.factor is None else _number(claim.factor)
        claimed = "" if claim.claimed is None else f"{claim.claimed:.3g}"
        lines.append(
            f"| {claim.paper} | {claim.speaks_of} | {claim.setting} | {claim.delta:g} | {claimed} | {true} | {factor} "
            f"| {claim.why} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
