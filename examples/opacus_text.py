"""Opacus' example imdb.py on texts rated by people, with its import changed: embeddings, their mean, two layers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.integrations.opacus import PrivacyEngine  # was: from opacus import PrivacyEngine


class SampleNet(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab_size, 16, mode="mean", padding_idx=0)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(self.emb(x)).relu()).log_softmax(1)


def tokens(text: torch.Tensor) -> torch.Tensor:  # three bytes are a token: a public vocabulary
    return (text[:, :-2] * 1009 + text[:, 1:-1] * 31 + text[:, 2:]) % 1023 * (text[:, 2:] > 0)


EPOCHS, DELTA = 2, 1e-5
train, test = (data.fetch(torch.arange(len(data))) for data in eh.data.load("sentiment") if data)
train_loader = DataLoader(TensorDataset(tokens(train[0][:, :160]), train[1]), batch_size=1024)
model, criterion = SampleNet(1024), nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
privacy_engine = PrivacyEngine(out="runs/opacus-text")
model, optimizer, loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=0.8, max_grad_norm=1.0, epochs=EPOCHS
)
for _epoch in range(EPOCHS):
    for data, label in loader:
        optimizer.zero_grad()
        criterion(model(data), label).backward()
        optimizer.step()
accuracy = (model.eval()(tokens(test[0][:, :160])).argmax(1) == test[1]).float().mean()
print(f"accuracy {accuracy:.3f}, epsilon {privacy_engine.get_epsilon(DELTA):.3f}, statement in {privacy_engine.folder}")
