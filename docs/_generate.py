"""Reference pages made from the code, and the output of commands shown in the tutorials: nothing in them is typed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import os
import re
import sys
import tempfile
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

import evenhand
from evenhand import cli, errors
from evenhand.cli.claims import table as claims_table
from evenhand.data import columns
from evenhand.mechanism import noise_grid
from evenhand.summation import Summation
from evenhand.training.config import Config
from evenhand.training.guards import coupling_guard

SOURCE = Path(evenhand.__file__).parent

PLAN = "evenhand plan --records 60000 --epsilon 3 --delta 1e-5 --epochs 30 --batch-size 512"
OWNERS = "evenhand plan --owners strict=400,open=600 --budgets strict=1,open=8 --method idp_sample --epochs 30"
SCALES = OWNERS.replace("idp_sample", "idp_scale")
ALIKE = OWNERS.replace("idp_sample", "dpsgd")
COST = "evenhand epsilon --rate 0.01 --noise 1 --steps 1000 --delta 1e-5"
STEPS = (
    "evenhand plan --records 60000 --epsilon 3 --delta 1e-5 --epochs 30 --batch-size 512 --schedule step --decay 0.5"
)
PAPER = (
    "evenhand epsilon --as-published 004 --records 1173 --batch-size 32 --epochs 30 --delta 1e-3 --schedule step "
    "--decay 0.5 --every 10 --epsilon 3"
)
KINDS = {
    "str": "text",
    "float": "number",
    "float | str": "number or text",
    "int": "whole number",
    "bool": "true or false",
    "Sequence": "list",
    "Mapping": "table",
}
TRAIN = "evenhand train --data digits --model linear --epsilon 3 --delta 1e-5 --epochs 1 --out runs/signed"


def everything(out: Path) -> None:
    """Write every generated page into ``out``; a file that would not change is left alone."""
    out.mkdir(parents=True, exist_ok=True)
    pages = {
        "cli": command_line(),
        "methods": method_table(),
        "config": config_keys(),
        "columns": column_kinds(),
        "errors": error_list(),
        "claims": cached(out / "claims.md", claims),
        "charges": rounding_charges(),
        "escape": escapes(),
        **outputs(),
        **raised(),
    }
    for name, text in pages.items():
        write(out / f"{name}.md", text)


def write(path: Path, text: str) -> None:
    """Keep the time of an unchanged file, so that Sphinx need not read its pages again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def command_line() -> str:
    """Every command with its arguments, options and example, from the app itself."""
    import typer

    group = typer.main.get_command(cli.app)
    parts = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        help_text = inspect.cleandoc(command.help or "")
        module = next(module for module in vars(cli).values() if getattr(module, "NAME", None) == name)
        kinds, example = typing.get_type_hints(module.run), module.EXAMPLE
        rows = [_option(found, kinds.get(found.name)) for found in command.params if found.name != "help"]
        parts.append(
            f"## evenhand {name}\n\n{help_text}\n\n```text\n{example}\n```\n\n{grid(['', 'what', 'default'], rows)}"
        )
    return "\n\n".join(parts) + "\n"


def _option(parameter: Any, kind: Any) -> list[str]:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        shown = f"`{(parameter.metavar or parameter.name).strip('[]')}`"
    else:
        value = "" if kind in (bool, bool | None) else f" {parameter.metavar or _value(kind)}"
        shown = ", ".join(f"`{name}{value}`" for name in names)
    default = parameter.default
    plain = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    written = "required" if parameter.required else f"`{default}`" if plain and str(default) else ""
    return [shown, cell(parameter.help or ""), written]


def _value(kind: Any) -> str:
    """What a flag takes, in a word."""
    for wanted, word in ((Path, "PATH"), (float, "NUMBER"), (int, "WHOLE NUMBER")):
        if wanted is kind or wanted in typing.get_args(kind):
            return word
    return "TEXT"


