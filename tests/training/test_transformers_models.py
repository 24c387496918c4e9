"""Models of transformers train on datasets of Hugging Face as they are: dict batches in, logits out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.gradients import per_sample
from evenhand.training.private import Private

pytestmark = pytest.mark.slow
PLACES, WORDS, RECORDS = 12, 60, 240


def texts() -> Any:
    """Sentences of different length: the label says whether the first word is a frequent one."""
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, WORDS, (RECORDS, PLACES), generator=generator)
    lengths = [4 + number % (PLACES - 3) for number in range(RECORDS)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [row[:length].tolist() for row, length in zip(words, lengths, strict=True)],
            "attention_mask": [[1] * length for length in lengths],
            "label": [int(row[0] > WORDS // 2) for row in words],
            "region": ["south" if number % 4 else "north" for number in range(RECORDS)],
        }
    )


def pad(**settings: Any) -> eh.data.Pad:
    return eh.data.Pad(PLACES, {"input_ids": 0, "attention_mask": 0}, **settings)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=PLACES,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=PLACES, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def classified() -> tuple[eh.data.Data, eh.data.Data]:
    source = texts()
    settings: dict[str, Any] = {"label": "label", "groups": "region", "inputs": ["input_ids", "attention_mask"]}
    settings |= {"labels": ["0", "1"], "collate_fn": pad(), "tokenizer": "made-up"}
    return eh.data.wrap(source.select(range(180)), **settings), eh.data.wrap(source.select(range(180, 240)), **settings)


def following() -> tuple[eh.data.Data, eh.data.Data]:
    source, settings = texts(), {"label": "labels", "inputs": ["input_ids", "attention_mask"]}
    settings["collate_fn"] = pad(next_of="input_ids")
    return eh.data.wrap(source.select(range(180)), **settings), eh.data.wrap(source.select(range(180, 240)), **settings)


@pytest.mark.parametrize(("model", "data"), [(bert, classified), (gpt2, following)], ids=["bert", "gpt2"])
def test_dict_batches_are_trained_evaluated_predicted_resumed_and_verified(
    model: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = data()
    torch.manual_seed(0)
    first = model()
    stopped = {"after": 3}
    original = Private.step

    def step(self: Any, batch: Any) -> Any:
        if self.position >= stopped["after"]:
            raise KeyboardInterrupt
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Private, "step", step)
        with pytest.raises(KeyboardInterrupt):
            eh.fit(first, train, epsilon=8, epochs=2, batch_size=30, test=test, out=tmp_path / "run")
    run = eh.resume(tmp_path / "run", model=model(), train=train, test=test)
    assert eh.verify(run.path)["problems"] == []
    assert len(run.evaluations) > 0
    if data is classified:
        assert len(run.predict(test).predicted) == 60
        assert "made-up" in str(run.plan)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_gradients_are_those_of_each_record_by_plain_autograd(name: str) -> None:
    torch.manual_seed(0)
    model, (train, _) = (bert(), classified()) if name == "bert" else (gpt2(), following())
    model.eval()
    inputs, targets = train.fetch(torch.arange(6))
    loss = eh.losses.CrossEntropy()
    result = per_sample(model, loss, inputs, targets)
    norms = []
    for row in range(6):
        model.zero_grad()
        one = model(**{key: part[row : row + 1] for key, part in inputs.items()}).logits
        loss(one, targets[row : row + 1]).sum().backward()
        norms.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm())
    assert torch.allclose(result.norm, torch.stack(norms), rtol=1e-4)


def test_a_model_that_is_given_labels_is_refused() -> None:
    source = texts().map(lambda row: {"labels": row["label"]})
    data = eh.data.wrap(
        source,
        label="label",
        labels=["0", "1"],
        inputs=["input_ids", "attention_mask", "labels"],
        collate_fn=pad(),
    )
    plan = eh.plan("dpsgd", eh.Privacy(8, 1e-4), data=data.facts, epochs=1, batch_size=30)
    assert plan.steps
    with pytest.raises(eh.errors.UnsupportedModelError, match="a loss of its own"):
        per_sample(bert(), eh.losses.CrossEntropy(), *data.fetch(torch.arange(4)))


def test_padding_to_the_longest_of_a_batch_is_refused() -> None:
    transformers = pytest.importorskip("transformers")

    class Tokens:
        """The part of a tokenizer that a collator calls."""

        def pad(self, rows: Any, **_: Any) -> Any:
            width = max(len(row["input_ids"]) for row in rows)
            names = ("input_ids", "attention_mask")
            filled = {name: [row[name] + [0] * (width - len(row[name])) for row in rows] for name in names}
            filled["label"] = [row["label"] for row in rows]
            return transformers.BatchEncoding(filled, tensor_type="pt")

    collate = transformers.DataCollatorWithPadding(Tokens())
    with pytest.raises(eh.errors.DataError, match="Pad every record to one declared length"):
        eh.data.wrap(texts(), label="label", inputs=["input_ids", "attention_mask"], collate_fn=collate)


def test_columns_of_equal_length_need_no_collate_function() -> None:
    source = texts().remove_columns("region")
    padded = source.map(lambda row: {name: part[0].tolist() for name, part in pad()([row]).items()})
    data = eh.data.wrap(padded, label="label", inputs=["input_ids", "attention_mask"])
    assert data.fetch(torch.tensor([3, 1]))[0]["input_ids"].shape == (2, PLACES)
    transformed = padded.with_transform(
        lambda rows: {"x": torch.tensor(rows["input_ids"]).float(), "y": torch.tensor(rows["label"])}
    )
    assert eh.data.wrap(transformed, label="y").fetch(torch.tensor([3, 1]))[0]["x"].shape == (2, PLACES)
