"""The one command behind docs/results: run experiments, or read runs that are there, and write their pages.

    python experiments/results.py adult dutch --data-dir FOLDER
    python experiments/results.py --all --data-dir FOLDER

An experiment is a TOML file here, or a script of its own (``SCRIPTS``), which ``--all`` runs too. Interrupted, the same
command goes on. ``--from FOLDER`` writes pages from runs made before, without running anything.
``--pages`` writes pages and pictures again from their JSON files alone. ``--quick`` runs a small part of everything to
see that it works; its pages go elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import index_text  # noqa: E402
import matched_guides  # noqa: E402
import matched_studies  # noqa: E402
import page_text  # noqa: E402
import plotting  # noqa: E402
import pooled_tables  # noqa: E402
import serving_studies  # noqa: E402
import summarising  # noqa: E402

from evenhand.comparison import declared_claims  # noqa: E402
from evenhand.comparison import sweep as grid  # noqa: E402
from evenhand.comparison.compare import compare  # noqa: E402
from evenhand.errors import EvenhandError, UsageError  # noqa: E402
from evenhand.training.loop import Interrupted  # noqa: E402

RESULTS = HERE.parent / "docs" / "results"
PACKAGED = HERE.parent / "src" / "evenhand" / "comparison" / "recommend.json"
SCRIPTS: dict[str, tuple[str, ...]] = {
    "adapt_curves": ("--data-dir", "{data}", "--seeds", "20"),
    "density_leak": (),
    "densities": ("{data}", "--cache", "{runs}/features", "--lines", "{runs}/densities.jsonl"),
    "epsilon_study": (),
    "group_curves": ("--data-dir", "{data}"),
    "idp_mnist": ("{data}/mnist", "--lines", "{runs}/idp_mnist.jsonl"),
    "idp_mnist_code": (
        "{data}/mnist",
        "--as-code",
        "--methods",
        "dpsgd,idp_sample,idp_scale",
        "--seeds",
        "0,1,2,3,4",
        "--lines",
        "{runs}/idp_mnist.jsonl",
    ),
    "owner_curves": ("--data-dir", "{data}"),
    "lira_owners": (),
    "findings": ("--data-dir", "{data}", "--seeds", "20"),
    "parity": ("--data-dir", "{data}"),
    "prior_split": (),
    "ham_ideas": ("--data-dir", "{data}", "--work", "{runs}/serving"),
    "knn_distances": ("--data-dir", "{data}", "--work", "{runs}/serving"),
    "sad_noise": (),
    **{name: (name, "--data-dir", "{data}", "--work", "{runs}/serving") for name in matched_studies.STUDIES},
    **{
        f"serving_{name}": (name, "--data-dir", "{data}", "--work", "{runs}/serving")
        for name in serving_studies.STUDIES
    },
}
"""Experiments that are no comparison of runs, and what their scripts are told."""
FILES = {
    "idp_mnist_code": "idp_mnist",
    "replication": "replication/again",
    **dict.fromkeys(matched_studies.STUDIES, "matched"),
    **{f"serving_{name}": "serving" for name in serving_studies.STUDIES},
}
"""Scripts that are not called like their page: they run one study of several."""
PAGES = {"epsilon_study": "epsilon"}
"""Pages that are not called like their script."""
MINUTES = re.compile(r"([\d.]+) (?:processor minutes|minutes of runs on shared cores)")
"""How the pages of scripts say what they took; less than a minute goes unsaid."""
BESIDES = "besides features and tuning"
"""How a page says what its figure leaves out."""
DIGITS = 5
"""Figures after the point in the JSON files: what is left out is far below every interval."""


def names() -> list[str]:
    """Every experiment, by the name of its file."""
    return sorted(file.stem for file in HERE.glob("*.toml"))


def quick(values: Mapping[str, Any]) -> dict[str, Any]:
    """A small part of an experiment: one epoch, two seeds, the first point of the grid twice at most."""
    small = {**values, "seeds": 2, "epochs": 1}
    small["variants"] = {
        name: {key: value for key, value in table.items() if key != "epochs"}
        for name, table in values.get("variants", {}).items()
    }
    tune = {key: value for key, value in values.get("tune", {}).items() if key in ("score", "share")}
    if tune:
        small["tune"] = {**tune, "lr": values["tune"].get("lr", [0.1, 0.2])[:2]}
    if "epsilons" in values:
        small["epsilons"] = values["epsilons"][:1]
    return small


def run(name: str, runs: Path, *, small: bool = False, jobs: int | None = None) -> dict[str, Any]:
    """Run an experiment, or what is missing of it; returns its table with what the file says about the study."""
    values = grid.table(HERE / f"{name}.toml")
    sweep = grid.sweep(quick(values) if small else values, HERE, f"experiments/{name}.toml")
    if not sweep.public:
        raise UsageError(f"{name} uses data that are not public: its figures cannot be published.")
    executor = "here" if jobs == 1 else "processes"  # in one process, methods and studies share plans and data
    found = compare(sweep, runs / name, jobs=jobs, executor=executor)
    for reason in found.failed:
        print(f"{name}: failed: {reason}", file=sys.stderr)
    return table(name, runs)


def script(name: str, data: str, runs: Path) -> bool:
    """Run an experiment that writes its own page; False if it failed."""
    told = [part.format(data=data, runs=runs) for part in SCRIPTS[name]]
    file = HERE / f"{FILES.get(name, name)}.py"
    return subprocess.run([sys.executable, str(file), *told], check=False).returncode == 0


def table(name: str, runs: Path) -> dict[str, Any]:
    """The table of an experiment whose runs are there."""
    file = runs / name / "table.json"
    if not file.exists():
        raise UsageError(f"There is no {file}: run it first, without --from.")
    study = grid.table(HERE / f"{name}.toml")["study"]
    found: dict[str, Any] = {"experiment": name, "study": study, **json.loads(file.read_text())}
    return found


def write(found: Mapping[str, Any], out: Path) -> None:
    """Write an experiment's figures, then the pages that show any of them, and the index of all that are there."""
    out.mkdir(parents=True, exist_ok=True)
    found = _rounded(found)
    (out / f"{found['experiment']}.json").write_text(json.dumps(found, indent=1) + "\n")
    tables = written(out)
    for table in tables:
        if table["experiment"] == found["experiment"] or pooled_tables.shares_cells(table, found):
            _write_page(shown(table, tables), out)
    (out / "index.md").write_text(index(out))


