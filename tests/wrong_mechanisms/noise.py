"""Wrong noise: absent, too small, of another kind, repeated, or not the noise that the ledger records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from evenhand.mechanism.random_streams import Domain, Stream
from evenhand.methods.rules import Clip
from evenhand.testing.reference_step import ReferenceStep, Vector
from evenhand.testing.subjects import BATCH, Subject
from evenhand.types import Commit
from wrong_mechanisms.base import Wrong, wrong_step


@dataclass(frozen=True)
class Scaled(ReferenceStep):
    """Makes less noise than it records."""

    factor: float = 0.0

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Normals times the factor."""
        return self.factor * super().normals(stream, domain, step, size, offset)


class EmptyWithout(ReferenceStep):
    """Makes no noise for a batch without rows."""

    def noise(self, stream: Stream, commit: Commit, size: int, used: int, spacing: float) -> Vector:
        """Zeros when nobody is there."""
        return super().noise(stream, commit, size, used, spacing) * bool(used)


class BiasesWithout(ReferenceStep):
    """Makes no noise for the last parameter."""

    def noise(self, stream: Stream, commit: Commit, size: int, used: int, spacing: float) -> Vector:
        """Zeros for the last quarter."""
        found = super().noise(stream, commit, size, used, spacing)
        return np.where(np.arange(size) < 0.75 * size, found, 0.0)


class Broadcast(ReferenceStep):
    """Adds one number to all coordinates."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """The first of them, everywhere."""
        return np.full(size, super().normals(stream, domain, step, 1, offset)[0])


class EveryStepTheSame(ReferenceStep):
    """Uses the noise of step 0 at every step, so that differences of releases are exact."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Those of step 0."""
        return super().normals(stream, domain, 0, size, offset)


class Repeated(ReferenceStep):
    """Repeats a short stretch of noise over the coordinates."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Every number twice."""
        return np.repeat(super().normals(stream, domain, step, size, offset)[: -(-size // 2)], 2)[:size]


class Laplace(ReferenceStep):
    """Laplace noise of the right variance, accounted as Gaussian."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """By the inverse of the distribution function."""
        from scipy import special, stats

        found = stats.laplace.ppf(special.ndtr(super().normals(stream, domain, step, size, offset)))
        return np.asarray(found / np.sqrt(2))


class Truncated(ReferenceStep):
    """Cuts noise off at three standard deviations: a release beyond is proof."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Within [-3, 3]."""
        return super().normals(stream, domain, step, size, offset).clip(-3, 3)


class Whole(ReferenceStep):
    """Rounds noise to whole multiples of its standard deviation."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Whole numbers."""
        return np.rint(super().normals(stream, domain, step, size, offset))


class ShortFloats(ReferenceStep):
    """Draws noise in bfloat16, which has a few thousand values."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Rounded to bfloat16."""
        found = torch.from_numpy(super().normals(stream, domain, step, size, offset))
        return found.to(torch.bfloat16).double().numpy()


class CommonScale(ReferenceStep):
    """Multiplies each step's noise by a random size of its own: the same for all coordinates, so they tell."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """Times 0.8 or 1.2 in turn, of the right variance on average."""
        return np.asarray(super().normals(stream, domain, step, size, offset) * (0.8, 1.166)[step % 2])


class SmallestClass(ReferenceStep):
    """Makes noise for the smallest recorded sensitivity: another number than the ledger's."""

    def noise(self, stream: Stream, commit: Commit, size: int, used: int, spacing: float) -> Vector:
        """Scaled down to the strictest owner."""
        share = min(commit.sensitivity) / max(commit.sensitivity)
        return share * super().noise(stream, commit, size, used, spacing)


class FreeFloats(ReferenceStep):
    """Releases floats as they come: their low-order bits tell which sums were possible."""

    def rounded(self, total: Vector, spacing: float) -> Vector:
        """Not at all."""
        return total


class Seeded(ReferenceStep):
    """Draws from torch's generator with a fixed seed, so that a resumed run repeats its noise."""

    def normals(self, stream: Stream, domain: Domain, step: int, size: int, offset: int = 0) -> Vector:
        """By a seed that the step decides."""
        source = torch.Generator().manual_seed(1 + 2 * step + (domain == "queries"))
        return torch.randn(size, generator=source, dtype=torch.float64).numpy()


class AnswersWithout(ReferenceStep):
    """Gives answers to the rule without noise, and records some."""

    def answer_noise(self, stream: Stream, step: int, size: int, offset: int, std: float) -> Vector:
        """Zeros."""
        return np.zeros(size)


class AnswersShare(ReferenceStep):
    """Uses the gradient's noise for the answers too: together they give both away."""

    def answer_noise(self, stream: Stream, step: int, size: int, offset: int, std: float) -> Vector:
        """The gradient's."""
        return std * self.normals(stream, "gradient", step, size, offset)


def one_key(seed: int, segment: int) -> Stream:
    """A resumed run draws with the key of the first segment: its noise repeats."""
    return Stream.insecure(seed, 0)


MEMBERS: tuple[Wrong, ...] = (
    wrong_step(Scaled(), "noise", name="no noise"),
    *(wrong_step(Scaled(factor), "noise", name=f"noise times {factor}") for factor in (0.5, 0.9, 0.97)),
    wrong_step(Scaled(2**-0.5), "noise", name="noise divided by the root of 2"),
    wrong_step(Scaled(1 / BATCH), "noise", name="noise divided by the batch twice"),
    *(
        wrong_step(step, "noise")
        for step in (
            EmptyWithout(),
            BiasesWithout(),
            Broadcast(),
            EveryStepTheSame(),
            Repeated(),
            Laplace(),
            Truncated(),
            Whole(),
            ShortFloats(),
            CommonScale(),
            SmallestClass(),
            AnswersWithout(),
            AnswersShare(),
        )
    ),
    wrong_step(Seeded(), "step"),
    wrong_step(FreeFloats(), "step"),
    Wrong("one_key", (one_key.__doc__ or "").strip(), Subject(Clip(), stream=one_key), "noise"),
    wrong_step(Scaled(), "audit", name="no noise, audited"),
    wrong_step(Scaled(0.5), "audit", name="noise times 0.5, audited"),
)
"""Wrong noise."""
