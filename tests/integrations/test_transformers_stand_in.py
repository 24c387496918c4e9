"""PrivateTrainer without transformers: what is mapped, refused, sent to callbacks and written."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_transformers import (
    Records,
    TinyForCausalLM,
    TinyForSequenceClassification,
    TrainingArguments,
    module,
)

import evenhand as eh
from evenhand.errors import DataError, UnsupportedModelError, UsageError
from evenhand.integrations.transformers import PrivateTrainer, repository
from evenhand.integrations.transformers.arguments import settings_of
from evenhand.integrations.transformers.records import Reader, collator_of


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", module())
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))


def test_the_hugging_face_door_of_the_readme_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "transformers" in code]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"classifier": TinyForSequenceClassification()}
    exec(example, names | {"train_texts": Records(1, 300), "test_texts": Records(2, 200)})
    assert eh.verify(tmp_path / "out-run")["ok"]


class Watcher:
    """A TrainerCallback that writes down what it was given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **values: self.events.append((name, values))


def trainer(folder: Path, **changes: Any) -> PrivateTrainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder / "model"), per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=0.05
    )
    given: dict[str, Any] = {"train_dataset": Records(1, 300), "eval_dataset": Records(2, 200), "epsilon": 3.0}
    given |= {"groups": ["a", "b"] * 150, "insecure_seed": 1, **changes}
    return PrivateTrainer(given.pop("model", None) or TinyForSequenceClassification(), given.pop("args", args), **given)


def test_a_training_is_released_verified_and_described(tmp_path: Path) -> None:
    seen = Watcher()
    trained = trainer(tmp_path, callbacks=[seen], compute_metrics=lambda given: {"rows": len(given.label_ids)})
    with pytest.raises(UsageError, match="before training has ended"):
        trained.save_model()
    output = trained.train()
    checked = eh.verify(trained.run_folder)
    assert checked["ok"]
    assert checked["epsilon"] <= 3.0
    assert output.global_step == math.ceil(3 * 300 / 32)
    assert math.isnan(output.training_loss)
    assert trained.model.config.use_cache is True
    assert not trained.model.training
    assert [name for name, _ in seen.events if name in ("on_train_begin", "on_train_end")] == [
        "on_train_begin",
        "on_train_end",
    ]
    given = {key for _, values in seen.events for key in values}
    assert given <= {"logs", "metrics"}
    assert trained.state.log_history[-1]["epsilon"] <= 3.0
    assert trained.evaluate()["eval_rows"] == 200
    saved = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    released = eh.load(trained.run_folder, model=TinyForSequenceClassification()).model.state_dict()
    assert all(torch.equal(saved[name], released[name]) for name in released)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "Method dpsgd; epsilon" in card
    trained.create_model_card()
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == card


def test_a_callback_that_asks_to_stop_ends_the_training_and_the_plan_is_promised(tmp_path: Path) -> None:
    class Impatient:
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any) -> Any:
            control.should_training_stop = True
            return control

    trained = trainer(tmp_path, callbacks=[Impatient])
    assert 0 < trained.train().global_step < trained.state.max_steps
    assert trained.run.privacy.epsilon == trained.run.plan.epsilons[0]


def test_callbacks_are_told_the_loss_own_metrics_and_the_best_so_far(tmp_path: Path) -> None:
    """EarlyStoppingCallback needs all three: it looks a metric up and compares it with ``state.best_metric``."""
    told: list[tuple[float | None, dict[str, float]]] = []

    class Looks:
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float]) -> None:
            told.append((state.best_metric, metrics))

    own = iter([0.25, 0.75, 0.5, 0.5, 0.5])
    options: dict[str, Any] = {"callbacks": [Looks()], "compute_metrics": lambda given: {"f1": next(own)}}
    args = TrainingArguments(str(tmp_path / "model"), per_device_train_batch_size=32, learning_rate=0.05)
    args.metric_for_best_model, args.greater_is_better = "f1", True
    trained = trainer(tmp_path, args=args, **options)
    trained.train()
    assert [best for best, _ in told] == [None, 0.25, 0.75]
    assert [metrics["eval_f1"] for _, metrics in told] == [0.25, 0.75, 0.5]
    assert all(metrics["eval_loss"] > 0 for _, metrics in told)
    assert trained.state.best_metric == 0.75
    assert [row.get("eval_f1") for row in trained.state.log_history] == [0.25, 0.75, 0.5, None]


