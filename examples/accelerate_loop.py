"""Train privately in a loop of accelerate: its device and its printing, our steps."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.integrations.accelerate import prepare

out = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"
train, test = (TensorDataset(*part.fetch(torch.arange(len(part)))) for part in eh.data.digits())
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
accelerator = Accelerator(cpu=True)
private, loader = prepare(
    accelerator,
    model,
    optimizer,
    DataLoader(train, batch_size=128, shuffle=True),
    loss=torch.nn.CrossEntropyLoss(reduction="none"),
    epochs=3,
    epsilon=3.0,
    delta=1e-5,
    out=out,
)
with private:
    for epoch in range(3):
        for batch in loader:
            private.step(batch)
        accelerator.print(f"epoch {epoch}: epsilon so far {private.epsilon:.2f}")
        private.checkpoint()
    private.release()
run = eh.load(out, model=model)
print(run.privacy)
run.report(test).save(f"{out}/report.html")
assert eh.verify(out)["ok"]
