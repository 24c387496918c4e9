"""``evenhand compare``: methods x promises x seeds at the same true epsilon, one table and one report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand import _user_code
from evenhand.cli import early_checks, options
from evenhand.cli.train import interruptible
from evenhand.errors import UsageError
from evenhand.terminal import say

if TYPE_CHECKING:
    from evenhand.comparison.compare import Comparison

NAME = "compare"
EXAMPLE = "evenhand compare --data digits --methods sgd,dpsgd --epsilons 1,3,8 --seeds 3 --out runs/compared"


def run(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml]",
            help="Settings of train, with methods, epsilons, seeds, [tune] and so on; flags override.",
        ),
    ] = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    source: options.Source = None,
    features: options.Features = None,
    model: Annotated[str | None, typer.Option("--model", help="As for train.")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Names from `evenhand methods`, by commas.")] = None,
    goals: Annotated[
        str | None,
        typer.Option("--goals", help="A line of each method for each goal: overall,balanced,worst,parity:fpr."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--rules", metavar="FILE.py", help="Your own rules for --methods; the file is executed."),
    ] = None,
    groups: Annotated[str | None, typer.Option("--groups", help="As for train.")] = None,
    test_data: Annotated[str | None, typer.Option("--test-data", help="Held-out file, instead of a share.")] = None,
    keep_together: options.KeepTogether = None,
    persons: options.Persons = None,
    records_per_person: options.RecordsPerPerson = None,
    person_cap: options.PersonCap = None,
    owners: options.Owners = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", help="Epsilon per owner instead of --epsilons: strict=1,open=8 or FILE.toml."),
    ] = None,
    epsilons: Annotated[str | None, typer.Option("--epsilons", help="Promises to every record, e.g. 1,3,8.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Trainings per method and promise; default 3.")] = None,
    reference: Annotated[
        bool | None, typer.Option("--reference/--no-reference", help="Add the non-private model: research only.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Add differences to this method, paired by seed.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="resampled: other held-out records for each seed; fixed: one split. Default resampled on public data.",
        ),
    ] = None,
    least_records: options.LeastRecords = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME,NAME", help="What to compare and tune by: fpr_difference, mae ..."),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            help="auto: train the seeds of small models together, many times quicker; on: refuse others. Default off.",
        ),
    ] = None,
    settings: options.Settings = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: Annotated[float | None, typer.Option("--lr", help="As for train.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The first seed.")] = None,
    insecure_seed: Annotated[
        int | None, typer.Option("--insecure-seed", help="Reproducible noise: research only.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the comparison; started again, it goes on.")] = Path(
        "runs/compared"
    ),
    jobs: Annotated[int | None, typer.Option("--jobs", help="Worker processes; default one per core.")] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on a Ray cluster whose machines share --out (pip install evenhand[ray]).")
    ] = False,
    json: options.Json = False,
) -> None:
    """Compare methods at the same true epsilon; exit code 1 if a run failed. Run it again to continue."""
    asked = options.given(
        data=data,
        data_dir=None if data_dir is None else str(Path(data_dir).absolute()),
        source=options.source(source),
        features=features,
        model=model,
        groups=groups,
        test_data=None if test_data is None else str(Path(test_data).absolute()),
        owners=owners,
        keep_together=keep_together,
        persons=persons,
        records_per_person=records_per_person,
        person_cap=person_cap,
        methods=None if methods is None else [name.strip() for name in methods.split(",") if name.strip()],
        goals=None if goals is None else [name.strip() for name in goals.split(",") if name.strip()],
        epsilons=None if epsilons is None else [_number(text) for text in epsilons.split(",")],
        seeds=seeds,
        reference=reference,
        baseline=baseline,
        split=split,
        least_records=least_records,
        metric=list(options.metrics(metric)) or None,
        replicas=replicas,
        settings=options.parsed(settings),
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        insecure_seed=insecure_seed,
    ) | options.budgets(budgets)
    early_checks.compare(config, asked, out, own_rules=rules is not None)
    if rules is not None:
        _user_code.executed(rules.absolute(), "rule")
    from evenhand.comparison import sweep
    from evenhand.comparison.compare import compare

    chosen = sweep.sweep(asked) if config is None else sweep.from_toml(config, asked)
    options.tell_unit(chosen.base.keep_together)
    with interruptible():
        comparison = compare(chosen, out, jobs=jobs, executor=_executor(ray, rules))
    options.emit(_summary(comparison), _text(comparison), json)
    if comparison.failed:
        say(
            f"evenhand: {len(comparison.failed)} of {len(comparison.results)} runs did not finish. "
            f"{comparison.failed[0]} What is charged stays charged; the same command goes on with them."
        )
        raise typer.Exit(1)


def _executor(ray: bool, rules: Path | None) -> str:
    """Return where runs are made; rules of the user's own are known in this process only."""
    if rules is None:
        return "ray" if ray else "processes"
    if ray:
        raise UsageError("--rules are run in one process of this machine: leave out --ray.")
    return "here"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError("--epsilons takes numbers separated by commas, for example --epsilons 1,3,8.") from None


def _text(comparison: Comparison) -> str:
    words = comparison.files.get("full_markdown", comparison.files["markdown"]).read_text(encoding="utf-8")
    reused = (
        f"{comparison.reused} of {len(comparison.results)} runs were finished before and not repeated.\n"
        if comparison.reused
        else ""
    )
    full = (
        f"\nwith research values, not to be shared: {comparison.files['full_report']}"
        if "full_report" in comparison.files
        else ""
    )
    return f"{words}\n{reused}report: {comparison.files['report']}{full}"


def _summary(comparison: Comparison) -> dict[str, Any]:
    import json

    from evenhand.comparison.tables import rows_of

    body = json.loads(comparison.files.get("full_json", comparison.files["json"]).read_bytes())
    return {
        **body,
        "rows": rows_of(body),
        "files": {name: str(path) for name, path in comparison.files.items()},
        "runs": [str(result.task.path) for result in comparison.results],
        "reused": comparison.reused,
        "failed": comparison.failed,
    }
