"""Models, losses and augmentations whose records do not touch each other: none of them may ever be blocked."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_training import CLASSES, FEATURES, Case, entropy, mlp, pictures, sentences


def _hidden(*layers: nn.Module, width: int = 16) -> Case:
    return Case(nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Linear(width, CLASSES)), entropy)


def _picture(*layers: nn.Module) -> Case:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(CLASSES))
    body(torch.zeros(1, 1, 8, 8))
    return Case(body, entropy, data=pictures())


def _seen(model: nn.Module) -> Case:
    return Case(model, entropy)


def _read(model: nn.Module) -> Case:
    return Case(model, entropy, data=sentences())


class Own(nn.Module):
    """A module made of a forward function and parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Tensor:
        return self._function(self, *args)


class Words(nn.Module):
    """Embeddings, a body over (records, words, 8), and a head over the mean of the words that are there."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor] | nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens > 0
        x = self.embedding(tokens)
        if self.body is not None:
            x = self.body(x, there)
        weight = there.unsqueeze(2).to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **settings: Any) -> None:
        super().__init__()
        self.inner = kind(8, 8, batch_first=True, **settings)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.inner(x)[0]


class Attending(nn.Module):
    """Attention with a padding mask per record; keeps its last map to be looked at."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.attention, self.keeps, self.last = nn.MultiheadAttention(8, 2, batch_first=True), keeps, None

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, key_padding_mask=~there, need_weights=self.keeps)
        if self.keeps:
            self.last = weights.detach()
        return out


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=~there)


class LowRank(nn.Module):
    """A frozen layer and a trained change of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Counter(nn.Module):
    """Counts its passes, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return self.body(x)


class Routed(nn.Module):
    """Each record goes to its best expert, however many others do; experts see their records only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        best = scores.argmax(1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return every[torch.arange(len(x)), best] * scores.gather(1, best.unsqueeze(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1) < 0.8).to(x.dtype) if self.training else 1.0
        return x + keep * self.layer(x).relu()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.empty_like(x).normal_(generator=self.generator)


class Teacher:
    """Distils from an average of the trained weights, which every pass moves whatever the records."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, copy.deepcopy(model).requires_grad_(False)

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(own.detach().to(mean.dtype), 0.01)
            scale = sum(p.abs().mean() for p in self.average.parameters())
        return entropy(out, y) + 0.01 * scale * out.square().sum(1)


def _distilled() -> Case:
    model = mlp()
    return Case(model, Teacher(model))


def _annealed() -> Case:
    class Tempered:
        temperature = 2.0

        def __call__(self, out: Tensor, y: Tensor) -> Tensor:
            return entropy(out / self.temperature, y)

    loss = Tempered()

    def cool(step: int, _: Any) -> None:
        loss.temperature = max(1.0, 2.0 - step / 100)

    return Case(mlp(), loss, between=cool)


def _evaluated() -> Case:
    """A frozen BatchNorm that is looked at in eval mode between steps."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)).eval()

    def look(_: int, inputs: Tensor) -> None:
        with torch.no_grad():
            model(inputs)

    return Case(model, entropy, between=look)


def _switched() -> Case:
    """Dropout, with a look in eval mode between steps."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES))

    def look(step: int, inputs: Tensor) -> None:
        if step % 20 == 0:
            with torch.no_grad():
                model.eval()(inputs)
            model.train()

    return Case(model, entropy, between=look)


def _huge() -> Case:
    """Sharp kinks: large weights before ReLU, so that rounding switches units."""
    model = mlp()
    with torch.no_grad():
        model[0].weight.mul_(300.0)
        model[2].weight.div_(300.0)
    return Case(model, entropy)


def _with_table(loss: Callable[[Any, Any], Tensor]) -> Case:
    return Case(mlp(), loss)


def _rows(change: Callable[[], float]) -> Callable[[Tensor], Tensor]:
    """Scale every record by its own draw."""
    return lambda x: x * torch.tensor([[change()] for _ in range(len(x))], dtype=x.dtype)


