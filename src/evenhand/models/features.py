"""Fixed features of records: second-order scattering of pictures, a public backbone, or the user's own network.

Scattering is as in Tramer & Boneh (2021), "Differentially private learning needs better features": Morlet wavelets at
two scales and eight angles, averages over four pixels, then normalisation within each record. Every number is constant
or comes from the record itself, so nothing is spent: means and deviations over the data would cost privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand import _user_code, _validate, terminal
from evenhand._user_code import described, is_own
from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.models import backbones

__all__ = ["extract", "names", "provenance"]

SCALES = 2
ANGLES = 8
STEP = 2**SCALES
"""Pixels from one average to the next."""
GROUPS = 27
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2
WIDTH = 0.8
"""Standard deviation of the finest wavelet along its wave, in pixels; twice that at the next scale."""
FREQUENCY = 0.75 * math.pi
SLANT = 4 / ANGLES
"""How narrow a wavelet is along its wave, compared with across."""
ALIASES = 2
CACHED = 8 * 28 * 28
"""Pixels treated at a time: what they become stays in the processor's cache."""


def scattering(pictures: Tensor) -> Tensor:
    """Return 81 maps for each channel of pictures (B, C, H, W), normalised within the record in 27 groups of maps.

    A map has an average for every fourth pixel in both directions: 28 x 28 gives 7 x 7. A record's features depend on
    that record only.

    Examples:
      >>> tuple(scattering(torch.rand(5, 1, 28, 28)).shape), tuple(scattering(torch.rand(2, 3, 32, 32)).shape)
      ((5, 81, 7, 7), (2, 243, 8, 8))
    """
    if pictures.dim() != 4 or min(pictures.shape[2:]) < 2 * STEP or not pictures.is_floating_point():
        raise UsageError(
            "Scattering needs pictures of floats shaped (channels, height, width), at least 8 x 8 pixels. These "
            f"records have shape {tuple(pictures.shape[1:])} and type {str(pictures.dtype).removeprefix('torch.')}."
        )
    few = max(1, CACHED // pictures[:1].numel())
    maps = torch.cat([coefficients(part) for part in torch.split(pictures.float(), few)])
    return functional.group_norm(maps.flatten(1, 2), GROUPS)


def coefficients(pictures: Tensor) -> Tensor:
    """Return the raw coefficients, (B, C, 81, H / 4, W / 4): the average, 16 of first order, 64 of second order.

    The order is that of scales, then of angles; in the second order the first wavelet's angle comes first.
    """
    height, width = pictures.shape[-2:]
    spectrum = torch.fft.fft2(padded(pictures)).unsqueeze(-3)
    fine, coarse = _modulus(spectrum, 0), _modulus(spectrum, 1)
    second = _modulus(torch.fft.fft2(fine).unsqueeze(-3), 1).flatten(-4, -3)
    maps = [_averages(padded(pictures).unsqueeze(-3), 0, height, width), _averages(fine, 0, height, width)]
    maps += [_averages(u, 1, height, width) for u in (coarse, second)]
    return torch.cat(maps, dim=-3)


def padded(pictures: Tensor) -> Tensor:
    """Pad pictures by reflection: one step on every side, and further to a whole number of steps."""
    height, width = pictures.shape[-2:]
    return functional.pad(pictures, (STEP, STEP + -width % STEP, STEP, STEP + -height % STEP), mode="reflect")


def _modulus(spectrum: Tensor, scale: int) -> Tensor:
    """Return the modulus of a signal's response to the eight wavelets of a scale, at every ``2**scale``-th pixel.

    To take every second pixel is to fold the spectrum: its quarters are added.
    """
    signal, wavelets = (_folds(t, scale) for t in (torch.view_as_real(spectrum), _doubled(scale, *spectrum.shape[-2:])))
    answers = signal[0] * wavelets[0]
    for part, wavelet in zip(signal[1:], wavelets[1:], strict=True):
        answers.addcmul_(part, wavelet)
    waves = torch.fft.ifft2(torch.view_as_complex(answers))
    lengths: Tensor = waves.real.square().add_(waves.imag.square()).sqrt_().div_(4**scale)
    return lengths


def _folds(spectrum: Tensor, scale: int) -> list[Tensor]:
    """Return the parts (..., H / 2**scale, W / 2**scale, 2) of a spectrum (..., H, W, 2) that are added in folding."""
    rows = spectrum.chunk(2**scale, dim=-3)
    return [part for row in rows for part in row.chunk(2**scale, dim=-2)]


@cache
def _doubled(scale: int, height: int, width: int) -> Tensor:
    """Return the wavelets' transforms twice: for the real and for the imaginary part of a spectrum."""
    return morlets(scale, height, width).unsqueeze(-1).repeat(1, 1, 1, 2)


def morlets(scale: int, height: int, width: int) -> Tensor:
    """Return the wavelets' transforms, real, (8, height, width): a Gaussian around the frequency, less one around zero.

    What is taken away makes the mean of the wavelet zero. Frequencies beyond the grid are folded into it, which is the
    same as sampling the wavelet at the pixels.
    """
    wavelets = []
    for turn in range(ANGLES):
        angle = math.pi * turn / ANGLES
        wave, envelope = (_bump(f, scale, angle, height, width) for f in (FREQUENCY / 2**scale, 0.0))
        wavelets.append(wave - envelope * (wave[0, 0] / envelope[0, 0]))
    return torch.stack(wavelets).float()


def _bump(frequency: float, scale: int, angle: float, height: int, width: int) -> Tensor:
    down, right = _frequencies(height).unsqueeze(1), _frequencies(width)
    size, total = WIDTH * 2**scale, torch.zeros(height, width, dtype=torch.float64)
    for i in range(-ALIASES, ALIASES + 1):
        for j in range(-ALIASES, ALIASES + 1):
            v, u = down + 2 * math.pi * i, right + 2 * math.pi * j
            along = v * math.cos(angle) + u * math.sin(angle) - frequency
            across = u * math.cos(angle) - v * math.sin(angle)
            total += torch.exp(-(size**2) / 2 * (along.square() + (across / SLANT).square()))
    return total


def _averages(maps: Tensor, coarseness: int, height: int, width: int) -> Tensor:
    """Return Gaussian averages around every fourth pixel of the picture, from maps of every ``2**coarseness``-th."""
    rows, columns = averaging(coarseness, height), averaging(coarseness, width)
    return rows @ maps @ columns.T


@cache
def averaging(coarseness: int, size: int) -> Tensor:
    """Return the matrix that averages one padded side; the Gaussian is a product, so each side is averaged alone."""
    long = size + 2 * STEP + -size % STEP
    pixels = torch.arange(0, long, 2**coarseness, dtype=torch.float64)
    centres = torch.arange(STEP, STEP + size, STEP, dtype=torch.float64).unsqueeze(1)
    wide = WIDTH * 2 ** (SCALES - 1)
    weights = torch.exp(-((pixels - centres) ** 2) / (2 * wide**2))
    return (weights / weights.sum(1, keepdim=True)).float()


def _frequencies(size: int) -> Tensor:
    frequencies: Tensor = 2 * math.pi * torch.fft.fftfreq(size, dtype=torch.float64)
    return frequencies


SCATTERING = "scattering"


def names() -> tuple[str, ...]:
    """Return the names that `extract` takes, besides ``file.py:factory``."""
    return (SCATTERING, *backbones.BACKBONES)


def provenance(name: str) -> str:
    """Return licence and pre-training data of a public backbone in one line; nothing for other features.

    Examples:
      >>> provenance("efficientnet_lite0")[:46], provenance("scattering")
      ('EfficientNet-Lite0, weights under Apache 2.0, ', '')
    """
    backbone = backbones.BACKBONES.get(name)
    return "" if backbone is None else backbone.described


def extract(name: str, inputs: Tensor, batch: int = 512) -> Tensor:
    """Return the features of every record, in the order of the records.

    A record's features depend on nothing but the record and on what is frozen, so training on them promises the same as
    training on the records. The promise does not cover the data that a frozen network was trained on.

    Args:
      name: one of `names`, or ``file.py:factory``: a function without arguments that returns a trained module.
      inputs: one row per record.
      batch: how many records are computed at a time.

    Examples:
      >>> extract("scattering", torch.rand(3, 1, 8, 8)).shape
      torch.Size([3, 81, 2, 2])
    """
    _validate.whole(batch, "batch")
    if not isinstance(inputs, Tensor) or inputs.dim() < 1 or not len(inputs):
        raise UsageError("Features are computed from one tensor with a row per record, and at least one row.")
    compute = _computing(name, inputs[:batch])
    rows: list[Tensor] = []
    with torch.no_grad(), terminal.progress_bar(f"features {Path(name).name}") as draw:
        for part in torch.split(inputs, batch):
            rows.append(compute(part))
            draw(min(len(rows) * batch, len(inputs)), len(inputs))
    return torch.cat(rows)


def _computing(name: str, records: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the features; a network of one's own is checked on these records."""
    if is_own(name):
        module = load(name)
        check(module, records, name)
        return module
    _validate.known(name, names(), "features")
    return scattering if name == SCATTERING else backbones.loaded(name)


ROWS = 8
ROUNDING = 1e-4
"""Computing a record in another company may change its features by this much of their largest, and no more."""

MIXED = (
    ": it mixes the records of a batch, or draws random numbers. Then a record would reach the features of others, and "
    "no bound on it would hold. Usual reasons: BatchNorm without running statistics, a mean over the batch, dropout "
    "called as a function."
)


def parts(features: str) -> tuple[Path, str]:
    """Return file and factory of ``file.py:factory``."""
    return _user_code.parts(features, "--features", "nets.py:body")


def load(features: str) -> nn.Module:
    """Execute the file and return the module of its factory, frozen and in eval mode."""
    path, name = parts(features)
    what = f"{path.name}:{name}"
    factory = _attribute(path, name)
    try:
        module = factory()
    except Exception as error:
        raise UsageError(f"{what} failed with {described(error)}. Nothing was spent.") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{what} returned {type(module).__name__}: it must return a torch.nn.Module with its weights.")
    return module.eval().requires_grad_(False)


def check(module: Callable[[Tensor], Tensor], records: Tensor, what: str) -> None:
    """Refuse a module whose features of a record depend on other records, or that changes while it computes.

    A few records are computed in company, and then each alone. This can refute that records are independent. It cannot
    prove it.
    """
    what, before = Path(what).name, _state(module)
    rows = sorted({*range(min(ROWS, len(records))), len(records) - 1})
    with torch.no_grad():
        try:
            together = module(records)
        except Exception as error:
            shape = tuple(records.shape[1:])
            raise UsageError(f"{what} cannot take inputs of shape {shape} ({type(error).__name__}).") from None
        if not isinstance(together, Tensor) or together.dim() < 2 or len(together) != len(records):
            raise UsageError(f"{what} must return one tensor with a row of features per record.")
        try:
            alone = [module(records[row : row + 1]) for row in rows]
        except Exception as error:
            kind = type(error).__name__  # what it says may quote the record
            raise UnsupportedModelError(f"{what} cannot compute a record alone ({kind}){MIXED}") from None
    if any(not torch.equal(old, new) for old, new in zip(before, _state(module), strict=True)):
        raise UnsupportedModelError(
            f"{what} changes while it computes, so later records would carry something of earlier ones, and no bound "
            "on a record would hold. Return a module without running statistics, or with them in eval mode."
        )
    for row, single in zip(rows, alone, strict=True):
        if single.shape != together[row : row + 1].shape or not _same(together[row], single[0]):
            raise UnsupportedModelError(f"{what} gives a record other features in other company{MIXED}")


def _same(together: Tensor, alone: Tensor) -> bool:
    if not (bool(together.isfinite().all()) and bool(alone.isfinite().all())):
        return bool(torch.equal(together.isfinite(), alone.isfinite()))
    size = max(float(together.abs().max()), float(alone.abs().max()))
    return float((together - alone).abs().max()) <= ROUNDING * size


def _state(module: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()] if isinstance(module, nn.Module) else []


def _attribute(path: Path, name: str) -> Callable[[], object]:
    factory = getattr(_user_code.executed(path, "features"), name, None)
    if not callable(factory):
        raise UsageError(f"{path.name} has no function {name!r}: write `def {name}(): return ...` with the weights.")
    function: Callable[[], object] = factory
    return function
