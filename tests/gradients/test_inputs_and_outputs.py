"""Inputs and outputs as other libraries have them: gradients are those of each record by plain autograd."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients import Engine, Shared, examine, per_sample, probe
from evenhand.gradients.batch_utils import call, logits
from evenhand.gradients.views import Viewed, mean_loss

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


class Output:
    """An output with logits, as ``ModelOutput``; it is no dict that torch knows."""

    def __init__(self, logits: Tensor, loss: Tensor | None = None) -> None:
        self.logits, self.loss = logits, loss


class Reader(nn.Module):
    """Words and their places, averaged where the mask is one."""

    def __init__(self, returned: str = "object") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = nn.Embedding(9, 6), nn.Embedding(5, 6), nn.Linear(6, 3)
        self.returned = returned

    def forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor | None = None) -> Any:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        seen = (self.words(input_ids) + self.places(positions)) * mask[..., None]
        scores = self.head(seen.sum(1) / mask.sum(1, keepdim=True))
        outputs = {"object": Output(scores), "dict": {"logits": scores}, "tuple": (scores, seen), "tensor": scores}
        return outputs[self.returned]


def batch(size: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (size, 5), generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (size, 1), generator=generator)).float()
    return {"input_ids": ids, "mask": mask}, torch.arange(size) % 3


def alone(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> list[dict[str, Tensor]]:
    """Gradients of each record by plain autograd, one after the other."""
    found = []
    for row in range(len(targets)):
        record = {
            name: part[row : row + 1] if isinstance(part, Tensor) else part.value for name, part in inputs.items()
        }
        model.zero_grad()
        CROSS_ENTROPY(logits(model(**record)), targets[row : row + 1]).sum().backward()
        found.append({name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def check(model: nn.Module, given: Any, inputs: dict[str, Any], targets: Tensor, tolerance: float = 1e-5) -> None:
    expected, result = alone(model, inputs, targets), per_sample(model, CROSS_ENTROPY, given, targets)
    norms = torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in expected])
    assert torch.allclose(result.norm, norms, rtol=tolerance)
    weights = torch.linspace(0.1, 1, len(targets))
    for name, total in result.weighted_sum(weights).items():
        wanted = sum(float(weight) * one[name] for weight, one in zip(weights, expected, strict=True))
        assert torch.allclose(total.double(), wanted, rtol=100 * tolerance, atol=tolerance)


@pytest.mark.parametrize("returned", ["object", "dict", "tuple", "tensor"])
def test_mappings_are_keyword_arguments_and_outputs_are_read_for_their_logits(returned: str) -> None:
    inputs, targets = batch()
    check(Reader(returned), UserDict(inputs), inputs, targets)


def test_lists_and_tuples_are_positional_arguments() -> None:
    inputs, targets = batch()
    check(Reader(), list(inputs.values()), inputs, targets)
    check(Reader(), tuple(inputs.values()), inputs, targets)


def test_positions_that_all_records_share_are_no_record() -> None:
    inputs, targets = batch()
    shared: dict[str, Any] = {**inputs, "position_ids": Shared(torch.arange(4, -1, -1)[None])}
    check(Reader(), shared, shared, targets)
    probe(Reader(), CROSS_ENTROPY, shared, targets)


def test_a_dimension_of_one_is_not_taken_for_shared() -> None:
    inputs, targets = batch()
    with pytest.raises(UsageError, match=r"evenhand\.gradients\.Shared"):
        per_sample(Reader(), CROSS_ENTROPY, {**inputs, "position_ids": torch.arange(5)[None]}, targets)


def test_views_leave_what_is_shared_alone() -> None:
    inputs, targets = batch()
    shared: dict[str, Any] = {**inputs, "position_ids": Shared(torch.arange(5)[None])}
    twice = {name: part if isinstance(part, Shared) else torch.stack([part, part], 1) for name, part in shared.items()}
    one = per_sample(Reader(), CROSS_ENTROPY, shared, targets).norm
    both = per_sample(Viewed(Reader(), 2), mean_loss(CROSS_ENTROPY, 2), twice, targets).norm
    assert torch.allclose(one, both, rtol=1e-5)


def test_the_doctor_examines_mappings() -> None:
    inputs, targets = batch()
    diagnosis = examine(Reader(), CROSS_ENTROPY, UserDict(inputs), targets)
    assert diagnosis.trainable


def test_a_loss_of_the_models_own_is_never_used() -> None:
    scores, mean = torch.zeros(2, 3), torch.tensor(0.5)
    for outputs in (Output(scores, mean), {"loss": mean, "logits": scores}, (mean, scores), {"loss": mean}):
        with pytest.raises(UnsupportedModelError, match="a loss of its own"):
            logits(outputs)
    for outputs in ({"hidden": scores}, None, ()):
        with pytest.raises(UnsupportedModelError, match="without logits"):
            logits(outputs)


def test_a_loss_of_ones_own_gets_what_the_model_returns() -> None:
    inputs, targets = batch()
    expected = per_sample(Reader("tensor"), CROSS_ENTROPY, inputs, targets).norm
    result = per_sample(Reader(), lambda out, y: CROSS_ENTROPY(out.logits, y), inputs, targets)
    assert torch.allclose(result.norm, expected)
    with pytest.raises(UnsupportedModelError, match=r"read\s+outputs\.logits"):
        per_sample(Reader(), lambda out, y: CROSS_ENTROPY(out, y), inputs, targets)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_models_in_other_precisions_are_exact_to_that_precision(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    inputs, targets = torch.randn(12, 8), torch.arange(12) % 3
    probe(model, CROSS_ENTROPY, inputs, targets)
    engine = Engine(model, CROSS_ENTROPY)
    result = engine.run(inputs, targets)
    double = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    double.load_state_dict(model.state_dict())
    expected = per_sample(double, CROSS_ENTROPY, inputs.to(dtype).double(), targets).norm
    assert torch.allclose(result.norm, expected, rtol=tolerance)
    assert engine.way() == "kernels"
    assert {part.dtype for part in result.weighted_sum(torch.ones(12)).values()} <= {torch.float32, torch.float64}


def test_inputs_of_a_model_with_several_precisions_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        call(model, torch.ones(1, 2))


class Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = inner, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x).sum(1))
        return result


@pytest.mark.parametrize(
    ("inner", "records"),
    [
        (nn.Linear(2, 4), torch.zeros(5, 0, 2)),
        (nn.Embedding(7, 4), torch.zeros(5, 0, dtype=torch.long)),
        (nn.LayerNorm(4), torch.zeros(5, 0, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), torch.zeros(5, 0, 4)),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, nn.Module) else "",
)
def test_sequences_of_length_zero_have_the_gradients_of_what_follows(inner: nn.Module, records: Tensor) -> None:
    model, targets = Summed(inner), torch.arange(5) % 3
    probe(model, CROSS_ENTROPY, records, targets)
    result = per_sample(model, CROSS_ENTROPY, records, targets)
    assert torch.isfinite(result.norm).all()
    with torch.no_grad():
        error = model.head.bias.softmax(0).expand(5, -1) - nn.functional.one_hot(targets, 3)
    assert torch.allclose(result.norm.float(), error.norm(dim=1), rtol=1e-5)
    assert torch.allclose(result.weighted_sum(torch.ones(5))["head.bias"], error.sum(0), atol=1e-6)


def test_a_layer_that_takes_no_sequence_of_length_zero_says_so() -> None:
    recurrent = nn.LSTM(2, 4, batch_first=True)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = recurrent, nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.inner(x)[0].sum(1))
            return result

    with pytest.raises(UnsupportedModelError, match=r"cannot take inputs of shape \(0, 2\)"):
        probe(First(), CROSS_ENTROPY, torch.zeros(5, 0, 2), torch.zeros(5, dtype=torch.long))
