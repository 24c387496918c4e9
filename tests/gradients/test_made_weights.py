"""Convolutions whose weight is made of parameters: exact in every form, and left alone where it depends on records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import compare
from oracles import cross_entropy
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from evenhand.errors import UsageError
from evenhand.gradients import Engine
from evenhand.gradients.layers import conv
from evenhand.gradients.memory import ScratchBuffers
from evenhand.gradients.unserved import convolved_weights, module_fallback
from evenhand.gradients.unserved.convolved_weights import ConvolvedWeight
from evenhand.gradients.views import Viewed, mean_loss

DOUBLE, RECORDS = torch.float64, 6


class Standardised(nn.Conv2d):
    """Convolves with a weight whose output channels have mean 0 and variance 1, as BiT does."""

    def made(self) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        return functional.batch_norm(flat, None, None, training=True, eps=1e-6).reshape_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.made(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(Standardised):
    """Convolves with such a weight times a gain for each channel, as NF-ResNet does."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def made(self) -> Tensor:
        return super().made() * self.gain * 0.3


class ByHand(Standardised):
    def made(self) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return centred / (self.weight.std((1, 2, 3), keepdim=True) + 1e-5)


class OverChannels(Standardised):
    def made(self) -> Tensor:
        return self.weight - self.weight.mean(0)


class Masked(Standardised):
    def made(self) -> Tensor:
        return self.weight * torch.ones_like(self.weight).tril()


class Raw(Standardised):
    def made(self) -> Tensor:
        return self.weight


class OfTheBatch(Standardised):
    """Its weight depends on the other records by less than a comparison of norms could tell."""

    def forward(self, x: Tensor) -> Tensor:
        weight = super().made() * (1 + 1e-7 * x.detach().mean())
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


MADE: dict[str, Callable[[], nn.Module]] = {
    "standardised": lambda: Standardised(4, 6, 3, padding=1),
    "without bias": lambda: Standardised(4, 6, 3, padding=1, bias=False),
    "groups": lambda: Standardised(4, 6, 3, padding=1, groups=2),
    "strides": lambda: Standardised(4, 6, 3, stride=(2, 1), padding=(2, 0)),
    "dilation": lambda: Standardised(4, 6, 3, dilation=2, padding=2, groups=2),
    "gain": lambda: Scaled(4, 6, 3, stride=2, padding=1),
    "by hand": lambda: ByHand(4, 6, 3, padding=1),
    "weight norm": lambda: weight_norm(nn.Conv2d(4, 6, 3, padding=1)),
    "weight norm of inputs": lambda: weight_norm(nn.Conv2d(4, 6, 3), dim=1),
    "weight norm, transposed": lambda: weight_norm(nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1)),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
    "transposed, dilated": lambda: nn.ConvTranspose2d(4, 6, 2, dilation=3, output_padding=2),
    "over channels": lambda: OverChannels(4, 6, 3),
    "masked": lambda: Masked(4, 6, 3),
    "raw": lambda: Raw(4, 6, 3, stride=2),
}
FORMED = {"standardised", "without bias", "groups", "strides", "dilation", "gain", "by hand", "weight norm",
          "weight norm, transposed"}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def net(layer: nn.Module, dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh())
    return nn.Sequential(first, layer, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)).to(dtype)


def batch(dtype: torch.dtype = DOUBLE, size: int = RECORDS) -> tuple[Tensor, Tensor]:
    return torch.rand(size, 3, 6, 6, dtype=dtype), torch.arange(size) % 3


def records(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each record's gradient by torch.func, in float64."""
    model = copy.deepcopy(model).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0)).sum()

    return vmap(grad(one), in_dims=(None, 0, 0))(parameters, inputs.double(), targets)


