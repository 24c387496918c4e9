"""``evenhand statement``: what is promised, to whom, and what is not covered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options
from evenhand.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from evenhand.runs.folder import Folder

NAME = "statement"
EXAMPLE = "evenhand statement runs/first --html statement.html"


def run(
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run folder, as given to --out.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write one page to print and sign.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file: .md the words, .json the data, .html the page.")
    ] = None,
    sign: options.Sign = None,
    stopped_independently: Annotated[
        bool,
        typer.Option(
            "--stopped-independently",
            help="Declare that the run ended early for reasons that did not depend on the data at all.",
        ),
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of statement.json.")] = False,
    json: options.Json = False,
) -> None:
    """Print the privacy statement, write it to a file, or sign the run folder.

    Of a run that stopped early it counts the whole plan.
    """
    from evenhand.runs import statement_files

    if schema:
        print(statement_files.text(), end="")
        return
    if folder is None:
        raise UsageError("Pass a run folder, for example: evenhand statement runs/first")
    from evenhand.runs.folder import Folder
    from evenhand.runs.statement import markdown
    from evenhand.runs.statement_files import packed

    options.refuse_nameless(html, out)
    run_folder = Folder.existing(folder)
    if stopped_independently:
        run_folder.declare_stopped()
    if sign is not None:
        signer = _signed(run_folder, sign)
        if html is None and out is None:
            options.emit({"signed_by": signer}, f"signed by {signer}: {run_folder.signature_file}", json)
            return
    wanted = [(path, ".html" if path is html else path.suffix.lower()) for path in (html, out) if path is not None]
    if not wanted:
        statement = run_folder.statement()
        options.emit(packed(statement), markdown(statement), json)
        return
    _check(run_folder, wanted)
    _write(_to_sign(run_folder), wanted)
    names = [str(path) for path, _ in wanted]
    options.emit({"written": names}, "\n".join(f"statement: {name}" for name in names), json)


def _signed(folder: Folder, key: Path) -> str:
    from evenhand.runs.verify import sign

    return sign(folder.path, key)


def _check(folder: Folder, wanted: list[tuple[Path, str]]) -> None:
    from evenhand.runs.statement_files import FROM_FACTS, FROM_NOISE, KEPT

    for path, form in wanted:
        if form not in (".md", ".json", ".html"):
            raise UsageError("--out writes .md (the words), .json (the data) or .html (the page): end the name so.")
        if path.resolve().parent == folder.path.resolve() and path.name in (*FROM_FACTS, *FROM_NOISE, *KEPT):
            raise UsageError(f"{path.name} is a file of the run itself: choose another name.")


def _to_sign(folder: Folder) -> dict[str, Any]:
    """Return the statement in the folder if it is up to date, so that its digest is the printed one; else a new one.

    The folder is verified first; VerificationError is raised if it does not verify.
    """
    from evenhand import untrusted
    from evenhand.runs.folder import head_in
    from evenhand.runs.statement_files import unpacked
    from evenhand.runs.verify import verify

    problems = verify(folder.path)["problems"]
    if problems:
        raise VerificationError(
            f"This run does not verify, so there is nothing to sign: {problems[0]} See `evenhand verify`."
        )
    if folder.statement_file.exists() and head_in(folder.statement_file) == folder.ledger().charged_head:
        return unpacked(untrusted.read_json(folder.statement_file))
    return folder.statement()


def _write(statement: dict[str, Any], wanted: list[tuple[Path, str]]) -> None:
    from evenhand.runs.folder import statement_bytes, write_durably
    from evenhand.runs.statement import markdown
    from evenhand.runs.statement_page import render_statement

    forms: dict[str, Callable[[Mapping[str, Any]], str]] = {
        ".md": markdown,
        ".html": render_statement,
        ".json": lambda data: statement_bytes(data).decode(),
    }
    for path, form in wanted:
        try:
            write_durably(path, forms[form](statement).encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}). Choose another file.") from None
