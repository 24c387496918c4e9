"""``evenhand init``: declare what is publicly known about a file, from its header alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from evenhand import durable
from evenhand.cli import options
from evenhand.errors import UsageError
from evenhand.terminal import say

T = TypeVar("T")
NAME = "init"
EXAMPLE = "evenhand init people.csv --label ill --labels no,yes --number age=0:120 --category sex=f,m --groups sex"


@dataclass(frozen=True)
class Answers:
    """Declarations, made by flags or by answering."""

    label: str | None = None
    labels: tuple[str, ...] = ()
    ordered: bool = False
    groups: str | None = None
    owners: str | None = None
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    budgets: dict[str, float] = field(default_factory=dict)


def run(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, Parquet, NPZ, or a folder of pictures.")],
    label: Annotated[
        str | None,
        typer.Option(
            "--label", help="The column to predict (a real number: give its --number); several labels: a,b,c."
        ),
    ] = None,
    labels: Annotated[str | None, typer.Option("--labels", help="Its values, e.g. no,yes.")] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="The labels have an order, given from the lowest to the highest.")
    ] = False,
    groups: Annotated[
        str | None, typer.Option("--groups", help="Column whose values are reported on; race,sex for intersections.")
    ] = None,
    owners: Annotated[str | None, typer.Option("--owners", help="Column of budget classes.")] = None,
    budgets: Annotated[str | None, typer.Option("--budgets", help="Epsilon per owner, e.g. strict=1,open=8.")] = None,
    number: Annotated[
        list[str] | None, typer.Option("--number", metavar="COLUMN=LOW:HIGH", help="Public bounds; repeat.")
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option("--category", metavar="COLUMN=A,B,*", help="Public values; * takes all others; repeat."),
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option("--missing", metavar="COLUMN=CHOICE", help="middle or flag (number), category; else refused."),
    ] = None,
    missing_token: Annotated[
        list[str] | None, typer.Option("--missing-token", help="Text that means 'no value', besides nothing.")
    ] = None,
    drop: Annotated[str | None, typer.Option("--drop", help="Columns to leave out, e.g. id,name.")] = None,
    only_declared: Annotated[
        bool, typer.Option("--only-declared", help="Leave out every column that is not declared by a flag or answer.")
    ] = False,
    size: Annotated[str | None, typer.Option("--size", help="Of pictures: WIDTHxHEIGHT.")] = None,
    grey: Annotated[bool, typer.Option("--grey", help="Pictures have one channel.")] = False,
    delimiter: Annotated[str, typer.Option("--delimiter", help="Between the cells of a CSV file.")] = ",",
    named: Annotated[
        bool, typer.Option("--header", help="The first line names the columns, whatever it looks like: print names.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Default: FILE with .toml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the TOML file.")] = False,
    json: options.Json = False,
) -> None:
    """Write a commented TOML file for `evenhand train`. Only the first line is read, and refused if it is a record.

    In a terminal it asks for what the flags leave open.
    """
    from evenhand.data.own_data import header
    from evenhand.data.tables import believed, refuse_record

    target = out or source.with_name(source.stem + ".toml")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already: pass --force to overwrite it, or another --out.")
    columns = header(source, delimiter=delimiter)
    answers = Answers(
        label=label,
        labels=_listed(labels),
        ordered=ordered,
        groups=groups,
        owners=owners,
        numbers={name: _bounds(value) for name, value in _pairs(number, "--number", "age=0:120").items()},
        categories={name: _listed(value) for name, value in _pairs(category, "--category", "sex=f,m").items()},
        missing=_pairs(missing, "--missing", "age=middle"),
        tokens=tuple(missing_token or ()),
        dropped=_listed(drop),
        budgets=options.pairs(budgets, "--budgets") if budgets is not None else {},
    )
    asking = sys.stdin.isatty() and not json and not source.is_dir()
    told = named or source.is_dir() or (asking and _confirmed(source))
    known = told or believed(columns, _declared(answers))
    if not known:
        refuse_record(columns)
    _check(answers, columns, known)
    if source.is_dir():
        text = _pictures(source, target, answers, size, grey)
        left: list[str] = []
    else:
        if asking:
            answers = _asked(answers, columns, only_declared)
            _check(answers, columns, known)
        if only_declared:
            undeclared = [name for name in _features(answers, columns) if not _known(answers, name)]
            answers = replace(answers, dropped=(*answers.dropped, *undeclared))
        left = [name for name in _features(answers, columns) if not _known(answers, name)]
        text = _table(source, target, answers, columns, delimiter)
    try:
        durable.clean(target.parent)
        durable.write(target, text.encode())
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror}). Choose another --out.") from None
    numbers = [columns.index(name) + 1 for name in left]
    listed = ", ".join(left) if told else f"{len(left)} of the {len(columns)} columns"
    todo = f"Declare in it: {listed}. Then" if left else "Look at it, then"
    options.emit(
        {"config": str(target), "columns": len(columns), "undeclared": numbers},
        f"{target} written from the header of {source.name}; no value was read.\n{todo}: {_command(target, answers)}",
        json,
    )


def _asked(answers: Answers, columns: Sequence[str], only_declared: bool = False) -> Answers:
    """Ask for what is open, again where an answer cannot be used. An empty answer leaves it open."""

    def column(reply: str) -> str | None:
        from evenhand.data.tables import no_column

        if reply and reply not in columns:
            raise no_column(reply, columns, columns)
        return reply or None

    if answers.label is None:
        question = f"Columns: {', '.join(columns)}\nWhich one is to be predicted?"
        answers = replace(answers, label=_ask(question, column))
    if not answers.labels and answers.label and answers.label not in answers.numbers:
        answers = replace(answers, labels=_ask(f"Values of {answers.label}, e.g. no,yes", _labels))
    if answers.groups is None:
        answers = replace(answers, groups=_ask("Column of groups to report on (empty: none)", column))
    for name in [] if only_declared else _features(answers, columns):
        if not _known(answers, name):
            question = f"{name}: public bounds LOW:HIGH, or values a,b,c (* for all others), or - to leave it out"
            answers = _ask(question, partial(_with_column, answers, name))
    return answers


def _with_column(answers: Answers, name: str, reply: str) -> Answers:
    """Return the answers with what a reply declares about one column; raise if it cannot be used."""
    if reply == "-":
        return replace(answers, dropped=(*answers.dropped, name))
    if "," in reply or "*" in reply:
        answers = replace(answers, categories={**answers.categories, name: _listed(reply)})
    elif reply:
        answers = replace(answers, numbers={**answers.numbers, name: _bounds(reply)})
    _column(answers, name)
    return answers


def _labels(reply: str) -> tuple[str, ...]:
    names = _listed(reply)
    if reply and (len(names) < 2 or len(set(names)) != len(names)):
        raise UsageError("Type at least two different values, separated by commas: no,yes.")
    return names


def _ask(question: str, read: Callable[[str], T]) -> T:
    """Ask until the reply can be read; the reason why one cannot is printed. The end of the input ends the program."""
    while True:
        reply = str(typer.prompt(question, default="", show_default=False, err=True)).strip()
        try:
            return read(reply)
        except UsageError as error:
            say(f"{error} Please answer again.")


def _confirmed(source: Path) -> bool:
    """Ask whether the first line may be printed. Without a header it is a record."""
    from evenhand.data.tables import HINT

    def answer(reply: str) -> bool:
        if reply.lower() not in _ANSWERS:
            raise UsageError("Type yes or no.")
        return _ANSWERS[reply.lower()]

    if _ask(f"Does the first line of {source.name} name its columns? It is printed then. (yes/no)", answer):
        return True
    raise UsageError(f"{HINT}.")


_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "": False}


def _declared(answers: Answers) -> list[str]:
    """Return every column that was named."""
    several = [*_columns(answers.label), *_columns(answers.groups)]
    named = [*several, answers.owners, *answers.dropped, *answers.missing]
    return [name for name in [*named, *answers.numbers, *answers.categories] if name is not None]


def _columns(text: str | None) -> tuple[str, ...]:
    """Return the columns that ``race,sex`` names."""
    return _listed(text)


def _check(answers: Answers, columns: Sequence[str], known: bool) -> None:
    """Raise if a column that was named does not exist.

    The message names the other columns only where they are ``known`` to be names.
    """
    from evenhand.data.tables import no_column

    for name in _declared(answers):
        if name not in columns:
            raise no_column(name, columns, columns if known else ())


def _features(answers: Answers, columns: Sequence[str]) -> list[str]:
    labels = _columns(answers.label)
    return [name for name in columns if name not in labels and name not in answers.dropped]


def _known(answers: Answers, name: str) -> bool:
    return name in answers.numbers or name in answers.categories or (name == answers.owners and bool(answers.budgets))


def _table(source: Path, target: Path, answers: Answers, columns: Sequence[str], delimiter: str) -> str:
    from evenhand.training.config import literal

    lines = _head(source, target, answers, delimiter)
    if answers.tokens:
        lines.append(f"missing_tokens = {literal(['', *answers.tokens])}   # cells that mean 'no value'")
    lines += _training()
    if answers.budgets:
        lines += ["", "[budgets]                  # epsilon of each owner, instead of --epsilon"]
        lines += [f"{_key(name)} = {value:g}" for name, value in answers.budgets.items()]
    lines += [
        "",
        "# What is publicly known about each column: bounds and values that were fixed WITHOUT looking at the data,",
        "# since looking costs privacy. Numbers are clipped to [low, high] and scaled to [-1, 1]; each value of a",
        "# category becomes a feature of 0 or 1. A column without a table is left out"
        + (f": {', '.join(answers.dropped)}." if answers.dropped else "."),
    ]
    bounded = [answers.label] if answers.label in answers.numbers and not answers.labels else []
    for name in [*bounded, *_features(answers, columns)]:
        lines += ["", *_column(answers, str(name))]
    return "\n".join(lines) + "\n"


def _column(answers: Answers, name: str) -> list[str]:
    from evenhand.data.columns import declared
    from evenhand.training.config import literal

    lines, missing = [f"[columns.{_key(name)}]"], answers.missing.get(name, "refuse")
    if name in answers.numbers:
        low, high = answers.numbers[name]
        declared(name, {"kind": "number", "low": low, "high": high, "missing": missing})
        lines += ['kind = "number"', f"low = {literal(low)}", f"high = {literal(high)}"]
        choices = '"refuse", "middle" (of the bounds) or "flag" (middle, and a feature that says so)'
    elif _known(answers, name):
        values = answers.categories.get(name) or tuple(answers.budgets)
        listed = [value for value in values if value != "*"]
        declared(name, {"kind": "category", "values": listed, "missing": missing})
        lines += ['kind = "category"', f"values = {literal(listed)}"]
        lines += ['other = "other"   # every value that is not listed'] if "*" in values else []
        lines += ["feature = false   # the model does not see it"] if name == answers.owners else []
        choices = '"refuse" or "category" (one of its own)'
    else:
        return [
            *lines,
            '# kind = "number"        # declare it: bounds',
            "# low = 0",
            "# high = 100",
            '# kind = "category"      # or values',
            '# values = ["a", "b"]',
            '# other = "other"        # takes every other value; without it they are refused',
        ]
    return [*lines, f"missing = {literal(missing)}   # {choices}"]


def _pictures(source: Path, target: Path, answers: Answers, size: str | None, grey: bool) -> str:
    from evenhand.data import own_data

    width, times, height = (size or "").partition("x")
    if not times or not (width.isdigit() and height.isdigit()):
        raise UsageError("Pictures need their size declared: --size WIDTHxHEIGHT, for example --size 32x32.")
    declared = replace(answers, label=own_data.FOLDER, labels=answers.labels or tuple(own_data.classes(source)))
    return "\n".join(
        [
            *_head(source, target, declared, ","),
            *_training(model="cnn"),
            "",
            f"[columns.{own_data.PICTURE}]",
            'kind = "image"',
            f"height = {height}",
            f"width = {width}",
            f"channels = {1 if grey else 3}",
            "resize = false   # true: pictures of another size are resized, else refused",
            "",
        ]
    )


def _head(source: Path, target: Path, answers: Answers, delimiter: str) -> list[str]:
    from evenhand.training.config import literal

    path = os.path.relpath(source, target.parent)
    path = path if os.sep in path or not source.is_dir() else f".{os.sep}{path}"
    return [
        f"# Written by `evenhand init` from the header of {source.name}: no value was read.",
        f"# Train: {_command(Path(target.name), answers)}",
        "",
        f"data = {literal(path)}   # relative to this file",
        *([f"delimiter = {literal(delimiter)}"] if delimiter != "," else []),
        f"label = {literal(answers.label)}" if answers.label else '# label = "..."           # the column to predict',
        *_label_lines(answers),
        f"groups = {literal(answers.groups)}   # who is reported on" if answers.groups else '# groups = "..."',
        f"owners = {literal(answers.owners)}   # budget classes" if answers.owners else '# owners = "..."',
        '# persons = "..."   # whom a row is about, where somebody may have several: the promise is then to persons',
    ]


def _command(target: Path, answers: Answers) -> str:
    """Return what to type next; owners with budgets of their own need a method that uses them."""
    return f"evenhand train {target} {'--method idp_sample' if answers.budgets else '--epsilon 3'}"


def _label_lines(answers: Answers) -> list[str]:
    """Return the lines on the values of the label; a real number has bounds instead."""
    from evenhand.training.config import literal

    if answers.labels:
        lines = [f"labels = {literal(answers.labels)}"]
        return [*lines, "ordered = true   # from the lowest to the highest"] if answers.ordered else lines
    if answers.label in answers.numbers:
        return ["# a real number: its public bounds stand in [columns] below"]
    return ['# labels = ["no", "yes"]   # its values']


def _training(model: str = "mlp") -> list[str]:
    return [
        'test_share = 0.2   # held out for the report; or test_data = "other.csv"',
        "",
        f'model = "{model}"      # linear, mlp, cnn, tanh_cnn, resnet18 ..., or "file.py:factory"',
        "epochs = 20        # expected passes over the data",
        "# batch_size = 512 # expected records per step; default about a tenth of the data, at most 1024",
        "lr = 0.2           # of SGD with momentum 0.9, falling to zero",
        "seed = 0           # of the split and the initialisation, never of the noise",
    ]


def _key(name: str) -> str:
    from evenhand.training.config import key

    return key(name)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def _bounds(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return _whole(float(low)), _whole(float(high))
    except ValueError:
        raise UsageError("Bounds are written LOW:HIGH, for example 0:120; values of a category as a,b,c.") from None


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


def _pairs(entries: Sequence[str] | None, flag: str, example: str) -> dict[str, str]:
    by_column: dict[str, str] = {}
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        if not equals or not name or not value or name in by_column:
            raise UsageError(f"{flag} takes each column once, for example {flag} {example}.")
        by_column[name] = value
    return by_column
