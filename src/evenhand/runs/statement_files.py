"""Statement parts about files: the JSON schema (draft 2020-12), what may be shared, tables and columns of owners."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from evenhand import untrusted
from evenhand.accounting import owner_classes
from evenhand.errors import VerificationError
from evenhand.reporting.text import cell
from evenhand.runs import statement_warnings
from evenhand.runs.audits import record

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan
    from evenhand.runs.ledger import Reading


def text() -> str:
    """Return the JSON schema of statement.json as it is published."""
    return resources.files("evenhand.runs").joinpath("statement.schema.json").read_text(encoding="utf-8")


def schema() -> dict[str, Any]:
    """Return the schema as data, for any validator.

    Examples:
      >>> schema()["properties"]["guarantee"]["properties"]["unit"]["enum"]
      ['one record', 'person']
    """
    document: dict[str, Any] = json.loads(text())
    return document


DECISION = "decision.json"
"""How a run's outputs become answers; only a run with a goal, or with counts of labels, has one."""
FROM_NOISE = (
    "model.safetensors",
    "model-last.safetensors",
    "metrics.jsonl",
    "model-card.md",
    "report.html",
    "owners.csv",
    "decision.json",
)
"""Shareable because the noise stands between them and the training records; without it they are not."""
FROM_FACTS = (
    "plan.json",
    "ledger.jsonl",
    "statement.json",
    "statement.md",
    "composition.json",
    "preprocessing.json",
    "signature.json",
    record.FILE,
)
"""Made of public facts, planned numbers and hashes."""
KEPT = ("private/", "config.toml", "env.json")
"""Optimizer state and raw training losses; the names of your files; your software."""

_FREE = (
    "no extra cost: the accounting takes the noisy gradient of every step as published, and the weights after any step "
    "follow from those and from the first weights, so the same epsilon covers every intermediate checkpoint of this run"
)
_KEPT = (
    "checkpoints in private/ are not for sharing: they hold optimizer state, and raw training losses lie beside them"
)
_UNLESS = ", as long as what changed the weights outside of private steps used no data"
_DELETED = (
    "must be deleted: this run was withdrawn, and another one goes on from its beginning; whoever sees what both "
    "computed after that sees both spends"
)
_LIKE = {
    True: "not protected from whoever knows the seed, like the final model",
    False: "not covered by any guarantee, like the final model",
}


def sharing(
    *,
    certified: bool,
    insecure: bool = False,
    foreign: bool = False,
    withdrawn: bool = False,
    decided: bool = False,
    audited: bool = False,
) -> dict[str, Any]:
    """Return which files may be shared and which must not, for a run with an established guarantee or without one.

    Args:
      certified: a finite epsilon is established.
      insecure: the noise came from a public seed, so that it hides nothing from who knows the seed.
      foreign: the weights were also changed outside of private steps.
      withdrawn: budgets were lowered, and another run goes on from an earlier checkpoint of this one.
      decided: the run has a decision of its own; one without it names no such file.
      audited: likewise, an audit.

    Examples:
      >>> sharing(certified=True)["may_be_shared"][0]
      'model.safetensors'
      >>> "model.safetensors" in sharing(certified=False)["must_not_be_shared"]
      True
      >>> "metrics.jsonl" in sharing(certified=True, withdrawn=True)["must_not_be_shared"]
      True
    """
    noisy = FROM_NOISE if decided else tuple(name for name in FROM_NOISE if name != DECISION)
    facts = FROM_FACTS if audited else tuple(name for name in FROM_FACTS if name != record.FILE)
    protected = certified and not insecure and not withdrawn
    cost = _FREE + (_UNLESS if foreign else "") if protected else _DELETED if withdrawn else _LIKE[certified]
    return {
        "may_be_shared": [*(noisy if protected else ()), *facts],
        "must_not_be_shared": [*(() if protected else noisy), *KEPT],
        "intermediate_checkpoints": f"{cost}; {_KEPT}",
    }


def of_run(plan: Plan, ledger: Reading, files: Collection[str] = ()) -> dict[str, Any]:
    """Return ``sharing`` for a run with this plan and ledger, which has these files."""
    return sharing(
        certified=plan.certified and not ledger.blocked,
        insecure=statement_warnings.insecure(ledger),
        foreign=bool(ledger.foreign),
        withdrawn=ledger.withdrawn is not None,
        decided=DECISION in files,
        audited=record.FILE in files,
    )


def words(permissions: Mapping[str, Any]) -> list[str]:
    """Return the result of ``sharing`` in words: one paragraph on files and one on checkpoints.

    Examples:
      >>> words(sharing(certified=True))[1][:44]
      'Intermediate checkpoints: no extra cost: the'
    """
    withdrawn = permissions["intermediate_checkpoints"].startswith(_DELETED)
    where = "" if withdrawn else " where the training records need protection"
    shareable, others = (", ".join(permissions[key]) for key in ("may_be_shared", "must_not_be_shared"))
    return [
        f"May be shared: {shareable} (metrics, card and report describe the evaluation data, "
        f"which this statement does not cover). Must not be shared: {others}."
        if {*FROM_NOISE} - {DECISION} <= set(permissions["may_be_shared"])
        else f"May be shared: {shareable}. Must not be shared{where}: {others}.",
        f"Intermediate checkpoints: {permissions['intermediate_checkpoints']}.",
    ]


