"""The privacy statement: what is promised to whom, what is not covered, and what it rests on. JSON and plain words.

Everything in it follows from the plan, the ledger and a few declared facts, so ``verify`` can build it again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from evenhand._numbers import rounded_up
from evenhand.accounting import accountant, owner_classes
from evenhand.runs import statement_files, statement_warnings
from evenhand.runs.audits import record

if TYPE_CHECKING:
    from evenhand.mechanism.make_plan import Plan
    from evenhand.runs.ledger import Reading
    from evenhand.types import Event

SCHEMA = 1
COVERS = ("the released model weights", "every intermediate checkpoint and private side answer of this run")
DOES_NOT_COVER = (
    "preprocessing, feature choice and vocabularies, unless they are public or charged",
    "metrics on evaluation data: those records are not protected by this statement",
    "stopping early, or choosing among models, by held-out curves: that choice depends on the held-out records",
    "choices made by raw training values: losses that a step returns, training metrics, files in private/",
    "other runs on the same data, tuning included: their epsilons add up; not counted are runs elsewhere, on files cut "
    "from the same source, and on arrays in another order, size or scale",
    "pre-training data of a model that was not initialised at random",
    "several records of one person, or copies of a record (oversampling): the unit is one record, and k of them are "
    "protected k times less or worse",
    "timing, memory and storage side channels, and files in private/",
)
_OF_RECORDS = next(text for text in DOES_NOT_COVER if text.startswith("several records"))
_OF_PERSONS = (
    "persons who stand under several names, and records of others that tell of a person: the unit is a person with all "
    "records under their name",
    "other runs on the same data whose unit is one record, or persons told apart in another way: they are in no total",
    "a change of one record of a person who stays: that is replacing a person, which costs more than adding one",
)
TRUST = (
    "the trainer sees the raw data; whoever receives the shared files is the adversary and may know all other records"
)
TUNED = "Its settings were chosen by trials scored on training records; no figure covers that choice."
UNDECLARED, DECLARED = "not declared: the whole plan counts", "declared independent of the data"
_WHOLE_PLAN = (
    "The figures are those of the whole plan: they hold also if values that the run released decided when to stop; if "
    "raw training values did, none hold."
)
_DECLARED = (
    "Declared by the trainer: the run ended before its plan did, for reasons that did not depend on the data in any "
    "way. The figures count the charged steps alone and hold only if that is true; else those of the whole plan hold, "
    "which are in plan.json."
)
_ESCAPED = (
    ("&", "&amp;"),
    ("\\", "&#92;"),
    ("<", "&lt;"),
    ("[", "\\["),
    ("`", "&#96;"),
    ("://", "&#58;//"),
    ("www.", "www&#46;"),
    ("WWW.", "WWW&#46;"),
    ("@", "&#64;"),
)
"""What could become markup, and how it is written, in this order: what stands in front of a mark cannot free it."""
EVERYONE = "every record in every step"
PROFILE_EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def build(
    plan: Plan,
    ledger: Reading,
    *,
    model: str | None,
    software: Mapping[str, str],
    groups: Mapping[str, Any],
    composition: Mapping[str, Any] | None,
    files: Mapping[str, str],
    audit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the statement as data, for the steps that the promise counts (see ``Reading.counted``).

    ``audit`` is that of the whole plan, as its folder has it.
    """
    spent = plan.spent_by_owner(ledger.counted)
    owners = owner_classes.rows(plan, [None] * len(spent) if ledger.blocked else spent)
    worst = max(owners, key=lambda row: math.inf if row["epsilon"] is None else row["epsilon"])
    body = {
        "schema": SCHEMA,
        "guarantee": {
            "level": "not established" if ledger.blocked and plan.certified else plan.guarantee,
            "epsilon": worst["epsilon"],
            "delta": plan.delta,
            "unit": plan.unit,
            "adjacency": plan.adjacency,
            **_profile(plan, ledger, plan.facts.owner_names.index(worst["name"])),
        },
        "owners": owners,
        "mechanism": {
            "method": plan.method,
            **({"packages": list(plan.packages)} if plan.packages else {}),
            "rule": dict(plan.rule),
            "sampling": EVERYONE if min(plan.rates) == 1.0 else statement_files.COINS,
            "expected_batch": plan.expected_batch,
            "steps_planned": plan.steps,
            "steps_charged": ledger.reserved,
            "steps_committed": ledger.committed,
            "steps_counted": ledger.counted,
            "stop": _stop(ledger),
            "noise_multiplier": _range(plan, [level.noise for level in plan.levels]),
            "clip_bound": _range(plan, [level.bound for level in plan.levels]),
            "noise": "Gaussian, AES-256-CTR keystream and Box-Muller in float64, on a power-of-two grid",
            "randomness": _randomness(ledger),
            "hardened": "sums and noise are rounded to a grid: hardened against float attacks, not immune",
            **_prior(plan),
        },
        "accounting": {"accountant": plan.accountant, **_composed(composition)},
        "covers": list(COVERS) if plan.certified and ledger.withdrawn is None and not ledger.blocked else [],
        "does_not_cover": [*_not_covered(plan), *map(statement_warnings.not_covered, ledger.forks)],
        "sharing": statement_files.of_run(plan, ledger, files),
        "public_inputs": _facts(plan),
        "trust_model": TRUST,
        "audit": record.stated(audit),
        "groups": dict(groups),
        "warnings": plan.warnings() + statement_warnings.of_run(plan, ledger, model),
        "plan": plan.digest,
        "ledger_head": ledger.charged_head,
        "model_sha256": model,
        "files": dict(files),
        "software": dict(software),
    }
    return {**body, "digest": digest(statement_files.packed(body))}


