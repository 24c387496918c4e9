"""Classify sentences privately with the arguments of transformers.Trainer; runs offline on sentences made here.

pip install 'evenhand[transformers]'
"""

import random
import sys

import torch
from datasets import ClassLabel, Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import evenhand as eh
from evenhand.integrations.transformers import PrivateTrainer

WORDS = ["good", "fine", "bad", "poor", "film", "book", "talk", "the"]
random.seed(0)
torch.manual_seed(0)
rows = []
for domain in random.choices(["films", "books"], weights=[8, 2], k=2000):
    label = random.random() < 0.5
    told = random.choices(WORDS[:2] if label else WORDS[2:4], k=3) + random.choices(WORDS[4:], k=5)
    ids = [WORDS.index(word) for word in random.sample(told, 8)]
    rows.append({"input_ids": ids, "label": int(label), "domain": domain})
data = Dataset.from_list(rows).cast_column("label", ClassLabel(names=["negative", "positive"]))
data = data.train_test_split(0.2, seed=0)

config = BertConfig(
    vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)
model = BertForSequenceClassification(config)
out = sys.argv[1] if len(sys.argv) > 1 else "sentences"
args = TrainingArguments(out, num_train_epochs=8, learning_rate=3e-3, lr_scheduler_type="cosine")
args.per_device_train_batch_size, args.gradient_accumulation_steps = 40, 4  # 160 records expected per step
train, test = data["train"], data["test"]
trainer = PrivateTrainer(model, args, train_dataset=train, eval_dataset=test, epsilon=3, groups="domain")
trainer.train()
print({name: value for name, value in trainer.evaluate().items() if "accuracy" in name})
print(trainer.run.privacy)
assert eh.verify(trainer.run_folder)["ok"]  # the model is in OUT, ledger and report are in OUT-run
