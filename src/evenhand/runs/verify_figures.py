"""Check that figures in a run folder are of the model that lies in it: metrics, statement, card, report.

Each evaluation names the weights it measured by a digest that follows from the model's file (see ``weights_digest``);
card and report name that file. Files of an earlier version name neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand import untrusted
from evenhand.errors import VerificationError
from evenhand.runs import weights_digest
from evenhand.runs.folder import Folder
from evenhand.runs.ledger import Reading

FACT, SHOWN = "Model file", 16
"""Under what name card and report give the digest of the model's file, and how much of it."""
_PAGES = ("report.html", "model-card.md")
_NAMING = 2
"""Format of run folders from which on evaluations and pages name what they are about."""


@dataclass(frozen=True)
class Findings:
    """Problems: files that are not about the released model. Notes: what cannot be told."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_figures(folder: Folder, reading: Reading) -> Findings:
    """Compare the figures of a folder that has released a model with that model; only the folder is read."""
    digest = untrusted.digest(folder.model_file)
    if digest is None or reading.withdrawn is not None:
        return Findings()
    try:
        findings = (_metrics(folder, reading), *(_page(folder.path / name, digest, reading) for name in _PAGES))
    except VerificationError as error:
        return Findings((str(error),))
    problems = tuple(problem for part in findings for problem in part.problems)
    return Findings(problems, tuple(note for part in findings for note in part.notes))


def _metrics(folder: Folder, reading: Reading) -> Findings:
    lines = folder.metrics()
    unnamed = [line for line in lines if not isinstance(line.get("weights"), str)]
    if unnamed and reading.format >= _NAMING:
        return Findings(("a line of metrics.jsonl does not say which weights it measured: it was edited.",))
    if not lines or lines[-1] in unnamed:
        early = "an earlier version wrote metrics.jsonl: whether its figures are of the released model is not checked."
        return Findings(notes=(early,) if lines else ())
    digest = weights_digest.digest_of_file(folder.model_file)
    about = [line for line in lines if line.get("weights") == digest]
    said = _read_statement(folder)
    if said is None:
        return Findings()
    if not (said["groups"] or about):
        text = "the released model was not evaluated: metrics.jsonl is about weights before the last ones."
        return Findings(notes=(text,))
    if not about:
        return Findings(
            ("the statement's figures are not of model.safetensors: no line of metrics.jsonl measured it.",)
        )
    if said["groups"] and said["groups"] != about[-1]["groups"]:
        return Findings(("the statement's figures are not those that metrics.jsonl has of model.safetensors.",))
    if said["ledger_head"] == reading.charged_head and lines[-1]["weights"] != digest:
        return Findings(("the last line of metrics.jsonl measured other weights than those in model.safetensors.",))
    return Findings()


def _read_statement(folder: Folder) -> Mapping[str, Any] | None:
    """Return the parts of a statement that are compared here; None if there is none."""
    if not folder.statement_file.exists():
        return None
    said: Mapping[str, Any] = untrusted.read_json(folder.statement_file, {"groups": dict, "ledger_head": str})
    return said


def _page(page: Path, digest: str, reading: Reading) -> Findings:
    """Check that a page names the model's file as it is now, which one written before its release does not.

    A page that is not the recorded one is another problem, found elsewhere.
    """
    recorded = reading.files().get(page.name)
    if not page.exists() or recorded not in (None, untrusted.digest(page)):
        return Findings()
    text = untrusted.read_bytes(page)
    if FACT.encode() not in text and reading.format < _NAMING:
        return Findings(notes=(f"an earlier version wrote {page.name}: of which model it speaks is not checked.",))
    if digest[:SHOWN].encode() in text:
        return Findings()
    again = "evenhand report RUN --card RUN/model-card.md"
    return Findings((f"{page.name} does not speak of model.safetensors as it is now: write it again with `{again}`.",))
