"""A fitted density as a run folder: plan, ledger, model, statement, in the form of every other run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from evenhand.accounting.plan import Plan
from evenhand.data import duplicate_rows
from evenhand.data.dataset import Data
from evenhand.data.row_digests import survey
from evenhand.datasets import DatasetLedger
from evenhand.density.summing import Releases
from evenhand.privacy.ledger import Ledger
from evenhand.publishing import publish
from evenhand.run_files import digests
from evenhand.runs import Folder, write_durably, write_json
from evenhand.streams import Stream

Fit = Callable[[Releases, Stream], nn.Module]
After = Callable[[Folder, nn.Module], None]


def made(
    plan: Plan,
    data: Data,
    fit: Fit,
    *,
    out: str | Path | None,
    insecure_seed: int | None = None,
    compose: bool = True,
    after: After | None = None,
) -> tuple[nn.Module, Folder | None]:
    """Run the releases of a plan; with ``out`` every one is on disk before it is made (law 4).

    ``after`` may write further public files, such as held-out metrics, before the statement is written.
    """
    stream = Stream.fresh() if insecure_seed is None else Stream.insecure(insecure_seed, 0)
    if out is None:
        _counted(plan, data, compose, stream)
        return fit(Releases(plan, stream), stream), None
    folder = Folder.create(Path(out), plan)
    write_durably(folder.rows_file, survey(data).to_bytes())
    insecure = insecure_seed is not None
    with Ledger.open(
        folder.ledger_file,
        plan=plan.digest,
        steps=plan.steps,
        key=stream.fingerprint,
        insecure=insecure,
        files=digests(folder.path),
    ) as ledger:
        write_json(folder.composition_file, _counted(plan, data, compose, stream))
        model = fit(Releases(plan, stream, ledger), stream)
        if after is not None:
            after(folder, model)
        publish(model, folder.model_file, ledger)
        folder.write_statement()
    return model, folder


def _counted(plan: Plan, data: Data, compose: bool, stream: Stream) -> dict[str, Any]:
    duplicate_rows.tell(data)
    return DatasetLedger.of(data).enter(plan, seeded=stream.public) if compose else {"runs": None}