def digest(body: Mapping[str, Any]) -> str:
    """Return the hash of a statement in the form of its file, without its own digest: a changed byte shows."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def paragraphs(statement: Mapping[str, Any]) -> list[str]:
    """Return the statement in words. Epsilon never stands without unit, adjacency, delta and what is not covered."""
    guarantee, inputs = statement["guarantee"], statement["public_inputs"]
    unit, promised = unit_of(inputs), promised_to(inputs)
    files = statement_files.words(statement["sharing"]) if "sharing" in statement else []
    if guarantee["epsilon"] is None:
        return [promise(statement), *files]
    texts = [promise(statement)]
    owners = statement["owners"]
    if len(owners) > 1 or owners[0]["budget"] is not None:
        texts += [
            owner_classes.owner_words(row, guarantee["delta"], unit, promised)
            for row in owners[: owner_classes.OWNERS_SHOWN]
        ]
        texts += owner_classes.further_owners(owners)
        if len(owners) > owner_classes.OWNERS_SHOWN:
            texts.append(
                "; ".join(owner_classes.in_words(owner_classes.summary(owners))) + f" (delta {guarantee['delta']:g})."
            )
    mechanism = statement["mechanism"]
    source = f" of the package {' and '.join(mechanism['packages'])}" if mechanism.get("packages") else ""
    drawn = "all of them" if mechanism["sampling"] == EVERYONE else "by Poisson sampling"
    drawn += f", at most {inputs['person_cap']} records of each person in all" if "person_cap" in inputs else ""
    texts.append(
        f"Made by {mechanism['method']}{source} ({guarantee['level']}): {mechanism['steps_charged']} of "
        f"{mechanism['steps_planned']} planned steps are charged, about {mechanism['expected_batch']:g} {unit}s each, "
        f"{drawn}. Randomness: {mechanism['randomness']}."
    )
    texts += stop_words(mechanism) + prior_words(mechanism, unit)
    texts.append(runs_words(statement["accounting"], guarantee["delta"], promised))
    texts.append("Not covered: " + "; ".join(statement["does_not_cover"]) + ".")
    texts += features_words(statement["public_inputs"])
    texts += files
    texts += [f"Trust: {statement['trust_model']}.", public_counts(statement["public_inputs"])]
    texts.append(record.words(statement["audit"]))
    return texts


def _not_covered(plan: Plan) -> list[str]:
    """Return what the promise does not cover; several records of one person are covered where the unit is a person."""
    if plan.facts.promised == "record":
        return list(DOES_NOT_COVER)
    return [part for text in DOES_NOT_COVER for part in (_OF_PERSONS if text == _OF_RECORDS else (text,))]


def unit_of(inputs: Mapping[str, Any]) -> str:
    """Return whom the public counts of a statement count: "record" or "person"."""
    return "person" if "persons" in inputs and "person_cap" not in inputs else "record"


def promised_to(inputs: Mapping[str, Any]) -> str:
    """Return whom a statement with these public facts promises something: "record" or "person"."""
    return "person" if "persons" in inputs else "record"


def public_counts(inputs: Mapping[str, Any]) -> str:
    """Return a sentence that names the counts printed exactly, and what they tell who knows all other records.

    Examples:
      >>> public_counts({"records": 900, "owners": [["all", 900]], "expected_batch": 64.0})[:61]
      'Public, not protected: the number of records (900) and the ex'
    """
    owners, unit, cap = len(inputs["owners"]), unit_of(inputs), inputs.get("person_cap")
    one = promised_to(inputs)
    each = f", of the {unit}s of each of the {owners} owners," if owners > 1 else ""
    return (
        f"Public, not protected: the number of {unit}s ({inputs['records']}){each} and the expected batch "
        f"({inputs['expected_batch']:g}). The promise compares training with and without a {one} under the same "
        f"counts; who knows all other {one}s learns from these alone that one more was there"
        + (
            f", and with how many of these records, not what is in them. They are what is left of "
            f"{inputs['number_of_persons']} persons, also a public number, when each keeps at most {cap} records; each "
            "record is drawn by itself."
            if cap
            else ", not what is in it."
        )
        + (f" A person is all records with one value of {inputs['persons']!r}." if inputs.get("persons") else "")
    )


def features_words(inputs: Mapping[str, Any]) -> list[str]:
    """Return which public network made the inputs; nothing if none did.

    Examples:
      >>> features_words({"records": 9}), features_words({"features": "A network, trained on B"})[0][:53]
      ([], 'Inputs are features of a frozen network: A network, t')
    """
    if not inputs.get("features"):
        return []
    return [
        f"Inputs are features of a frozen network: {inputs['features']}. The promise does not cover the data that it "
        "was trained on."
    ]


def stop_words(mechanism: Mapping[str, Any]) -> list[str]:
    """Return what the figures of a run that stopped before its last step rest on; nothing for one that did not.

    Examples:
      >>> stop_words({"stop": None}), stop_words({"stop": DECLARED})[0][:32]
      ([], 'Declared by the trainer: the run')
    """
    return {UNDECLARED: [_WHOLE_PLAN], DECLARED: [_DECLARED]}.get(mechanism.get("stop") or "", [])


def prior_words(mechanism: Mapping[str, Any], unit: str = "record") -> list[str]:
    """Return a sentence on the counts that the run released beside its steps; nothing for a run without them.

    Examples:
      >>> prior_words({}), prior_words({"prior": {"counts_of": "labels", "noise_multiplier": 28.9}})[0][:49]
      ([], 'Counts of labels over all records are released at')
    """
    if (prior := mechanism.get("prior")) is None:
        return []
    over = "all records" if unit == "record" else "one record of each person"
    return [
        f"Counts of {prior['counts_of']} over {over} are released at most once, with noise multiplier "
        f"{prior['noise_multiplier']:.4g}; the ledger holds them, and the figures above contain what they cost."
    ]


def _prior(plan: Plan) -> dict[str, Any]:
    """Return the entry on released counts; without them there is none, and neither had earlier statements."""
    if plan.prior is None:
        return {}
    return {"prior": {"counts_of": plan.prior.kind, "noise_multiplier": plan.prior.noise}}


def _stop(ledger: Reading) -> str | None:
    if ledger.stopped:
        return DECLARED
    return UNDECLARED if ledger.reserved < ledger.steps else None


def markdown(statement: Mapping[str, Any]) -> str:
    """Return the statement as a Markdown page."""
    lines = ["# Privacy statement", "", *(f"{_plain(text)}\n" for text in paragraphs(statement))]
    lines += [f"**Warning:** {_plain(text)}\n" for text in statement["warnings"]]
    lines.append(
        f"Plan `{statement['plan'][:16]}`, ledger head `{statement['ledger_head'][:16]}`, "
        f"model `{(statement['model_sha256'] or 'not released')[:16]}`."
    )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return text in which no tag, entity, link, picture or code can come of a name or an address that anyone chose."""
    for mark, written in _ESCAPED:
        text = text.replace(mark, written)
    return text


