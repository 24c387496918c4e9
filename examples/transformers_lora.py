"""Fine-tune a language model privately with LoRA, and generate; runs offline on sequences made here.

pip install 'evenhand[transformers]'
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import evenhand as eh
from evenhand.integrations.transformers import PrivateTrainer

torch.manual_seed(0)
steps = torch.randint(1, 3, (1500, 14))  # every word is 1 or 2 above the one before it, modulo 20
words = (torch.randint(0, 20, (1500, 1)) + steps.cumsum(1)) % 20
data = Dataset.from_dict({"input_ids": words.tolist()}).train_test_split(0.2, seed=0)

config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
base = GPT2LMHeadModel(config)
state = {name: value.clone() for name, value in base.state_dict().items()}
adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
out = sys.argv[1] if len(sys.argv) > 1 else "counting"
args = TrainingArguments(out, per_device_train_batch_size=120, num_train_epochs=5, learning_rate=1e-2)
train, test = data["train"], data["test"]
trainer = PrivateTrainer(get_peft_model(base, adapters), args, train_dataset=train, eval_dataset=test, epsilon=8)
print(trainer.train().metrics)

fresh = GPT2LMHeadModel(config)
fresh.load_state_dict(state)  # the public model, and the adapter that OUT holds
model = PeftModel.from_pretrained(fresh, out).eval()
start = {"input_ids": torch.tensor([[2, 4, 6, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
print(model.generate(**start, max_new_tokens=4, do_sample=False, pad_token_id=0))
assert eh.verify(trainer.run_folder)["ok"]  # ledger, statement and report are in OUT-run
