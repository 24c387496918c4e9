"""What memory= does in the group rules: how often noise hides the rare group, and what it changes on digits.

    python experiments/group_memory.py steps                   # no training: counts drawn as a step draws them
    python experiments/group_memory.py digits --seeds 40       # paired runs at epsilon 3, a few minutes

``steps`` draws noisy counts for groups of the sizes of MNIST with class 8 cut to 500 (54,649 records); 90 % of the rare
group and 50 % of the others have gradients above the base bound. It prints in which share of the steps the rare group's
bound is at or below the median of the others', although it should be far above. ``digits`` trains a linear model on the
digits that come with evenhand (class 8 cut to 40 records): one seed gives all variants of a method the same first
weights, samples and noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from scipy import stats
from torch import nn

import evenhand as eh
from evenhand.gradients.microbatches import MicroBatches
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.sampling import PoissonSampler, draw
from evenhand.mechanism.step import Mechanism, private_gradient
from evenhand.methods.rules import GroupClip
from evenhand.training.optimizers import AdamBC, Descent
from evenhand.types import Facts, Public, State

SIZES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 500, 5949)
RARE = 8
ABOVE = tuple(0.9 if group == RARE else 0.5 for group in range(len(SIZES)))
MEMORIES: tuple[str | float, ...] = ("none", "full", 0.9, 0.99)


def hidden(memory: str | float, batch: int, epochs: int, epsilon: float, seed: int = 0) -> tuple[float, float]:
    """Return the share of steps in which the rare group's bound is not above the others', and the query's noise."""
    records = sum(SIZES)
    facts = Facts(records, (("all", records),), groups=tuple(str(group) for group in range(len(SIZES))))
    plan = eh.plan("dpsgd_f", eh.Privacy(epsilon, 1e-5), data=facts, epochs=epochs, batch_size=batch)
    noise = plan.levels[0].queries[0]
    rule, random = GroupClip(memory=memory), np.random.default_rng(seed)
    remembered, low = rule.initial(facts), 0
    for step in range(plan.steps):
        above = [random.binomial(size, share * batch / records) for size, share in zip(SIZES, ABOVE, strict=True)]
        below = [random.binomial(size, (1 - share) * batch / records) for size, share in zip(SIZES, ABOVE, strict=True)]
        noisy = np.array([*above, *below]) + noise * random.standard_normal(2 * len(SIZES))
        public = Public(batch=float(batch), groups=len(SIZES))
        state = State(step, torch.ones(1), {"group_counts": torch.from_numpy(noisy)}, remembered, public)
        bounds = rule.factors(state).tolist()
        low += bounds[RARE] <= statistics.median(bound for group, bound in enumerate(bounds) if group != RARE)
        remembered = rule.advance(state)
    return low / plan.steps, noise


@cache
def planned(method: str, epsilon: float) -> eh.Plan:
    """Return the plan of a method whose settings stand in its name."""
    return eh.plan(method, eh.Privacy(epsilon, 1e-5), data=eh.data.digits()[0].facts, epochs=15, batch_size=128)


def trained(method: str, seed: int, epsilon: float, lr: float, optimizer_name: str = "sgd") -> tuple[float, ...]:
    """Return accuracy overall, of class 8, and the mean over classes on the held-out digits, in percent.

    Plan, sampler and private step are those of ``eh.fit``; there is no run folder, since nothing is released.
    """
    train, test = eh.data.digits()
    chosen, plan = eh.method(method), planned(method, epsilon)
    parts = Mechanism(plan, chosen.rule, chosen.queries, Stream.insecure(seed, 0))
    sampler = PoissonSampler(train.owner, plan.rates, parts.stream)
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    optimizer, schedule = Descent(optimizer_name, lr=lr).build(model, plan.steps)
    engine = MicroBatches(model, nn.CrossEntropyLoss(reduction="none"))
    memory = chosen.rule.initial(plan.facts)
    for step in range(plan.steps):
        if schedule is not None:
            schedule.go_to(step)
        batch = draw(train, sampler, step, 0)
        released = private_gradient(parts, engine.run(batch.inputs, batch.targets), batch, memory)
        memory = released.memory
        for name, parameter in model.named_parameters():
            parameter.grad = released.gradient[name].to(parameter.dtype)
        if isinstance(optimizer, AdamBC):
            optimizer.see_noise(released.commit.std / plan.expected_batch)
        optimizer.step()
    inputs, labels = test.fetch(torch.arange(len(test)))
    right = (model(inputs).argmax(1) == labels).double()
    recalls = [100 * float(right[labels == label].mean()) for label in range(10)]
    return 100 * float(right.mean()), recalls[RARE], statistics.mean(recalls)


def paired(left: Sequence[float], right: Sequence[float]) -> str:
    """Return the mean difference and its 95 % interval over seeds (Student's t)."""
    gaps = np.array(left) - np.array(right)
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    return f"{gaps.mean():+.2f} [{gaps.mean() - half:+.2f}, {gaps.mean() + half:+.2f}]"


def main() -> None:
    """Print the figures that were asked for."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", choices=("steps", "digits"))
    asked.add_argument("--method", default="dpsgd_f")
    asked.add_argument("--seeds", type=int, default=40)
    asked.add_argument("--epsilon", type=float, default=3.0)
    asked.add_argument("--lr", type=float, default=0.5)
    asked.add_argument("--memories", default="none,full,0.9", help="the first is what the others are compared with")
    given = asked.parse_args()
    if given.what == "steps":
        for batch, epochs in ((1024, 20), (256, 20)):
            for memory in MEMORIES:
                low, noise = hidden(memory, batch, epochs, given.epsilon)
                print(f"B {batch}, noise {noise:.1f}, memory {memory}: {100 * low:.1f} % of the steps")
        return
    names = given.memories.split(",")
    figures = {
        name: [
            trained(f"{given.method}:memory={name}", seed, given.epsilon, given.lr)[:2] for seed in range(given.seeds)
        ]
        for name in names
    }
    first = figures[names[0]]
    for name, values in figures.items():
        overall, rare = zip(*values, strict=True)
        row = {"method": given.method, "memory": name, "overall": statistics.mean(overall)}
        row |= {"class 8": statistics.mean(rare), "seeds": given.seeds}
        if name != names[0]:
            base_overall, base_rare = zip(*first, strict=True)
            row |= {"overall, paired": paired(overall, base_overall), "class 8, paired": paired(rare, base_rare)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
