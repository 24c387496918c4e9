"""A stand-in for the parts of transformers that PrivateTrainer reads: CI has neither it nor its models."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class TrainingArguments:
    output_dir: str = "trainer_output"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    fp16: bool = False
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    eval_strategy: str = "no"
    push_to_hub: bool = False
    label_names: list[str] | None = None
    of_a_later_version: bool = False


@dataclass
class TrainerState:
    epoch: float | None = None
    global_step: int = 0
    max_steps: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    log_history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TrainerControl:
    should_training_stop: bool = False


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


@dataclass
class EvalPrediction:
    predictions: Any
    label_ids: Any


def module() -> ModuleType:
    library: Any = ModuleType("transformers")
    for part in (TrainingArguments, TrainerState, TrainerControl, EvalPrediction):
        setattr(library, part.__name__, part)
    library.trainer_utils = SimpleNamespace(TrainOutput=TrainOutput, PredictionOutput=PredictionOutput)
    library.set_seed = torch.manual_seed
    return library


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class TinyForSequenceClassification(nn.Module):
    """A model that computes a mean loss when it is handed labels, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2, problem_type=None, use_cache=True)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        assert labels is None, "the model was handed labels"
        assert not (self.training and self.config.use_cache)
        logits = self.head(self.words(input_ids).mean(1))
        return Output(logits)

    def save_pretrained(self, folder: str) -> None:
        from pathlib import Path

        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


class TinyForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        assert labels is None, "the model was handed labels"
        return Output(self.head(self.words(input_ids)))


class Records(torch.utils.data.Dataset[dict[str, Any]]):
    """Records as dicts: the label is whether the first word is large."""

    def __init__(self, first: int, count: int, length: int = 5, labelled: bool = True) -> None:
        made = torch.Generator().manual_seed(first)
        self.ids = torch.randint(0, 10, (count, length), generator=made)
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = {"input_ids": self.ids[index], "attention_mask": torch.ones_like(self.ids[index])}
        return {**record, "labels": int(self.ids[index, 0] > 4)} if self.labelled else record
