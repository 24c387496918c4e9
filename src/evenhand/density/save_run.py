"""A fitted density as a run folder: plan, ledger, model, statement, in the form of every other run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from evenhand.accounting.plan import Plan
from evenhand.data import record_checks
from evenhand.data.dataset import Data
from evenhand.density.noisy_sums import Releases, Sums
from evenhand.mechanism.random_streams import Stream
from evenhand.runs.dataset_ledger import DatasetLedger, check_records
from evenhand.runs.folder import Folder, publish, write_json
from evenhand.runs.ledger import Ledger, Reading
from evenhand.runs.os_errors import boundary
from evenhand.runs.run_files import digests, place_recorded_files

Fit = Callable[[Releases, Stream], nn.Module]
Before = Callable[[Folder], None]
After = Callable[[Folder, nn.Module], None]


@boundary()
def run_releases(
    plan: Plan,
    data: Data,
    fit: Fit,
    *,
    out: str | Path | None,
    insecure_seed: int | None = None,
    compose: bool = True,
    before: Before | None = None,
    begun: Before | None = None,
    after: After | None = None,
) -> tuple[nn.Module, Folder | None]:
    """Run the releases of a plan; with ``out`` every one is charged, on disk, before it is made (law 4).

    A folder whose run died after some of the same plan's releases is finished: those that are on disk are not made
    again. ``before`` may write files before there is a ledger; ``begun`` may stop the run when there is one, before
    anything is charged; ``after`` may write further public files, such as held-out metrics, before the statement.
    """
    folder, reading = (None, None) if out is None else _folder(Path(out), plan)
    segment = 0 if reading is None else len(reading.keys)
    stream = Stream.fresh() if insecure_seed is None else Stream.insecure(insecure_seed, segment)
    if folder is None:
        _counted(plan, data, compose, stream)
        return fit(Releases(plan, stream), stream), None
    sums = Sums(folder)
    check_records(folder, data)
    if before is not None:
        before(folder)
    insecure = insecure_seed is not None
    with Ledger.open(
        folder.ledger_file,
        plan=plan.digest,
        steps=plan.steps,
        key=stream.fingerprint,
        insecure=insecure,
        anchors=folder.anchors(),
        files=digests(folder.path),
        block=1,
    ) as ledger:
        place_recorded_files(folder.path, ledger)
        if begun is not None:
            begun(folder)
        if not folder.composition_file.exists():
            write_json(folder.composition_file, _counted(plan, data, compose, stream))
        model = fit(Releases(plan, stream, ledger, sums, 0 if reading is None else reading.committed), stream)
        if after is not None:
            after(folder, model)
        publish(model, folder.model_file, ledger)
        folder.write_statement()
        sums.forget()
    return model, folder


def _folder(path: Path, plan: Plan) -> tuple[Folder, Reading | None]:
    """Create the folder of a new run, or return that of an unfinished run of this plan, with its ledger."""
    folder = Folder(path)
    if folder.begun and not folder.finished():
        reading = folder.ledger()
        if reading.reserved and reading.plan == plan.digest:
            Sums(folder).refuse_lost(plan, reading.reserved)
            return folder, reading
    return Folder.create(path, plan), None


def _counted(plan: Plan, data: Data, compose: bool, stream: Stream) -> dict[str, Any]:
    record_checks.tell(data)
    return DatasetLedger.of(data).enter(plan, seeded=stream.public) if compose else {"runs": None}
