"""``evenhand predict``: a trained run's answers for new records."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from evenhand import durable
from evenhand.cli import options
from evenhand.errors import UsageError

NAME = "predict"
EXAMPLE = "evenhand predict runs/people new.csv --out predictions.csv"


def run(
    folder: options.RunFolder,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="New records: CSV, Parquet, NPZ or image folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; default stdout.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="COLUMN", help="Copy this column of FILE, e.g. an id.")
    ] = None,
    delimiter: Annotated[str, typer.Option("--delimiter", help="Between the cells of FILE.")] = ",",
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:FACTORY", help="If the model is code of your own: it is executed."),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option("--features", metavar="FILE.py:FACTORY", help="If the features are: it is executed."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Predict a label and its probabilities for every record; the file needs no label column.

    Cells that a spreadsheet would run as a formula are written with a leading apostrophe.
    """
    from evenhand.data.columns import text
    from evenhand.data.own_data import read_table
    from evenhand.data.tables import guarded
    from evenhand.training.goals.predict import predict, preprocessing

    table = read_table(source, preprocessing(folder), delimiter=delimiter)
    copied_columns = {name: [guarded(text(cell)) for cell in table.cells(name)] for name in keep or []}
    predictions = predict(folder, table, model=model, features=features)
    header = [*copied_columns, "prediction", *(f"probability of {label}" for label in predictions.labels)]
    cells = zip(*copied_columns.values(), strict=True) if copied_columns else ([] for _ in predictions.predicted)
    rows = [
        [*copies, guarded(label), *(f"{value:.6f}" for value in values)]
        for copies, label, values in zip(cells, predictions.predicted, predictions.probabilities, strict=True)
    ]
    summary = {"records": len(rows), "labels": list(predictions.labels)}
    if out is not None:
        _write(out, _csv(header, rows))
        options.emit(
            {**summary, "out": str(out)}, f"{len(rows)} prediction{'s' if len(rows) != 1 else ''}: {out}", json
        )
    elif json:
        answers = {
            "predictions": predictions.predicted,
            "probabilities": predictions.probabilities,
            "kept": copied_columns,
        }
        options.emit({**summary, **answers}, "", json)
    else:
        sys.stdout.write(_csv(header, rows))


def _csv(header: list[str], rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def _write(path: Path, text: str) -> None:
    try:
        durable.clean(path.parent)
        durable.write(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Choose another --out.") from None
