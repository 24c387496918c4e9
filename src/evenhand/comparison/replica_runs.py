"""Run the cells of one method and promise together, as replicas: one small model trained many times, cheaply.

Every replica is an ordinary run: its own folder, plan, secret key, ledger and statement, which ``evenhand verify``
accepts. What it leaves out is what a single run writes on the way: checkpoints, evaluations before the last one, a
report and a model card.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenhand import durable
from evenhand.comparison import training_record_figures as research
from evenhand.comparison.run_cell import Task, loaded, processor_threads, seconds
from evenhand.comparison.summary import cell_digest
from evenhand.data.fingerprint import survey
from evenhand.data.record_checks import LeftOut, check_finite, refuse_other_shape, refuse_training_records
from evenhand.errors import PlanMismatchError, UnsupportedModelError, UsageError
from evenhand.gradients.stacked_models import Chain
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.replicas import Replicas
from evenhand.mechanism.step import Mechanism, rehearse
from evenhand.methods import registry
from evenhand.runs import released_weights
from evenhand.runs.dataset_ledger import Counting, begin_together, follow_together
from evenhand.runs.folder import Folder, publish, write_durably
from evenhand.runs.ledger import BLOCK, Ledger
from evenhand.runs.recorder import Recorder
from evenhand.runs.run_files import digests
from evenhand.training import evaluate, losses, trusted_code
from evenhand.training.config import Config, to_toml
from evenhand.training.losses import default_loss
from evenhand.training.steps.stacks import chain_for, most_together, train_stacked
from evenhand.types import Commit

if TYPE_CHECKING:
    from evenhand.accounting.plan import Plan
    from evenhand.data import Data
    from evenhand.methods.queries import Query
    from evenhand.methods.rules import Rule


def grouped(tasks: Sequence[Task], mode: str) -> tuple[dict[str, tuple[Task, ...]], list[Task]]:
    """Return the tasks that can be trained together, by a name for each stack, and those that must run by themselves.

    Raises:
      UsageError: ``mode`` is "on" and some must run by themselves; the message says why. Nothing was spent.
    """
    cells: dict[tuple[Any, ...], list[Task]] = {}
    for task in tasks:
        key = (cell_digest(task.cell.config, task.cell.epsilon), task.cell.method, task.validation)
        cells.setdefault(key, []).append(task)
    stacks: dict[str, tuple[Task, ...]] = {}
    alone: list[Task] = []
    for members in cells.values():
        try:
            chain = _chain(members[0])
        except UnsupportedModelError as error:
            if mode == "on":
                raise UsageError(
                    f"The runs of {members[0].cell.method!r} cannot be trained as replicas: {error}. Use --replicas "
                    "auto, which trains such runs one by one. Nothing was spent."
                ) from None
            alone += members
            continue
        for part in _stacked(sorted(members, key=lambda task: -task.plan.steps), chain):
            stacks[f"{part[0].path.name} and {len(part) - 1} more"] = tuple(part)
    return stacks, alone


def _stacked(tasks: Sequence[Task], chain: Chain) -> Iterator[Sequence[Task]]:
    """Yield the tasks in parts that fit into memory, those with most steps first."""
    rows = max(task.plan.expected_batch for task in tasks)
    most = most_together(rows, chain)
    for start in range(0, len(tasks), most):
        yield tasks[start : start + most]


def _chain(task: Task) -> Chain:
    """Return the form of a cell's model; raise UnsupportedModelError if its runs cannot be trained together."""
    return chain_for(task.cell.config, loaded(task.cell, task.validation)[0])


@dataclass(frozen=True)
class _Replica:
    """One run of a stack: its task, data, model (filled at the end), folder, ledger and mechanism."""

    task: Task
    train: Data
    held_out: Data | None
    model: nn.Module
    counting: Counting
    mechanism: Mechanism
    ledger: Ledger

    @property
    def folder(self) -> Folder:
        return self.counting.folder


def perform_together(tasks: tuple[Task, ...]) -> None:
    """Train the runs of one cell at once; their folders are durable on return.

    All steps of all plans are charged, on disk, before the first one runs. A folder in which an earlier attempt was cut
    short is set aside, since what it charged stays charged, and the run begins anew.

    Args:
      tasks: runs that ``grouped`` put together.
    """
    torch.set_num_threads(processor_threads())
    began, tasks = time.process_time(), tuple(sorted(tasks, key=lambda task: -task.plan.steps))
    chain, config = _chain(tasks[0]), tasks[0].cell.config
    with ExitStack() as ledgers:
        with durable.together():
            acting = {task.plan.digest: _acting(task.plan) for task in {one.plan.digest: one for one in tasks}.values()}
            replicas = [
                _opened(task, *data, *acting[task.plan.digest], ledgers)
                for task, data in zip(tasks, _data(tasks), strict=True)
            ]
            begin_together([(replica.counting, replica.train) for replica in replicas])
            for replica in replicas:
                _charge(replica)
        loss = default_loss(replicas[0].train, replicas[0].model) if config.loss is None else losses.named(config.loss)
        stack = Replicas([one.mechanism for one in replicas], [one.train for one in replicas], chain, loss)
        last, average = _trained(replicas, stack, chain, config)
        with durable.together():
            for place, replica in enumerate(replicas):
                if average is not None:
                    _fill(replica.model, last, place)
                    publish(replica.model, replica.folder.last_model_file, replica.ledger)
                _fill(replica.model, last if average is None else average, place)
                _measure(replica)
            follow_together([replica.counting for replica in replicas])
            for replica in replicas:
                _publish(replica)
        told = LeftOut()
        told.add(stack.left_out, stack.drawn)
        told.summary(stack.drawn)
        with durable.together():
            for replica in replicas:
                replica.folder.write_statement()
            ledgers.close()
    share = (time.process_time() - began) / len(tasks)
    with durable.together():
        for task in tasks:
            spent = seconds(task) + share
            write_durably(task.folder.private / "processor_seconds.txt", f"{spent:.3f}\n".encode())