def escapes() -> str:
    """Return the table of how likely records that touch each other in a share of batches are not found."""
    shares = (0.2, 0.1, 0.05, 0.02, 0.01)
    before, secret = coupling_guard.DRAWS, coupling_guard.LOOKS
    rows = [[f"{s:g}", f"{coupling_guard.escape(s):.2g}", f"{coupling_guard.escape(s, secret):.2g}"] for s in shares]
    counts = f"{before} looks before training", f"{secret} secret looks"
    return grid(["shows in a share of", *counts], rows) + "\n"


def rounding_charges() -> str:
    """Return the table of what the rounding of float32 sums is charged, by the expected batch."""
    rows = []
    for batch in (16, 64, 256, 1024, 16_384, 65_536):
        summation = Summation(batch)
        charged = noise_grid.charged_sum(np.ones(1), [1.0], noise_grid.grid(1.0), 10**6, summation)[0]
        rows.append([str(batch), str(summation.rows), f"{charged:.5f}"])
    return (
        grid(["expected batch", "records of a block", "charged sensitivity, times C (a million parameters)"], rows)
        + "\n"
    )


def method_table() -> str:
    """The catalogue with guarantee, settings and reference."""
    rows = [
        [
            f"`{row['name']}`",
            cell(row["summary"]),
            row["guarantee"],
            ", ".join(f"`{key}={value}`" for key, value in row["settings"].items()),
            cell(row["reference"]),
        ]
        for row in cli.methods.rows()
    ]
    return grid(["method", "what it does", "guarantee", "settings", "reference"], rows)


def config_keys() -> str:
    """The keys of a TOML file; what they mean is the help of the flags of the same name."""
    helps = {name: text for command in ("init", "train") for name, text in _helps(command).items()}
    helps |= {
        "missing_tokens": helps["missing_token"],
        "record_budgets": "A column or file with one epsilon per record, instead of owners; `--budgets` takes it too.",
        "split_seed": "Seed of the held-out split, where it is not `seed`: comparisons keep one split for all seeds.",
        "prior": "Release noisy counts of the labels, paid from the same promise; `--no-prior` sets it to false.",
        "prior_counts": "Publicly known counts of the labels instead, one per label; `--prior` gives them.",
        "columns": "One table per column, `[columns.NAME]`: see below.",
    }
    rows = []
    for field in dataclasses.fields(Config):
        flag = f"`--{field.name.replace('_', '-')}`" if field.name in _helps("train") else ""
        flag = "`--set KEY=VALUE`" if field.name == "settings" else flag
        kind = str(field.type).partition("[")[0].removesuffix(" | None")
        default = field.default if field.default is not dataclasses.MISSING else {}
        rows.append([f"`{field.name}`", cell(helps.get(field.name, "")), KINDS[kind], _shown(default), flag])
    return grid(["key", "what", "type", "default", "flag of `train`"], rows)


@functools.cache
def _helps(command: str) -> dict[str, str]:
    import typer

    found = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name: parameter.help or "" for parameter in found.params}


def _shown(default: Any) -> str:
    if default is None or default == () or default == {}:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default!r}`"


def column_kinds() -> str:
    """The kinds of column, from their classes."""
    parts = []
    for kind in (columns.Number, columns.Category, columns.Image):
        words = inspect.getdoc(kind) or ""
        prose = words.split("\n\nExamples:")[0].replace("``", "`")
        rows = [
            [
                f"`{field.name}`",
                KINDS[str(field.type).partition("[")[0].removesuffix(" | None")],
                "required" if field.default is dataclasses.MISSING else _shown(field.default),
            ]
            for field in dataclasses.fields(kind)
        ]
        parts.append(f'### kind = "{kind.kind}"\n\n{prose}\n\n{grid(["key", "type", "default"], rows)}')
    return "\n\n".join(parts) + "\n"


def error_list() -> str:
    """Every error class with its exit code and docstring."""
    rows = [
        [
            f"[`{name}`](errors/{name}.md)",
            cell(inspect.getdoc(kind) or ""),
            str(kind.exit_code),
            f"`{kind.__mro__[1].__name__}`",
        ]
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.EvenhandError)
    ]
    return grid(["error", "when", "exit code", "kind of"], rows)


