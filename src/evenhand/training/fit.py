"""Train (``fit``) or go on (``resume``): from data, model and promise to a finished run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenhand import threads
from evenhand.accounting.budgets import Budgets, FixedNoise, Privacy, Promise
from evenhand.data.dataset import Data, wrap
from evenhand.data.fingerprint import survey
from evenhand.data.large.workers import in_workers
from evenhand.data.owners_and_groups import by_record
from evenhand.data.record_checks import refuse_both_sides, refuse_other_shape, refuse_training_records
from evenhand.density import METHODS
from evenhand.errors import BudgetExhausted, UsageError
from evenhand.gradients.doctor.refusals import refuse_wrapped
from evenhand.mechanism.make_plan import Plan
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.mechanism.processes.group import Group, refuse_several
from evenhand.methods.catalogue import Method
from evenhand.methods.catalogue import method as find_method
from evenhand.methods.priors import Prior
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.runs.folder import Folder, write_durably
from evenhand.runs.os_errors import boundary
from evenhand.training import density_runs, evaluate, losses, trusted_code, weight_average
from evenhand.training.attach import create_together, start
from evenhand.training.augment import Augment, views_of
from evenhand.training.config import PYTHON, Config, descent_again, of_run, settings_of, to_toml, views_again
from evenhand.training.goals import serve as goals
from evenhand.training.goals.goal import Goal
from evenhand.training.guards.model_guards import Compute, adapt_to_views
from evenhand.training.guards.promise_audit import audit_before_release, refuse_unauditable
from evenhand.training.loggers import Broadcast, Logger
from evenhand.training.loop import Companions, run
from evenhand.training.losses import Loss, default_loss
from evenhand.training.optimizers import Descent, OptimizerFactory, SchedulerFactory
from evenhand.training.progress import seconds as estimated_seconds
from evenhand.training.rebudget import refuse_waiting
from evenhand.training.run import Run
from evenhand.training.steps.callbacks import Callback, Callbacks, Stop
from evenhand.training.weight_average import EMA, Average
from evenhand.types import PriorKind

__all__ = ["default_loss", "fit", "resume"]

OnStart = Callable[[Plan, float], None]


@boundary()
def fit(
    model: nn.Module,
    train: Any,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise: float | None = None,
    privacy: Promise | None = None,
    method: str | Method = "dpsgd",
    settings: Mapping[str, Any] | None = None,
    epochs: float = 10,
    batch_size: float | None = None,
    loss: str | Loss | None = None,
    lr: float = 0.2,
    optimizer: str | OptimizerFactory | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    scheduler: str | SchedulerFactory | None = None,
    average: float | EMA | None = None,
    compute: Compute | None = None,
    workers: int = 0,
    augment: str | Augment | None = None,
    views: int = 1,
    test: Any = None,
    groups: Iterable[Any] | None = None,
    owners: Iterable[Any] | None = None,
    persons: Iterable[Any] | None = None,
    records_per_person: int = 1,
    person_cap: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    insecure_seed: int | None = None,
    allow_unproven: bool = False,
    compose: bool = True,
    training_records: bool = False,
    allow_not_finite: bool = False,
    prior: bool | PriorKind | Sequence[float] | Mapping[Any, float] | Prior = True,
    goal: str | Goal = "overall",
    tau: float | str | None = None,
    least_records: int = LEAST,
    audit: str | None = None,
    config: Config | None = None,
    on_start: OnStart | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
) -> Run:
    """Train a model privately, from data to statement and report.

    Args:
      model: your module; it is trained in place.
      train: (X, y), a torch Dataset, or ``evenhand.data.wrap(...)``.
      epsilon: promise to every record; or give ``privacy`` (Privacy, Budgets, FixedNoise), or ``noise``.
      delta: probability that the promise may fail; default the largest power of ten that is at most 1/(10 N).
      noise: a noise multiplier instead of a promise; the statement says what it costs.
      privacy: the promise as an object, for example Budgets.
      method: a name from ``evenhand methods``, or a Method; ``settings`` changes the defaults of a named one.
      settings: see ``method``.
      epochs: expected passes over the data.
      batch_size: expected records per step; default about a tenth of the data, at most 1024.
      loss: a name with settings (``"focal:gamma=2"``, see ``losses``) or a function ``loss(outputs, targets)`` with one
        value per record; default cross-entropy for classes, squared error for real numbers.
      lr: learning rate of a named optimizer.
      optimizer: a name (sgd, adam, adamw ...), default SGD with momentum 0.9; or a function of the parameters,
        ``lambda parameters: torch.optim.Adam(parameters)``.
      momentum: of a named optimizer that has one.
      weight_decay: of a named optimizer; default torch's.
      scheduler: linear (default: the rate falls to zero), constant, cosine, one-cycle or step; or a function of the
        optimizer (and the number of steps) that returns a torch LRScheduler. With your own optimizer the default is
        constant.
      average: decay of an average of the weights, 0.999 for example, or ``weight_average.EMA``; the average is
        evaluated and released, with the last weights beside it.
      compute: micro-batches, memory and precision, see ``Compute``; nothing private depends on it.
      workers: processes that read the records of a map-style Dataset, ahead of their step; nothing private depends on
        it, and what is drawn at random while a record is read has the same secret seed with any number.
      augment: "shift", "shift:2", "flip" or "flip+shift" for pictures; or a function that gives a random view of every
        record of a batch of inputs, see ``augmenting``.
      views: how many views of a record are averaged before its gradient is bounded.
      test: held-out data for the report; not covered by the statement.
      groups: one name per training record, when ``train`` is not wrapped yet.
      owners: the budget class of each training record, likewise.
      persons: whose record each training record is, likewise: the promise is then about a person.
      records_per_person: how many records of a drawn person a step uses at most; their losses are averaged.
      person_cap: draw records one by one instead, at most so many of each person, see `evenhand.data.wrap`.
      out: the run folder; default a new one in runs/.
      progress: show progress; default only in a terminal or a notebook.
      insecure_seed: bit-reproducible noise and sampling, for research only.
      allow_unproven: run a method without an established guarantee.
      compose: add this run up with earlier ones on the same data; False is named in the statement.
      training_records: ``test`` holds training records on purpose: their figures are not private, and everything that
        is measured on it goes into the run's ``private`` folder. Else such data are refused, see ``data.overlap``.
      allow_not_finite: train although more than one record in a hundred holds values that are not finite.
      prior: release noisy counts of the labels once, before the first step: they cost at most a hundredth of the
        promise, and decisions can then be moved towards small classes afterwards. "labels by group" counts them for
        each group. False leaves them out; targets that are no labels have none. Publicly known counts or shares, one
        per label, can be declared instead and cost nothing: ``prior=[900, 100]``.
      goal: whom the run serves: "overall", "balanced" (all classes alike), "worst" (the worst class first), or
        "parity:fpr" (also tpr, selection_rate, equalized_odds) between groups. It decides the loss's offsets and how
        outputs become answers; the promise does not depend on it.
      tau: strength of the offset in place of the goal's own; "held-out" chooses it on held-out records.
      least_records: figures of groups with fewer held-out records than this stay in the run's ``private`` folder.
      audit: "quick" or "thorough": attack the promise before the first step, see ``guards.promise_audit``.
      config: what the command line was asked, kept in the folder for ``resume``.
      on_start: called with the plan and the estimated seconds before anything is spent; raise in it to stop here.
      loggers: given released values (held-out accuracy, epsilon of the plan and so far) at each evaluation, see
        ``training.loggers``. For a stop that they decide, the epsilon of the plan holds.
      callbacks: objects of classes made from ``evenhand.Callback``, which are given released values too and may stop.
      stop: ``evenhand.EarlyStopping(...)`` or a function ``stop(step, values)`` of the held-out metrics. The statement
        says the epsilon of the whole plan, since such a stop depends on the data.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> model = torch.nn.Linear(64, 10)
      >>> run = eh.fit(model, train, epsilon=3.0, delta=1e-5, epochs=1, test=test, out=tempfile.mkdtemp())
      >>> run.privacy.epsilon <= 3.0
      True
    """
    refuse_wrapped(model)
    group = Group.of_this_process()
    by_person = {"persons": persons, "records_per_person": records_per_person, "person_cap": person_cap}
    data = _wrapped(train, groups=groups, owners=owners, **by_person)
    if isinstance(privacy, Budgets) and privacy.owners is not None:
        data = by_record(data, privacy.owners, owners)
    held_out = None if test is None else wrap(test).by_record
    if held_out is not None:
        refuse_other_shape(data, held_out)
        refuse_both_sides(data, held_out)
    if held_out is not None and not training_records:
        refuse_training_records(survey(data), held_out)
    telling = Broadcast(loggers, evaluates=test is not None and not training_records)
    hooks = Callbacks(callbacks, stop, evaluates=test is not None and not training_records)
    known = None if isinstance(prior, bool | str) else prior
    chosen = find_method(method, settings)
    promise = choose_promise(epsilon, delta, noise, privacy)
    plan = make_plan(
        *(chosen, promise),
        data=data.facts,
        epochs=epochs,
        batch_size=batch_size,
        allow_unproven=allow_unproven,
        prior=countable(data, prior if isinstance(prior, bool | str) else False),
    )
    refuse_unauditable(plan, audit)
    wanted = goals.ask(
        *(goal, tau, known),
        data=data,
        held_out=held_out,
        released=plan.prior is not None,
        research=training_records,
        least=least_records,
    )
    descent = _descent(optimizer, lr, momentum, weight_decay, scheduler)
    several, ema, computing = views_of(augment, views), weight_average.named(average), compute or Compute()
    with (
        threads.suited(model, data.facts.inputs, plan.expected_batch),
        in_workers(workers, data, held_out) as (data, held_out),
    ):
        used = default_loss(data, model) if loss is None else losses.named(loss)
        if held_out is not None:
            evaluate.check_outputs(model, held_out, used, data.facts.labels if plan.prior is not None else ())
        torch_optimizer, schedule = descent.build(model, plan.steps)
        path = Path(group.first(lambda: str(out if out is not None else new_folder(plan))))
        folder = create_together(group, path, plan, model, torch_optimizer, insecure_seed)
        run_config = config or Config(
            data=PYTHON, model=PYTHON, method=plan.method, epochs=epochs, insecure_seed=insecure_seed
        )
        run_config = dataclasses.replace(
            run_config,
            training_records=training_records,
            allow_not_finite=allow_not_finite,
            prior=plan.prior is not None,
            least_records=least_records,
            audit=audit,
            **goals.recorded(wanted),
        )
        run_config = dataclasses.replace(run_config, **settings_of(descent, loss, ema, computing, augment, views))

        def write_config() -> None:
            """Write what a resume needs to know."""
            write_durably(folder.path / "config.toml", to_toml(run_config).encode())
            trusted_code.write(folder, data.declared, {"model": run_config.model, "features": run_config.features})

        group.first(write_config)
        companions = Companions(schedule, None if ema is None else Average(model, ema))
        private = start(
            *(model, torch_optimizer, used, plan, folder, group),
            insecure_seed=insecure_seed,
            compose=compose,
            compute=computing,
            views=several,
            extras=companions.by_name,
            allow_not_finite=allow_not_finite,
        )

        def before() -> goals.Serving:
            """Say what is about to happen, then release the counts and take the loss that the goal needs."""

            def announce() -> None:
                """Say what is about to be spent, and how long it takes."""
                assert on_start is not None
                fetched, slots = data.on(next(model.parameters()).device).as_drawn, data.facts.records_per_person
                if several is not None:
                    seen = dataclasses.replace(several, slots=slots)
                    fetched = dataclasses.replace(fetched, fetch=lambda rows: _viewed(seen, *data.as_drawn.fetch(rows)))
                with computing.casting(model):
                    adapted = adapt_to_views(model, used, several, slots)
                    on_start(plan, estimated_seconds(*adapted, plan, fetched, computing))

            if on_start is not None:
                group.first(announce)
            audit_before_release(group, folder, plan, audit)
            return goals.begin(private, data, wanted, used)

        with boundary(folder.path):
            least = least_records
            return run(private, data, held_out, companions, telling, progress, before, training_records, least, hooks)


@boundary()
def resume(
    path: str | Path,
    *,
    model: nn.Module | str | None = None,
    features: str | None = None,
    train: Any = None,
    test: Any = None,
    loss: str | Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    average: EMA | None = None,
    compute: Compute | None = None,
    workers: int = 0,
    augment: str | Augment | None = None,
    views: int = 1,
    progress: bool | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    training_records: bool = False,
    release_untrained: bool = False,
) -> Run:
    """Continue a run that was stopped or killed: a new segment with a new key takes the steps that remain.

    What was charged stays charged: steps that ran after the last checkpoint are lost, and run and statement say how
    many. If all are lost nothing is released, except with ``release_untrained``. The learning rate goes on where the
    plan does. Pass again what ``fit`` was given as a Python object: model and data, and your own loss, optimizer,
    scheduler, average or augmentation. Names are found in the run's config. A file of code (``model`` or ``features``,
    as ``file.py:factory``) is executed if it is named here, or if `evenhand train` was given this very file on this
    machine.
    """
    folder, group = Folder.existing(path), Group.of_this_process()
    plan = folder.plan()
    if folder.finished():
        density_runs.forget_sums(folder)
        raise BudgetExhausted(
            f"This run is finished: all {plan.steps} steps are charged and the model is in {folder.model_file}. "
            "To train on, make a new plan; both budgets add up."
        )
    refuse_waiting(folder)
    config = of_run(folder.path, code={"model": model, "features": features}, remembered=True)
    if plan.method in METHODS:
        refuse_several("A density")
        if callbacks or stop is not None:
            raise UsageError("A density is released at once and has no steps: leave out callbacks and stop.")
        return _resumed_density(folder, config, train, test, loggers)
    for name, given in (("loss", loss), ("optimizer", optimizer)):
        if given is None and getattr(config, name) == PYTHON:
            raise UsageError(f"The run was started with its own {name}: pass {name}= again to resume it.")
    if train is None:
        train, test = config.load_data()
    research = training_records or config.training_records
    telling = Broadcast(loggers, evaluates=test is not None and not research)
    hooks = Callbacks(callbacks, stop, evaluates=test is not None and not research)
    data, held_out = wrap(train), None if test is None else wrap(test).by_record
    if held_out is not None and not research:
        refuse_training_records(survey(data), held_out)
    model = config.build_model(data.facts) if model is None or isinstance(model, str) else model
    refuse_wrapped(model)
    chosen_loss = loss or config.loss
    ema = weight_average.named(average if average is not None else config.average)
    torch_optimizer, schedule = descent_again(config, optimizer, scheduler).build(model, plan.steps)
    companions = Companions(schedule, None if ema is None else Average(model, ema))
    with (
        threads.suited(model, data.facts.inputs, plan.expected_batch),
        in_workers(workers, data, held_out) as (data, held_out),
    ):
        used = default_loss(data, model) if chosen_loss is None else losses.named(chosen_loss)
        wanted = goals.ask(
            *(config.goal, config.tau, config.prior_counts or None),
            data=data,
            held_out=held_out,
            released=plan.prior is not None,
            research=research,
            least=config.least_records,
        )
        private = start(
            *(model, torch_optimizer, used, plan, folder, group),
            insecure_seed=config.insecure_seed,
            compute=compute or Compute(config.micro_batch, config.lean, config.precision),
            views=views_again(config, augment, views),
            extras=companions.by_name,
            allow_not_finite=config.allow_not_finite,
            release_untrained=release_untrained,
        )

        def before() -> goals.Serving:
            audit_before_release(group, folder, plan, config.audit)
            return goals.begin(private, data, wanted, used)

        with boundary(folder.path):
            least = config.least_records
            return run(private, data, held_out, companions, telling, progress, before, research, least, hooks)


def countable(data: Data, asked: bool | PriorKind) -> PriorKind | None:
    """Return which counts a prior of these data is made of, as asked for; None for targets that are no labels.

    Examples:
      >>> import evenhand as eh
      >>> countable(eh.data.digits()[0], True), countable(eh.data.wrap(torch.zeros(2, 1), [0.5, 0.1]), True)
      ('labels', None)
    """
    if asked is False:
        return None
    targets = data.fetch(torch.arange(1))[1]
    labels = len(data.facts.labels)
    if isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.dim() == 1 and labels > 1:
        return "labels" if asked is True else asked
    if isinstance(targets, torch.Tensor) and targets.is_floating_point() and targets.dim() == 2 and labels:
        return "each label" if asked is True else asked
    if asked is True:
        return None
    raise UsageError(f"The targets of these data are no labels that could be counted: leave out prior={asked!r}.")


def _resumed_density(folder: Folder, config: Config, train: Any, test: Any, loggers: Sequence[Logger]) -> Run:
    """Finish a density from the noisy sums on disk and return its run; only the other releases are charged now."""
    density_runs.refuse_unfinishable(folder, config, given=train is not None)
    if train is None:
        train, test = config.load_data()
    data = wrap(train)
    budgets = density_runs.read_budgets(config, data)
    promise = choose_promise(config.epsilon, config.delta if budgets is None else None, config.noise, budgets)
    held_out = None if test is None else wrap(test).by_record
    return density_runs.train(config, data, held_out, promise, folder.path, loggers=loggers)


def _descent(
    optimizer: str | OptimizerFactory | None,
    lr: float,
    momentum: float | None,
    weight_decay: float | None,
    scheduler: str | SchedulerFactory | None,
) -> Descent:
    """Return the descent; a user's own optimizer keeps its rate unless a schedule is asked for."""
    usual = "linear" if optimizer is None or isinstance(optimizer, str) else "constant"
    return Descent(optimizer or "sgd", lr, momentum, weight_decay, scheduler or usual)


