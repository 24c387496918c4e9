"""The compiled loops of dense models: what torch computes in float64, in every variant, and not used when wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compiling import LESS, QUICK, build, changed, lacking, needs_compiler
from evenhand.gradients import Engine
from evenhand.gradients.fast import dense_native
from evenhand.gradients.fast.dense_native import DenseLoops
from evenhand.mechanism import step
from evenhand.types import Stats


@needs_compiler
def test_the_installation_built_the_loops_and_they_are_right() -> None:
    assert dense_native.loops() is not None


@needs_compiler
@pytest.mark.parametrize("less", LESS.values(), ids=LESS.keys())
def test_every_variant_agrees_with_torch(less: tuple[str, ...]) -> None:
    found = DenseLoops(lacking("gradients/fast/dense.c", less))
    assert dense_native.right(found)
    for rows, width, count in [(1, 17, 3), (64, 16, 16), (65, 1000, 11), (257, 63, 1), (9, 640, 5)]:
        assert dense_native._right_for(found, rows, width, count)


@needs_compiler
def test_loops_that_are_not_optimised_are_right_too(tmp_path: Path) -> None:
    """So that those below are refused for what they compute."""
    assert dense_native.right(DenseLoops(build(tmp_path, changed("gradients/fast/dense.c"), *QUICK)))


@needs_compiler
@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("total <= 1e30 ? total", "1 ? total"),
        ("total >= 1e-25", "total >= 0"),
        ("g * (x + (double)shape[3])", "g * (x + 1.0)"),
        ("shape[2] ? square(", "1 ? square("),
        ("norm[i] += g", "norm[i] = g"),
        ("norm[i] = sqrt(norm[i]);", "norm[i] = sqrt(norm[i]) * 0.99999;"),
        ("odd += !(norm[i] <= most);", ""),
        ("if (j < in) {", "if (0) {"),
        ("edge + count", "edge + count + 1"),
        ("(b ? b[c + k] : 0.0f)", "0.0f"),
        ("if (b) b[c] += scaled[c][k];", "if (b && k < 7) b[c] += scaled[c][k];"),
        ("s[6] * r[6][j]", "s[6] * r[5][j]"),
        ("k < 8 && i + k < rows", "k < 8 && i + k + 1 < rows"),
        ("start < in; start += COLUMNS", "start < in && !start; start += COLUMNS"),
        ("memset(w, 0, (size_t)(outs * in) * sizeof *w)", "memset(w, 1, (size_t)(outs * in) * sizeof *w)"),
        ("s[k] = (float)weight[i + k]", "s[k] = (float)weight[i]"),
        ("(v[6] + v[7])", "(v[6] + v[5])"),
        ("v[k] = s[k] * g[k * outs + c]", "v[k] = g[k * outs + c]"),
        ("b[c] += g[c] = s * g[c]", "g[c] = s * g[c]"),
        ("b[c] += g[c] = s * g[c]", "b[c] += s * g[c]"),
        ("for (; i < rows; i++) {", "for (; i + 1 < rows; i++) {"),
        ("memset(b, 0, (size_t)outs * sizeof *b);\n    int64_t", "int64_t"),
        ("p = p * r + 1.0 / 6.0;", "p = p * r + 1.0 / 6.1;"),
        ("sum[i] - 1.0)", "sum[i])"),
        ("own < 0 || own >= classes", "own < 0 || own > classes"),
        ("own < 0 || own >= classes", "own >= classes"),
        ("value > top[i] ? value : top[i]", "top[i]"),
        ("weight[i] < allowed ? weight[i] : allowed", "weight[i]"),
        ("allowed < most ? allowed : most", "allowed"),
        ("fabs(weight[i]) <= DBL_MAX && ", ""),
        ("norm[i] > 0.0 && ", ""),
        ("&& allowed > 0.0 ?", "?"),
        ("sensitivity[owner[i]] / norm[i]", "sensitivity[0] / norm[i]"),
        ("odd += !known;", ""),
        ("out[i] <= 0.0f ? 0.0f : grad[i]", "out[i] > 0.0f ? grad[i] : 0.0f"),
        ("out[i] <= 0.0f ? 0.0f : grad[i]", "out[i] < 0.0f ? 0.0f : grad[i]"),
    ],
)
def test_loops_that_compute_something_else_are_not_used(what: str, instead: str, tmp_path: Path) -> None:
    assert not dense_native.right(
        DenseLoops(build(tmp_path, changed("gradients/fast/dense.c", (what, instead)), *QUICK))
    )


def test_without_the_library_the_same_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 5))
    x, y, weights = torch.randn(30, 2, 3), torch.randint(5, (30,)), torch.rand(30, dtype=torch.float64)
    passes = []
    for way in (dense_native.loops(), None):
        monkeypatch.setattr("evenhand.gradients.fast.dense_chain.loops", lambda way=way: way)
        result = Engine(model, nn.CrossEntropyLoss(reduction="none")).run(x, y)
        passes.append((result.loss, result.norm, result.weighted_sum(weights)))
    (loss, norm, total), (slow_loss, slow_norm, slow_total) = passes
    torch.testing.assert_close(loss, slow_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm, slow_norm, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, slow_total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_weights_are_projected_alike(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr("evenhand.gradients.fast.bounded_weights", lambda *columns: None)
    inf, nan = float("inf"), float("nan")
    norm = torch.tensor([2.0, 0.0, 1e-40, nan, 4.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    given = torch.tensor([9.0, 1.0, 1e35, 1.0, nan, inf, -3.0, 0.1], dtype=torch.float64)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    found = step.clamp_weights(
        given, Stats(norm, norm, owner, owner, owner), torch.tensor([1.0, 2.0], dtype=torch.float64)
    )
    assert found.tolist() == [0.5, 0.0, 1e30, 0.0, 0.0, 0.0, 0.0, 0.1]


@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_an_owner_that_nobody_knows_is_an_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr("evenhand.gradients.fast.bounded_weights", lambda *columns: None)
    ones, owner = torch.ones(2, dtype=torch.float64), torch.tensor([0, 1])
    with pytest.raises(IndexError):
        step.clamp_weights(ones, Stats(ones, ones, owner, owner, owner), ones[:1])


def test_whoever_calls_gets_what_the_loops_may_read() -> None:
    """Transposed, of another precision or kind: not read as if it were rows after rows."""
    assert not dense_native.fits(torch.ones(3, 2).t())
    assert not dense_native.fits(torch.ones(3, 2, dtype=torch.bfloat16))
    assert not dense_native.fits(torch._neg_view(torch.ones(3, 2)))