def raised() -> dict[str, str]:
    """What the example of each error's page prints, run now in a temporary folder."""
    shown_by_page = {}
    for page in sorted((Path(__file__).parent / "reference" / "errors").glob("*.md")):
        for example in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            out, err = io.StringIO(), io.StringIO()
            with _elsewhere(), redirect_stdout(out), redirect_stderr(err):
                exec(compile(example, str(page), "exec"), {"__name__": page.stem})
            shown_by_page[f"error-{page.stem}"] = fenced("\n".join(textwrap.wrap(out.getvalue(), 100)))
    return shown_by_page


def claims() -> str:
    """The table of ``evenhand claims``."""
    from evenhand.comparison.paper_claims import claims as computed

    return claims_table(computed()) + "\n"


def cached(file: Path, make: Callable[[], str]) -> str:
    """Make the page again only when the accountant or the papers' formulas changed: it takes a while."""
    others = ("methods/schedules.py", "comparison/paper_claims.py", "cli/claims.py")
    used = [*SOURCE.glob("accounting/*.py"), *(SOURCE / name for name in others)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(used))).hexdigest()
    mark = f"<!-- from sources {digest} -->\n\n"
    if file.exists() and file.read_text(encoding="utf-8").startswith(mark):
        return file.read_text(encoding="utf-8")
    return mark + make()


def outputs() -> dict[str, str]:
    """What the commands of the pages print, run now in a temporary folder."""
    with _elsewhere() as folder:
        found = {
            "out-plan": shown(PLAN),
            "out-cost": shown(COST),
            "out-alike": shown(ALIKE),
            "out-sample": shown(OWNERS),
            "out-scale": shown(SCALES),
            "out-steps": shown(STEPS),
            "out-paper": printed(PAPER),
        }
        printed(TRAIN)
        found["out-statement"] = shown("evenhand statement runs/signed")
        found["out-verify"] = shown("evenhand verify runs/signed")
        printed("evenhand keys new --out engineer")
        printed("evenhand statement runs/signed --sign engineer")
        found["out-key"] = shown("evenhand verify runs/signed --key engineer.pub")
        found["out-folder"] = (
            (folder / "runs" / "signed" / "README.md").read_text().replace("# A run of evenhand\n", "")
        )
        printed(TRAIN.replace("runs/signed", "runs/again"))
        words = printed("evenhand statement runs/again").split("\n\n")
        found["out-together"] = fenced(next(text for text in words if "counts" in text or "counted" in text))
        files = sorted(path.name for path in (folder / "runs" / "signed").iterdir())
        found["out-files"] = fenced("\n".join(name for name in files if not name.endswith(".lock")))
        _damage(folder / "runs" / "signed" / "ledger.jsonl")
        found["out-changed"] = shown("evenhand verify runs/signed", expected=1)
    return found


def _damage(ledger: Path) -> None:
    ledger.write_bytes(ledger.read_bytes().replace(b'"std":', b'"std":1', 1))


@contextmanager
def _elsewhere() -> Iterator[Path]:
    before, state = Path.cwd(), os.environ.get("EVENHAND_STATE")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["EVENHAND_STATE"] = str(Path(folder) / "state")
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            os.environ.pop("EVENHAND_STATE")
            if state is not None:
                os.environ["EVENHAND_STATE"] = state


def shown(command: str, expected: int = 0) -> str:
    """The command's output as a block."""
    return fenced(printed(command, expected))


def printed(command: str, expected: int = 0) -> str:
    """What a command line prints; another exit code than ``expected`` stops the build."""
    out, err, arguments = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = command.split()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = arguments
    if code != expected:
        raise RuntimeError(f"{command} ended with {code}: {err.getvalue()}")
    return out.getvalue().strip() + "\n"


def fenced(text: str) -> str:
    """A block of plain text."""
    return f"```text\n{text.strip()}\n```\n"


def grid(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Words that fit into a table: one line, no marks of Markdown."""
    flat = " ".join(text.split()).replace("``", "`")
    return re.sub(r"(?<!\\)([|*<>])", r"\\\1", flat) if "`" not in flat else flat.replace("|", "\\|")


if __name__ == "__main__":
    everything(Path(__file__).parent / "reference" / "_generated")
