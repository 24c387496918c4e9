"""Datasets of transformers' users as records: the columns a model takes, one length for all, targets kept apart.

A model that is handed labels computes a mean loss of the batch, so targets never are among its inputs. For a causal
language model they are the next words. Rows have one declared length: rows padded to the longest of a batch would
depend on other records.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenhand.data import Data, Pad, next_words, wrap
from evenhand.data.fixed_length import IGNORED
from evenhand.errors import DataError, UnsupportedModelError, UsageError
from evenhand.integrations.transformers.library import base_of, setting

Collator: TypeAlias = Callable[[list[Any]], Any]
Names: TypeAlias = str | Iterable[Any] | None
"""A column, or one name per record."""

LABELS = ("labels", "label", "label_ids")
CLASSES, NUMBERS, TOKENS, WORDS = "classes", "numbers", "a class per token", "next words"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_TARGETS = ("ForMaskedLM", "ForConditionalGeneration", "ForQuestionAnswering", "ForPreTraining", "ForSeq2SeqLM")
_MIXING = {
    "DataCollatorWithFlattening": "it puts several records into one row",
    "DataCollatorForSeq2Seq": "its targets are inputs of the model too",
    "DataCollatorForWholeWordMask": "it draws masks from a generator that is not secret",
    "DataCollatorForPermutationLanguageModeling": "it draws masks from a generator that is not secret",
}


def task_of(model: nn.Module) -> str:
    """Return what the targets of a model are, by the name of its class: classes unless it says something else.

    Examples:
      >>> class TinyForCausalLM(nn.Linear): pass
      >>> task_of(TinyForCausalLM(1, 1)), task_of(nn.Linear(1, 2))
      ('next words', 'classes')
    """
    name = type(base_of(model)).__name__
    if name.endswith(_OTHER_TARGETS):
        raise UnsupportedModelError(
            f"{name} needs targets that PrivateTrainer does not make: it trains models for classification (of records "
            "or of tokens), regression and causal language modelling. For others write the loss yourself, evenhand.fit."
        )
    if name.endswith(_CAUSAL):
        return WORDS
    if name.endswith("ForTokenClassification"):
        return TOKENS
    problem = setting(model, "problem_type")
    if problem == "multi_label_classification":
        raise UnsupportedModelError(
            "Several labels for each record are not mapped yet: evenhand.fit trains them (evenhand.data.wrap with one "
            "column of 0 and 1 for each label)."
        )
    return NUMBERS if problem == "regression" or setting(model, "num_labels") == 1 else CLASSES


def virtual_tokens(model: nn.Module) -> int:
    """Return how many places PEFT's prompt tuning puts before a record's own; the model answers at them too."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return 0
    active: Any = configs.get(getattr(model, "active_adapter", "default"))
    kind = getattr(getattr(active, "peft_type", None), "value", "")
    return int(active.num_virtual_tokens) if kind in ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING") else 0


def collator_of(collator: Any, tokenizer: Any, max_length: int | None) -> Collator | None:
    """Return a collate function that pads to one declared length; None where rows are stacked as they are.

    Raises:
      UsageError: the collator mixes records or draws, or pads to the longest of a batch and no length is declared.
    """
    kind = type(collator).__name__
    if kind in _MIXING:
        raise UsageError(f"{kind} cannot be used: {_MIXING[kind]}. Pad with max_length=, or pass another collator.")
    if getattr(collator, "mlm", False) is True:
        raise UsageError(f"{kind}(mlm=True) cannot be used: it draws masks from a generator that is not secret.")
    if collator is None or hasattr(collator, "mlm"):
        tokens = tokenizer if collator is None else getattr(collator, "tokenizer", tokenizer)
        return None if max_length is None else _Cutting(_Padding(max_length, _fillers(tokens)), max_length, tokens)
    if not hasattr(collator, "padding"):
        return collator  # type: ignore[no-any-return]
    length = max_length or getattr(collator, "max_length", None)
    if length is None:
        raise UsageError(
            f"{kind} pads to the longest record of a batch, so that one record would change the rows of others: "
            "declare one length for all, PrivateTrainer(max_length=128)."
        )
    padding = dataclasses.replace(collator, padding="max_length", max_length=length)
    return _Cutting(padding, length, getattr(collator, "tokenizer", tokenizer))


def _fillers(tokenizer: Any) -> dict[str, float]:
    """Return what fills the places after a record, by column."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return {
        "input_ids": 0 if pad is None else pad,
        "attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
    }


@dataclass(frozen=True)
class _Cutting:
    """A collate function that pads to ``length`` places, given records that are cut to it.

    A record that is cut keeps its last token where the tokenizer puts that one behind every text.
    """

    padding: Collator
    length: int
    tokenizer: Any = None

    def __call__(self, records: list[Mapping[str, Any]]) -> Any:
        return self.padding([self._cut(record) for record in records])

    def _cut(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        places = len(record["input_ids"]) if "input_ids" in record else 0
        if places <= self.length:
            return record
        cut = {name: cell[: self.length] if _places(cell) == places else cell for name, cell in record.items()}
        last = int(record["input_ids"][-1])
        if last in {getattr(self.tokenizer, name, None) for name in ("sep_token_id", "eos_token_id")}:
            words = torch.as_tensor(cut["input_ids"]).clone()
            words[-1] = last
            cut["input_ids"] = words.tolist()
        return cut


def _places(cell: Any) -> int | None:
    """Return the length of a sequence; None for anything else."""
    return len(cell) if isinstance(cell, list | tuple) or bool(getattr(cell, "ndim", 0)) else None


@dataclass(frozen=True)
class _Padding:
    """A collate function that pads the columns that there are to ``length`` places."""

    length: int
    fillers: Mapping[str, float]

    def __call__(self, records: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        values = {name: value for name, value in self.fillers.items() if name in records[0]}
        values |= {name: IGNORED for name in LABELS if torch.as_tensor(records[0].get(name, 0)).dim()}
        return Pad(self.length, values)(records)


@dataclass(frozen=True)
class Targets:
    """A collate function around another one: it makes the targets of a task, under "labels", and drops other labels."""

    collator: Collator | None
    task: str
    prefix: int = 0

    def __call__(self, records: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one row per record."""
        batch = dict(_stacked(records) if self.collator is None else self.collator(records))
        given = [batch.pop(name) for name in LABELS if name in batch]
        if self.task != WORDS:
            return {**batch, "labels": given[0]} if given else batch
        words = given[0] if given else _counted(batch["input_ids"], batch.get("attention_mask"))
        following = next_words(words, torch.full((len(words),), words.shape[1]))
        before = following.new_full((len(following), self.prefix), IGNORED)
        return {**batch, "labels": torch.cat([before, following], dim=1)}


