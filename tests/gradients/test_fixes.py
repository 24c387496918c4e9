"""A fixed model can be trained privately, keeps what it can, and leaves the given one alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from evenhand.errors import UnsupportedModelError
from evenhand.gradients import fix, probe
from evenhand.gradients.doctor.fixes import changes, groups

LOSS = nn.CrossEntropyLoss(reduction="none")
TARGETS = torch.arange(6) % 3


def head(channels: int, spatial: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)] if spatial else [nn.Linear(channels, 3)]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "1d": (lambda: nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), *head(64, 0)), (4,), "GroupNorm(4, 64)"),
    "1d, few": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), *head(8, 0)), (4,), "GroupNorm(1, 8)"),
    "2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 48, 3), nn.BatchNorm2d(48), *head(48, 2)),
        (2, 6, 6),
        "GroupNorm(24, 48)",
    ),
    "2d, not affine": (
        lambda: nn.Sequential(nn.Conv2d(2, 7, 3), nn.BatchNorm2d(7, affine=False), *head(7, 2)),
        (2, 6, 6),
        "GroupNorm(7, 7)",
    ),
    "3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(32, 3)),
        (1, 3, 3, 3),
        "GroupNorm(4, 4)",
    ),
    "synchronised": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4), *head(4, 2)),
        (2, 6, 6),
        "GroupNorm(4, 4)",
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), *head(4, 2)),
        (2, 6, 6),
        "InstanceNorm2d(track_running_stats=False)",
    ),
}


class NormAct(nn.BatchNorm2d):
    """Like timm's BatchNormAct2d: normalises, then applies its own modules."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class Inherited(nn.BatchNorm2d):
    """Nothing but another name."""


class Squared(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


MODELS |= {
    "subclass": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), Inherited(4), *head(4, 2)), (2, 6, 6), "GroupNorm(4, 4)",
    ),
    "subclass with an activation": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), NormAct(4), *head(4, 2)), (2, 6, 6), "GroupNorm(4, 4), then SiLU",
    ),
}  # fmt: skip


def test_a_subclass_that_computes_something_else_stays() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), Squared(4), *head(4, 2))
    assert changes(model) == ()
    assert type(fix(model)[1]) is Squared


def test_the_activation_of_a_subclass_stays_where_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), NormAct(4), *head(4, 2))
    norm, act = fix(model)[1]
    assert (type(norm), type(act)) == (nn.GroupNorm, nn.SiLU)
    torch.testing.assert_close(norm.weight, model[1].weight)


@pytest.mark.parametrize("name", MODELS)
def test_a_fixed_model_passes_the_probe(name: str) -> None:
    make, record, after = MODELS[name]
    model, x = make(), torch.randn(6, *record)
    with pytest.raises(UnsupportedModelError):
        probe(model, LOSS, x, TARGETS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    probe(fix(model), LOSS, x, TARGETS)
    assert [change.after for change in changes(model)] == [after]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert changes(fix(model)) == ()


def test_weights_names_precision_and_modes_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6, eps=1e-3)).double()
    with torch.no_grad():
        model[1].weight.uniform_()
        model[1].bias.uniform_()
    model[1].bias.requires_grad_(False)
    made = fix(model)
    assert list(made.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(made[1].weight, model[1].weight)
    assert made[1].weight is not model[1].weight
    assert made[1].weight.requires_grad
    assert not made[1].bias.requires_grad
    assert made[1].eps == 1e-3
    assert made[1].weight.dtype == torch.float64
    assert made.training
    assert made[1].training
    assert not fix(model.eval())[1].training


def test_a_frozen_batch_norm_stays_in_a_model_that_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    model[1].eval()
    assert [change.name for change in changes(model)] == ["2"]
    assert isinstance(fix(model)[1], nn.BatchNorm1d)


def test_shared_layers_stay_shared() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm), "c": nn.BatchNorm2d(4)})
    model["c"].weight = norm.weight
    made = fix(model)
    assert made["a"][0] is made["b"][0]
    assert made["c"].weight is made["a"][0].weight
    assert isinstance(made["a"][0], nn.GroupNorm)
    assert len(changes(model)) == 2


def test_the_model_may_itself_be_the_layer() -> None:
    made = fix(nn.BatchNorm2d(12))
    assert isinstance(made, nn.GroupNorm)
    assert made.num_groups == 12


def test_embeddings_and_compiled_modules() -> None:
    model = nn.Sequential(
        nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, sparse=True, scale_grad_by_freq=True), nn.Embedding(9, 4)
    )
    assert [change.before for change in changes(model)] == [
        "Embedding with max_norm",
        "Embedding with scale_grad_by_freq, sparse",
    ]
    made = fix(model)
    assert (made[0].max_norm, made[1].sparse, made[1].scale_grad_by_freq) == (None, False, False)
    assert model[0].max_norm == 1.0
    assert torch.equal(made[0].weight, model[0].weight)
    compiled = nn.Sequential(torch.compile(nn.BatchNorm1d(32), backend="eager"), nn.Linear(32, 3))
    assert isinstance(fix(compiled)[0], nn.GroupNorm)
    assert isinstance(fix(torch.compile(nn.Linear(2, 2), backend="eager")), nn.Linear)


def test_what_cannot_be_mended_is_left_to_be_refused() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    assert changes(nn.Sequential(Own(8), nn.BatchNorm1d(1))) == ()


@pytest.mark.parametrize("channels", range(1, 130))
def test_groups_divide_the_channels(channels: int) -> None:
    found = groups(channels)
    assert channels % found == 0
    assert not any(channels % more == 0 for more in range(found + 1, min(32, channels) + 1))
    wide = groups(channels, 16)
    assert channels % wide == 0
    assert wide == 1 or channels // wide >= 16
