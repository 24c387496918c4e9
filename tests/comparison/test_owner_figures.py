"""Angles between owners' gradients and how much each pulls: by hand for a model of one weight vector."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.comparison.training_record_figures import by_owner


def test_angle_length_and_pull_by_hand() -> None:
    """A linear model with squared error: a record's gradient is 2 (prediction - y) x, here -2 x of length 2."""
    inputs = torch.tensor([[1.0, 0.0]] * 20 + [[0.5, math.sqrt(0.75)]] * 20)
    data = eh.data.wrap(inputs, torch.ones(40, 1), owners=["a"] * 20 + ["b"] * 20)
    plan = eh.plan("idp_scale", eh.Budgets({"a": 1.0, "b": 4.0}, 1e-3), data=data.facts, epochs=1, batch_size=8)
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    figures = by_owner(model, data, plan)
    assert figures["angle"]["a | b"] == pytest.approx(60.0, abs=1e-3)
    for index, name in enumerate("ab"):
        expected = 20 * plan.rates[index]
        assert figures["pull"][name] == pytest.approx(expected * plan.scales[index])
        assert figures["length"][name] == pytest.approx(expected * min(2.0, plan.scales[index]), rel=1e-5)
