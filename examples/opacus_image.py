"""Opacus' image tutorial on MNIST, with its imports changed: a CNN, and physical batches that fit into memory."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenhand as eh
from evenhand.integrations.opacus import BatchMemoryManager, PrivacyEngine  # was: opacus, opacus.utils...

EPOCHS, DELTA = 3, 1e-4
loaded = eh.data.load("mnist", options={"records": 3000})
train, test = (data.fetch(torch.arange(len(data))) for data in loaded if data)
train_loader = DataLoader(TensorDataset(*train), batch_size=150)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
    *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
    *(nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

privacy_engine = PrivacyEngine(out="runs/opacus-image")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader,
    epochs=EPOCHS, target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0,
)  # fmt: skip
for _epoch in range(EPOCHS):
    with BatchMemoryManager(data_loader=train_loader, max_physical_batch_size=64, optimizer=optimizer) as loader:
        for images, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), target)
            loss.backward()
            optimizer.step()
with torch.no_grad():
    accuracy = (model.eval()(test[0]).argmax(1) == test[1]).float().mean()
print(f"accuracy {accuracy:.3f}, epsilon {privacy_engine.get_epsilon(DELTA):.3f}, statement in {privacy_engine.folder}")