def test_a_training_that_a_callback_refused_before_its_first_charge_can_begin_again(tmp_path: Path) -> None:
    class Wants:
        def on_train_begin(self, args: Any, state: Any, control: Any) -> None:
            assert args.metric_for_best_model is not None

    args = TrainingArguments(str(tmp_path / "model"), per_device_train_batch_size=32, learning_rate=0.05)
    args.metric_for_best_model = None
    refused = trainer(tmp_path, args=args, callbacks=[Wants()])
    with pytest.raises(AssertionError):
        refused.train()
    args.metric_for_best_model = "loss"
    assert trainer(tmp_path, args=args, callbacks=[Wants()]).train().global_step > 0
    with pytest.raises(UsageError, match=r"There is a run in .* already"):
        trainer(tmp_path, args=args).train()


def test_predictions_have_logits_and_labels(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    predicted = trained.predict(Records(3, 40))
    assert predicted.predictions.shape == (40, 2)
    assert predicted.label_ids.tolist() == (Records(3, 40).ids[:, 0] > 4).long().tolist()


def test_training_records_are_refused_as_held_out_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hold training records"):
        trainer(tmp_path).evaluate(Records(1, 300))


def test_max_steps_is_the_number_of_steps(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path / "model"), per_device_train_batch_size=32, max_steps=4)
    trained = trainer(tmp_path, args=args, eval_dataset=None)
    assert trained.train().global_step == 4
    assert trained.run.plan.expected_batch == 32


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = trainer(tmp_path, eval_dataset=None)
    with pytest.raises(UsageError, match="no run of evenhand"):
        stopping.train(resume_from_checkpoint=True)
    steps = [0]
    original = torch.optim.AdamW.step

    def step(self: Any, *given: Any) -> Any:
        steps[0] += 1
        if steps[0] == 5:
            raise KeyboardInterrupt
        return original(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        stopping.train()
    with pytest.raises(UsageError, match="before training has ended"):
        stopping.predict(Records(3, 40))
    with pytest.raises(UsageError, match="resume_from_checkpoint=True"):
        trainer(tmp_path, eval_dataset=None).train()
    going_on = trainer(tmp_path, eval_dataset=None)
    going_on.train(resume_from_checkpoint=True)
    assert eh.verify(going_on.run_folder)["ok"]
    assert len(going_on.run.folder.ledger().keys) == 2


def test_next_words_are_the_targets_of_a_language_model(tmp_path: Path) -> None:
    reader = Reader(TinyForCausalLM())
    inputs, targets = reader.read(Records(1, 4, labelled=False)).fetch(torch.arange(4))
    assert targets[:, :-1].tolist() == inputs["input_ids"][:, 1:].tolist()
    assert targets[:, -1].tolist() == [-100] * 4
    assert set(inputs) == {"input_ids", "attention_mask"}
    padded = Reader(TinyForCausalLM(), collator_of(None, SimpleNamespace(pad_token_id=9), 7))
    inputs, targets = padded.read(Records(1, 4, labelled=False)).fetch(torch.arange(2))
    assert inputs["input_ids"][:, 5:].tolist() == [[9, 9], [9, 9]]
    assert targets[:, 4:].tolist() == [[-100] * 3] * 2


def test_a_language_model_trains(tmp_path: Path) -> None:
    data = {"train_dataset": Records(1, 200, labelled=False), "eval_dataset": Records(2, 50, labelled=False)}
    trained = trainer(tmp_path, model=TinyForCausalLM(), groups=None, **data)
    assert trained.train().metrics["eval_loss"] > 0
    assert eh.verify(trained.run_folder)["ok"]
    with pytest.raises(UsageError, match="no save_pretrained"):
        trained.save_model()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("fp16", True, "bf16=True"),
        ("push_to_hub", True, "nothing is pushed"),
        ("eval_strategy", "steps", "after every epoch"),
        ("max_grad_norm", 0.3, "every record is bounded"),
        ("of_a_later_version", True, "not known here"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_refused(setting: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings_of(TrainingArguments(**{setting: value}))


def test_all_settings_that_cannot_be_followed_are_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)3 settings:.*fp16=True.*max_grad_norm.*'bound': 0\.3.*optim='lion'"):
        settings_of(TrainingArguments(fp16=True, max_grad_norm=0.3, optim="lion"))


def test_what_sees_raw_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compute_loss_func is given a whole batch"):
        trainer(tmp_path, compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.mean())
    with pytest.raises(UsageError, match="raw batches"):
        type("Weighted", (PrivateTrainer,), {"compute_loss": lambda self, model, inputs: None})
    with pytest.raises(UsageError, match="optim='adafactor'"):
        trainer(tmp_path, args=TrainingArguments(optim="adafactor"))
    with pytest.raises(UsageError, match="pushes nothing"):
        trainer(tmp_path).push_to_hub()


def test_a_collator_of_the_library_is_given_records_cut_to_the_declared_length() -> None:
    @dataclasses.dataclass
    class DataCollatorWithPadding:
        tokenizer: Any
        padding: Any = True
        max_length: int | None = None

        def __call__(self, records: Any) -> Any:
            assert self.padding == "max_length"
            rows = [list(record["input_ids"]) for record in records]
            return {"input_ids": torch.tensor([row + [0] * ((self.max_length or 0) - len(row)) for row in rows])}

    tokens = SimpleNamespace(pad_token_id=0, sep_token_id=3, eos_token_id=None)
    ends, open_ended, short = [2, 5, 6, 7, 3], (2, 5, 6, 7, 8), [2, 3]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids), "label": 1} for ids in (ends, open_ended, short)]
    for collate in (collator_of(DataCollatorWithPadding(tokens), None, 4), collator_of(None, tokens, 4)):
        assert collate is not None
        assert collate(rows)["input_ids"].tolist() == [[2, 5, 6, 3], [2, 5, 6, 7], [2, 3, 0, 0]]


