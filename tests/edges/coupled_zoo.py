"""Models, losses and augmentations whose records touch each other, and the whole zoo of what must not be released."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stateful_zoo import STATEFUL
from torch import Tensor, nn
from torch.nn import functional
from zoo_training import CLASSES, FEATURES, Case, entropy, mlp, pictures, sentences


def _loss(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Case:
    """A plain model whose loss per record goes through ``change(losses, outputs, targets)``."""
    return Case(mlp(), lambda out, y: change(entropy(out, y), out, y))


def _input(change: Callable[[Tensor], Tensor]) -> Case:
    return Case(nn.Sequential(_Applied(change), mlp()), entropy)


class _Applied(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def hard_mining() -> Case:
    """Only the 32 largest losses of a batch count."""

    def mined(loss: Tensor, _: Tensor, __: Tensor) -> Tensor:
        hardest = loss.detach().topk(min(32, len(loss))).indices
        return loss * torch.zeros_like(loss).index_fill_(0, hardest, 1.0)

    return _loss(mined)


def quantile_loss() -> Case:
    """Losses above the batch's 80 % quantile are cut there, in batches of eight or more."""

    def cut(loss: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return loss if len(loss) < 8 else torch.minimum(loss, loss.detach().quantile(0.8))

    return _loss(cut)


class _Experts(nn.Module):
    """Two experts; each takes at most 60 % of a batch, the first that come."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 2), nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        best = scores.argmax(1)
        out = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            mine = (best == i).to(x.dtype)
            fits = mine * (mine.cumsum(0) <= max(4, 0.6 * len(x)))
            out = out + (fits * scores[:, i]).unsqueeze(1) * expert(x)
        return out


def experts_with_capacity() -> Case:
    return Case(_Experts(), entropy)


def mixup_by_random() -> Case:
    """One batch in ten is mixed, by Python's generator."""

    def mixed(x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x.flip(0) if random.random() < 0.1 else x

    return Case(mlp(), entropy, augment=mixed)


def cutmix_by_numpy() -> Case:
    """One batch in ten gets half of its columns from another record, by numpy's generator."""

    def mixed(x: Tensor) -> Tensor:
        if np.random.rand() >= 0.1:  # noqa: NPY002 - the global one is meant
            return x
        cut = FEATURES // 2
        return torch.cat([x[:, :cut], x.roll(1, 0)[:, cut:]], 1)

    return Case(mlp(), entropy, augment=mixed)


def mixing_by_torch() -> Case:
    """One pass in ten adds a neighbour's features inside the model."""
    return _input(lambda x: x + 0.2 * x.roll(1, 0) if float(torch.rand(())) < 0.1 else x)


def batch_maximum() -> Case:
    """Inputs are divided by the largest value of batches of more than 16 records."""
    return _input(lambda x: x / x.abs().amax() if len(x) > 16 else x)


def label_frequencies() -> Case:
    """Labels are smoothed towards the frequencies in the batch."""

    def smoothed(loss: Tensor, out: Tensor, y: Tensor) -> Tensor:
        prior = torch.bincount(y, minlength=CLASSES).to(out.dtype) / len(y)
        return loss if len(y) < 6 else 0.9 * loss - 0.1 * (out.log_softmax(1) * prior).sum(1)

    return _loss(smoothed)


def contrastive_term() -> Case:
    """Other records of the batch serve as negatives, if there are more than eight."""

    def contrast(loss: Tensor, out: Tensor, _: Tensor) -> Tensor:
        return loss if len(out) <= 8 else loss - 0.05 * (out @ out.t()).log_softmax(1).diagonal()

    return _loss(contrast)


class _SortedDropout(nn.Module):
    """Which units drop out depends on a record's rank in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 8:
            return x
        mask = (torch.rand(x.shape) > 0.3).to(x.dtype)
        return x * mask[x[:, 0].detach().argsort().argsort()]


def dropout_by_rank() -> Case:
    return Case(nn.Sequential(_SortedDropout(), mlp()), entropy)


class _PaddedMean(nn.Module):
    """Means over the batch's longest sentence, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        longest = int((tokens > 0).sum(1).max()) if len(tokens) > 4 else tokens.shape[1]
        return self.head(self.embedding(tokens[:, :longest]).mean(1))


def padding_to_the_longest() -> Case:
    return Case(_PaddedMean(), entropy, data=sentences())


class _Deduplicated(nn.Module):
    """Equal rows share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        _, group, count = torch.unique(x, dim=0, return_inverse=True, return_counts=True)
        return self.body(x) / count[group].unsqueeze(1).to(x.dtype)


def deduplication() -> Case:
    return Case(_Deduplicated(), entropy)


def rate_by_batch_loss() -> Case:
    """Every loss is scaled by the mean loss of the batch."""
    return _loss(lambda loss, _, __: loss * (loss.detach().mean() if len(loss) > 5 else 1.0))


class _ByBatch(torch.autograd.Function):
    """Forward nothing; backward divides by the batch's spread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad / (x.std() + 0.1) if len(x) > 4 else grad


class _Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_ByBatch.apply(self.body(x)).tanh())


def reversal_by_batch() -> Case:
    """Losses do not change with the company, gradients do."""
    return Case(_Reversed(), entropy)


def normalised_focus() -> Case:
    """Focal weights are normalised over batches of more than ten records."""

    def focus(loss: Tensor, _: Tensor, __: Tensor) -> Tensor:
        weight = (1 - (-loss.detach()).exp()) ** 2
        return loss * (weight / weight.mean() if len(loss) > 10 else weight)

    return _loss(focus)


def rank_weights() -> Case:
    """A loss counts by its rank in the batch."""
    return _loss(lambda loss, _, __: loss * (1.0 + loss.detach().argsort().argsort() / len(loss)))


def first_rows_only() -> Case:
    """Only the first 32 rows of a batch count, so that a record more pushes another one out."""
    return _loss(lambda loss, _, __: loss * (torch.arange(len(loss)) < 32).to(loss.dtype))


def divided_by_size() -> Case:
    """The loss depends on how many records there are, from eight on."""
    return _loss(lambda loss, _, __: loss * (10.0 / len(loss)) if len(loss) >= 8 else loss)


def batch_spread_noise() -> Case:
    """Noise on the inputs is as large as the batch's spread."""
    return _input(lambda x: x + 0.1 * torch.randn_like(x) * (x.std() if len(x) > 4 else 1.0))


def attention_over_the_batch() -> Case:
    """Records attend to each other in batches of more than six."""

    def attend(x: Tensor) -> Tensor:
        return x + 0.1 * (x @ x.t()).softmax(1) @ x if len(x) > 6 else x

    return _input(attend)


def pictures_centred_by_batch() -> Case:
    """Pictures are centred by the mean picture of batches of more than six."""
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    centred = _Applied(lambda x: x - x.mean(0) if len(x) > 6 else x)
    return Case(nn.Sequential(centred, body), entropy, data=pictures())


def sorted_sentences() -> Case:
    """Sentences are sorted by length, and each reads its predecessor's first word."""

    class Sorted(_PaddedMean):
        def forward(self, tokens: Tensor) -> Tensor:
            order = (tokens > 0).sum(1).argsort(stable=True)
            before = self.embedding(tokens[order.roll(1)][order.argsort()][:, 0])
            return self.head(self.embedding(tokens).mean(1) + (0.1 * before if len(tokens) > 4 else 0.0))

    return Case(Sorted(), entropy, data=sentences())


def median_margin() -> Case:
    """A margin is the median score of the batch."""

    def margin(loss: Tensor, out: Tensor, _: Tensor) -> Tensor:
        return functional.softplus(loss - (out.detach().amax(1).median() if len(out) > 4 else 0.0))

    return _loss(margin)


COUPLED = (
    hard_mining,
    quantile_loss,
    experts_with_capacity,
    mixup_by_random,
    cutmix_by_numpy,
    mixing_by_torch,
    batch_maximum,
    label_frequencies,
    contrastive_term,
    dropout_by_rank,
    padding_to_the_longest,
    deduplication,
    rate_by_batch_loss,
    reversal_by_batch,
    normalised_focus,
    rank_weights,
    first_rows_only,
    divided_by_size,
    batch_spread_noise,
    attention_over_the_batch,
    pictures_centred_by_batch,
    sorted_sentences,
    median_margin,
)
ZOO: dict[str, Callable[[], Case]] = {**{make.__name__: make for make in COUPLED}, **STATEFUL}
