"""Wrong batch rules: one record changes the weights of the others, and with them the sum, by more than is declared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenhand.methods.rules import BatchRule
from evenhand.types import State, Stats
from wrong_mechanisms.base import Wrong, wrong_rule


@dataclass(frozen=True)
class Clipping(BatchRule):
    """Clipping as a batch rule: right, and the start of the wrong ones."""

    name = "clipping"

    def weights(self, stats: Stats, state: State) -> Tensor:
        """min(1, C / n) times a factor per row."""
        clipped = (state.bound[stats.owner] / stats.norm).clamp(max=1.0)
        return clipped * self.factor(stats, state) if stats.norm.numel() else clipped

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 for every row; a wrong rule looks at the batch here."""
        return torch.ones_like(stats.norm)

    def sensitivity(self, state: State) -> Tensor:
        """The bound of each class."""
        return state.bound


class SumsToOne(Clipping):
    """Weights are divided by their sum over the batch."""

    name = "sums_to_one"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """B / sum of n."""
        return state.public.batch / stats.norm.clamp(min=1.0).sum().expand_as(stats.norm)


class LargestNorm(Clipping):
    """The bound is scaled by the largest norm of the batch."""

    name = "largest_norm"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 / largest norm."""
        return 1 / stats.norm.max().clamp(min=1.0).expand_as(stats.norm)


class RealisedMean(Clipping):
    """Divides by the number of records that happened to be drawn."""

    name = "realised_mean"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """B / size of the batch."""
        return torch.full_like(stats.norm, state.public.batch / stats.norm.numel())


class RawThreshold(Clipping):
    """Takes the threshold from the raw norms of the batch, as Auto-DPSGD is described."""

    name = "raw_threshold"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """Median norm / n, at most 1."""
        return (stats.norm.median() / stats.norm.clamp(min=1e-30)).clamp(max=1.0)


class WithoutOutliers(Clipping):
    """Leaves out records far above the mean norm of the batch."""

    name = "without_outliers"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """0 above twice the mean."""
        return (stats.norm <= 2 * stats.norm.mean()).double()


class Softmax(Clipping):
    """Weighs records by a softmax of their losses over the batch."""

    name = "softmax"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """B times the softmax, at most 1."""
        return (state.public.batch * torch.softmax(stats.loss, 0)).clamp(max=1.0)


class ClassWeightedMean(Clipping):
    """A class-weighted mean: divides by the weights of the classes that happened to be drawn."""

    name = "class_weighted_mean"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """Weight of the class / sum of the weights of the batch."""
        weight = 1.0 + stats.group.double()
        return weight / weight.sum()


class RawGroupSizes(Clipping):
    """Reweights groups by how many of their records happened to be drawn."""

    name = "raw_group_sizes"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 / realised size of the group."""
        return 1.0 / torch.bincount(stats.group, minlength=3)[stats.group].double()


class RawGroupCounts(Clipping):
    """DPSGD-F without noise on its counts: bounds follow the raw share of clipped records in each group."""

    name = "raw_group_counts"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """Half, plus half the share of the group's records that are clipped."""
        over = (stats.norm > state.bound[stats.owner]).double()
        size = torch.bincount(stats.group, minlength=3).clamp(min=1)
        return 0.5 + 0.5 * (torch.bincount(stats.group, weights=over, minlength=3) / size)[stats.group]


class Pairs(Clipping):
    """Micro-batches of two: bounds the sum of a pair, and one record moves all pairs after it."""

    name = "pairs"

    def weights(self, stats: Stats, state: State) -> Tensor:
        """C / sum of the norms of the pair, at most 1."""
        place = torch.arange(stats.norm.numel()) // 2
        together = torch.zeros_like(stats.norm).index_add(0, place, stats.norm)[place]
        return (state.bound[stats.owner] / together).clamp(max=1.0)


class TopLosses(Clipping):
    """Keeps the two largest losses: who enters pushes somebody else out."""

    name = "top_losses"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """1 for the two largest."""
        rank = torch.argsort(torch.argsort(stats.loss + 1e-9 * stats.record, descending=True))
        return (rank < 2).double()


class WithoutSmallest(Clipping):
    """Drops the two smallest losses: valid at equal bounds, wrong when owners have their own."""

    name = "without_smallest"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """0 for the two smallest."""
        rank = torch.argsort(torch.argsort(stats.loss + 1e-9 * stats.record))
        return (rank >= 2).double()


class Crashing(Clipping):
    """Fails on a batch without rows, which Poisson sampling draws now and then."""

    name = "crashing"

    def weights(self, stats: Stats, state: State) -> Tensor:
        """Clip; but first look at the first row."""
        return super().weights(stats, state) * (stats.norm[0] >= 0)


class Undefined(Clipping):
    """Gives NaN for equal losses."""

    name = "undefined"

    def factor(self, stats: Stats, state: State) -> Tensor:
        """Place of the loss between the smallest and the largest."""
        low, high = stats.loss.min(), stats.loss.max()
        return (stats.loss - low) / (high - low)


MEMBERS: tuple[Wrong, ...] = (
    *(
        wrong_rule(rule, "sensitivity")
        for rule in (
            SumsToOne(),
            LargestNorm(),
            RealisedMean(),
            RawThreshold(),
            WithoutOutliers(),
            Softmax(),
            ClassWeightedMean(),
            RawGroupSizes(),
            RawGroupCounts(),
            Pairs(),
            TopLosses(),
            WithoutSmallest(),
        )
    ),
    wrong_rule(Crashing(), "form"),
    wrong_rule(Undefined(), "form"),
)
"""Wrong batch rules."""
