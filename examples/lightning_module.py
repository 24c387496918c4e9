"""Train a LightningModule privately: one callback, and one loss per record."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.integrations.lightning import PrivateCallback


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):  # without the callback: the mean over a batch, not private
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


out = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
train, test = (TensorDataset(*part.fetch(torch.arange(len(part)))) for part in eh.data.digits())
private = PrivateCallback(epsilon=3.0, delta=1e-5, loss=torch.nn.CrossEntropyLoss(reduction="none"), out=out)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", callbacks=[private], logger=False, default_root_dir=out)
trainer.fit(Digits(), DataLoader(train, batch_size=128, shuffle=True), DataLoader(test, batch_size=256))
print(private.run.privacy)
private.run.report(test).save(f"{out}/report.html")
assert eh.verify(out)["ok"]
