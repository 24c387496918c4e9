"""PrivateTrainer with the real transformers, peft and datasets: small random models, nothing downloaded."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.integrations.transformers import PrivateTrainer, arguments

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their deprecations are theirs
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


def sequences(count: int, seed: int, **columns: Any) -> Any:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (count, 8), generator=made)
    return datasets.Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": [[1] * 8] * count, **{k: v(ids) for k, v in columns.items()}}
    )


def gpt() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str, labels: int) -> Any:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=labels,
    )
    return getattr(transformers, kind)(config)


def arguments_in(folder: Path, **changes: Any) -> Any:
    given = {"per_device_train_batch_size": 20, "num_train_epochs": 1, "learning_rate": 1e-2, **changes}
    return transformers.TrainingArguments(str(folder / "model"), report_to="none", **given)


ADAPTERS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_of_peft_is_trained_saved_and_generates(kind: str, tmp_path: Path) -> None:
    base = gpt()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, ADAPTERS[kind]())
    trained = {name: value.clone() for name, value in model.named_parameters() if value.requires_grad}
    data = {"train_dataset": sequences(100, 1), "eval_dataset": sequences(20, 2)}
    trainer = PrivateTrainer(model, arguments_in(tmp_path), **data, epsilon=3)
    output = trainer.train()
    assert eh.verify(trainer.run_folder)["ok"]
    assert output.metrics["eval_loss"] > 0
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in trained.items() if "lora_A" not in name)
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    fresh = gpt()
    fresh.load_state_dict(before)
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "model")).eval()
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    grown = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert grown.shape == (1, 7)


def test_sequences_are_classified_with_a_schedule_of_theirs_and_groups(tmp_path: Path) -> None:
    def label(ids: Any) -> list[int]:
        return (ids[:, 0] > 25).long().tolist()

    def domain(ids: Any) -> list[str]:
        return ["odd" if row % 2 else "even" for row in range(len(ids))]

    seen: list[dict[str, float]] = []

    class Watcher(transformers.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
            assert not given
            seen.append(metrics)

    train, test = (sequences(count, seed, label=label, domain=domain) for count, seed in ((300, 1), (200, 2)))
    args = arguments_in(
        tmp_path, warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.01, gradient_accumulation_steps=2
    )
    model = bert("BertForSequenceClassification", 2)
    trainer = PrivateTrainer(
        model, args, train_dataset=train, eval_dataset=test, groups="domain", epsilon=3, callbacks=[Watcher]
    )
    trainer.train()
    assert trainer.run.plan.expected_batch == 40
    assert {"eval_accuracy/odd", "eval_accuracy/even"} <= seen[-1].keys()
    predicted = trainer.predict(test.remove_columns("label"))
    assert predicted.predictions.shape == (200, 2)
    assert predicted.label_ids is None
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor(test["input_ids"][:4])
    with torch.no_grad():
        assert torch.equal(saved(input_ids=ids).logits, model(input_ids=ids).logits)


def test_tokens_are_classified(tmp_path: Path) -> None:
    def labels(ids: Any) -> list[list[int]]:
        return [[-100, *row] for row in (ids[:, 1:] > 25).long().tolist()]

    train, test = sequences(100, 1, labels=labels), sequences(60, 2, labels=labels)
    model = bert("BertForTokenClassification", 2)
    trainer = PrivateTrainer(model, arguments_in(tmp_path), train_dataset=train, eval_dataset=test, epsilon=3)
    assert trainer.train().metrics["eval_loss"] > 0
    assert eh.verify(trainer.run_folder)["ok"]


def test_records_of_different_lengths_need_one_declared_length(tmp_path: Path) -> None:
    ragged = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2, 3], [4, 5]] * 50, "attention_mask": [[1] * 3, [1] * 2] * 50}
    )
    collator = transformers.DataCollatorWithPadding(None)
    with pytest.raises(UsageError, match="max_length=128"):
        PrivateTrainer(gpt(), arguments_in(tmp_path), collator, train_dataset=ragged, epsilon=3)
    trainer = PrivateTrainer(gpt(), arguments_in(tmp_path), train_dataset=ragged, epsilon=3, max_length=4)
    assert trainer.train().global_step == 5


def test_every_setting_of_a_trainer_is_mapped_refused_or_idle() -> None:
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names - arguments.MAPPED - arguments.IDLE - arguments.REFUSED.keys() == set()
    assert not arguments.MAPPED & arguments.IDLE
    assert not arguments.REFUSED.keys() & (arguments.MAPPED | arguments.IDLE)


@pytest.mark.parametrize("example", ["transformers_trainer", "transformers_lora"])
def test_the_examples_run_offline(example: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(eh.__file__).parents[1])}
    line = [sys.executable, str(EXAMPLES / f"{example}.py"), str(tmp_path / "out")]
    done = subprocess.run(line, check=False, capture_output=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert eh.verify(tmp_path / "out-run")["ok"]
    assert "Method dpsgd; epsilon" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_examples_have_at_most_forty_lines() -> None:
    lengths = [len(file.read_text(encoding="utf-8").splitlines()) for file in EXAMPLES.glob("transformers*.py")]
    assert len(lengths) == 2
    assert max(lengths) <= 40


def words_of(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "film": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", name_or_path="public-words"
    )


@pytest.mark.parametrize("collator", ["none", "padding"])
def test_a_tokenizer_pads_to_the_declared_length_is_named_and_saved(collator: str, tmp_path: Path) -> None:
    tokenizer = words_of(tmp_path)
    texts = ["good film", "bad", "bad bad film", "good"] * 25
    data = datasets.Dataset.from_dict({"text": texts, "label": [int("good" in text) for text in texts]})
    data = data.map(lambda batch: tokenizer(batch["text"]), batched=True)
    given = None if collator == "none" else transformers.DataCollatorWithPadding(tokenizer)
    model = bert("BertForSequenceClassification", 2)
    trainer = PrivateTrainer(
        model, arguments_in(tmp_path), given, data, processing_class=tokenizer, max_length=6, epsilon=3
    )
    trainer.train()
    assert "tokens of public-words" in trainer.run.plan.facts.inputs
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").pad_token_id == 0
    inputs, targets = trainer._reader.read(data).fetch(torch.tensor([0, 1]))
    assert inputs["input_ids"].tolist() == [[2, 4, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]]
    assert inputs["attention_mask"].sum(1).tolist() == [2, 1]
    assert targets.tolist() == [1, 0]