LISTED = 100
"""Owner classes that a command prints as JSON; with more it names the file that has them all."""
FILE = "owners.csv"


def recalls(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the share of each owner's held-out records that are predicted correctly; None if their owners are unknown.

    Examples:
      >>> recalls([{"name": "a"}, {"name": "b"}], {"accuracy": 0.9, "owners": {"a": 0.8}})
      {'a': 0.8, 'b': None}
      >>> recalls([{"name": "all"}], {"accuracy": 0.9})
      {'all': 0.9}
    """
    known = last.get("owners") or ({owners[0]["name"]: last.get("accuracy")} if len(owners) == 1 else {})
    return {row["name"]: known.get(row["name"]) for row in owners}


def as_json(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any], table: str | None = None) -> dict[str, Any]:
    """Return ``{"owners": {name: {"epsilon", "budget", "records", "recall"}}}``.

    Of more than ``LISTED`` owners return a summary, and where the table is.
    """
    if len(owners) > LISTED:
        return {"owners": None, "owners_summary": owner_classes.summary(owners), "owners_table": table}
    recall_by_owner = recalls(owners, last)
    figures = ("epsilon", "budget", "records", "rate", "bound", "noise_multiplier")
    return {
        "owners": {
            row["name"]: {**{key: row[key] for key in figures}, "recall": recall_by_owner[row["name"]]}
            for row in owners
        }
    }


def as_csv(owners: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> str:
    """Return a line per owner class; a name that a spreadsheet would run as a formula gets an apostrophe."""
    recall_by_owner, text = recalls(owners, last), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    pairs = ("clip_bound_least", "clip_bound_most", "noise_multiplier_least", "noise_multiplier_most")
    writer.writerow(["owner", "records", "promised_epsilon", "spent_epsilon", "rate", *pairs, "recall"])
    for row in owners:
        ends = [*(row["bound"] or (None, None)), *(row["noise_multiplier"] or (None, None))]
        values = [row["records"], row["budget"], row["epsilon"], row["rate"], *ends, recall_by_owner[row["name"]]]
        writer.writerow([cell(row["name"]), *("" if value is None else value for value in values)])
    return text.getvalue()


COINS, COINS_BEFORE = "Poisson, 64-bit coins", "Poisson, 53-bit coins"
"""How draws are described, and how they were in statements of earlier versions."""
LISTED = 1000
"""Classes up to which each stands for itself, with the name of every figure."""
_OWN = ("name", "records")
_SHAPE: untrusted.Shape = {"names": [str], "records": [int], "kind": [int], "kinds": {str: list}}


def packed(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the statement in the form of its file: with many owner classes as columns, equal figures once.

    With few classes, or already in that form, it is the statement itself.

    Examples:
      >>> row = {"records": 2, "epsilon": 1.0}
      >>> rows = [{"name": str(place), **row} for place in range(LISTED + 1)]
      >>> form = packed({"owners": rows})
      >>> form["owners"]["kinds"], unpacked(form)["owners"] == rows, packed({"owners": rows[:3]})["owners"] == rows[:3]
      ({'epsilon': [1.0]}, True, True)
    """
    rows = statement.get("owners")
    if not isinstance(rows, list) or len(rows) <= LISTED:
        return statement
    figures = [key for key in rows[0] if key not in _OWN]
    places: dict[str, int] = {}
    kinds: list[Mapping[str, Any]] = []
    kind = []
    for row in rows:
        text = json.dumps([row[key] for key in figures])
        if text not in places:
            places[text] = len(kinds)
            kinds.append(row)
        kind.append(places[text])
    table = {
        "names": [row["name"] for row in rows],
        "records": [row["records"] for row in rows],
        "kind": kind,
        "kinds": {key: [row[key] for row in kinds] for key in figures},
    }
    return {**statement, "owners": table}


def unpacked(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement with one row per class, whatever its form, in the words of today.

    Raises:
      VerificationError: the columns do not fit each other.
    """
    written, table, mechanism = dict(written), written["owners"], written.get("mechanism")
    if isinstance(mechanism, dict) and mechanism.get("sampling") == COINS_BEFORE:
        written["mechanism"] = {**mechanism, "sampling": COINS}
    if isinstance(table, list):
        return written
    if not untrusted.fits(table, _SHAPE):
        raise VerificationError("statement.json cannot be read: it was damaged or edited.")
    columns, count = table["kinds"], len(table["names"])
    size = min((len(column) for column in columns.values()), default=0)
    whole = all(len(column) == size for column in columns.values())
    if not whole or not count == len(table["records"]) == len(table["kind"]) or count <= LISTED:
        raise VerificationError("statement.json cannot be read: its columns of owners have different lengths.")
    if not all(0 <= place < size for place in table["kind"]):
        raise VerificationError("statement.json cannot be read: a class of owners has no figures.")
    kinds = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows = [
        {"name": name, "records": records, **kinds[place]}
        for name, records, place in zip(table["names"], table["records"], table["kind"], strict=True)
    ]
    return {**written, "owners": rows}


def lines(form: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with thousands of classes: one line for each part of the statement."""
    parts = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in form.items())
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()
