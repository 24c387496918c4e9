"""Steps of an LSTM: compiled ones do what torch does, in every variant and with many threads, or are not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compiling import LESS, QUICK, build, changed, lacking, needs_compiler
from evenhand.gradients import Engine
from evenhand.gradients.fast import lstm_native
from evenhand.gradients.fast.lstm_native import TIMES, Compiled, grams
from evenhand.gradients.layers.recurrent_cells import TorchSteps
from evenhand.gradients.layers.recurrent_gradients import torch_grams


@needs_compiler
def test_the_installation_built_the_steps_and_they_are_right() -> None:
    assert lstm_native.compiled() is not None


@needs_compiler
@pytest.mark.parametrize("less", LESS.values(), ids=LESS.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_every_variant_does_what_torch_does(
    less: tuple[str, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Compiled(lacking("gradients/fast/recurrent.c", less))
    assert lstm_native.right(found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for scale in (0.01, 1.0, 30.0, 300.0):
        shown = [scale * torch.randn(201, 4 * 33), scale * torch.randn(201, 33), *torch.randn(3, 201, 33)]
        exact = [tensor.double() for tensor in shown]
        for way in ("forward", "back"):
            getattr(found, way)(*shown)
            getattr(TorchSteps(), way)(*exact)
            for own, true in zip(shown, exact, strict=True):
                torch.testing.assert_close(own.double(), true, rtol=2e-6, atol=5e-7 * max(1.0, scale**2))


@needs_compiler
@pytest.mark.parametrize("less", LESS.values(), ids=LESS.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_gram_matrices_in_every_variant(less: tuple[str, ...], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As precise for wide layers as for narrow ones, whatever the inputs are."""
    found = Compiled(lacking("gradients/fast/recurrent.c", less))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows, times, width, gates in ((201, 20, 192, 512), (65, 1, 7, 2), (3, 4, 16384, 4099), (40, 32, 130, 36)):
        one, other = torch.randn(times, rows, width + 3).transpose(0, 1)[:, :, 2:-1], torch.randn(rows, times, gates)
        sign = torch.tensor([1.0, -1.0]).repeat(times)[:times].view(1, -1, 1)
        same = one[:, :1] + 0.01 * one, other[:, :1] + 0.01 * other
        for x, grad in ((one, other), same, (same[0], same[1] * sign), (one.abs() + 1, other.abs() + 1)):
            for ones in (0, 2):
                squares, reach, firm = found.grams(x, grad, ones, 1e30)
                exact = torch_grams(x.double(), grad.double(), ones, 1e30)
                assert bool(((squares - exact[0]).abs() <= 1.5e-7 * exact[1].square()).all())
                torch.testing.assert_close(reach, exact[1], rtol=1.5e-7, atol=0)
                assert bool(firm.all())


@needs_compiler
def test_squares_that_float_cannot_hold_are_noticed() -> None:
    x, grad = torch.ones(6, 3, 20), torch.ones(6, 3, 20)
    x[0], x[1], grad[2], grad[3], x[4] = 1e25, 1e-25, 1e25, 1e-25, torch.nan
    found = grams(x, grad, 1, 1e30)
    assert found is not None
    assert found[2].tolist() == [False, False, False, False, False, True]


def test_long_and_other_inputs_are_left_to_torch() -> None:
    ordinary = torch.ones(2, TIMES, 5)
    assert (grams(ordinary, ordinary, 1, 1e30) is None) == (lstm_native.compiled() is None)
    long = torch.ones(2, TIMES + 1, 5)
    for table in (long, ordinary.double(), torch.ones(5, TIMES, 2).transpose(0, 2)):
        assert grams(table, table, 1, 1e30) is None


@needs_compiler
def test_curves_are_as_precise_as_torchs(tmp_path: Path) -> None:
    """Relative to the value: small numbers keep their digits."""
    found = Compiled(build(tmp_path, changed("gradients/fast/recurrent.c")))
    x = torch.cat([torch.linspace(-20, 20, 40_001), torch.logspace(-30, 0, 2000), -torch.logspace(-30, 0, 2000)])
    gates = torch.stack([torch.full_like(x, 50.0), torch.full_like(x, 50.0), x, x], dim=1)  # o = i = 1
    cell, state, through, forget = (torch.zeros(len(x), 1) for _ in range(4))
    found.forward(gates, cell, state, through, forget)
    tanh, sigmoid = x.double().tanh(), x.double().sigmoid()
    assert float(((cell[:, 0] - tanh) / tanh.clamp(min=-1, max=1)).nan_to_num().abs().max()) < 4e-7
    assert float(((forget[:, 0] - sigmoid) / sigmoid).abs().max()) < 4e-7


@needs_compiler
@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("float after = f * before + i * new", "float after = f * before + i * new * 1.001f"),
        ("gates[3 * width + j] = i - i * new * new;", "gates[3 * width + j] = i;"),
        ("through[j] = o - h * tanh;", "through[j] = o;"),
        ("forget[j] = f;", ""),
        ("cell[j] = after;", ""),
        ("cell[j] + state[j] * through[j]", "cell[j]"),
        ("slopes[3 * width + j] *= c;", ""),
        ("cell[j] = c * forget[j];", "cell[j] = c;"),
        ("fabsf(x) < 0.625f ? near : far", "near"),
        ("t->state + i * t->stride", "t->state + i * t->width"),
        ("__atomic_fetch_add(&t->next, SHARE,", "__atomic_fetch_add(&t->next, 2 * SHARE,"),
        ("x = x > 88.0f ? 88.0f : x;", ""),
        ("if ((first + PIECE) % RUN && first + PIECE < width) continue;", "if (first + PIECE < width) continue;"),
        ("if (first % RUN == 0) memset", "memset"),
        ("if (first % RUN == 0) memset", "if (first == 0) memset"),
        ("if (t >= times || count % LANES) memset", "if (t >= times) memset"),
        ("for (int64_t j = i; j < blocks", "for (int64_t j = i + 1; j < blocks"),
        ("for (int64_t t = s + 1; t < times; t++)", "for (int64_t t = s + 1; t < times - 1; t++)"),
        ("+= 2.0 * (inputs[s][t] + ones)", "+= (inputs[s][t] + ones)"),
        ("+= 2.0 * (inputs[s][t] + ones)", "+= 2.0 * inputs[s][t]"),
        ("*reach += sqrt((inputs[s][s] + ones)", "*reach += sqrt((inputs[s][s])"),
        ("energies[1] >= 1.0 / most &&", ""),
        ("energies[0] <= most &&", ""),
        ("x->at + i * x->row", "x->at + i * x->width"),
        ("at + t * apart", "at + t * width"),
    ],
)
def test_steps_that_compute_something_else_are_not_used(what: str, instead: str, tmp_path: Path) -> None:
    assert not lstm_native.right(
        Compiled(build(tmp_path, changed("gradients/fast/recurrent.c", (what, instead)), *QUICK))
    )


def test_without_the_library_the_same_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    model, x, y = Last(), torch.randn(9, 6, 5), torch.randint(14, (9,))
    passes = []
    for way in (lstm_native.compiled(), None):
        monkeypatch.setattr(lstm_native, "compiled", lambda way=way: way)
        result = Engine(model, nn.CrossEntropyLoss(reduction="none")).run(x, y)
        passes.append((result.loss, result.norm, result.weighted_sum(torch.ones(9))))
    torch.testing.assert_close(passes[0], passes[1], rtol=1e-4, atol=1e-6)
