"""The index of docs/results: which method for data like mine, what the papers claim, and what all of it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import judging
from page_text import COMMAND, lined_up, listed, seconds

from evenhand.reporting.text import unmarked

VERDICTS = ("holds", "does not hold", "too small to matter", "not decided")
CLAIMS = (
    "How many declared claims of each study hold. Its page has each of them with its interval; "
    "[the five papers](papers.md) has all claims of a paper together, also those of later studies, and says what "
    "holds, what does not and under which conditions."
)
"""Before the table of claims."""


def index(
    tables: Sequence[Mapping[str, Any]], scripts: float = 0.0, missing: Sequence[str] = (), besides: Sequence[str] = ()
) -> str:
    """All experiments, and which method to take for data like mine.

    ``scripts`` is how many minutes the pages say that scripts wrote, ``besides`` those that leave features and tuning
    out of it; ``missing`` are experiments without a page.
    """
    minutes = sum(seconds(table)[0] + seconds(table)[1] for table in tables) / 60
    rows = [_like(table, at) for table in tables if judging.guides(table) for at in judging.promises(table)]
    asked = [f"[{t['study']['title']}]({t['experiment']}.md): {t['study']['question']}" for t in tables]
    others = [line for line, table in zip(asked, tables, strict=True) if not judging.guides(table)]
    head = ["data", "records", "smallest group", "model", "promise", "best overall", "best worst group"]
    return (
        "# Results\n\n"
        "The papers' experiments on real data at honest epsilon, every method tuned with the same grid unless its page "
        "says that nothing was tuned. The pages are written by one command from the runs; no figure is typed. "
        "What the five papers claim, and what of it holds: [one page](papers.md).\n\n"
        "## Which method for data like mine?\n\n"
        'Find the row that is most like your data; it links to its page. Methods after "or" are not distinguishable '
        "from the best by paired 95 % intervals, so take the simplest of them. `evenhand recommend` reads the same "
        "figures.\n\n"
        f"{lined_up(head, rows)}\n\n"
        f"{_others(others)}"
        f"## What the papers claim\n\n{_claims(tables)}\n\n"
        "## All of it again\n\n"
        f"```text\n{COMMAND} --all --data-dir FOLDER\n```\n\n"
        f"The comparisons in the table took {minutes:.0f} processor minutes with their tuning, the other pages, which "
        f"scripts of the same command write, {scripts:.0f} minutes on one core: together about "
        f"{(minutes + scripts) / 120:.1f} hours on two cores. {_unrun(missing, besides)}\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n:glob:\n\npapers\n*\n```\n"
    )


def _others(lines: Sequence[str]) -> str:
    """Studies of one method's parts or of a paper's own choices: they do not say which method to take."""
    return f"## One question each\n\n{listed(lines)}\n\n" if lines else ""


def _unrun(missing: Sequence[str], besides: Sequence[str]) -> str:
    said = [f"Not in these figures: features and tuning of {', '.join(besides)}."] if besides else []
    if missing:
        said.append(f"Not in these figures, since they have not been run for these pages: {', '.join(missing)}.")
    return " ".join(said) or "Nothing else is run by it."


def _claims(tables: Sequence[Mapping[str, Any]]) -> str:
    """Return how many claims of each study have which verdict, studies of one paper together."""
    counted = [(table, Counter(verdict(claim) for claim in table["claims"])) for table in tables if table["claims"]]
    if not counted:
        return "No claim was judged yet."
    named = [kind for kind in VERDICTS if any(counts[kind] for _, counts in counted)]
    rows = [
        [
            unmarked(_paper(table)),
            f"[{table['study']['title']}]({table['experiment']}.md)",
            *(str(counts[kind] or "") for kind in named),
        ]
        for table, counts in sorted(counted, key=lambda pair: _paper(pair[0]))
    ]
    return f"{CLAIMS}\n\n{lined_up(['paper', 'study', *named], rows)}"


def _paper(table: Mapping[str, Any]) -> str:
    """Return who wrote the paper of a study, without what of it was rerun; "none" is a study of ours."""
    return re.split(r"[,:(]", str(table["study"]["paper"]))[0].strip()


def verdict(claim: Mapping[str, Any]) -> str:
    """Return the verdict on a claim without its reason."""
    return next(kind for kind in VERDICTS if claim["verdict"].startswith(kind))


def _like(table: Mapping[str, Any], at: str) -> list[str]:
    setting, least = table["setting"], judging.smallest(table["setting"])
    share = "" if least is None else f"{least[0]}, {100 * least[1]:.3g} %"
    names = []
    worst = "worst_owner" if "budgets" in setting else "worst"
    for measure in ("accuracy", worst):
        found = judging.best(table, measure, at)
        names.append("" if found is None else " or ".join([found.method, *found.tied]))
    shown = [f"{setting['records']:,}", share, setting["model"], at, *names]
    return [f"[{unmarked(setting['data'])}]({table['experiment']}.md)", *map(unmarked, shown)]
