"""The quick walk gives the names that torch gives."""

from __future__ import annotations

import pytest
from torch import nn

from evenhand.gradients.model_layout import modules_of, trainable_of


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = layer.weight
    inner = nn.Sequential(layer, nn.ReLU(), tied)
    model = nn.Sequential(inner, nn.ModuleDict({"a": layer, "b": nn.LSTM(2, 2)}), inner)
    model.register_module("nothing", None)
    tied.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "model", [nn.Linear(1, 1), shared(), nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2)]
)
def test_names_are_those_of_torch(model: nn.Module) -> None:
    assert modules_of(model) == list(model.named_modules())
    assert list(trainable_of(modules_of(model))) == [n for n, p in model.named_parameters() if p.requires_grad]
