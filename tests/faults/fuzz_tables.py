"""Malformed tables of unique values: whatever is wrong with a file, no message and no shareable file holds a value.

``python tests/faults/fuzz_tables.py 5000 0`` runs the whole campaign with seed 0.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inputs_harness import REACHED, Watch, before_training, finished, main

from cli.ways import HEADER, TOML
from commands import evenhand

INIT = (
    (),
    ("--label", "ill"),
    ("--label", "ill", "--labels", "no,yes", "--number", "age=0:100", "--category", "city=north,south"),
    ("--label", "sick", "--groups", "town"),
    ("--label", "ill", "--drop", "name,nam"),
    ("--header", "--label", "ill"),
    ("--label", "ill", "--json"),
    ("--delimiter", ";", "--label", "ill"),
)


@dataclass
class Table:
    """Lines of cells before they become bytes, and what was unique in them."""

    header: list[str]
    rows: list[list[str]]
    delimiter: str = ","
    ending: str = "\n"
    encoding: str = "utf-8"
    secrets: frozenset[str] = frozenset()


def table(draw: random.Random) -> Table:
    """A small table in which every free value is unique."""
    rows = []
    for number in range(draw.randrange(30, 60)):
        age = f"{draw.randrange(20, 80)}.{draw.randrange(10**8, 10**9)}"
        rows.append([age, draw.choice(("north", "south")), secret(draw), "yes" if number % 2 else "no"])
    return Table(list(HEADER), rows)


def secret(draw: random.Random) -> str:
    """A value that occurs nowhere else: a name, an address, a number, a date with a time."""
    token = f"{draw.getrandbits(40):010x}"
    number = draw.randrange(10**9, 10**10)
    return draw.choice((f"q{token}q", f"q{token}@mail.org", f"{number}", f"0.{number}e-3", f"1999-01-01T{number}"))


Change = Callable[[Table, random.Random], None]


def no_header(made: Table, draw: random.Random) -> None:
    """The first line is a record, of unique values or of ordinary ones."""
    made.header = [secret(draw) for _ in HEADER] if draw.random() < 0.5 else list(made.rows[0])


def some_names(made: Table, draw: random.Random) -> None:
    """One column has its declared name, the others have values."""
    made.header = [name if place == 3 else secret(draw) for place, name in enumerate(made.header)]


def ragged(made: Table, draw: random.Random) -> None:
    """A line with more or fewer fields."""
    row = draw.choice(made.rows)
    row.append(secret(draw)) if draw.random() < 0.5 else row.pop()


def repeated_names(made: Table, draw: random.Random) -> None:
    """Two columns of the same name, declared or not."""
    made.header[draw.randrange(4) % len(made.header)] = draw.choice([*made.header, secret(draw)])
    made.header = (made.header * 2)[: len(made.header)]


def no_label(made: Table, draw: random.Random) -> None:
    """The label has another name."""
    made.header = [secret(draw) if name == "ill" else name for name in made.header]


def odd_name(made: Table, draw: random.Random) -> None:
    """A name that is empty, a formula, too long or with control characters."""
    odd = ("", "=1+1", "x" * 500, "a\x1b[31mb", f"={secret(draw)}", " ", "'", "\u202eabc", f"{secret(draw)}\x07")
    made.header[draw.randrange(len(made.header))] = draw.choice(odd)


def cell(made: Table, draw: random.Random) -> None:
    """Cells that do not fit their column: unknown categories, words, dates, numbers out of range, nothing."""
    odd = ("1e308", "-1e309", "nan", "inf", "", "1_0", "0x10", "9" * 5000, "2024-13-45", "1,5", "\u0663", "None")
    for _ in range(draw.randrange(1, 4)):
        row = draw.choice(made.rows)
        row[draw.randrange(len(row))] = draw.choice(odd) if draw.random() < 0.4 else secret(draw)


def quotes(made: Table, draw: random.Random) -> None:
    """Quotes that are not closed, or closed in the middle."""
    row = draw.choice(made.rows)
    place = draw.randrange(len(row))
    row[place] = draw.choice(('"', '""', "")) + row[place] + draw.choice(('"', '"x', ""))


def huge(made: Table, draw: random.Random) -> None:
    """A field that is longer than readers take."""
    row = draw.choice(made.rows)
    row[draw.randrange(len(row))] = secret(draw) * draw.choice((100, 20_000))


def other_delimiter(made: Table, draw: random.Random) -> None:
    """Another character between the cells."""
    made.delimiter = draw.choice((";", "\t", "|", ", ", " "))


def endings(made: Table, draw: random.Random) -> None:
    """Other ends of lines."""
    made.ending = draw.choice(("\r\n", "\r", "\n\r", "\n\n", "\x0b", "\u2028"))


def encoding(made: Table, draw: random.Random) -> None:
    """Another encoding, or a byte order mark."""
    made.encoding = draw.choice(("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"))
    draw.choice(made.rows)[-2:-1] = ["nörd"]


def one_class(made: Table, draw: random.Random) -> None:
    """All labels are the same."""
    for row in made.rows:
        row[-1] = "no"


def few(made: Table, draw: random.Random) -> None:
    """No record, or one or two."""
    made.rows = made.rows[: draw.randrange(3)] or [[]]


CHANGES: tuple[Change, ...] = (
    *(no_header, some_names, ragged, repeated_names, no_label, odd_name, cell, quotes, huge, other_delimiter),
    *(endings, encoding, one_class, few),
)


def written(made: Table, draw: random.Random) -> bytes:
    """The bytes of a table, sometimes with some of them damaged."""
    lines = [made.delimiter.join(row) for row in (made.header, *made.rows)]
    data = (made.ending.join(lines) + made.ending).encode(made.encoding, "replace")
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        place = draw.randrange(len(data) + 1)
        data = data[:place] + bytes(draw.choices(range(256), k=draw.randrange(4))) + data[place + draw.randrange(3) :]
    return data if draw.random() < 0.95 else data[: draw.randrange(len(data) + 1)]


def campaign(count: int, draw: random.Random, folder: Path) -> Watch:
    """Run ``init``, ``train`` and ``predict`` on so many tables."""
    watch, ready = Watch(), _trained(folder)
    for number in range(count):
        made, changes = table(draw), draw.choices(CHANGES, k=draw.choice((1, 1, 2, 3)))
        for change in changes:
            if all(made.rows):
                change(made, draw)
        case, place = f"{number} {'+'.join(change.__name__ for change in changes)}", folder / "case"
        place.mkdir()
        data = written(made, draw)
        (place / "people.csv").write_bytes(data)
        (place / "people.toml").write_text(TOML)
        secrets = _secrets(made)
        flags = draw.choice(INIT)
        hidden = secrets - set(made.header) if "--header" in flags else secrets  # somebody said that they are names
        watch.command(case, place, "init", "people.csv", "--out", "new.toml", *flags, secrets=hidden)
        out = place / "run"
        with before_training():
            asked = ("train", "people.toml", "--epsilon", 3, "--out", "run")
            printed = watch.command(case, place, *asked, secrets=secrets)
        watch.unspent(case, out)
        if REACHED in printed:
            watch.shareable(case, out, secrets)
        if number % 3 == 0:
            keep = draw.choice(((), ("--keep", "nam"), ("--keep", "id")))
            watch.command(case, place, "predict", ready, "people.csv", *keep, secrets=secrets)
        if number % 50 == 0:
            (place / "people.tsv").write_bytes(data)
            shutil.copy(place / "people.csv", place / "owners.csv")
            for asked in (
                ("train", "--data", "digits", "--epsilon", 3, "--owners", "owners.csv", "--out", "other"),
                ("train", "people.csv", "--epsilon", 3, "--out", "other"),
                ("init", "people.tsv", "--out", "tabs.toml"),
                ("plan", "--data", "digits", "--budgets", "owners.csv"),
            ):
                watch.command(case, place, *asked, secrets=secrets)
        shutil.rmtree(place)
    return watch


def _secrets(made: Table) -> frozenset[str]:
    """Every cell that is neither a declared name nor an ordinary word."""
    cells = {cell.strip('"') for row in (made.header, *made.rows) for cell in row}
    return frozenset(cell for cell in cells if len(cell) >= 8 and cell != "9" * 5000 and not set(cell) <= set("x"))


def _trained(folder: Path) -> Path:
    """A run to predict with."""
    place = folder / "ready"
    place.mkdir(parents=True)
    draw = random.Random(0)
    made = table(draw)
    made.rows = [row for _ in range(3) for row in table(draw).rows]
    (place / "people.csv").write_bytes(written(made, random.Random(1)))
    lines = [",".join(row) for row in (made.header, *made.rows)]
    (place / "people.csv").write_text("\n".join(lines) + "\n")
    (place / "people.toml").write_text(TOML)
    finished(evenhand("train", "people.toml", "--epsilon", 3, "--out", "run", cwd=place))
    return place / "run"


if __name__ == "__main__":
    main(campaign, 5000)