def _viewed(views: Callable[[Any], Any], inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return views of the inputs, and the targets."""
    return views(inputs), targets


def choose_promise(
    epsilon: float | None, delta: float | None, noise: float | None, privacy: Promise | None
) -> Promise | None:
    """Return the one promise that was asked for; raise if there are two."""
    if sum(given is not None for given in (epsilon, noise, privacy)) > 1:
        raise UsageError("Give one of epsilon, noise and privacy: together they would contradict each other.")
    if privacy is not None and delta is not None:
        raise UsageError("Give delta inside the privacy object, for example Privacy(3, delta=1e-5).")
    if noise is not None:
        return FixedNoise(noise, delta)
    return privacy if epsilon is None else Privacy(epsilon, delta)


def _wrapped(train: Any, *, records_per_person: Any, **named: Any) -> Data:
    if records_per_person == 1 and all(given is None for given in named.values()):
        return wrap(train)
    inputs, targets = train if isinstance(train, tuple) and len(train) == 2 else (train, None)
    return wrap(inputs, targets, **named, records_per_person=records_per_person)


def new_folder(plan: Plan) -> Path:
    """Return the path of a run folder that does not exist yet, named after method and plan."""
    name = f"{plan.method}-{plan.digest[:8]}"
    number = next(n for n in range(1, 10_000) if not Path("runs", f"{name}-{n}").exists())
    return Path("runs", f"{name}-{number}")