def _write_page(found: Mapping[str, Any], out: Path) -> None:
    for end, picture in plotting.pictures(found).items():
        (out / f"{found['experiment']}_{end}.svg").write_text(picture.drawing)
    (out / f"{found['experiment']}.md").write_text(page_text.page(found))


def shown(table: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table as its page shows it: with the trainings that other studies made of the same cells."""
    return pooled_tables.shown(table, tables, declared(table))


def declared(table: Mapping[str, Any]) -> tuple[declared_claims.Claim, ...]:
    """The claims in the file of a table's experiment."""
    found = grid.table(HERE / f"{table['experiment']}.toml").get("claim", [])
    return declared_claims.claims(found, [entry["method"] for entry in table["entries"]])


def index(out: Path) -> str:
    """The index of all pages in ``out``, with what they took."""
    pages = [out / f"{PAGES.get(name, name)}.md" for name in SCRIPTS]
    minutes = sum(float(found) for page in pages if page.exists() for found in MINUTES.findall(page.read_text()))
    missing = [name for name in names() if not (out / f"{name}.json").exists()]
    besides = [page.stem for page in pages if page.exists() and BESIDES in page.read_text()]
    tables = written(out)
    return index_text.index([shown(table, tables) for table in tables], minutes, missing, besides)


def again(name: str, out: Path) -> dict[str, Any]:
    """The table behind a page that was written before."""
    file = out / f"{name}.json"
    if not file.exists():
        raise UsageError(f"There is no {file}: run the experiment first, without --pages.")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def summarise(out: Path, packaged: Path) -> None:
    """What ``evenhand recommend`` reads, from every table in ``out``."""
    tables = written(out)
    pooled = [shown(table, tables) for table in tables]
    packaged.write_text(json.dumps(summarising.packaged(pooled, matched_guides.packaged(out)), indent=1) + "\n")


def written(out: Path) -> list[dict[str, Any]]:
    """The tables of all experiments whose figures are in ``out``."""
    return [again(name, out) for name in names() if (out / f"{name}.json").exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"experiments: {', '.join(names())}")
    parser.add_argument("--all", action="store_true", help="every experiment")
    parser.add_argument("--data-dir", help="where the files of the data sets are")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="where the runs are kept")
    parser.add_argument("--from", dest="source", type=Path, help="write pages from runs in this folder; run nothing")
    parser.add_argument("--pages", action="store_true", help="write pages again from the JSON files; run nothing")
    parser.add_argument("--out", type=Path, help="where pages go; default docs/results, with --quick runs/quick/pages")
    parser.add_argument("--jobs", type=int, help="worker processes; default one per core")
    parser.add_argument("--quick", action="store_true", help="one epoch of everything: does it work?")
    asked = parser.parse_args(arguments)
    runs = asked.source or (Path("runs/quick") if asked.quick else asked.runs)
    out = asked.out or (runs / "pages" if asked.quick else RESULTS)
    chosen = [*names(), *([] if asked.pages or asked.source or asked.quick else SCRIPTS)] if asked.all else asked.names
    if asked.pages and not chosen:
        chosen = [found["experiment"] for found in written(out)]
    if not chosen or set(chosen) - {*names(), *SCRIPTS}:
        parser.error(f"name experiments, or --all: {', '.join([*names(), *SCRIPTS])}")
    if asked.data_dir:
        os.environ["EVENHAND_DATA"] = str(Path(asked.data_dir).resolve())
    failed = []
    for name in chosen:
        print(f"{name} ...", flush=True)
        if name in SCRIPTS:
            failed += [] if script(name, asked.data_dir or "data", runs) else [name]
            continue
        try:
            if asked.pages:
                found = again(name, out)
            else:
                found = table(name, runs) if asked.source else run(name, runs, small=asked.quick, jobs=asked.jobs)
            write(found, out)
        except Interrupted as stop:
            print(f"{name}: {stop}", file=sys.stderr)
            return 130
        except EvenhandError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {out / f'{name}.md'}", flush=True)
    if out == RESULTS:
        summarise(out, PACKAGED)
    return 1 if failed else 0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) if abs(value) >= 10**-DIGITS else value
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
