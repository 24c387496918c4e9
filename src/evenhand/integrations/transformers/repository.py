"""The folder that a model is shared by: weights in the library's own format, tokenizer, and a card that says the rest.

Nothing in it is pushed by itself. The run folder, whose ``private`` part must not be shared, lies beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from evenhand import untrusted
from evenhand._numbers import delta, rounded_up
from evenhand.errors import UsageError
from evenhand.runs.folder import write_durably
from evenhand.training.run import Run

CARD = "README.md"
BEGIN, END = "<!-- evenhand: begin -->", "<!-- evenhand: end -->"
_SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
_NEW = "---\nlibrary_name: transformers\ntags:\n- differential-privacy\n- evenhand\n---\n\n# {title}\n\n"
_HEADING = re.compile(r"^(?=#)", re.MULTILINE)


def save(folder: Path, model: nn.Module, processing_class: Any, run: Run) -> None:
    """Write model or adapter, what processes its inputs, and the card's section into ``folder``.

    Raises:
      UsageError: the model cannot save itself.
    """
    saving: Any = getattr(model, "save_pretrained", None)
    if not callable(saving):
        raise UsageError(
            f"{type(model).__name__} has no save_pretrained; its weights are in {run.folder.model_file}, and "
            "evenhand.load(RUN, model=...) reads them."
        )
    adapter = hasattr(model, "peft_config")
    saving(str(folder), **({"save_embedding_layers": _trains_embeddings(model)} if adapter else {}))
    if processing_class is not None:
        processing_class.save_pretrained(str(folder))
    write_card(folder, run)


def write_card(folder: Path, run: Run) -> Path:
    """Write the section on this run into the folder's card, in place of an earlier one; return the card's path."""
    card = folder / CARD
    before = untrusted.read_bytes(card).decode("utf-8", "replace") if card.exists() else ""
    write_durably(card, merged(before, section(run), title=folder.name).encode())
    return card


def merged(card: str, text: str, title: str = "Model") -> str:
    """Return a card with the section ``text``: in place of the one it has, else at its end.

    Examples:
      >>> once = merged("# Mine", "first")
      >>> merged(once, "second").split()
      ['#', 'Mine', '<!--', 'evenhand:', 'begin', '-->', 'second', '<!--', 'evenhand:', 'end', '-->']
    """
    block = f"{BEGIN}\n{text.strip()}\n{END}"
    if _SECTION.search(card):
        return _SECTION.sub(lambda _: block, card, count=1)
    return f"{card.rstrip() + chr(10) * 2 if card.strip() else _NEW.format(title=title)}{block}\n"


def section(run: Run) -> str:
    """Return the run's card one level down, opened by what is promised to whom."""
    statement = run.privacy
    spent = "none is established" if statement.epsilon is None else rounded_up(statement.epsilon)
    promise = (
        f"Method {run.plan.method}; epsilon {spent}, delta {delta(run.plan.delta)}; unit: {run.plan.unit}. "
        "`evenhand verify RUN` checks these figures in the run folder, which is not part of this repository."
    )
    heading, rest = run.card().split("\n", 1)
    return f"#{heading}\n\n{promise}\n{_HEADING.sub('#', rest)}"


def _trains_embeddings(model: nn.Module) -> bool:
    """Return whether embeddings are trained, so that PEFT need not ask a hub whether they changed."""
    inner: Any = getattr(model, "get_input_embeddings", None)
    embeddings = inner() if callable(inner) else None
    return embeddings is not None and any(parameter.requires_grad for parameter in embeddings.parameters())