def _counted(words: Tensor, mask: Tensor | None) -> Tensor:
    return words if mask is None else words.masked_fill(mask == 0, IGNORED)


def _stacked(records: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    columns = {name: [torch.as_tensor(record[name]) for record in records] for name in records[0]}
    if any(cell.shape != cells[0].shape for cells in columns.values() for cell in cells):
        raise DataError(
            "Records have different lengths: declare one for all, PrivateTrainer(max_length=128), to which they are "
            "padded and cut, or tokenise with padding='max_length'."
        )
    return {name: torch.stack(cells) for name, cells in columns.items()}


@dataclass(frozen=True)
class Reader:
    """How the datasets of one trainer are read.

    ``every`` hands all columns to the model (``remove_unused_columns=False``), else those that its forward names.
    """

    model: nn.Module
    collator: Collator | None = None
    tokenizer: Any = None
    label_names: tuple[str, ...] = ()
    every: bool = False

    def read(self, dataset: Any, groups: Names = None, owners: Names = None) -> Data:
        """Return a dataset as records; what is wrapped already stays as it is."""
        if isinstance(dataset, Data):
            return wrap(dataset, groups=groups, owners=owners)
        task = task_of(self.model)
        columns = self._columns(dataset)
        label = self._label(dataset, columns, task)
        collate: Collator | None = Targets(self.collator, task, virtual_tokens(self.model))
        if task in (CLASSES, NUMBERS) and self.collator is None and columns is not None:
            collate = None
        options: dict[str, Any] = {"groups": groups, "owners": owners, "collate_fn": collate}
        options["group_names"] = _class_names(dataset, groups) if isinstance(groups, str) else None
        if task == CLASSES:
            options["labels"] = self._classes(dataset, label)
        if columns is not None:
            options["inputs"] = self._inputs(columns, {groups if isinstance(groups, str) else None, label})
            if getattr(self.tokenizer, "name_or_path", ""):
                options["tokenizer"] = self.tokenizer
        return wrap(dataset, label=label, **options)

    def unlabelled(self, dataset: Any) -> bool:
        """Return whether a dataset has no column to predict, though the task needs one."""
        columns = self._columns(dataset)
        return columns is not None and task_of(self.model) != WORDS and not {*LABELS, *self.label_names} & {*columns}

    def _columns(self, dataset: Any) -> list[str] | None:
        """Return the names of the columns of a ``datasets.Dataset``; None for any other dataset."""
        named = hasattr(dataset, "column_names") and hasattr(dataset, "with_format")
        return [str(name) for name in dataset.column_names] if named else None

    def _label(self, dataset: Any, columns: list[str] | None, task: str) -> str:
        names = (*self.label_names, *LABELS)
        present = columns if columns is not None else _keys(dataset)
        label = next((name for name in names if name in present), None)
        if label is None and task != WORDS:
            raise DataError(
                "The dataset has no column to predict: call it 'labels' or 'label', or name it, "
                "TrainingArguments(label_names=['rating'])."
            )
        return label or "labels"

    def _inputs(self, columns: list[str], others: set[str | None]) -> list[str]:
        taken = inspect.signature(base_of(self.model).forward).parameters
        hidden = {*LABELS, *self.label_names, *others}
        given = [name for name in columns if name not in hidden and (self.every or name in taken)]
        if not given:
            raise DataError(
                f"The dataset has no column that the model takes: its forward has {', '.join(list(taken)[:3])} ... "
                "Texts are cut into tokens first: dataset.map(lambda rows: tokenizer(rows['text'], "
                "padding='max_length', truncation=True, max_length=128), batched=True)."
            )
        return given

    def _classes(self, dataset: Any, label: str) -> list[Any] | None:
        """Return the names of all classes: those of the column, or the numbers of the model's outputs."""
        names, count = _class_names(dataset, label), setting(self.model, "num_labels")
        return names or (list(range(count)) if isinstance(count, int) else None)


def _class_names(dataset: Any, column: str) -> list[Any] | None:
    """Return the names that a column of classes declares."""
    features = getattr(dataset, "features", None) or {}
    names = getattr(features.get(column), "names", None)
    return list(names) if names else None


def _keys(dataset: Any) -> set[str]:
    """Return the keys of a record."""
    first = dataset[0] if len(dataset) else {}
    return set(first) if isinstance(first, Mapping) else set()
