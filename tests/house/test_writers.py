"""The house rules for files: one module writes them, and no text is read or written in a guessed encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "evenhand"
WRITER = "durable.py"
"""Everything else writes through it. (Loggers hand figures to other libraries, which write on their own.)"""
READER = "untrusted.py"
CHANGING = {
    *("write_text", "write_bytes", "save_file", "save_model", "to_csv", "to_parquet", "savez", "savetxt", "renames"),
    *("symlink", "mkdir", "makedirs", "mkstemp", "mkdtemp", "copyfile", "copytree", "NamedTemporaryFile"),
    *("TemporaryDirectory", "TemporaryFile", "hardlink_to", "symlink_to", "FileLock"),
}
IN_MODULES = {"replace", "rename", "link", "copy2", "move", "open"}
ALLOWED = {
    ("auditing/canary.py", "TemporaryDirectory"),
    ("cli/__init__.py", "open"),
    ("data/fingerprint.py", "savez"),
}
"""The training of an audit is removed after it; standard output is turned to the null device when its reader is gone; a
survey is written into memory."""
NOT_TEXT = {"os", "Ledger", "Pillow", "tarfile", "gzip", "archive"}

Found = tuple[str, str | None, ast.Call]


def calls(source: str) -> Iterator[Found]:
    """Name of every function that is called, on what (None if on nothing, "" if on no plain name), and the call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, None, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, node.func.value.id if isinstance(node.func.value, ast.Name) else "", node


def mode(on: str | None, call: ast.Call) -> str:
    """The mode that a file is opened in."""
    place = 1 if on is None else 0
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[place : place + 1]
    return str(given[0].value) if given and isinstance(given[0], ast.Constant) else "r"


def writes(name: str, on: str | None, call: ast.Call) -> bool:
    """Whether a call makes, changes, moves or locks a file."""
    if name == "save" and on == "torch":
        target = call.args[1]
        return not (isinstance(target, ast.Name) and target.id in ("sink", "written"))
    if name == "touch" or (name in IN_MODULES and on in ("os", "shutil")):
        return True
    return name in CHANGING or (name == "open" and bool(set(mode(on, call)) & set("wax+")))


def guesses(name: str, on: str | None, call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of whoever runs it."""
    text = name in ("read_text", "write_text") or (name == "open" and on not in NOT_TEXT and "b" not in mode(on, call))
    return text and not any(keyword.arg == "encoding" for keyword in call.keywords)


def modules() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).as_posix(), file.read_text(encoding="utf-8")


def test_one_module_writes_files() -> None:
    found = {
        (path, call[0])
        for path, source in modules()
        if path not in (WRITER, READER)
        for call in calls(source)
        if writes(*call)
    }
    assert found == ALLOWED, "write through evenhand.durable, or run_files.write_durably for files of a run"


def test_the_search_finds_what_writes() -> None:
    bad = ['a.write_text("x")', 'open(f, "w")', 'p.open("ab")', "os.replace(a, b)", "torch.save(x, path)", "p.mkdir()"]
    assert all(writes(*next(calls(line))) for line in [*bad, "os.open(p, 0)", "FileLock(p)", "shutil.copy2(a, b)"])
    good = ["open(f)", 'p.open("rb")', '"a".replace("b", "c")', "torch.save(x, sink)", "durable.link(a, b)"]
    assert not any(writes(*next(calls(line))) for line in good)


def test_no_text_is_in_a_guessed_encoding() -> None:
    found = [(path, call[2].lineno) for path, source in modules() for call in calls(source) if guesses(*call)]
    assert found == []
    assert guesses(*next(calls("p.read_text()")))
    assert guesses(*next(calls('open(f, "w")')))
