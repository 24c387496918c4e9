"""Steps on given gradients: what the tests of the private step share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from evenhand.accounting.budgets import FixedNoise
from evenhand.mechanism.make_plan import Plan, plan
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.step import Mechanism, Released, private_gradient
from evenhand.methods.catalogue import Method
from evenhand.methods.queries import Query
from evenhand.methods.rules import Clip, Rule
from evenhand.types import Batch, Facts, Pass

FACTS = Facts(100, (("x", 50), ("y", 50)), groups=("a", "b"))


def made(method: Method | str = "dpsgd", noise: float = 1.0, **changes: object) -> Plan:
    return replace(plan(method, FixedNoise(noise, 1e-3), data=FACTS, epochs=10, batch_size=10), **changes)  # type: ignore[arg-type]


def rows(count: int, position: int = 0) -> Batch:
    zero = torch.zeros(count, dtype=torch.long)
    return Batch(None, None, group=zero, owner=zero, record=torch.arange(count), position=position, token=0)


def vectors(gradients: Tensor) -> Pass:
    """A pass over given per-record gradients: what the engine would return for them."""
    return Pass(
        loss=torch.zeros(gradients.shape[0]),
        norm=gradients.norm(dim=1),
        weighted_sum=lambda w: {"p": torch.nan_to_num(gradients * w[:, None]).sum(0)},
    )


def run(
    gradients: Tensor,
    made_plan: Plan,
    rule: Rule | None = None,
    batch: Batch | None = None,
    seed: int = 0,
    queries: tuple[Query, ...] = (),
) -> Released:
    mechanism = Mechanism(made_plan, rule or Clip(), queries, Stream.insecure(seed, 0))
    drawn = rows(gradients.shape[0]) if batch is None else batch  # an empty batch is false
    return private_gradient(mechanism, vectors(gradients), drawn, {})


def almost_noiseless() -> Plan:
    found = made()
    return replace(found, levels=(replace(found.levels[0], noise=1e-12),))
