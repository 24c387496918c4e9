"""Processes of one run: started at once with a process group of gloo between them, and what they do there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import evenhand as eh
from evenhand.data import Data
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism
from evenhand.methods import registry
from evenhand.runs.folder import Folder
from evenhand.testing.reference_step import ReferenceStep
from evenhand.training.loop import Interrupted
from evenhand.types import Pass
from processes import Started

BATCH, STEPS = 24, 20


def launched(
    size: int, folder: Path, work: Callable[..., object], *arguments: object, wait: float = 60
) -> list[Started]:
    """Start ``work(rank, *arguments)`` in each of several processes that talk to each other."""
    meeting = folder / f"meeting{len(list(folder.glob('meeting*')))}"
    return [Started(_in_group, rank, size, str(meeting), wait, work, arguments) for rank in range(size)]


def ended(ranks: list[Started], timeout: float = 120) -> list[tuple[int | None, str]]:
    """Return exit code and standard error of each process."""
    said = [rank.communicate(timeout)[1] for rank in ranks]
    return [(rank.poll(), text) for rank, text in zip(ranks, said, strict=True)]


def _in_group(rank: int, size: int, meeting: str, wait: float, work: Callable[..., object], arguments: Any) -> None:
    torch.set_num_threads(1)
    if size > 1:
        options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=wait)}
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", **options)
    work(rank, *arguments)
    if size > 1:
        distributed.destroy_process_group()


def people(dtype: torch.dtype = torch.float32, count: int = 240) -> Data:
    """Records of three classes, two groups and two owners."""
    draw = torch.Generator().manual_seed(1)
    targets = [i % 3 for i in range(count)]
    inputs = torch.randn(count, 6, generator=draw, dtype=torch.float64) + torch.tensor(targets)[:, None] / 2
    groups = ["a" if i % 5 else "b" for i in range(count)]
    owners = ["strict" if i % 3 else "open" for i in range(count)]
    return eh.data.wrap(inputs.to(dtype), targets, groups=groups, owners=owners, labels=(0, 1, 2))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small network with equal weights wherever it is built."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def plan_of(method: str, data: Data, steps: int = STEPS) -> eh.Plan:
    """A plan of so many steps in which every owner has a budget."""
    promise: Any = eh.FixedNoise(1.0, 1e-4) if method == "sgd" else eh.Budgets({"strict": 2.0, "open": 6.0}, 1e-4)
    epochs = steps * BATCH / len(data)
    return eh.plan(method, promise, data=data.facts, epochs=epochs, batch_size=BATCH, allow_unproven=True)


def trained(method: str, dtype: torch.dtype, out: Path, steps: int = STEPS, seed: int | None = 7) -> nn.Module:
    """Train in a loop of one's own, and return the model; process 0 leaves a checkpoint."""
    data, model = people(dtype), network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loss = nn.CrossEntropyLoss(reduction="none")
    with eh.attach(
        model, optimizer, loss, plan_of(method, data, steps), out=out, insecure_seed=seed, compose=False
    ) as private:
        for batch in private.batches(data):
            private.step(batch)
        private.release()
    return model


def train_all(rank: int, methods: list[str], dtypes: list[str], folder: str) -> None:
    """Train by every method and leave the weights of every process in the folder."""
    for method in methods:
        for name in dtypes:
            model = trained(method, getattr(torch, name), Path(folder) / f"{method}-{name}")
            torch.save(model.state_dict(), Path(folder) / f"{method}-{name}-{rank}.pt")


def weights(path: Path) -> Tensor:
    """The weights in a file, in a row."""
    state: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def refused(rank: int, folder: str, way: str) -> None:
    """Begin to train with something that only this process has, and write down what is said about it."""
    other = rank == 1
    data = people(count=240)
    if other and way == "data":
        inputs, targets = data.fetch(torch.arange(240))
        owners = ["strict" if i % 3 else "open" for i in range(240)]
        data = eh.data.wrap(inputs.flip(0), targets, groups=data.group_names(), owners=owners, labels=(0, 1, 2))
    model = network()
    if other and way == "weights":
        model[0].weight.data += 1  # type: ignore[operator]
    options: dict[str, Any] = {"epsilon": 3.0 if other and way == "plan" else 2.0, "epochs": 1, "batch_size": 24}
    if way == "seed":
        options["insecure_seed"] = rank
    if other and way == "versions":
        import evenhand.training.steps.together as together

        together.software = lambda: {"evenhand": "0.0"}
    if other and way == "optimizer":
        options["lr"] = 0.5
    if way == "raises" and other:
        options["callbacks"] = 7
    try:
        eh.fit(model, data, out=Path(folder) / "run", prior=False, **options)
    except Exception as error:
        Path(folder, f"said{rank}").write_text(json.dumps([type(error).__name__, str(error)]))