@pytest.fixture(params=["by pixels", "kept", "again"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one form: the way back is found for the whole weight, or records' gradients are kept, or made twice."""
    monkeypatch.setattr(conv, "ghost_is_cheaper", lambda *args, **kwargs: request.param == "by pixels")
    monkeypatch.setattr(ScratchBuffers, "keeps", lambda *args: request.param == "kept")
    monkeypatch.setattr(module_fallback, "CHUNK", 500)
    monkeypatch.setattr(convolved_weights, "CHUNK", 500)
    return str(request.param)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shares that were made."""
    made: list[str] = []
    share = ConvolvedWeight.share

    def noted(*args: Any) -> Any:
        made.append(type(result := share(*args)).__name__)
        return result

    monkeypatch.setattr(ConvolvedWeight, "share", noted)
    return made


@pytest.mark.parametrize("name", MADE)
def test_exact_in_every_form(name: str, form: str, shares: list[str]) -> None:
    model = net(MADE[name]())
    engine = Engine(model, cross_entropy)
    for _ in range(2):
        inputs, targets = batch()
        compare(engine.run(inputs, targets), records(model, inputs, targets), 1e-10)
    assert engine.way() == "kernels"
    assert not engine.apart()
    mapped = form == "by pixels" and name in FORMED
    expected = {"_Mapped"} if mapped else {"Convolved"} if name.startswith(("transposed", "raw")) else {"Held"}
    assert set(shares) <= expected  # the raw one resembles a layer with a kernel


@pytest.mark.parametrize("name", sorted(FORMED))
def test_float32_norms_are_those_of_float64_to_five_digits(name: str, form: str) -> None:
    model, (inputs, targets) = net(MADE[name](), torch.float32), batch(torch.float32)
    result = Engine(model, cross_entropy).run(inputs, targets)
    compare(result, records(model, inputs, targets), 1e-5)


@pytest.mark.parametrize("noise", [0.3, 1e-4])
@pytest.mark.parametrize("made", [Standardised, Scaled])
def test_gradients_that_are_lost_on_the_way(
    made: type[nn.Conv2d], noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of equal pixels has a gradient along equal numbers, which standardised weights do not see."""
    monkeypatch.setattr(conv, "ghost_is_cheaper", lambda *args, **kwargs: True)
    model = nn.Sequential(made(3, 6, 3, bias=False), nn.Flatten(), nn.Linear(24, 3, bias=False))
    inputs, targets = 10 + noise * torch.randn(RECORDS, 3, 4, 4), torch.arange(RECORDS) % 3
    exact = records(model, inputs, targets)
    del exact["2.weight"]
    model[2].requires_grad_(False)
    result = Engine(model, cross_entropy).run(inputs, targets)
    if noise > 1e-3:  # else the input gradients, which are float32, have no digits for what is left
        norm = torch.stack([rows.flatten(1).square().sum(1) for rows in exact.values()]).sum(0).sqrt()
        torch.testing.assert_close(result.norm, norm, rtol=1e-4, atol=0.0)
    each = torch.eye(RECORDS, dtype=DOUBLE)
    lengths = [sum(s.double().square().sum() for s in result.weighted_sum(one).values()) ** 0.5 for one in each]
    torch.testing.assert_close(torch.stack(lengths), result.norm, rtol=1e-5, atol=0.0)


def test_two_layers_with_one_parameter(form: str) -> None:
    one, other = Scaled(4, 4, 3, padding=1), Scaled(4, 4, 3, padding=2, dilation=2, groups=1)
    other.weight, other.gain = one.weight, one.gain
    model = nn.Sequential(nn.Conv2d(3, 4, 3), one, nn.Tanh(), other, nn.Flatten(), nn.Linear(64, 3)).double()
    inputs, targets = batch()
    engine = Engine(model, cross_entropy)
    compare(engine.run(inputs, targets), records(model, inputs, targets), 1e-10)
    assert engine.way() == "kernels"


@pytest.mark.parametrize("dims", [1, 3])
def test_one_and_three_dimensions(dims: int, form: str) -> None:
    layer = weight_norm((nn.Conv1d if dims == 1 else nn.Conv3d)(2, 3, 3, padding=1, stride=2))
    up = (nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose3d)(3, 2, 2)
    model = nn.Sequential(layer, nn.Tanh(), up, nn.Flatten(), nn.Linear(2 * 3**dims, 3)).double()
    inputs, targets = torch.rand(RECORDS, 2, *[4] * dims, dtype=DOUBLE), torch.arange(RECORDS) % 3
    engine = Engine(model, cross_entropy)
    compare(engine.run(inputs, targets), records(model, inputs, targets), 1e-10)
    assert engine.way() == "kernels"


def test_several_views_of_a_record(form: str) -> None:
    model = net(MADE["gain"]())
    inputs, targets = torch.rand(RECORDS, 2, 3, 6, 6, dtype=DOUBLE), torch.arange(RECORDS) % 3
    result = Engine(Viewed(model, 2), mean_loss(cross_entropy, 2)).run(inputs, targets)
    each = [records(model, inputs[:, view], targets) for view in (0, 1)]
    compare(result, {f"model.{name}": (each[0][name] + each[1][name]) / 2 for name in each[0]}, 1e-10)


def test_a_weight_that_depends_on_the_batch_is_not_believed() -> None:
    model, (inputs, targets) = net(OfTheBatch(4, 6, 3)), batch()
    engine = Engine(model, cross_entropy)
    result = engine.run(inputs, targets)
    assert engine.way() == "record by record (vmap)"
    compare(result, records(model, inputs, targets), 1e-12)


def test_a_weight_that_a_step_of_its_own_changes_is_not_believed() -> None:
    engine = Engine(net(spectral_norm(nn.Conv2d(4, 6, 3))), cross_entropy)
    engine.run(*batch())
    assert engine.way() == "record by record (vmap)"


def test_spectral_norm_without_steps_is_exact(form: str) -> None:
    model, (inputs, targets) = net(spectral_norm(nn.Conv2d(4, 6, 3))).eval(), batch()
    engine = Engine(model, cross_entropy)
    compare(engine.run(inputs, targets), records(model, inputs, targets), 1e-10)
    assert engine.way() == "kernels"


def test_parameters_that_changed_after_the_pass_give_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchBuffers, "keeps", lambda *args: False)
    model = net(MADE["masked"]())
    result = Engine(model, cross_entropy).run(*batch())
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(UsageError, match="before the update"):
        result.weighted_sum(torch.ones(RECORDS))


def test_operations_that_vmap_refuses_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, refused = torch.autograd.grad, []

    def picky(*args: Any, is_grads_batched: bool = False, **kwargs: Any) -> Any:
        if is_grads_batched:
            refused.append(args)
            raise RuntimeError("no batching rule")
        return plain(*args, **kwargs)

    model, (inputs, targets) = net(MADE["masked"]()), batch()
    expected = records(model, inputs, targets)
    monkeypatch.setattr(torch.autograd, "grad", picky)
    compare(Engine(model, cross_entropy).run(inputs, targets), expected, 1e-10)
    assert refused


def test_functional_group_norm_is_followed() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(functional.group_norm(x, 2, self.weight, self.bias))

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Normed(), nn.Flatten(), nn.Linear(64, 3)).double()
    inputs, targets = batch()
    engine = Engine(model, cross_entropy)
    compare(engine.run(inputs, targets), records(model, inputs, targets), 1e-10)
    assert engine.way() == "kernels"