def test_collators_that_pad_by_the_batch_or_draw_are_refused() -> None:
    dynamic = type("DataCollatorWithPadding", (), {"padding": True, "max_length": None})()
    with pytest.raises(UsageError, match="declare one length"):
        collator_of(dynamic, None, None)
    with pytest.raises(UsageError, match="draws masks"):
        collator_of(SimpleNamespace(mlm=True), None, 16)
    with pytest.raises(UsageError, match="several records into one row"):
        collator_of(type("DataCollatorWithFlattening", (), {})(), None, 16)


def test_records_without_a_target_or_with_other_targets_are_refused() -> None:
    with pytest.raises(DataError, match="no column to predict"):
        Reader(TinyForSequenceClassification()).read(Records(1, 4, labelled=False))
    other = type("TinyForMaskedLM", (TinyForCausalLM,), {})()
    with pytest.raises(UnsupportedModelError, match="needs targets"):
        Reader(other).read(Records(1, 4))


def test_texts_that_nobody_cut_into_tokens_are_told_so() -> None:
    class Texts:
        column_names = ("text", "label")

        def with_format(self, _: str) -> Texts:
            return self

        def __len__(self) -> int:
            return 2

    with pytest.raises(DataError, match=r"its forward has input_ids.*cut into tokens"):
        Reader(TinyForSequenceClassification()).read(Texts())


def test_a_second_section_takes_the_place_of_the_first() -> None:
    once = repository.merged("---\ntags: [mine]\n---\n# Mine\n", "first")
    twice = repository.merged(once, r"second \1")
    assert twice.count(repository.BEGIN) == 1
    assert twice.startswith("---\ntags: [mine]\n---\n# Mine")
    assert r"second \1" in twice
    assert "first" not in twice


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"evenhand\[transformers\]"):
        trainer(tmp_path)
