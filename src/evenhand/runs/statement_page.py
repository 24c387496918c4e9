"""Write a privacy statement as one page to print and sign: A4 or Letter, one file, nothing loaded, every name inert.

The layout is in ``reporting/templates/statement.html.j2``; the words are those of ``runs.statement``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenhand._numbers import delta, promised, rounded_up, setting
from evenhand.accounting.owner_classes import OWNERS_SHOWN, further_owners, in_words, span, summary
from evenhand.reporting.page import Block, Bullets, Facts, Section, Words, document
from evenhand.reporting.text import clip
from evenhand.runs.audits import record
from evenhand.runs.statement import promise, promised_to, public_counts, runs_words, stop_words, unit_of

NAMES_SHOWN, NAME_LENGTH = 12, 60
STYLE = "statement.css"


def render_statement(statement: Mapping[str, Any]) -> str:
    """Return the page of one statement; it runs no script.

    Args:
        statement: the data of ``statement.json``, made by ``runs.statement.build``.
    """
    established = statement["guarantee"]["epsilon"] is not None
    return document(
        "statement.html.j2",
        f"Privacy statement {statement['digest'][:16]}",
        style=STYLE,
        script="",
        method=statement["mechanism"]["method"],
        records=statement["public_inputs"]["records"],
        units=unit_of(statement["public_inputs"]) + "s",
        established=established,
        figures=_figures(statement["guarantee"]) if established else {},
        promise=" ".join([promise(statement), *(stop_words(statement["mechanism"]) if established else [])]),
        warnings=list(map(_sentence, statement["warnings"])),
        owners=[_owner(row) for row in statement["owners"][:OWNERS_SHOWN]] if established else [],
        further=_further(statement["owners"]) if established else [],
        terms=f"at delta {delta(statement['guarantee']['delta'])}, {statement['guarantee']['adjacency']} "
        f"{statement['guarantee']['unit']}",
        sections=[*_made(statement), *_covered(statement)],
        hashes=_hashes(statement),
        software=", ".join(f"{name} {version}" for name, version in statement["software"].items()),
    )


def _figures(guarantee: Mapping[str, Any]) -> dict[str, str]:
    return {
        "epsilon": rounded_up(guarantee["epsilon"]),
        "delta": delta(guarantee["delta"]),
        "unit": guarantee["unit"],
        "adjacency": guarantee["adjacency"],
        "guarantee": guarantee["level"],
    }


def _owner(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one owner class."""
    return [
        clip(row["name"], NAME_LENGTH),
        str(row["records"]),
        promised(row["budget"], missing="nothing"),
        rounded_up(row["epsilon"]),
        f"{row['rate']:.3g}",
        span(row.get("bound")),
        span(row.get("noise_multiplier")),
    ]


def _further(owners: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on the owner classes beyond those listed; none if all are listed."""
    sentences = further_owners(owners)
    return [*sentences, "; ".join(in_words(summary(owners))) + "."] if sentences else []


def _counts(mechanism: Mapping[str, Any]) -> str:
    """Return a clause on the counts of labels that were released once; nothing without them."""
    prior = mechanism.get("prior")
    return "" if prior is None else f", {prior['noise_multiplier']:.4g} on counts of {prior['counts_of']}"


def _made(statement: Mapping[str, Any]) -> list[Section]:
    """Return how the model was made, from which public inputs, and whom one must trust."""
    mechanism, inputs = statement["mechanism"], statement["public_inputs"]
    established = statement["guarantee"]["epsilon"] is not None
    settings = ", ".join(f"{key} {value}" for key, value in mechanism["rule"]["settings"].items())
    facts = {
        "Rule": mechanism["rule"]["name"] + (f" ({settings})" if settings else ""),
        "Steps": f"{mechanism['steps_charged']} charged of {mechanism['steps_planned']} planned, "
        f"about {mechanism['expected_batch']:g} {unit_of(inputs)}s each",
        "Sampling": mechanism["sampling"],
        **({"Package": ", ".join(mechanism["packages"])} if mechanism.get("packages") else {}),
    }
    if established:
        facts |= {
            "Noise": f"{setting(*mechanism['noise_multiplier'])} times the clip bound "
            f"{setting(*mechanism['clip_bound'])}{_counts(mechanism)}. {mechanism['noise']}",
            "Randomness": mechanism["randomness"],
            "Floats": mechanism["hardened"],
            "Accountant": statement["accounting"]["accountant"],
        }
    runs = (
        runs_words(statement["accounting"], statement["guarantee"]["delta"], promised_to(inputs))
        if established
        else "This run has no established guarantee and is in no total."
    )
    public: list[Block] = [Facts(_inputs(inputs)), *([Words(public_counts(inputs))] if established else [])]
    audit = record.words(statement["audit"])
    return [
        Section("How the model was made", [Facts(facts)]),
        Section("Other runs on the same data", [Words(runs)]),
        Section("Public inputs: not protected", public),
        Section("Trust and audit", [Words(f"{_sentence(statement['trust_model'])} {audit}")]),
    ]


def _covered(statement: Mapping[str, Any]) -> list[Section]:
    """Return what the promise covers, what it does not, and which files may be shared."""
    sharing = statement["sharing"]
    files: list[Block] = [
        Words(f"May be shared: {', '.join(sharing['may_be_shared'])}."),
        Words(f"Must not be shared: {', '.join(sharing['must_not_be_shared'])}."),
    ]
    covered = [Section("Covered", [_bullets(statement["covers"])])] if statement["covers"] else []
    return [
        *covered,
        Section("Not covered", [_bullets(statement["does_not_cover"])]),
        Section("Files of the run folder", files),
        Section("Intermediate checkpoints", [Words(_sentence(sharing["intermediate_checkpoints"]))]),
    ]


def _inputs(inputs: Mapping[str, Any]) -> dict[str, str]:
    derived = ", ".join(inputs["read_off_the_data"])
    return {
        "Records": f"{inputs['records']} in {len(inputs['owners'])} owner class(es)",
        "Groups": _names(inputs["groups"]),
        "Labels": _names(inputs["labels"]),
        "Inputs": inputs["inputs"] or "not declared",
        **({"Persons": _persons(inputs)} if "person_cap" in inputs else {}),
        **({"Features of": inputs["features"]} if inputs.get("features") else {}),
        "Read off the data": f"{derived}: declare them if they are not public" if derived else "nothing",
    }


def _persons(inputs: Mapping[str, Any]) -> str:
    return f"{inputs['number_of_persons']}, at most {inputs['person_cap']} records of each"


def _names(names: Sequence[str]) -> str:
    if not names:
        return "none declared"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(clip(name, NAME_LENGTH) for name in names[:NAMES_SHOWN]) + more


def _hashes(statement: Mapping[str, Any]) -> dict[str, str]:
    return {
        "This statement": statement["digest"],
        "Plan": statement["plan"],
        "Ledger head": statement["ledger_head"],
        "Model": statement["model_sha256"] or "not released",
        **statement["files"],
    }


def _bullets(texts: Sequence[str]) -> Bullets:
    return Bullets([Words(_sentence(text)) for text in texts])


def _sentence(text: str) -> str:
    """Return the text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
