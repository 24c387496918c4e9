"""``eh.compare``: a comparison from Python, of data in memory or by name, with a DataFrame as its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import _notebook, durable
from evenhand.comparison import run_cell
from evenhand.comparison import sweep as sweeps
from evenhand.comparison.compare import Comparison
from evenhand.comparison.compare import compare as run_sweep
from evenhand.errors import UsageError
from evenhand.training.config import PYTHON

if TYPE_CHECKING:
    import pandas

    from evenhand.reporting.comparison_sections import Entry

COLUMNS = ("method", "epsilon", "metric", "mean", "low", "high", "n")


@dataclass(frozen=True)
class Compared:
    """Result of ``eh.compare``: figures as a DataFrame, the runs, and the folder they are in."""

    comparison: Comparison
    folder: Path

    @property
    def table(self) -> pandas.DataFrame:
        """Return a row per method, epsilon and metric: mean over trainings, ends of its interval, number of trainings.

        The metric ``accuracy[NAME]`` is the accuracy of one group. ``epsilon`` is NaN for a method without privacy.
        """
        import pandas

        return pandas.DataFrame([row for entry in self.comparison.entries for row in rows(entry)], columns=[*COLUMNS])

    @property
    def failed(self) -> list[str]:
        """Return why trainings failed."""
        return self.comparison.failed

    def save(self, folder: str | Path) -> Path:
        """Copy what may be shared (tables, report, runs without private files) into a new folder; return its path."""
        target = Path(folder)
        if target.exists() and any(target.iterdir()):
            raise UsageError(f"{target} is not empty: name a new folder, so that nothing is overwritten.")
        for file in sorted(self.folder.rglob("*")):
            inside = file.relative_to(self.folder)
            if file.is_file() and not file.is_symlink() and _shareable(inside):
                durable.make_folder((target / inside).parent, parents=True)
                durable.write(target / inside, file.read_bytes())
        return target

    def __str__(self) -> str:
        wide = self.table.pivot_table(index=["method", "epsilon"], columns="metric", values="mean", dropna=False)
        return str(wide.filter(["accuracy", "balanced_accuracy", "accuracy_group_min"]))

    def _repr_html_(self) -> str:
        figures = self.table[~self.table["metric"].str.contains("[", regex=False)]
        lines = [[_shown(value) for value in row] for row in figures.itertuples(index=False, name=None)]
        return _notebook.table("Comparison", COLUMNS, lines)


def compare(
    data: Any,
    methods: Sequence[str] = ("dpsgd",),
    epsilons: Sequence[float] = (3.0,),
    seeds: int = 3,
    *,
    test: Any = None,
    model: str = "mlp",
    out: str | Path | None = None,
    jobs: int | None = None,
    replicas: str = "off",
    progress: bool | None = None,
    **settings: Any,
) -> Compared:
    """Train every method at every epsilon several times, at the same true epsilon, and return what they reach.

    Args:
      data: a name from ``evenhand data``, or what ``eh.fit`` takes: (X, y), a wrapped DataFrame, a torch Dataset.
      methods: names from ``evenhand methods``, and of rules that you registered in this process.
      epsilons: promises to every record.
      seeds: trainings per method and epsilon.
      test: held-out data of data in memory; without it a fifth of the records is held out.
      model: a built-in name, or ``file.py:factory`` of your own.
      out: folder of the comparison; default a new one in runs/. ``Compared.save`` copies what may be shared.
      jobs: worker processes for data by name; data in memory and your own rules are run in this process.
      replicas: "auto" trains the seeds of a small model together, many times quicker, and other models one by one;
        "on" refuses those; see docs/how-to/experiments.md.
      progress: show a bar; default only in a terminal.
      settings: what a file for ``evenhand compare`` may hold: epochs, batch_size, lr, delta, reference, baseline ...

    Examples:
      >>> import tempfile, evenhand as eh
      >>> linear = {"model": "linear", "epochs": 1, "out": tempfile.mkdtemp()}
      >>> compared = eh.compare(eh.data.digits(), ["dpsgd"], [3.0], seeds=2, **linear)
      >>> list(compared.table.columns)
      ['method', 'epsilon', 'metric', 'mean', 'low', 'high', 'n']
    """
    if isinstance(methods, str):
        raise UsageError(f"methods takes a list of names: methods=[{methods!r}].")
    folder = _new_folder() if out is None else Path(out)
    values = {"methods": list(methods), "epsilons": list(epsilons), "seeds": seeds, "model": model, **settings}
    values["replicas"] = replicas
    if isinstance(data, str):
        if test is not None:
            raise UsageError("Data by name bring their own held-out records: leave out test=, or pass test_data=PATH.")
        chosen = sweeps.sweep({**values, "data": data}, Path.cwd())
        executor = "here" if set(methods) & _own_rules() else "processes"
        return Compared(run_sweep(chosen, folder, jobs=jobs, progress=progress, executor=executor), folder)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty, and data in memory cannot be recognised in it: name a new folder.")
    chosen = sweeps.sweep({**values, "data": PYTHON})
    with _in_memory(data, test, int(settings.get("seed", 0)), float(settings.get("test_share", 0.2))):
        return Compared(run_sweep(chosen, folder, progress=progress, executor="here"), folder)


def rows(entry: Entry) -> list[dict[str, Any]]:
    """Return one row per metric of a method at one promise, and one per group; by the names in ``COLUMNS``."""
    figures = {**entry.metrics, **{f"accuracy[{name}]": value for name, value in entry.groups.items()}}
    return [
        dict(
            zip(
                COLUMNS,
                (entry.method, entry.epsilon, name, value.value, value.low, value.high, entry.seeds),
                strict=True,
            )
        )
        for name, value in figures.items()
    ]


@contextlib.contextmanager
def _in_memory(data: Any, test: Any, seed: int, share: float) -> Iterator[None]:
    """Let the cells find these data under the name "python"."""
    from evenhand.data.dataset import Data, wrap
    from evenhand.data.tables import split

    if test is None and isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Data) for part in data):
        train, held_out = data[0], data[1].by_record
    elif test is None:
        train, held_out = split(wrap(data), share, seed)
    else:
        train, held_out = wrap(data), wrap(test).by_record
    with run_cell.given(train, held_out):
        yield


def _shareable(file: Path) -> bool:
    """Return whether a file of a comparison may be shared: nothing private, no settings, no locks."""
    return not set(file.parts) & {"private", "config.toml", "env.json"} and file.suffix != ".lock"


def _new_folder() -> Path:
    """Return the path of a folder in runs/ that does not exist yet."""
    return next(path for number in range(1, 10_000) if not (path := Path("runs", f"compared-{number}")).exists())


def _own_rules() -> set[str]:
    """Return the names of rules that are registered in this process and belong to no module of evenhand."""
    from evenhand.methods import registry

    return {
        name for name in registry.names("rule") if not registry.part("rule", name).__module__.startswith("evenhand.")
    }


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
