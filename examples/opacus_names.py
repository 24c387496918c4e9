"""Opacus' tutorial on classifying names by language with an LSTM, with its import changed; torch's own LSTM serves."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.integrations.opacus import PrivacyEngine  # was: from opacus import PrivacyEngine


class CharNNClassifier(nn.Module):
    def __init__(self, embedding_size: int = 16, hidden_size: int = 32, output_size: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, batch_first=True)  # was: opacus.layers.DPLSTM
        self.out_layer = nn.Linear(hidden_size, output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(x))
        return self.out_layer(x.amax(1))


EPOCHS, DELTA = 3, 1e-5
train, test = (data.fetch(torch.arange(len(data))) for data in eh.data.load("names") if data)
train_loader = DataLoader(TensorDataset(*train), batch_size=1000)
model, criterion = CharNNClassifier(), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
privacy_engine = PrivacyEngine(out="runs/opacus-names")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader,
    target_delta=DELTA, target_epsilon=8.0, epochs=EPOCHS, max_grad_norm=1.5,
)  # fmt: skip
for epoch in range(EPOCHS):
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    accuracy = (model.eval()(test[0]).argmax(1) == test[1]).float().mean()
    print(f"epoch {epoch}: accuracy {accuracy:.3f}, epsilon {privacy_engine.get_epsilon(DELTA):.3f}")
    model.train()
