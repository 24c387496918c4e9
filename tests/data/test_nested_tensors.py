"""Nested tensors with one record per row: records of different length without padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.data.fingerprint import fingerprint, survey
from evenhand.gradients import per_sample

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


def nested(records: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(records, layout=torch.jagged)


def sequences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2 + number % 4, 3, generator=generator) for number in range(count)]


class Summed(nn.Module):
    """A model of sequences; torch sums nested tensors as padded ones only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.nested.to_padded_tensor(torch.tanh(self.inner(x)), 0.0)
        result: Tensor = self.head(seen.sum(1))
        return result


def test_gradients_are_those_of_each_record_alone() -> None:
    model, records, targets = Summed(), sequences(6), torch.arange(6) % 2
    result = per_sample(model, CROSS_ENTROPY, nested(records), targets)
    for row, record in enumerate(records):
        model.zero_grad()
        CROSS_ENTROPY(model(nested([record])), targets[row : row + 1]).sum().backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert float(result.norm[row]) == pytest.approx(float(alone), rel=1e-5)


def test_records_are_trained_measured_and_predicted(tmp_path: Path) -> None:
    data = eh.data.wrap(nested(sequences(36)), [number % 2 for number in range(36)])
    assert data.fetch(torch.tensor([], dtype=torch.long))[0].shape[0] == 0
    train, test = data.take(torch.arange(28)), data.take(torch.arange(28, 36))
    run = eh.fit(Summed(), train, epsilon=3, epochs=1, batch_size=14, test=test, out=tmp_path / "run")
    assert eh.verify(run.path)["problems"] == []
    assert run.predict(test).predicted == run.predict(nested(sequences(36)[28:])).predicted


def test_training_records_among_the_held_out_ones_are_recognised(tmp_path: Path) -> None:
    data = eh.data.wrap(nested(sequences(36)), [number % 2 for number in range(36)])
    with pytest.raises(eh.errors.UsageError, match="hold training records"):
        eh.fit(Summed(), data, epsilon=3, epochs=1, batch_size=14, test=data.take(torch.arange(8)), out=tmp_path)


def test_records_are_told_by_their_values_and_their_length() -> None:
    records = sequences(4)
    targets = [0, 1, 0, 1]
    longer = [*records[:3], torch.cat([records[3], torch.zeros(1, 3)])]
    one, again, other = (eh.data.wrap(nested(part), targets) for part in (records, list(records), longer))
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)
    records[1] = records[1] * torch.nan
    assert survey(eh.data.wrap(nested(records), targets)).not_finite == 1


def test_the_old_layout_is_refused() -> None:
    old = torch.nested.nested_tensor(sequences(4), layout=torch.strided)
    with pytest.raises(eh.errors.DataError, match="jagged"):
        eh.data.wrap(old, [0, 1, 0, 1])