def promise(statement: Mapping[str, Any]) -> str:
    """Return the guarantee in words, or a sentence that there is none."""
    guarantee = statement["guarantee"]
    if guarantee["level"] == "not private":
        return (
            "This model is NOT private: it was trained without clipping or noise, for comparison only. It may reveal "
            "its training records. Do not share it as a private model."
        )
    if guarantee["epsilon"] is None and statement_warnings.tells_blocked(statement["warnings"]):
        return (
            "No privacy guarantee holds for this run: it was stopped because records influence each other, or state "
            "was changed that no private step wrote, or an audit certified more than was promised. No epsilon is "
            "printed for that reason. Delete what it computed."
        )
    if guarantee["epsilon"] is None:
        return (
            f"No privacy guarantee is established for this model: its method {statement['mechanism']['method']!r} has "
            "no proof. No epsilon is printed for that reason."
        )
    guess = rounded_up(100 * guarantee["guess_rate_at_1_percent"], 1)
    person = promised_to(statement["public_inputs"]) == "person"
    change = (
        "one person is added or removed, with all of their records," if person else "one record is added or removed,"
    )
    return (
        f"If {change} the chance of any outcome changes by at most a factor "
        f"e^{rounded_up(guarantee['epsilon'])} (epsilon {rounded_up(guarantee['epsilon'])}, unit: {guarantee['unit']}, "
        f"adjacency: add/remove), except with probability delta {guarantee['delta']:g}. At 1 % false alarms a guess "
        f"whether a {'person' if person else 'record'} was in the data succeeds at most {guess} % of the time."
    )


