"""The private step, top to bottom: per-record scalars -> noisy answers -> weights -> bounded sum -> noise -> gradient.

Everything that makes a step private happens here, once, for every method. The caller has put the step's charge on disk
before (law 4); what comes back is safe to hand to any optimizer.

``private_gradient`` is the step; the functions below it follow in the order in which it calls them. ``Mechanism``, at
the end, is what stays constant over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.errors import UnsupportedModelError
from evenhand.gradients.fast_paths import fast
from evenhand.gradients.row_norms import LARGEST, numbers
from evenhand.mechanism import noise_grid
from evenhand.mechanism.add_noise import Ahead, release_few, release_parts
from evenhand.mechanism.make_plan import Plan, PlannedLevel
from evenhand.mechanism.random_streams import Stream
from evenhand.mechanism.weights import total_of, weights_of
from evenhand.methods.queries import Count, Query
from evenhand.methods.rules import Rule, SampleRule
from evenhand.summation import Summation, ratio_of
from evenhand.types import Batch, Commit, Pass, Public, State, Stats

if TYPE_CHECKING:
    from evenhand.gradients.microbatches import Early

_LARGEST_WEIGHT = 1e30
_LISTED_CLASSES = 16
"""With more owner classes a commit holds one number for all of them, which each class's scale multiplies."""


@dataclass(frozen=True)
class Released:
    """The outcome of a step: a private gradient, the rule's next memory, and what the ledger must say.

    The plan's promise covers all of it except ``left_out``, the number of rows that were not finite: it is not private
    and belongs in the run's private log only. ``state`` is all that the rule saw besides its rows. The caller owns the
    tensors.
    """

    gradient: dict[str, Tensor]
    memory: Mapping[str, Any]
    commit: Commit
    left_out: int
    state: State | None = None


