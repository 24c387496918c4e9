"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.errors import UsageError
from evenhand.terminal import note, plain

if TYPE_CHECKING:
    from evenhand.methods.schedules import Schedule

LONGEST = 200
"""Bytes of a file's name; disks take 255, and names beside it are a little longer."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as given to --out.")]
Sign = Annotated[
    Path | None,
    typer.Option("--sign", help="Private key from `evenhand keys new`: write signature.json for the folder."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="A name from `evenhand data`, or a file or image folder of your own (see `evenhand init`)."
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", help="Where the files of built-in data are. Default: EVENHAND_DATA, else the cache."),
]
Source = Annotated[
    list[str] | None,
    typer.Option(
        "--source", metavar="KEY=VALUE", help="An option of built-in data, e.g. owners=digits, records=10000."
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Train on features of the inputs: scattering, efficientnet_lite0 (1, 2), minilm (for text), or a frozen "
        "network of yours, file.py:factory.",
    ),
]
MethodName = Annotated[str | None, typer.Option("--method", help="A name from `evenhand methods`.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method, e.g. bound=0.5.")
]
Epsilon = Annotated[float | None, typer.Option("--epsilon", help="Promise to every record.")]
Delta = Annotated[float | None, typer.Option("--delta", help="Default: the largest power of ten up to 1/(10 N).")]
Noise = Annotated[float | None, typer.Option("--noise", help="A fixed noise multiplier instead of --epsilon.")]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Expected passes over the data.")]
Owners = Annotated[
    str | None, typer.Option("--owners", help="Budget class of a record: label, a column, or a file of names.")
]
Budgets = Annotated[
    str | None,
    typer.Option(
        "--budgets", help="Epsilon per owner: strict=1,open=8 or FILE.toml; or per record: a column, or a file."
    ),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", help="cross_entropy, focal:gamma=2, binary, mse, class_weighted:weights=[1,5]: per record."),
]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", help="sgd (default), adam, adam_bc, adamw, nadam, radam, adamax, rmsprop, adagrad."),
]
Lr = Annotated[
    float | None, typer.Option("--lr", help="Learning rate at the start of the schedule (one-cycle: its top).")
]
LrSchedule = Annotated[
    str | None,
    typer.Option(
        "--lr-schedule", help="linear (default: falls to 0), constant, cosine, one-cycle, step (a tenth per third)."
    ),
]
MetricNames = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME,NAME", help="Printed first: balanced_accuracy, fpr, fpr_difference, brier, mae ..."
    ),
]
KeepTogether = Annotated[
    str | None,
    typer.Option("--keep-together", metavar="COLUMN", help="Records with the same value, as a person's, share a side."),
]
Persons = Annotated[
    str | None,
    typer.Option("--persons", metavar="COLUMN", help="Whose record it is: the promise is then about a person."),
]
RecordsPerPerson = Annotated[
    int | None, typer.Option("--records-per-person", help="Records of a drawn person that a step uses; default 1.")
]
PersonCap = Annotated[
    int | None,
    typer.Option("--person-cap", metavar="G", help="Draw records one by one instead, at most G of each person."),
]
LeastRecords = Annotated[
    int | None,
    typer.Option("--least-records", help="Share no figures of groups with fewer held-out records; default 10."),
]
Momentum = Annotated[float | None, typer.Option("--momentum", help="Of sgd (default 0.9) or rmsprop.")]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay", help="Default: that of the optimizer in torch.")]
Average = Annotated[
    float | None,
    typer.Option("--average", help="Decay of an average of the weights, e.g. 0.99; it is what is released."),
]
Augment = Annotated[
    str | None, typer.Option("--augment", help="Random views of pictures: shift, shift:2 (pixels), flip, flip+shift.")
]
Views = Annotated[
    int | None, typer.Option("--views", help="Views of each record, averaged before its gradient is bounded.")
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", help="Records computed at once; halved when memory runs out.")
]
Lean = Annotated[bool | None, typer.Option("--lean/--no-lean", help="Less memory, at some cost in time.")]
Precision = Annotated[
    str | None, typer.Option("--precision", help="float32, or bf16 for the model; norms, sums and noise stay full.")
]
GoalName = Annotated[
    str | None,
    typer.Option("--goal", help="Whom to serve: overall (default), balanced, worst, or parity:fpr|tpr|selection_rate."),
]
Tau = Annotated[
    str | None,
    typer.Option("--tau", help="Strength of the offset for small classes, or held-out. Default: that of the goal."),
]
PriorCounts = Annotated[
    str | None,
    typer.Option("--prior", metavar="N,N", help="Publicly known counts of the labels, instead of noisy ones."),
]
BatchSize = Annotated[float | None, typer.Option("--batch-size", help="EXPECTED records per step (Poisson sampling).")]


def parsed(settings: list[str] | None, flag: str = "--set", example: str = "bound=0.5") -> dict[str, Any]:
    """Parse ``["bound=0.5"]`` to ``{"bound": 0.5}``; values are JSON where they can be, else text."""
    result: dict[str, Any] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise UsageError(f"{flag} takes KEY=VALUE, for example {flag} {example}.")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def source(settings: list[str] | None) -> dict[str, Any]:
    """Return the options that ``--source`` stands for.

    Examples:
      >>> source(["records=10000", "owners=digits"])
      {'records': 10000, 'owners': 'digits'}
    """
    return parsed(settings, "--source", "records=10000")


def counts(text: str | None) -> list[float] | None:
    """Return the counts that ``--prior`` declares.

    Examples:
      >>> counts("900,100")
      [900.0, 100.0]
    """
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError("--prior takes one publicly known count per label: --prior 900,100.") from None


def strength(text: str | None) -> float | str | None:
    """Return the number that ``--tau`` gives, else its text, which the library checks.

    Examples:
      >>> strength("2"), strength("held-out")
      (2.0, 'held-out')
    """
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def metrics(names: str | None) -> tuple[str, ...]:
    """Return the metrics that ``--metric`` names; an unknown one is refused before anything is loaded.

    Examples:
      >>> metrics("fpr,brier"), metrics(None)
      (('fpr', 'brier'), ())
    """
    from evenhand.reporting.metrics import listed

    return () if names is None else listed(names)


def given(**values: Any) -> dict[str, Any]:
    """Return only the options that the user typed."""
    return {key: value for key, value in values.items() if value is not None and value != {}}


def emit(data: Any, text: str, as_json: bool) -> None:
    """Print JSON for a program, or text for a person."""
    print(json.dumps(data) if as_json else plain(text))


def refuse_nameless(*paths: Path | None) -> None:
    """Refuse paths that name no file, such as an empty one or a folder, before anything is written."""
    for path in paths:
        if path is not None and (not path.name or len(os.fsencode(path.name)) > LONGEST):
            raise UsageError("A file to write needs a name, of at most 200 bytes: for example made.html.")


def pairs(text: str, flag: str) -> dict[str, float]:
    """Parse ``"strict=1,open=8"`` to ``{"strict": 1.0, "open": 8.0}``."""
    result: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().rpartition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or name in result:
            raise UsageError(f"{flag} takes NAME=NUMBER,NAME=NUMBER with each name once, for example strict=1,open=8.")
        result[name] = number
    return result


def budgets(text: str | None) -> dict[str, Any]:
    """Return the settings that ``--budgets`` stands for: NAME=NUMBER pairs, a TOML file of them, or a column or file.

    Examples:
      >>> budgets("strict=1,open=8"), budgets("promise")
      ({'budgets': {'strict': 1.0, 'open': 8.0}}, {'budgets': {}, 'record_budgets': 'promise'})
    """
    if text is None:
        return {}
    if text.endswith(".toml"):
        return {"budgets": _table(Path(text))}
    if "=" in text:
        return {"budgets": pairs(text, "--budgets")}
    return {"budgets": {}, "record_budgets": text}


def _table(path: Path) -> dict[str, Any]:
    """Read epsilons by owner: the table [budgets] of a file, or all of a file that has none."""
    from evenhand import _toml

    values = _toml.read(path)
    epsilons = values.get("budgets", values)
    if (
        not isinstance(epsilons, dict)
        or not epsilons
        or any(isinstance(value, dict | list) for value in epsilons.values())
    ):
        raise UsageError(f"{path} must hold one epsilon per owner, for example: strict = 1 and open = 8.")
    return epsilons


ScheduleName = Annotated[str | None, typer.Option("--schedule", help="constant, linear, time, step or phases.")]
ScheduleDecay = Annotated[float | None, typer.Option("--decay", help="R of linear, time and step decay.")]
ScheduleEvery = Annotated[int | None, typer.Option("--every", help="K of step decay: epochs between two levels.")]
SchedulePhases = Annotated[int | None, typer.Option("--phases", help="Number of phases.")]
SpendingPlot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the spent epsilon over the steps.")
]


def built_schedule(
    name: str | None, decay: float | None, every: int | None, phases: int | None, **more: Any
) -> Schedule:
    """Return the schedule that the flags describe, one of evenhand's own; a flag that it does not have is an error."""
    from evenhand import _validate
    from evenhand.methods import registry

    known = _validate.known(name or "constant", registry.built_in("schedule"), "schedule")
    chosen = registry.build("schedule", known, given(decay=decay, every=every, n=phases, **more))
    return chosen  # type: ignore[no-any-return]


def draw_spending(
    path: Path,
    spending: Mapping[str, Sequence[tuple[int, float]]],
    budgets: Mapping[str, float],
    delta: float,
    unit: str = "record",
) -> None:
    """Write an SVG of the spent epsilon per owner, with the promises as dashed lines."""
    from evenhand._numbers import rounded_up
    from evenhand.reporting.charts import lines
    from evenhand.runs.folder import write_durably

    picture = lines(
        spending,
        title="Spent epsilon",
        x_label="step",
        y_label=f"spent epsilon (per {unit}, add/remove, delta {delta:g})",
        limits={f"promised to {name}": value for name, value in budgets.items()},
        printed=rounded_up,
    )
    write_durably(path, picture.encode())


def tell_unit(column: str | None) -> None:
    """Print that records kept together in the split are still promised privacy one by one, if a column is named."""
    if column is not None:
        note(
            f"WARNING: records with the same {column} are on one side of the split, but the promise is about one "
            f"record: several records of one person are not covered together. For that: --persons {column}."
        )