def stepped(rank: int, out: str, log: str, steps: int = STEPS, resume: bool = False, way: str = "") -> None:
    """Train step by step, and write down every step whose update is done; ``way`` is what goes wrong in process 1."""
    data, model = people(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss = nn.CrossEntropyLoss(reduction="none")
    begun: dict[str, Any] = {"resume": out} if resume else {"plan": plan_of("dpsgd", data, steps), "out": out}
    executed = Path(log, f"executed{rank}")
    with eh.attach(model, optimizer, loss, compose=False, **begun) as private:
        for batch in private.batches(data):
            if rank == 1 and private.position == 3:
                go_wrong(way, private, model)
            private.step(batch)
            with executed.open("a") as file:
                file.write(f"{private.position - 1}\n")
            if private.position % 4 == 0:
                private.checkpoint()
        private.release()


def go_wrong(way: str, private: Any, model: nn.Module) -> None:
    """Do in one process what must not go unnoticed, or must end all of them."""
    if way == "raises":
        raise ValueError("a private value")
    if way == "weights":
        model[0].weight.data[0, 0] += 1e-3  # type: ignore[index, union-attr]
    if way == "stalls":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "other key":
        waiting = private._draws._waiting[0]
        keys = waiting.whole.record_keys.copy()
        keys[0] += 1
        private._draws._waiting[0] = replace(waiting, whole=replace(waiting.whole, record_keys=keys))
    if way == "stale step":
        private._draws._waiting[0] = replace(
            private._draws._waiting[0], whole=replace(private._draws._waiting[0].whole, position=2)
        )
    if way in ("long sum", "NaN sum", "loss fails"):
        run = private._watch.run

        def spoilt(*arguments: Any) -> Pass:
            if way == "loss fails":
                raise RuntimeError("a private value")
            result = run(*arguments)
            factor = 30.0 if way == "long sum" else float("nan")
            last = result.last_sum
            return replace(result, spend=lambda weights: {name: part * factor for name, part in last(weights).items()})

        private._watch.run = spoilt


def fitted(rank: int, out: str, log: str) -> None:
    """Train with fit until a signal comes."""
    Path(log, f"pid{rank}").write_text(str(os.getpid()))
    try:
        eh.fit(network(), people(), epsilon=1.0, delta=1e-4, epochs=4000, batch_size=24, out=out, prior=False)
    except Interrupted as stop:
        Path(log, f"said{rank}").write_text(str(stop))


WATCHED = ("dpsgd", "dpsgd_f", "ino_scale")


def watched(rank: int, folder: str) -> None:
    """Train with steps of length one, and leave the weights before and after each step."""
    for method in WATCHED:
        data, model = people(torch.float64), network(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = nn.CrossEntropyLoss(reduction="none")
        plan, out = plan_of(method, data, 4), Path(folder, method)
        states = [{name: value.clone() for name, value in model.state_dict().items()}]
        with eh.attach(model, optimizer, loss, plan, out=out, insecure_seed=7, compose=False) as private:
            for batch in private.batches(data):
                private.step(batch)
                states.append({name: value.clone() for name, value in model.state_dict().items()})
        torch.save(states, Path(folder, f"{method}-states{rank}.pt"))


def released_and_expected(method: str, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Each step's private gradient as two processes released it, and as one slow step computes it record by record.

    The slow one draws by itself, takes the gradient of each record by autograd alone, weighs, sums and adds noise row
    by row (``ReferenceStep``); it shares key and plan with the processes, and nothing of how they divide the work.
    """
    data, model = people(torch.float64), network(torch.float64)
    plan, states = Folder(Path(folder, method)).plan(), torch.load(Path(folder, f"{method}-states1.pt"))
    rule = registry.build("rule", **plan.rule)
    queries = tuple(registry.build("query", **query) for query in plan.queries)
    mechanism = Mechanism(plan, rule, queries, Stream.insecure(7, 0))
    sampler = PoissonSampler(data.owner, plan.rates, mechanism.stream, None if mechanism.whole else plan.scales)
    memory: Mapping[str, Any] = rule.initial(plan.facts)
    for step in range(plan.steps):
        model.load_state_dict(states[step])
        batch = draw(data, sampler, step, 0)
        rows, losses = [], []
        for i in range(len(batch)):
            loss = nn.functional.cross_entropy(model(batch.inputs[i : i + 1].double()), batch.targets[i : i + 1])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
            losses.append(loss.detach())
        gradients = torch.stack(rows)
        result = Pass(torch.stack(losses), gradients.norm(dim=1), lambda w, g=gradients: {"all": w @ g})
        released = ReferenceStep()(mechanism, result, batch, memory)
        memory = released.memory
        moved = [states[step][name] - states[step + 1][name] for name, _ in model.named_parameters()]
        yield torch.cat([part.flatten() for part in moved]), released.gradient["all"]


class Records(torch.utils.data.Dataset[Any]):
    """Records that are changed at random as they are read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> Any:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(6, generator=draw) + 0.1 * torch.rand(6), number % 3


FITS: dict[str, dict[str, Any]] = {
    "goal": {"goal": "balanced", "average": 0.9},
    "persons": {"persons": {"records_per_person": 2}},
    "person_cap": {"persons": {"person_cap": 2}},
    "micro_batch": {"compute": eh.Compute(micro_batch=7)},
    "lean": {"compute": eh.Compute(lean=True), "optimizer": "adam_bc", "lr": 0.01},
    "dataset": {"dataset": True, "workers": 2},
    "dropout": {"dropout": True},
}
"""Ways to train that use more of a run than a plain loop does; all but the last give one process's weights."""


def fit_all(rank: int, folder: str) -> None:
    """Train in each of these ways by ``fit``, with held-out records, and leave the weights of every process."""
    for name, options in FITS.items():
        given = dict(options)
        model, data = network(), people()
        if given.pop("dropout", False):
            model = nn.Sequential(nn.Dropout(0.5), model)
        if given.pop("dataset", False):
            data = eh.data.wrap(Records(), labels=(0, 1, 2))
        if by_person := given.pop("persons", {}):
            inputs, targets = people().fetch(torch.arange(240))
            names = [f"p{i // 3}" for i in range(240)]
            data = eh.data.wrap(inputs, targets, persons=names, **by_person, labels=(0, 1, 2))
        usual = {"noise": 1.0, "epochs": 2, "batch_size": 24, "insecure_seed": 5, "compose": False, "progress": False}
        run = eh.fit(model, data, test=people(count=60), training_records=True, out=f"{folder}/{name}", **usual | given)
        assert run.path.name == name
        torch.save(model.state_dict(), Path(folder, f"{name}-{rank}.pt"))