def private_gradient(mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Released:
    """Return the private gradient of one pass over the sampled rows. The step must be charged already.

    The sum of ``result`` may be overwritten with the gradient; ``result`` must not be summed again.

    Guarantee:
      For a record of class k the released values are a Gaussian mechanism of sensitivity ``commit.sensitivity[k]`` and
      standard deviation ``commit.std`` (and likewise per query): the numbers that made the noise are the numbers
      returned for the ledger (law 2). Divides by the EXPECTED batch size (law 5).
    """
    weighed = weigh(mechanism, result, batch, memory)
    total = result.last_sum(weighed.weights)
    noise = noise_for(mechanism, weighed, sum([value.numel() for value in total.values()]))
    gradient = _add_noise(mechanism, noise, total, batch.position, in_place=result.spend is not None)
    return Released(gradient, *conclude(mechanism, weighed, noise), weighed.left_out, weighed.state)


@dataclass(frozen=True)
class Weighed:
    """The first half of a step: a weight for every row of the batch, and what its release needs. Nothing is released.

    ``weights`` are bounded: ``0 <= weight * norm <= sensitivity[owner]``, and 0 for rows that are not finite. They are
    secret. ``asked`` is what the side queries are charged.
    """

    weights: Tensor
    state: State
    level: PlannedLevel
    sensitivity: Tensor
    bound: Tensor
    asked: tuple[tuple[float, float], ...]
    left_out: int


def weigh(mechanism: Mechanism, result: Pass, batch: Batch, memory: Mapping[str, Any]) -> Weighed:
    """Return the weights of a pass over the sampled rows, after the noisy answers that the rule may look at."""
    rule, position = mechanism.rule, batch.position
    level = mechanism.plan.level_at(position)
    stats, finite = _select_finite_rows(result, batch)
    bound = mechanism.bound(level, stats.norm.device)
    state = State(position, bound.clone(), memory=memory, public=mechanism.public)
    asked: tuple[tuple[float, float], ...] = ()
    if mechanism.queries:
        answers, asked = _answer_queries(mechanism, level, stats, state)
        state = State(position, state.bound, answers, memory, mechanism.public)
    sensitivity = _check_sensitivity(mechanism, state, bound)
    weights = clamp_weights(weights_of(rule, stats, state), stats, sensitivity)
    left_out = 0 if finite is None else int((~finite).sum())
    return Weighed(_all_rows(weights, finite), state, level, sensitivity, bound, asked, left_out)


def noise_for(mechanism: Mechanism, weighed: Weighed, dimension: int) -> GradientNoise:
    """Return the noise that a sum of ``dimension`` numbers, made with exactly these weights, must get."""
    return mechanism.gradient_noise(weighed.level, weighed.sensitivity, weighed.bound, dimension)


def conclude(mechanism: Mechanism, weighed: Weighed, noise: GradientNoise) -> tuple[Mapping[str, Any], Commit]:
    """Return the rule's next memory, and what the ledger must say of a step that was released with this noise."""
    commit = Commit(weighed.state.step, 1, noise.covered, noise.std, weighed.asked)
    return mechanism.rule.advance(weighed.state), commit


def _select_finite_rows(result: Pass, batch: Batch) -> tuple[Stats, Tensor | None]:
    """Return the columns that a rule may see, and a mask of the rows they belong to (None: all rows).

    A row whose norm or loss is not finite is left out: it contributes to nothing.
    """
    norm, loss = result.norm.double(), result.loss.double()
    columns: tuple[Tensor, ...] = (norm, loss, batch.group, batch.owner, batch.record)
    if not (norm.is_cpu and batch.owner.is_cpu):
        columns = norm, loss, *(column.to(norm.device) for column in columns[2:])
    if result.finite:
        return Stats(*columns), None
    finite = torch.isfinite(norm) & torch.isfinite(loss)
    if bool(finite.all()):
        return Stats(*columns), None
    return Stats(*(column[finite] for column in columns)), finite


def _answer_queries(
    mechanism: Mechanism, level: PlannedLevel, stats: Stats, state: State
) -> tuple[dict[str, Tensor], tuple[tuple[float, float], ...]]:
    """Return the noisy answer of every query by name, and what is charged: (sensitivity, standard deviation) of each.

    Queries see the rows of this step. Every record's value is clipped to the declared sensitivity.
    """
    answers: dict[str, Tensor] = {}
    asked: list[tuple[float, float]] = []
    offset = 0
    for query, multiplier, noise in zip(mechanism.queries, level.queries, mechanism.query_noise, strict=True):
        total, std = total_of(query, noise.width, noise.sensitivity, stats, state), multiplier * noise.covered
        noisy = release_few(total, std, noise.spacing, mechanism.normals, "queries", state.step, offset)
        answer = torch.from_numpy(noisy)
        answers[query.name] = answer if state.bound.is_cpu else answer.to(state.bound.device)
        asked.append((noise.covered, std))
        offset += noise.width
    return answers, tuple(asked)


def _check_sensitivity(mechanism: Mechanism, state: State, bound: Tensor) -> Tensor:
    """Return the rule's sensitivity per owner class; raise unless every one is finite and positive.

    The tensor is ``bound`` itself or a copy. The rule has neither, so it cannot change the sensitivity later.
    """
    sensitivity = mechanism.rule.sensitivity(state)
    if sensitivity is state.bound and torch.equal(sensitivity, bound):
        return bound
    largest = math.inf if mechanism.plan.guarantee == "not private" else LARGEST
    if sensitivity.shape != state.bound.shape or not _in_range(sensitivity, largest):
        raise UnsupportedModelError(
            f"The rule {mechanism.rule.name!r} declares no finite positive sensitivity per owner class: "
            "nothing was released."
        )
    return sensitivity.clone()


def _in_range(values: Tensor, largest: float) -> bool:
    """Return whether all values are numbers above 0 and at most ``largest``."""
    if len(values) <= _LISTED_CLASSES:
        return all(0.0 < value <= largest for value in values.tolist())
    column = numbers(values)
    return bool(column.min() > 0.0 and column.max() <= largest)


def clamp_weights(weights: Tensor, stats: Stats, sensitivity: Tensor) -> Tensor:
    """Return the weights clamped so that ``0 <= weight * norm <= sensitivity[owner]``, whatever the rule returned.

    The guarantee of every sample rule rests on this. A weight that is not finite becomes 0, and no weight exceeds
    what float32 can carry.
    """
    norm, owner = stats.norm, stats.owner.long()
    quick = fast().bounded_weights(weights, norm, owner, sensitivity, _LARGEST_WEIGHT)
    if quick is not None:
        return quick
    given = weights.to(torch.float64)
    usable = torch.isfinite(given) & (norm > 0)
    allowed = torch.where(usable, torch.minimum(given, sensitivity[owner] / norm), 0.0)
    return allowed.clamp_(0.0, _LARGEST_WEIGHT)


def _all_rows(weights: Tensor, finite: Tensor | None) -> Tensor:
    """Return a weight for every row of the batch: 0 for those that were left out."""
    return weights if finite is None else weights.new_zeros(len(finite)).masked_scatter_(finite, weights)


def _add_noise(
    mechanism: Mechanism, noise: GradientNoise, total: Mapping[str, Tensor], step: int, *, in_place: bool
) -> dict[str, Tensor]:
    """Return the noisy sum divided by the expected batch size, by parameter; without noise if the plan is not private.

    If ``in_place``, it is written over ``total`` where possible.
    """
    plan = mechanism.plan
    if plan.guarantee == "not private":
        return {name: value / plan.expected_batch for name, value in total.items()}
    noisy = release_parts(
        *(list(total.values()), noise.std, noise.spacing, mechanism.normals, step, plan.expected_batch),
        lean=mechanism.lean,
        in_place=in_place,
    )
    return dict(zip(total, noisy, strict=True))


def early_weights(mechanism: Mechanism, batch: Batch, memory: Mapping[str, Any]) -> Early | None:
    """Return a function that computes the weights of some rows before the other rows of the batch are known.

    Return None if the rule needs the whole batch, or a query about it. No guarantee rests on these weights:
    ``private_gradient`` computes all of them again, and a sum made with these is used only if they are equal.
    """
    rule = mechanism.rule
    if mechanism.queries or not isinstance(rule, SampleRule):
        return None

    def weights(norm: Tensor, loss: Tensor, rows: slice) -> Tensor:
        part = replace(batch, group=batch.group[rows], owner=batch.owner[rows], record=batch.record[rows])
        stats, finite = _select_finite_rows(Pass(loss, norm, lambda _: {}), part)
        bound = mechanism.bound(mechanism.plan.level_at(batch.position), norm.device)
        state = State(step=batch.position, bound=bound.clone(), memory=memory, public=mechanism.public)
        sensitivity = _check_sensitivity(mechanism, state, bound)
        return _all_rows(clamp_weights(weights_of(rule, stats, state), stats, sensitivity), finite)

    return weights


def rehearse(mechanism: Mechanism) -> None:
    """Run rule and queries on made-up rows with a fresh key: code that cannot run fails before anything is charged."""
    ones = torch.ones(2, dtype=torch.float64)
    facts = mechanism.plan.facts
    group, owner = (torch.tensor([0, len(names) - 1]) for names in (facts.groups, facts.owners))
    batch = Batch(None, None, group=group, owner=owner, record=torch.arange(2), position=0, token=0)
    result = Pass(loss=ones, norm=ones, weighted_sum=lambda weights: {"rehearsal": weights})
    quiet = replace(mechanism, stream=Stream.fresh())
    private_gradient(quiet, result, batch, mechanism.rule.initial(facts))


class QueryNoise(NamedTuple):
    """Length of a query's answer, its sensitivity, the spacing of its grid, and the sensitivity its noise covers."""

    width: int
    sensitivity: float
    spacing: float
    covered: float


class GradientNoise(NamedTuple):
    """Spacing of the gradient's grid, the sensitivity its noise covers per owner class, and its standard deviation.

    The last two are charged.
    """

    spacing: float
    covered: tuple[float, ...]
    std: float


@dataclass(frozen=True)
class Mechanism:
    """The plan of one segment of a run, the rule and queries it names, and the secret random stream.

    Nothing in it changes during the segment. Its caches depend on plan, model size and stream, never on the data.
    """

    plan: Plan
    rule: Rule
    queries: tuple[Query, ...]
    stream: Stream
    lean: bool = False

    @property
    def whole(self) -> bool:
        """Return whether the weight of a record may depend on the other records of its batch."""
        return not isinstance(self.rule, SampleRule)

    @cached_property
    def public(self) -> Public:
        """Return the plan's constants that rules may see. All of them are public."""
        rates = torch.tensor(self.plan.rates, dtype=torch.float64)
        sizes = torch.tensor([count for _, count in self.plan.facts.owners], dtype=torch.float64)
        return Public(
            batch=self.plan.expected_batch,
            steps_per_epoch=self.plan.facts.records / self.plan.expected_batch,
            groups=len(self.plan.facts.groups),
            rate=rates,
            expected=rates * sizes,
        )

    @cached_property
    def scales(self) -> Tensor:
        """Return the factor of the clip bound, per owner class."""
        return torch.tensor(self.plan.scales, dtype=torch.float64)

    def bound(self, level: PlannedLevel, device: torch.device) -> Tensor:
        """Return the clip bound per owner class. The mechanism owns the tensor: give rules a copy of it."""
        usual = self._bounds.get(level.bound)
        if usual is None:
            usual = self._bounds[level.bound] = self.scales * level.bound
        return usual if device.type == "cpu" else usual.to(device)

    @cached_property
    def normals(self) -> Ahead:
        """Return the source of the noise, which may compute the normals of a step ahead of it."""
        return Ahead(self.stream)

    @cached_property
    def summation(self) -> Summation:
        """Return how sums of gradients are split into blocks, and the sensitivity that their rounding adds."""
        return Summation(self.plan.expected_batch, 1.0 if self.whole else ratio_of(self.plan.scales))

    @cached_property
    def query_noise(self) -> tuple[QueryNoise, ...]:
        """Return the noise of every query; its standard deviation is the level's multiplier times ``covered``."""
        noises = []
        for query in self.queries:
            width, sensitivity = int(query.width(self.plan.facts)), float(query.sensitivity)
            if isinstance(query, Count) and width != query.places(len(self.plan.facts.groups)):
                raise UnsupportedModelError(f"The query {query.name!r} must have one count per place: leave out width.")
            spacing = noise_grid.grid(sensitivity)
            covered = noise_grid.charged(sensitivity, spacing, width, self.plan.expected_batch)
            noises.append(QueryNoise(width, sensitivity, spacing, covered))
        return tuple(noises)

    def gradient_noise(self, level: PlannedLevel, sensitivity: Tensor, bound: Tensor, dimension: int) -> GradientNoise:
        """Return the noise for a sum of ``dimension`` numbers, none of it if the plan is not private.

        It is cached where ``sensitivity`` is ``bound`` itself: then it depends on level and dimension alone.
        """
        if self.plan.guarantee == "not private":
            return GradientNoise(0.0, (), 0.0)
        usual, key = sensitivity is bound, (level.noise, level.bound, dimension)
        noise = self._usual_noise.get(key) if usual else None
        if noise is None:
            spacing, column = noise_grid.grid(float(sensitivity.max())), numbers(sensitivity)
            charged = noise_grid.charged_sum(column, self.plan.scales, spacing, dimension, self.summation, self.whole)
            noise = GradientNoise(spacing, *noise_std(level, charged, numbers(self.scales)))
            if usual:
                self._usual_noise[key] = noise
        return noise

    @cached_property
    def _bounds(self) -> dict[float, Tensor]:
        return {}

    @cached_property
    def _usual_noise(self) -> dict[tuple[float, float, int], GradientNoise]:
        return {}


def noise_std(
    level: PlannedLevel, charged: NDArray[np.float64], scales: NDArray[np.float64]
) -> tuple[tuple[float, ...], float]:
    """Return the sensitivity that the noise covers per class, and the one standard deviation for all of them.

    It is so large that every class k gets at least its planned noise multiplier, ``level.noise / scales[k]``. With many
    classes one number stands for all sensitivities: the largest per unit of scale.
    """
    ratio = float((charged / scales).max())
    listed = tuple(charged.tolist()) if len(charged) <= _LISTED_CLASSES else (ratio,)
    return listed, level.noise * ratio