def _data(tasks: Sequence[Task]) -> list[tuple[Data, Data | None]]:
    """Return training and held-out data of every task, checked; runs on the same data share one object."""
    checked: dict[int, tuple[Data, Data | None]] = {}
    parts = [loaded(task.cell, task.validation) for task in tasks]
    for task, (train, held_out) in zip(tasks, parts, strict=True):
        if id(train) not in checked:
            if held_out is not None:
                refuse_other_shape(train, held_out)
                refuse_training_records(survey(train), held_out)
            check_finite(survey(train), task.cell.config.allow_not_finite)
            checked[id(train)] = replace(train, tuned=True) if task.tuned else train, held_out
    return [checked[id(train)] for train, _ in parts]


def _acting(plan: Plan) -> tuple[Rule, tuple[Query, ...]]:
    """Return the rule and the queries that a plan names, tried once on made-up rows for all of its replicas."""
    rule = registry.build("rule", **plan.rule)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    rehearse(Mechanism(plan, rule, queries, Stream.fresh()))
    return rule, queries


def _opened(
    task: Task, train: Data, held_out: Data | None, rule: Rule, queries: tuple[Query, ...], ledgers: ExitStack
) -> _Replica:
    """Make the run folder with plan and config, and open its ledger. Nothing is charged."""
    config, plan = task.cell.config, task.plan
    if train.facts != plan.facts:
        raise PlanMismatchError("The data changed after the comparison was planned: start it again. Nothing was spent.")
    _set_aside(task)
    folder = Folder.create(task.path, plan)
    write_durably(folder.path / "config.toml", to_toml(config).encode())
    trusted_code.write(folder, train.declared, {"model": config.model, "features": config.features})
    seed = config.insecure_seed
    stream = Stream.fresh() if seed is None else Stream.insecure(seed, 0)
    model = config.build_model(train.facts)
    mechanism = Mechanism(plan, rule, queries, stream)
    ledger = ledgers.enter_context(
        Ledger.open(
            folder.ledger_file,
            plan=plan.digest,
            steps=plan.steps,
            key=stream.fingerprint,
            insecure=seed is not None,
            files=digests(folder.path),
        )
    )
    return _Replica(task, train, held_out, model, Counting(folder, plan, config.compose), mechanism, ledger)


def _set_aside(task: Task) -> None:
    """Give the folder of an attempt that was cut short after its charge another name; it stays what it is."""
    folder = task.folder
    if folder.begun and folder.ledger().reserved:
        names = (task.path.with_name(f"{task.path.name}-cut-short-{number}") for number in range(1, 10_000))
        task.path.rename(next(name for name in names if not name.exists()))


def _charge(replica: _Replica) -> None:
    """Charge every step of a replica's plan in its ledger."""
    remaining = replica.task.plan.steps
    while remaining:
        block = min(BLOCK, remaining)
        replica.ledger.reserve(block)
        remaining -= block


def _trained(
    replicas: Sequence[_Replica], stack: Replicas, chain: Chain, config: Config
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Take all steps; return the last parameters and their averages (None without), stacked by name.

    Replicas stand in the order of their numbers of steps, so that those which still train are always the first.
    """
    values = [dict(replica.model.named_parameters()) for replica in replicas]
    stacked = {name: torch.stack([value[name].detach() for value in values]) for name in chain.names}
    recorders = [Recorder(replica.ledger) for replica in replicas]

    def told(_: int, commits: Sequence[Commit]) -> None:
        for recorder, commit in zip(recorders, commits, strict=False):
            recorder.add(commit, 0.0)

    trained = train_stacked(stack, stacked, [replica.task.plan.steps for replica in replicas], config, told)
    for recorder in recorders:
        recorder.flush()
    return trained


def _fill(model: nn.Module, parameters: Mapping[str, Tensor], place: int) -> None:
    """Give a model the parameters of its replica."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name][place])


def _measure(replica: _Replica) -> None:
    """Measure a replica on its held-out records as a single run does."""
    folder, plan, model = replica.folder, replica.task.plan, replica.model
    if replica.held_out is not None:
        epoch = plan.steps * plan.expected_batch / plan.facts.records
        line = evaluate.row(model, replica.held_out, plan.steps, epoch)
        line |= {"segment": 0, "weights": released_weights.digest(model)}
        folder.add_metrics(line, replica.task.cell.config.least_records)


def _publish(replica: _Replica) -> None:
    """Release the model of a replica that is counted."""
    publish(replica.model, replica.folder.model_file, replica.ledger)
    if replica.task.research:
        research.write(replica.folder, replica.model, replica.train, replica.task.plan)
