"""Second-order scattering of pictures: fixed wavelets, a modulus, wavelets again, averages. Nothing is learned.

As in Tramer & Boneh (2021), "Differentially private learning needs better features": Morlet wavelets at two scales
and eight angles, averages over four pixels, then normalisation within each record. Every number is a constant or comes
from the record itself, so nothing is spent: means and deviations over the data would cost privacy.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from evenhand.errors import UsageError

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
    """81 maps for each channel of pictures (B, C, H, W), normalised within the record in 27 groups of maps.

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
    """The coefficients themselves, (B, C, 81, H / 4, W / 4): the average, 16 of first order, 64 of second order.

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
    """Mirrored by one step on every side, and on to a whole number of steps."""
    height, width = pictures.shape[-2:]
    return functional.pad(pictures, (STEP, STEP + -width % STEP, STEP, STEP + -height % STEP), mode="reflect")


def _modulus(spectrum: Tensor, scale: int) -> Tensor:
    """Length of a signal's answers to the eight wavelets of a scale, at every ``2**scale``-th pixel.

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
    """The parts (..., H / 2**scale, W / 2**scale, 2) of a spectrum (..., H, W, 2) that fall on each other."""
    rows = spectrum.chunk(2**scale, dim=-3)
    return [part for row in rows for part in row.chunk(2**scale, dim=-2)]


@cache
def _doubled(scale: int, height: int, width: int) -> Tensor:
    """The wavelets' transforms, once for the real and once for the imaginary part of what they are multiplied with."""
    return morlets(scale, height, width).unsqueeze(-1).repeat(1, 1, 1, 2)


def morlets(scale: int, height: int, width: int) -> Tensor:
    """The wavelets' transforms, real, (8, height, width): a Gaussian around the frequency, less one around zero.

    What is taken away makes the mean of the wavelet zero. Frequencies beyond the grid are folded into it, which is the
    same as sampling the wavelet at the pixels.
    """
    made = []
    for turn in range(ANGLES):
        angle = math.pi * turn / ANGLES
        wave, envelope = (_bump(f, scale, angle, height, width) for f in (FREQUENCY / 2**scale, 0.0))
        made.append(wave - envelope * (wave[0, 0] / envelope[0, 0]))
    return torch.stack(made).float()


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
    """Gaussian averages around every fourth pixel of the picture, from maps of every ``2**coarseness``-th."""
    rows, columns = averaging(coarseness, height), averaging(coarseness, width)
    return rows @ maps @ columns.T


@cache
def averaging(coarseness: int, size: int) -> Tensor:
    """The matrix that averages a padded side: the Gaussian is a product, so each side is averaged alone."""
    long = size + 2 * STEP + -size % STEP
    pixels = torch.arange(0, long, 2**coarseness, dtype=torch.float64)
    centres = torch.arange(STEP, STEP + size, STEP, dtype=torch.float64).unsqueeze(1)
    wide = WIDTH * 2 ** (SCALES - 1)
    weights = torch.exp(-((pixels - centres) ** 2) / (2 * wide**2))
    return (weights / weights.sum(1, keepdim=True)).float()


def _frequencies(size: int) -> Tensor:
    found: Tensor = 2 * math.pi * torch.fft.fftfreq(size, dtype=torch.float64)
    return found