def _flipped(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


def _gumbel(self: Any, x: Tensor) -> Tensor:
    return self.head(functional.gumbel_softmax(self.body(x), tau=1.0))


def _two_heads(out: Tensor, y: Tensor) -> Tensor:
    return entropy(out[:, :CLASSES], y) + 0.1 * out[:, CLASSES:].square().mean(1)


INNOCENTS: dict[str, Callable[[], Case]] = {
    "relu": lambda: _hidden(nn.ReLU()),
    "tanh": lambda: _hidden(nn.Tanh()),
    "gelu": lambda: _hidden(nn.GELU()),
    "silu": lambda: _hidden(nn.SiLU()),
    "leaky relu": lambda: _hidden(nn.LeakyReLU(0.2)),
    "elu": lambda: _hidden(nn.ELU()),
    "prelu": lambda: _hidden(nn.PReLU()),
    "hard tanh": lambda: _hidden(nn.Hardtanh(-0.1, 0.1)),
    "linear": lambda: _seen(nn.Linear(FEATURES, CLASSES)),
    "deep": lambda: _hidden(*[layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.ReLU())]),
    "sharp kinks": _huge,
    "dropout": lambda: _hidden(nn.ReLU(), nn.Dropout(0.5)),
    "dropout on inputs": lambda: _seen(nn.Sequential(nn.Dropout(0.2), mlp())),
    "alpha dropout": lambda: _hidden(nn.SELU(), nn.AlphaDropout(0.2)),
    "feature dropout": lambda: _picture(nn.ReLU(), nn.Dropout2d(0.3)),
    "stochastic depth": lambda: _hidden(StochasticDepth()),
    "noise of its own generator": lambda: _hidden(Noisy(), nn.ReLU()),
    "gumbel": lambda: _seen(Own(_gumbel, body=mlp(), head=nn.Linear(CLASSES, CLASSES))),
    "layer norm": lambda: _hidden(nn.LayerNorm(16), nn.ReLU()),
    "group norm": lambda: _picture(nn.GroupNorm(2, 4), nn.ReLU()),
    "instance norm": lambda: _picture(nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
    "rms norm": lambda: _hidden(nn.RMSNorm(16), nn.ReLU()),
    "frozen batch norm": _evaluated,
    "frozen batch norm in pictures": lambda: Case(
        _picture(nn.BatchNorm2d(4), nn.ReLU()).model.eval(), entropy, data=pictures()
    ),
    "looks in eval mode": _switched,
    "low rank": lambda: _seen(nn.Sequential(LowRank(), nn.ReLU(), nn.Linear(16, CLASSES))),
    "frozen body": lambda: _seen(nn.Sequential(nn.Linear(FEATURES, 32).requires_grad_(False), nn.Linear(32, CLASSES))),
    "tied weights": lambda: _seen(Tied()),
    "residual": lambda: _seen(
        Own(lambda self, x: self.b(x + self.a(x).relu()), a=nn.Linear(10, 10), b=nn.Linear(10, CLASSES))
    ),
    "cosine": lambda: _seen(
        Own(lambda self, x: 5 * self.a(functional.normalize(x, dim=1)), a=nn.Linear(FEATURES, CLASSES, bias=False))
    ),
    "maxout": lambda: _seen(
        Own(lambda self, x: self.b(self.a(x).view(len(x), 8, 2).amax(2)), a=nn.Linear(10, 16), b=nn.Linear(8, CLASSES))
    ),
    "bilinear": lambda: _seen(Own(lambda self, x: self.a(x, x), a=nn.Bilinear(FEATURES, FEATURES, CLASSES))),
    "soft experts": lambda: _seen(
        Own(
            lambda self, x: self.a(x) * self.g(x).sigmoid() + self.b(x) * (1 - self.g(x).sigmoid()),
            a=mlp(), b=mlp(), g=nn.Linear(FEATURES, 1),
        )
    ),
    "routed experts": lambda: _seen(Routed()),
    "counters": lambda: _seen(Counter()),
    "fourier features": lambda: _seen(
        Own(lambda self, x: self.a(torch.cat([x.sin(), x.cos()], 1)), a=nn.Linear(2 * FEATURES, CLASSES))
    ),
    "double precision": lambda: Case(
        nn.Sequential(Own(lambda self, x: x.double()), mlp().double()), lambda out, y: entropy(out, y)
    ),
    "insists on float32": lambda: _seen(nn.Sequential(Own(lambda self, x: x.float()), mlp())),
    "convolution": lambda: _picture(nn.ReLU(), nn.MaxPool2d(2)),
    "convolution with average": lambda: _picture(nn.Tanh(), nn.AdaptiveAvgPool2d(2)),
    "convolution in depth": lambda: _picture(nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU()),
    "flipped views": lambda: Case(_picture(nn.ReLU()).model, entropy, augment=_flipped, data=pictures()),
    "three views": lambda: Case(_picture(nn.ReLU()).model, entropy, augment=_flipped, views=3, data=pictures()),
    "named views": lambda: Case(_picture(nn.ReLU()).model, entropy, augment="flip+shift:1", data=pictures()),
    "noisy views": lambda: Case(mlp(), entropy, augment=lambda x: x + 0.1 * torch.randn_like(x), views=2),
    "views by random": lambda: Case(mlp(), entropy, augment=_rows(lambda: 1 + 0.1 * random.random())),
    "views by numpy": lambda: Case(mlp(), entropy, augment=_rows(lambda: float(np.random.normal(1, 0.1)))),  # noqa: NPY002
    "bag of words": lambda: _read(Words()),
    "words and dropout": lambda: _read(Words(Own(lambda self, x, _: self.drop(x), drop=nn.Dropout(0.3)))),
    "lstm": lambda: _read(Words(Recurrent(nn.LSTM))),
    "gru": lambda: _read(Words(Recurrent(nn.GRU))),
    "rnn": lambda: _read(Words(Recurrent(nn.RNN))),
    "attention": lambda: _read(Words(Attending(keeps=False))),
    "attention that is looked at": lambda: _read(Words(Attending(keeps=True))),
    "transformer": lambda: _read(Words(Layer(0.1))),
    "frozen embedding": lambda: _frozen_embedding(),
    "class weights": lambda: _with_table(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), reduction="none")),
    "label smoothing": lambda: _with_table(nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")),
    "focal": lambda: _with_table(lambda out, y: entropy(out, y) * (1 - (-entropy(out, y)).exp().detach()) ** 2),
    "hinge": lambda: _with_table(functional_hinge),
    "two heads": lambda: Case(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 5)), _two_heads),
    "annealed temperature": _annealed,
    "teacher of weights": _distilled,
    "last outputs kept": lambda: _seen(Own(_keeping, body=mlp())),
    "rare words": lambda: _read(Words(Own(lambda self, x, _: x.relu()))),
}  # fmt: skip


def functional_hinge(out: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(out, y, reduction="none")


def _frozen_embedding() -> Case:
    model = Words()
    model.embedding.requires_grad_(False)
    return _read(model)


def _keeping(self: Any, x: Tensor) -> Tensor:
    self.last = self.body(x)
    return self.last
