"""Train a skorch classifier privately: a mixin before its class."""

import sys

import numpy as np
import torch
from skorch import NeuralNetClassifier

import evenhand as eh
from evenhand.integrations.skorch import PrivateNet


class PrivateClassifier(PrivateNet, NeuralNetClassifier):
    pass


out = sys.argv[1] if len(sys.argv) > 1 else "runs/skorch"
(x, y), (x_test, y_test) = (part.fetch(torch.arange(len(part))) for part in eh.data.digits())
net = PrivateClassifier(
    torch.nn.Linear,
    module__in_features=64,
    module__out_features=10,
    criterion=torch.nn.CrossEntropyLoss,
    optimizer__momentum=0.9,
    lr=0.5,
    max_epochs=3,
    epsilon=3.0,
    delta=1e-5,
    out=out,
)
net.fit(x.numpy(), y.numpy())
print(f"accuracy {np.mean(net.predict(x_test.numpy()) == y_test.numpy()):.2f}")
print(net.run_.privacy)
net.run_.report((x_test, y_test)).save(f"{out}/report.html")
assert eh.verify(out)["ok"]
