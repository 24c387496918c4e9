"""Commands that are disturbed, small ones of each kind: what stands in their folders before, what is typed after."""

from __future__ import annotations

import random
import shutil
import signal
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host
from host import Ended, Place

Command = tuple[str, ...]
"""Words of a command line; ``$run``, ``$other``, ``$files``, ``$data`` stand for folders. ``attach``: the API."""

_DIGITS = ("--data", "digits", "--model", "linear", "--epsilon", "3", "--epochs", "3", "--seed", "0")
_TRAIN: Command = ("train", *_DIGITS, "--out", "$run")
_OWNERS: Command = (
    *("train", "$data/people.toml", "--method", "idp_scale", "--budgets", "strict=2,open=8"),
    *("--average", "0.9", "--epochs", "3", "--out", "$run"),
)
_DENSITY: Command = ("train", "--data", "digits", "--method", "moment_density", "--epsilon", "3", "--out", "$run")
_RESUME: Command = ("resume", "$run")
_RAISED: Command = ("resume", "$run", "--budgets", "strict=3,open=9")
_LOWERED: Command = ("resume", "$run", "--budgets", "strict=1,open=8", "--out", "$other")
_COMPARE: Command = (
    *("compare", "--data", "digits", "--model", "linear", "--methods", "sgd,dpsgd", "--epsilons", "3"),
    *("--seeds", "1", "--epochs", "1", "--jobs", "1", "--out", "$run"),
)
_INIT: Command = (
    *("init", "$data/people.csv", "--label", "ill", "--labels", "no,yes", "--number", "age=0:120"),
    *("--category", "sex=f,m", "--drop", "owner", "--out", "$files/made.toml"),
)
_REPORT: Command = ("report", "$run")
_STATEMENT: Command = ("statement", "$run", "--html", "$files/page.html")
_KEYS: Command = ("keys", "new", "--out", "$files/key")
_SIGN: Command = ("statement", "$run", "--sign", "$files/key")
_PREDICT: Command = ("predict", "$run", "$data/new.csv", "--out", "$files/answers.csv")


@dataclass(frozen=True)
class Scenario:
    """A command that is disturbed; ``before`` prepares its folders; ``again`` is what a person types after a fault.

    A number in ``before`` is that of steps after which a signal stops the command.
    """

    name: str
    command: Command
    again: tuple[Command, ...]
    before: tuple[tuple[Command, int | None], ...] = ()

    @property
    def anew(self) -> Command | None:
        """Return the command with another folder, for a message that says to take one."""
        if "--out" not in self.command:
            return None
        place = self.command.index("--out") + 1
        given = self.command[place]
        other = "$other" if given == "$run" else f"{given}-2"
        return (*self.command[:place], other, *self.command[place + 1 :])


_TRAINED = ((_TRAIN, None),)
SCENARIOS: Sequence[Scenario] = (
    Scenario("train", _TRAIN, (_RESUME, _TRAIN)),
    Scenario("owners", _OWNERS, (_RESUME, _OWNERS)),
    Scenario("resume", _RESUME, (_RESUME,), ((_TRAIN, 5),)),
    Scenario("rebudget", _RAISED, (_RAISED, _RESUME), ((_OWNERS, 5),)),
    Scenario("go back", _LOWERED, (_LOWERED, ("resume", "$other")), ((_OWNERS, 2), (_RESUME, 6))),
    Scenario("density", _DENSITY, (_RESUME, _DENSITY)),
    Scenario("compare", _COMPARE, (_COMPARE,)),
    Scenario("attach", ("attach", "$run"), (("attach", "$run"),)),
    Scenario("report", _REPORT, (_REPORT,), _TRAINED),
    Scenario("statement", _STATEMENT, (_STATEMENT,), _TRAINED),
    Scenario("sign", _SIGN, (_SIGN,), ((_KEYS, None), *_TRAINED)),
    Scenario("keys", _KEYS, (_KEYS,)),
    Scenario("init", _INIT, (_INIT, (*_INIT, "--force"))),
    Scenario("predict", _PREDICT, (_PREDICT,), ((_OWNERS, None),)),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def make_data(folder: Path) -> None:
    """Write a small table with groups and owners, what is declared about it, and new records without a label."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = [(draw.randrange(18, 95), draw.choice("fm"), draw.choice(("strict", "open"))) for _ in range(300)]
    lines = [f"{age},{sex},{'yes' if age + draw.gauss(0, 9) > 60 else 'no'},{owner}" for age, sex, owner in rows]
    (folder / "people.csv").write_text("\n".join(["age,sex,ill,owner", *lines]) + "\n")
    (folder / "new.csv").write_text("age,sex,owner\n31,f,open\n72,m,strict\n")
    (folder / "people.toml").write_text(
        'data = "people.csv"\nlabel = "ill"\nlabels = ["no", "yes"]\ngroups = "sex"\nowners = "owner"\n'
        'model = "linear"\nseed = 0\ntest_share = 0.3\n'
        '[columns.age]\nkind = "number"\nlow = 0\nhigh = 120\n'
        '[columns.sex]\nkind = "category"\nvalues = ["f", "m"]\n'
        '[columns.owner]\nkind = "category"\nvalues = ["strict", "open"]\nfeature = false\n'
    )


@dataclass(frozen=True)
class Stage:
    """Where commands run: ``data`` are the inputs, which no command changes; ``templates`` hold prepared folders."""

    data: Path
    templates: Path

    def typed(self, place: Place, command: Command) -> Callable[[], int] | list[str]:
        """Return a command with its folders filled in."""
        names = {"run": place.run, "other": place.other, "files": place.files, "data": self.data}
        words = [string.Template(word).substitute(names) for word in command]
        return (lambda: attach(Path(words[1]))) if words[0] == "attach" else words

    def run(self, place: Place, command: Command, **options: Any) -> Ended:
        """Run a command in a place."""
        return host.command(place, self.typed(place, command), **options)

    def fresh(self, scenario: Scenario, root: Path) -> Place:
        """Return a place in which all that comes before the scenario's command has happened."""
        template = self.templates / scenario.name
        if not template.exists():
            place = Place(template).made()
            for command, stop_after in scenario.before:
                ended = self.run(place, command, stop_after=stop_after)
                if ended.code != (0 if stop_after is None else 128 + signal.SIGTERM):
                    raise RuntimeError(f"{scenario.name} cannot be prepared: {ended.err}")
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root, symlinks=True)
        return Place(root)


def attach(out: Path) -> int:
    """Train, save and release in a loop of one's own; a folder with a checkpoint is resumed."""
    import torch

    import evenhand as eh
    from evenhand.errors import EvenhandError

    train, test = eh.data.digits()
    model = torch.nn.Linear(64, 10)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=train.facts, epochs=1, batch_size=128)
    try:
        if _begun(out):
            eh.resume(out, model=model, train=train, test=test, loss=loss, optimizer=_sgd)
            return 0
        with eh.attach(model, _sgd(model.parameters()), loss, plan, out=out) as private:
            for batch in private.batches(train):
                private.step(batch)
                if private.position == 5:
                    private.checkpoint()
            private.checkpoint()
            private.release()
    except EvenhandError as error:
        print(f"evenhand: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _begun(out: Path) -> bool:
    return any(b'"reserve"' in file.read_bytes() for file in out.glob("ledger.jsonl"))


def _sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.5)
