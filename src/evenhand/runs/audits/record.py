"""Read the audit in a run folder: what statements say of it, and whether it fits the plan.

Only audits that read no data are recorded here: the figures of others are exact functions of private records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand._numbers import rounded_up, shown_down
from evenhand.errors import VerificationError

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan

FILE = "audit.json"
NONE = "Not audited yet."
_NUMBER = (int, float)
_SHAPE: untrusted.Shape = {
    "kind": str,
    "confidence": _NUMBER,
    "delta": _NUMBER,
    "ok": bool,
    "per_owner": {str: {"claim": _NUMBER, "lower_bound": _NUMBER, "ceiling": _NUMBER, "trials": int}},
    "threat_model": str,
    "method": str,
    "data": str,
    "details": {"plan": str},
}
_FIGURES = ("claim", "lower_bound", "ceiling", "trials")
_SLACK = 1e-3
"""How much a written claim may differ from the computed one: another version's accountant may have been looser."""
_ROUNDED = 1e-2
"""How far a bound may lie above its ceiling: both are searched to a thousandth of the noise."""


def read(folder: Path, plan: str) -> dict[str, Any] | None:
    """Return the audit of the plan with this digest as a folder has it; None if there is none, or of another plan.

    Raises:
      VerificationError: the file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    audit: dict[str, Any] = untrusted.read_json(file, _SHAPE)
    return audit if audit["details"]["plan"] == plan else None


def stated(audit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a statement says of an audit: whom it attacked, how, and a claim beside every bound.

    Examples:
      >>> bound = {"claim": 3.0, "lower_bound": 2.5, "ceiling": 9.0, "trials": 100, "ok": True}
      >>> about = dict.fromkeys(("threat_model", "method", "data"), "")
      >>> audit = {"kind": "mechanism", "confidence": 0.99, "ok": True, "per_owner": {"all": bound}, **about}
      >>> stated(audit)["per_owner"]["all"]["lower_bound"], stated(None)
      (2.5, None)
    """
    if audit is None:
        return None
    owners = {name: {key: bound[key] for key in _FIGURES} for name, bound in audit["per_owner"].items()}
    copied = ("kind", "confidence", "ok", "threat_model", "method", "data")
    return {**{key: audit[key] for key in copied}, "per_owner": owners}


def words(audit: Mapping[str, Any] | None) -> str:
    """Return what a statement says of an audit in plain sentences; the owner whose bound comes closest is named.

    Examples:
      >>> words(None)
      'Not audited yet.'
      >>> bound = {"claim": 3.0, "lower_bound": 2.5, "ceiling": 9.0, "trials": 100}
      >>> words({"confidence": 0.99, "ok": True, "per_owner": {"all": bound}})[:72]
      'Audited without data: epsilon is at least 2.500 by 100 trials, where 3.0'
    """
    if audit is None:
        return NONE
    name, bound = max(audit["per_owner"].items(), key=lambda item: item[1]["lower_bound"] / (item[1]["claim"] or 1e-9))
    several = len(audit["per_owner"]) > 1
    closest = f" (owner {name!r}, whose bound comes closest of {len(audit['per_owner'])})" if several else ""
    verdict = (
        "No lower bound exceeds its claim."
        if audit["ok"]
        else "A LOWER BOUND EXCEEDS ITS CLAIM: the mechanism spends more than was promised."
    )
    return (
        f"Audited without data: epsilon is at least {shown_down(bound['lower_bound'])} by {bound['trials']:,} trials, "
        f"where {rounded_up(bound['claim'])} is claimed and {shown_down(bound['ceiling'])} is the most that so many "
        f"trials can show{closest}; confidence {audit['confidence']:g}. {verdict} The trials attack the plan's own "
        "sampler, step and noise, with every step seen; they say nothing about other code of this training."
    )


def problems(folder: Path, plan: Plan, *, blocked: bool) -> list[str]:
    """Return what is wrong with a folder's audit: a claim that is not the plan's, or a verdict that does not follow.

    The trials are not repeated. ``blocked`` says whether the ledger blocks the run.
    """
    try:
        audit = read(folder, plan.digest)
    except VerificationError as error:
        return [str(error)]
    if audit is None:
        return []
    for name, bound in audit["per_owner"].items():
        if not _of_plan(plan, name, bound["claim"]):
            return ["audit.json compares with another epsilon than the plan's."]
    if not _possible(audit, plan.delta):
        return ["audit.json holds figures that no audit of this plan can have."]
    exceeds = any(bound["lower_bound"] > bound["claim"] for bound in audit["per_owner"].values())
    if audit["ok"] == exceeds or audit["kind"] != "mechanism" or not audit["per_owner"]:
        return ["the verdict in audit.json does not follow from its bounds."]
    if exceeds and not blocked:
        return ["an audit certified more than was promised, and the ledger does not say that the run is blocked."]
    return []


def _of_plan(plan: Plan, name: str, claim: float) -> bool:
    """Return whether a claim is the plan's epsilon for this owner: the plan's own, or this owner's by itself.

    Those of many thousand owners are certified together, and a little above what each would be alone.
    """
    names = plan.facts.owner_names
    if name not in names:
        return False
    owner = names.index(name)
    planned = plan.epsilons[owner]
    if planned is not None and math.isclose(claim, planned, rel_tol=_SLACK):
        return True
    alone = plan.spent(plan.steps, owner)
    return alone is not None and math.isclose(claim, alone, rel_tol=_SLACK)


def _possible(audit: Mapping[str, Any], delta: float) -> bool:
    """Return whether an audit without data can have come to these figures."""
    return (
        0 < audit["confidence"] < 1
        and audit["delta"] == delta
        and audit.get("private") is False
        and all(
            bound["trials"] >= 1 and 0 <= bound["lower_bound"] <= bound["ceiling"] * (1 + _ROUNDED)
            for bound in audit["per_owner"].values()
        )
    )
