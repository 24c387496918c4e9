"""Fuzzed configs and command lines: an error is one message, in little time, and nothing that they say is executed.

``python tests/faults/fuzz_configs.py 20000 0`` runs the whole campaign with seed 0. Training itself is left out: what
is accepted ends where the first step would be charged.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from inputs_harness import MARK, Watch, before_training, evil, main

from cli.ways import TOML, people
from commands import evenhand
from evenhand._toml import literal
from evenhand.training.config import Config

SETTINGS = tuple(Config.__dataclass_fields__)
BASE = f"{TOML}".replace("epochs = 1", "epsilon = 3\nepochs = 1\nlr = 0.2\nseed = 0\nmethod = 'dpsgd'")
SHELL = (f"$(touch {MARK})", f"`touch {MARK}`", f"; touch {MARK} ;", f"__import__('os').system('touch {MARK}')")
CODE = ("os:system", "evil.py", "evil.py:", ":net", "evil:net", "evil.net", "evil.py:net.net", "evil.zip/evil.py:net")
NAMES = (
    *(
        "",
        " ",
        "x" * 300,
        "x" * 5000,
        "a\\u0000b",
        "../../..",
        "/",
        ".",
        "~",
        "/dev/zero",
        "/dev/full",
        "no/such/file.csv",
    ),
    *(
        "pipe",
        "folder",
        "people.csv/x",
        "people.toml",
        "people.csv",
        "run",
        "\\u202e",
        "\\u001b[31m",
        "%s%n",
        "{0}",
        "CON",
    ),
    *(
        "people.parquet",
        "people.npz",
        "people.tsv",
        "people.exe",
        "people",
        "digits",
        "adult",
        "label",
        "age",
        "python",
    ),
)
NUMBERS = (
    *("0", "-1", "1", "2", "0.5", "1e-300", "1e308", "1e400", "-1e400", "nan", "inf", "-inf", "9223372036854775807"),
    *(
        "9223372036854775808",
        "-9223372036854775808",
        "1" + "0" * 200,
        "1" + "0" * 300,
        "0x10",
        "0b1",
        "1_000",
        "1e3",
        "-0.0",
    ),
    *("1e9", "1e15", "1000000000", "3", "100", "17"),
)
VALUES: tuple[Callable[[random.Random], str], ...] = (
    lambda draw: f'"{draw.choice((*NAMES, *SHELL, *CODE))}"',
    lambda draw: draw.choice(NUMBERS),
    lambda draw: draw.choice(("true", "false", "[]", "{}", "[[]]", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z")),
    lambda draw: f"[{', '.join(draw.choice(VALUES)(draw) for _ in range(draw.randrange(4)))}]",
    lambda draw: f"{{a = {draw.choice(VALUES)(draw)}}}",
    lambda draw: draw.choice(("[" * 40, "{a=" * 40, "'''", '"""', '"\\x"', "'", "", "=", "\x00", "\x1b[2J", "a.b.c")),
    lambda draw: draw.choice(
        ('"mlp"', '"linear"', '"sgd"', '"adam"', '"focal:gamma=2"', '"flip"', '"bf16"', '"cosine"')
    ),
)
LINES = tuple(
    line.split()
    for line in (
        "init people.csv --label ill --labels no,yes --number age=0:9 --category city=a,b --out new.toml",
        "init folder --size 8x8 --grey --out new.toml",
        "train people.toml --epsilon 3 --out made",
        "train people.toml --budgets strict=1,open=8 --owners city --out made",
        "train people.toml --method dpsgd --noise 1 --set bound=0.5 --lr 0.1 --out made",
        "train people.toml --epsilon 3 --optimizer adam --loss focal:gamma=2 --batch-size 9 --out made",
        "train people.toml --epsilon 3 --delta 1e-5 --average 0.9 --views 2 --augment flip --out made",
        "train people.toml --epsilon 3 --seed 1 --test-share 0.5 --test-data people.csv --precision bf16 --out made",
        "plan --records 1000 --epsilon 3 --epochs 2 --batch-size 100 --json",
        "plan --owners a=400,b=600 --budgets a=1,b=3 --method dpsgd --set bound=1",
        "epsilon --rate 0.01 --noise 1 --steps 100 --delta 1e-5",
        "epsilon --records 1000 --batch-size 10 --epochs 2 --noise 1.1",
        "verify run --key people.csv",
        "statement run --out made.md",
        "statement run --html made.html --json",
        "keys new --out made.key",
        "report run --out made.html --card made.md",
        "methods --json",
        "data --data-dir folder --json",
        "doctor --model mlp --input-shape 4 --classes 2 --batch 4",
        "check people.csv",
        "predict run people.csv --keep age --out made.csv --delimiter ,",
        "predict run people.csv --model linear --json",
        "resume run --epsilon 9 --epochs 1",
        "resume run --budgets strict=1 --out made --model linear",
        "recommend --records 1000 --epsilon 3 --kind table --goal worst --smallest 0.1 --parameters 9 --budgets a=1",
        "nonsense --help",
    )
)
"""Commands that are in order; ``claims`` rightly takes longer than a fuzzed command may, and ``compare`` trains."""
OPTIONS = ("", "strict=1", "a=nan", "strict=1,open=8", "=", "a=", "bound=", "bound=1e400", "bound=" + "[" * 3000, "x=1")