def _profile(plan: Plan, ledger: Reading, owner: int) -> dict[str, Any]:
    if not plan.certified or ledger.blocked:
        return {"mu": None, "guess_rate_at_1_percent": None, "profile": []}
    mu, guess, deltas = _figures(tuple(plan.events_of_each(owner, ledger.counted)), plan.delta, plan.cap)
    pairs = zip(PROFILE_EPSILONS, deltas, strict=True)
    return {"mu": mu, "guess_rate_at_1_percent": guess, "profile": [list(pair) for pair in pairs]}


@lru_cache(maxsize=512)
def _figures(events: tuple[Event, ...], delta: float, cap: int) -> tuple[float, float, tuple[float, ...]]:
    """Return mu, guess rate and profile; cached, since a run that ends needs them several times at 0.1 seconds each."""
    composed = accountant.compose(events, cap=cap)
    return composed.mu(delta), composed.guess_rate(0.01), tuple(map(composed.delta, PROFILE_EPSILONS))


def _range(plan: Plan, values: Sequence[float]) -> list[float] | None:
    """Return the smallest and the largest value over the schedule; each owner class scales the bound."""
    return [min(values), max(values)] if plan.certified else None


def _composed(composition: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the count of runs on the same data as a statement gives it; all None if the trainer opted out."""
    if composition is None or composition["runs"] is None:
        return {"runs_composed": None, "uncounted_runs": None, "epsilon_all_runs": None, "tuning_counted": False}
    return {
        "runs_composed": composition["runs"],
        "uncounted_runs": composition["uncounted"],
        "epsilon_all_runs": max(composition["epsilons"].values(), default=None),
        "tuning_counted": not composition.get("tuned", False),
    }


def runs_words(accounting: Mapping[str, Any], delta: float, unit: str = "record") -> str:
    """Return one or two sentences on what other runs on the same data add; ``unit`` is whom this run promises it."""
    runs = accounting["runs_composed"]
    if runs is None:
        return "Other runs on the same data, tuning included, were NOT added up: the trainer chose not to count them."
    chosen = "" if accounting["tuning_counted"] else f" {TUNED}"
    if runs == 1:
        return f"This is the first run on these data that the trainer's machine has counted.{chosen}"
    total = rounded_up(accounting["epsilon_all_runs"])
    records = "of them promise nothing about single, whole records and are"
    persons = "of them promise something about records or other persons, or nothing, and are"
    without = records if unit == "record" else persons
    extra = f"; {accounting['uncounted_runs']} {without} in no total" if accounting["uncounted_runs"] else ""
    whose = "the others'" if extra else "their"
    return (
        f"The trainer's machine counts {runs} runs on these data{extra}. If all {whose} models are released, they "
        f"spend at most epsilon {total} together on any one {unit} at delta {delta:g} (add/remove).{chosen}"
    )


def _facts(plan: Plan) -> dict[str, Any]:
    """Return the public facts; the network behind the inputs only where there is one, as earlier statements have it."""
    facts = plan.facts
    network = {"features": facts.features} if facts.features else {}
    return {
        "records": facts.records,
        "owners": [list(pair) for pair in facts.owners],
        "groups": list(facts.groups),
        "labels": list(facts.labels),
        "inputs": facts.inputs,
        "read_off_the_data": list(facts.derived),
        "expected_batch": plan.expected_batch,
        **network,
        **({"persons": facts.told_apart} if facts.promised == "person" else {}),
        **({"person_cap": facts.person_cap, "number_of_persons": facts.persons} if facts.person_cap else {}),
    }


def _randomness(ledger: Reading) -> str:
    if statement_warnings.insecure(ledger):
        return "from a PUBLIC SEED (insecure_seed): whoever knows the seed can remove the noise"
    return "operating-system entropy, a new key for each start"
