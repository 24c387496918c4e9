"""Sixty wrong inputs of a new user: one clear line each, what to type, nothing spent, no data value printed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from ways import CANARY, HEADER, TOML, people, spent, write

import evenhand as eh
from commands import evenhand
from evenhand.errors import EvenhandError

Command = tuple[list[object], str]
COMMANDS: dict[str, Command] = {}
"""Name of the mistake -> what was typed, and words that the answer must hold. "..." stands for a good training."""
GOOD = ["train", "people.toml", "--epsilon", 3, "--out", "run"]
DIGITS = ["train", "--data", "digits", "--epochs", 1, "--out", "run"]


def typed(name: str, *arguments: object, words: str) -> None:
    COMMANDS[name] = (list(arguments), words)


def changed(name: str, flag: str, value: object, words: str) -> None:
    """A good training with one flag that is wrong."""
    typed(name, *GOOD, flag, value, words=words)


typed("no promise", "train", "people.toml", words="--epsilon 3")
typed("epsilon zero", *DIGITS, "--epsilon", 0, words="greater than 0")
typed("epsilon negative", *DIGITS, "--epsilon", -1, words="greater than 0")
typed("epsilon in words", *DIGITS, "--epsilon", "three", words="--epsilon")
typed("epsilon not a number", *DIGITS, "--epsilon", "nan", words="finite")
typed("epsilon and noise", *DIGITS, "--epsilon", 3, "--noise", 1, words="Give one of epsilon, noise")
typed("delta of one", *DIGITS, "--epsilon", 3, "--delta", 1, words="delta")
typed("unknown command", "trian", words="Did you mean 'train'")
typed("unknown flag", *DIGITS, "--epsilonn", 3, words="--epsilon")
typed("unknown method", *DIGITS, "--epsilon", 3, "--method", "dp-sgd", words="Did you mean 'dpsgd'")
typed("unknown source", "train", "--data", "digit", "--epsilon", 3, words="Did you mean 'digits'")
typed("file missing", "train", "--data", "poeple.csv", "--epsilon", 3, words="There is no file 'poeple.csv'")
typed("config missing", "train", "poeple.toml", "--epsilon", 3, words="poeple.toml")
typed("data without declaration", "train", "--data", "people.csv", "--epsilon", 3, words="evenhand init people.csv")
typed("table given as config", "train", "people.csv", "--epsilon", 3, words="evenhand init people.csv")
typed("empty table", "train", "empty.toml", "--epsilon", 3, words="is empty")
typed("header only", "train", "header.toml", "--epsilon", 3, words="no records")
typed("one class only", "train", "one_class.toml", "--epsilon", 3, words="same label")
typed("undeclared labels", "train", "many.toml", "--epsilon", 3, words="not declared")
changed("label not in the file", "--label", "il", "Did you mean 'ill'")
changed("label is a feature", "--label", "age", "also declared in [columns]")
changed("groups not in the file", "--groups", "town", "'town'")
changed("groups with a typo", "--groups", "ctiy", "Did you mean 'city'")
changed("owners not in the file", "--owners", "consent", "'consent'")
changed("budgets without numbers", "--budgets", "strict=much", "NAME=NUMBER")
changed("test share of one", "--test-share", 1, "test_share")
changed("test file missing", "--test-data", "later.csv", "There is no file 'later.csv'")
changed("model file missing", "--model", "nets.py:small", "There is no model file")
changed("factory missing", "--model", "own.py:small", "has no function 'small'")
changed("model without factory", "--model", "own.py", "file.py:factory")
changed("unknown model", "--model", "mpl", "Did you mean 'mlp'")
changed("too many outputs", "--model", "own.py:three_outputs", "output")
changed("wrong input width", "--model", "own.py:wide", "inputs of shape (3,)")
changed("model for pictures", "--model", "cnn", "picture")
changed("device not there", "--device", "cuda", "--device cpu")
changed("device unknown", "--device", "gpu", "--device cpu")
changed("batch larger than the data", "--batch-size", 5000, "more than the")
changed("batch of nothing", "--batch-size", 0, "batch_size")
changed("no epochs", "--epochs", 0, "epochs")
changed("negative rate", "--lr", -0.1, "lr")
changed("unknown optimizer", "--optimizer", "adan", "Did you mean 'adam'")
changed("unknown loss", "--loss", "crossentropy", "Did you mean 'cross_entropy'")
changed("unknown setting", "--set", "bond=0.5", "Did you mean 'bound'")
changed("setting without a value", "--set", "bound", "KEY=VALUE")
changed("unknown logger", "--log", "wandbb", "Did you mean 'wandb'")
changed("out is a file", "--out", "people.csv", "is a file")
changed("out of another run", "--out", "done", "done")
typed("broken config", "train", "broken.toml", "--epsilon", 3, words="not valid TOML")
typed("unknown key", "train", "key.toml", "--epsilon", 3, words="Did you mean 'epochs'")
typed(
    "bounds the wrong way round", "init", "people.csv", "--number", "age=120:0", "--out", "new.toml", words="not below"
)
typed(
    "column to declare missing",
    "init",
    "people.csv",
    "--label",
    "il",
    "--header",
    "--force",
    words="Did you mean 'ill'",
)
typed("comparing nothing", "compare", "--data", "digits", "--methods", ",", words="nothing to compare")
typed("no seeds", "compare", "--data", "digits", "--seeds", 0, words="seeds=0")
typed("epsilons in words", "compare", "--data", "digits", "--epsilons", "low,high", words="--epsilons 1,3,8")
typed("resume of nothing", "resume", "runs/none", words="runs/none")
typed("verify of nothing", "verify", "runs/none", words="runs/none")
typed("report of a folder that is no run", "report", "taken", words="taken")
typed("predict with other columns", "predict", "done", "other.csv", words="There is no column called 'age'")
typed("predict on a file that is missing", "predict", "done", "later.csv", words="later.csv")
typed("plan without records", "plan", "--epsilon", 3, words="--records")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run on people.csv."""
    folder = tmp_path_factory.mktemp("finished")
    write(folder)
    assert evenhand("train", "people.toml", "--epsilon", 3, "--out", "done", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def project(tmp_path: Path, finished: Path) -> Path:
    """A folder as a new user may have it: a table, its declaration, and some that are wrong."""
    write(tmp_path)
    shutil.copytree(finished / "done", tmp_path / "done")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text(CANARY)
    tables: dict[str, list[list[str]]] = {
        "empty": [],
        "header": [HEADER],
        "one_class": [HEADER, *([*row[:3], "no"] for row in people())],
        "many": [HEADER, *([*row[:3], f"{CANARY}{place}"] for place, row in enumerate(people(500)))],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.csv").write_text("".join(",".join(row) + "\n" for row in rows))
        (tmp_path / f"{name}.toml").write_text(TOML.replace("people.csv", f"{name}.csv"))
    (tmp_path / "other.csv").write_text("years,city\n31,north\n")
    (tmp_path / "broken.toml").write_text("epochs = = 3\n")
    (tmp_path / "key.toml").write_text(TOML.replace("epochs", "epoch"))
    (tmp_path / "own.py").write_text(
        "import torch\ndef three_outputs(facts): return torch.nn.Linear(3, 3)\n"
        "def wide(facts): return torch.nn.Linear(99, 2)\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_answered_in_one_clear_line(name: str, project: Path) -> None:
    arguments, words = COMMANDS[name]
    before = set(project.rglob("*"))
    done = evenhand(*arguments, cwd=project)
    assert words in done.stderr, done.stderr
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("evenhand: ")
    assert len(done.stderr) < 600
    assert "Traceback" not in done.stderr
    assert "not foreseen" not in done.stderr
    assert CANARY not in done.stderr
    assert not [path for path in project.rglob("ledger.jsonl") if path not in before], "nothing may be spent"


Call = tuple[Callable[[Path], Any], str]
CALLS: dict[str, Call] = {}
"""Name of the mistake -> a call, and words that the error must hold."""
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 2
TEXT = np.array([[CANARY, "1"]] * 60)


def called(words: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def known(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CALLS[function.__name__] = (function, words)
        return function

    return known


def net(inputs: int = 4, outputs: int = 2) -> nn.Module:
    return nn.Linear(inputs, outputs)


def fitted(out: Path, data: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return eh.fit(model or net(), data, **{"epsilon": 3.0, "epochs": 1, "out": out / "run", **options})


CALLS |= {
    "no promise": (lambda out: fitted(out, (X, Y), epsilon=None), "epsilon=3"),
    "epsilon in words": (lambda out: fitted(out, (X, Y), epsilon="3"), "epsilon must be a number"),
    "epsilon true": (lambda out: fitted(out, (X, Y), epsilon=True), "epsilon must be a number"),
    "unknown method": (lambda out: fitted(out, (X, Y), method="dpsdg"), "Did you mean 'dpsgd'"),
    "y too short": (lambda out: fitted(out, (X, Y[:-1])), "60 inputs but 59 targets"),
    "labels not a number": (lambda out: fitted(out, (X, np.where(Y == 0, np.nan, 1.0))), "not finite"),
    "labels missing": (lambda out: fitted(out, (X, [None, "yes"] * 30)), "targets are missing"),
    "500 labels": (lambda out: fitted(out, (np.zeros((500, 4)), [f"{CANARY}{i}" for i in range(500)])), "labels="),
    "features of text": (lambda out: fitted(out, (TEXT, Y)), "not a number"),
    "ragged features": (lambda out: fitted(out, ([[1.0], [1.0, 2.0]] * 30, Y)), "rows of different length"),
    "no records": (lambda out: fitted(out, (X[:0], Y[:0])), "no records"),
    "wrong input width": (lambda out: fitted(out, (X, Y), net(inputs=7)), "inputs of shape (4,)"),
    "one output": (lambda out: fitted(out, (X, np.arange(60) % 3), net(outputs=1)), "output"),
    "too few outputs": (lambda out: fitted(out, (X, np.arange(60) % 5), net(outputs=3)), "output"),
    "three dimensions": (lambda out: fitted(out, (X.reshape(60, 2, 2), Y)), "inputs of shape (2, 2)"),
    "a DataLoader": (
        lambda out: fitted(out, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(X)))),
        "Pass loader.dataset",
    ),
    "a path": (lambda out: fitted(out, "people.csv"), "cannot be read as data"),
    "groups too short": (lambda out: fitted(out, (X, Y), groups=["a"] * 9), "60 records but 9 groups"),
    "loss with a mean": (lambda out: fitted(out, (X, Y), loss=nn.CrossEntropyLoss()), "reduction"),
    "optimizer of other parameters": (
        lambda out: fitted(out, (X, Y), optimizer=lambda parameters: torch.optim.SGD(net().parameters(), lr=0.1)),
        "parameters",
    ),
    "optimizer object": (
        lambda out: fitted(out, (X, Y), optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        "lambda parameters",
    ),
    "model class": (lambda out: fitted(out, (X, Y), nn.Linear), "model"),
    "batch normalisation": (
        lambda out: fitted(out, (X, Y), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))),
        "BatchNorm",
    ),
    "batch larger than the data": (lambda out: fitted(out, (X, Y), batch_size=1000), "more than the 60 records"),
    "no epochs": (lambda out: fitted(out, (X, Y), epochs=0), "epochs"),
    "test of another width": (lambda out: fitted(out, (X, Y), test=(X[:, :3] + 1, Y)), "shape (3,)"),
    "load of nothing": (lambda out: eh.load(out / "none"), "none"),
    "verify of nothing": (lambda out: eh.verify(out / "none"), "none"),
    "unknown budget": (
        lambda out: fitted(out, (X, Y), epsilon=None, privacy=eh.Budgets({"strict": 1}), owners=["open"] * 60),
        "Budgets and owners differ",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_one_clear_error(name: str, tmp_path: Path) -> None:
    call, words = CALLS[name]
    with pytest.raises(EvenhandError) as raised:
        call(tmp_path)
    message = str(raised.value)
    assert words in message
    assert CANARY not in message
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    assert spent(tmp_path) == 0


def test_the_list_holds_sixty_mistakes_and_more() -> None:
    assert len(COMMANDS) >= 60
    assert len(CALLS) >= 25