def config(draw: random.Random) -> bytes:
    """A config with some lines changed, taken out, repeated, added or damaged."""
    lines = BASE.strip().splitlines()
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.randrange(len(lines))
        name = lines[place].partition(" = ")[0]
        value = draw.choice(VALUES)(draw)
        setting = draw.choice((*SETTINGS, "nonsense", "x" * 400, '"a b"', "a.b", "settings.bound", "columns.age.low"))
        lines[place : place + 1] = draw.choice(
            (
                [f"{name} = {value}"],
                [f"{name} = {value}"],
                [lines[place], f"{setting} = {value}"],
                [f"{setting} = {value}", lines[place]],
                [],
                [lines[place]] * 2,
                [f"[{setting}]", lines[place]],
                [lines[place], f"[{draw.choice(('settings', 'source', 'budgets'))}]", f"{setting} = {value}"],
            )
        )
        lines = lines or ["x"]
    data = "\n".join(lines).encode()
    if draw.random() < 0.15:
        place = draw.randrange(len(data) + 1)
        data = data[:place] + bytes(draw.choices(range(256), k=draw.randrange(5))) + data[place + draw.randrange(9) :]
    return data


def line(draw: random.Random) -> list[str]:
    """A command with some of its words changed, taken out, repeated or added."""
    words = list(draw.choice(LINES))
    flags = [word for line in LINES for word in line if word.startswith("--")]
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.randrange(1, len(words) + 1)
        new = draw.choice(
            ([_word(draw)], [_word(draw)], [_word(draw)], [draw.choice(flags)], [], words[place : place + 2])
        )
        words[place : place + draw.choice((0, 1, 1, 1))] = new
    return [word.replace("\\u0000", "").encode().decode("unicode_escape", "replace") for word in words]


def _word(draw: random.Random) -> str:
    pools: Sequence[Sequence[str]] = (NAMES, NUMBERS, SHELL, CODE, OPTIONS, ("3,8,8", "64", "mlp", "dpsgd", "run"))
    return draw.choice(draw.choice(pools))


def campaign(count: int, draw: random.Random, folder: Path) -> Watch:
    """Run so many cases: seven configs of ten, three command lines; some configs lie in the folder of a run."""
    watch, place = Watch(), _place(folder)
    for number in range(count):
        case = f"{number}"
        with before_training():
            if number % 10 < 7:
                where = place / ("run" if number % 20 == 0 else ".") / "fuzzed.toml"
                where.write_bytes(_named(config(draw), draw, where))
                watch.command(case, place, "train", where.relative_to(place), "--out", "made")
                where.unlink()
            else:
                words = line(draw)
                if _lasting(words):
                    continue
                watch.command(case, place, *words)
        watch.unspent(case, place / "made")
        _swept(place)
    return watch


def _named(data: bytes, draw: random.Random, where: Path) -> bytes:
    """A config in the folder of a run may name a file of code; nobody did on the command line."""
    if where.parent.name != "run":
        return data
    code = literal(str(where.parent.parent / "evil.py") + ":net")
    return f"{draw.choice(('model', 'features'))} = {code}\n".encode() + data.replace(b'model = "linear"', b"")


def _lasting(words: Sequence[str]) -> bool:
    """Whether a command names a file of code, which it then rightly executes, or asks for a download."""
    code = any("evil.py" in word for word in words)
    return (words[0] in ("check", "doctor", "train", "predict", "resume") and code) or words[:2] == ["data", "fetch"]


def _place(folder: Path) -> Path:
    place = folder / "place"
    (place / "folder").mkdir(parents=True)
    lines = ["age,city,name,ill", *(",".join(row) for row in people(60))]
    (place / "people.csv").write_text("\n".join(lines) + "\n")
    (place / "people.toml").write_text(BASE)
    done = evenhand("train", "people.toml", "--epsilon", 3, "--out", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    evil(place / "evil.py")
    return place


def _swept(place: Path) -> None:
    """Take away what a case left, except for what was there before."""
    kept = {"people.csv", "people.toml", "run", "folder", "evil.py"}
    for left in place.iterdir():
        if left.name not in kept:
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main(campaign, 20_000)
