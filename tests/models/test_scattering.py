"""Scattering is what its definition says: wavelets written in space, convolved pixel by pixel, give the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from evenhand.errors import UsageError
from evenhand.models.features import CACHED, CHANNELS, coefficients, extract, padded, scattering


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def wavelet(scale: int, angle: float, size: int) -> np.ndarray:
    """A Morlet wavelet by its formula, sampled at the pixels and wrapped around the grid."""
    sigma, slant, frequency = 0.8 * 2**scale, 0.5, 0.75 * np.pi / 2**scale
    place = np.arange(-3 * size, 3 * size)
    down, right = np.meshgrid(place, place, indexing="ij")
    along = down * np.cos(angle) + right * np.sin(angle)
    across = right * np.cos(angle) - down * np.sin(angle)
    envelope = slant / (2 * np.pi * sigma**2) * np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = envelope * np.exp(1j * frequency * along)
    morlet = wave - envelope * wave.sum() / envelope.sum()
    return morlet.reshape(6, size, 6, size).sum((0, 2))


def convolved(signal: np.ndarray, kernel: np.ndarray, step: int) -> np.ndarray:
    """Circular convolution, written as the sum that it is, at every ``step``-th pixel."""
    size = len(signal)
    found = np.zeros((size // step, size // step), dtype=complex)
    for i in range(size):
        for j in range(size):
            found += kernel[i, j] * np.roll(signal, (i, j), (0, 1))[::step, ::step]
    return found


def averaged(maps: np.ndarray, every: int) -> np.ndarray:
    """Gaussian averages around every fourth pixel, without the padding."""
    place = np.arange(0, len(maps) * every, every)
    inside = range(4, place[-1] + every - 4, 4)
    found = np.zeros((len(inside), len(inside)))
    for row, y in enumerate(inside):
        for column, x in enumerate(inside):
            weights = np.exp(-((place[:, None] - y) ** 2 + (place - x) ** 2) / (2 * 1.6**2))
            found[row, column] = (weights / weights.sum() * maps).sum()
    return found


def defined(picture: np.ndarray) -> np.ndarray:
    """All 81 maps of a picture that is already padded."""
    size, angles = len(picture), [np.pi * k / 8 for k in range(8)]
    fine = [abs(convolved(picture, wavelet(0, angle, size), 1)) for angle in angles]
    coarse = [abs(convolved(picture, wavelet(1, angle, size), 2)) for angle in angles]
    second = [abs(convolved(u, wavelet(1, angle, size), 2)) for u in fine for angle in angles]
    return np.stack([averaged(u, 1) for u in (picture, *fine)] + [averaged(u, 2) for u in (*coarse, *second)])


def test_it_is_the_definition() -> None:
    picture = drawn(1, 1, 12, 12)
    found = coefficients(picture)[0, 0]
    expected = defined(padded(picture)[0, 0].double().numpy())
    assert found.shape == (CHANNELS, 3, 3) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_shapes() -> None:
    assert extract("scattering", drawn(2, 1, 28, 28)).shape == (2, 81, 7, 7)
    assert extract("scattering", drawn(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert extract("scattering", drawn(2, 2, 9, 14)).shape == (2, 162, 3, 4)
    assert extract("scattering", drawn(2, 1, 8, 8).double()).dtype == torch.float32


def test_a_turned_picture_turns_the_angles() -> None:
    picture = drawn(1, 1, 16, 16)
    found, turned = coefficients(picture)[0, 0], coefficients(picture.mT)[0, 0].mT
    other = [(4 - angle) % 8 for angle in range(8)]
    order = [0, *(1 + k for k in other), *(9 + k for k in other), *(17 + 8 * k + m for k in other for m in other)]
    torch.testing.assert_close(turned, found[order], rtol=1e-4, atol=1e-6)


def test_plain_pictures_have_nothing_but_their_average() -> None:
    found = coefficients(torch.full((1, 1, 16, 16), 0.7))[0, 0]
    torch.testing.assert_close(found[0], torch.full((4, 4), 0.7))
    assert found[1:].abs().max() < 1e-6
    assert not scattering(torch.zeros(1, 1, 16, 16)).any()


def test_twice_as_bright_is_twice_as_large_before_and_the_same_after_normalising() -> None:
    picture = drawn(2, 1, 16, 16)
    torch.testing.assert_close(coefficients(2 * picture), 2 * coefficients(picture))
    loud = 100 * picture
    torch.testing.assert_close(scattering(loud), scattering(2 * loud), rtol=1e-2, atol=1e-2)


def blob(down: float, right: float) -> Tensor:
    """A ring around a place, 28 x 28: edges at every angle."""
    place = torch.arange(28.0)
    distance = ((place.unsqueeze(1) - down) ** 2 + (place - right) ** 2).sqrt()
    return torch.exp(-((distance - 6) ** 2) / 3).view(1, 1, 28, 28)


def apart(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / one.norm())


def test_fine_stripes_may_move() -> None:
    stripes = torch.cos(2.2 * torch.arange(33.0)).view(1, 1, 1, 33).expand(1, 1, 32, 33)
    here, moved = stripes[..., :32], stripes[..., 1:]
    inner = (coefficients(here)[..., 2:-2, 2:-2], coefficients(moved)[..., 2:-2, 2:-2])
    assert apart(here, moved) > 1.5
    assert apart(*inner) < 0.1


def test_energy_falls_with_the_order() -> None:
    maps = coefficients(blob(14, 14))[0, 0].square().sum((1, 2))
    orders = [float(part.sum()) for part in maps.split([1, 16, 64])]
    assert orders[0] > orders[1] > orders[2] > 0


def test_records_are_alone() -> None:
    pictures = drawn(3 * CACHED // 256, 1, 16, 16)
    found = extract("scattering", pictures, batch=7)
    assert len(pictures) > CACHED // 256
    torch.testing.assert_close(found[5:6], extract("scattering", pictures[5:6]), rtol=1e-4, atol=1e-4)
    changed = pictures.clone()
    changed[0] = 1e6
    assert torch.equal(extract("scattering", changed, batch=7)[1:], found[1:])


def test_every_group_of_maps_is_normalised_within_the_record() -> None:
    groups = scattering(10 * drawn(2, 3, 16, 16)).view(2, 27, -1)
    torch.testing.assert_close(groups.mean(2), torch.zeros(2, 27), atol=1e-5, rtol=0)
    torch.testing.assert_close(groups.var(2, unbiased=False), torch.ones(2, 27), atol=0.1, rtol=0)


@pytest.mark.parametrize("wrong", [torch.rand(3, 28, 28), torch.rand(3, 1, 7, 28), torch.ones(3, 1, 28, 28).byte()])
def test_what_is_no_picture_of_floats_is_refused(wrong: Tensor) -> None:
    with pytest.raises(UsageError, match=r"pictures of floats shaped \(channels, height, width\), at least 8 x 8"):
        extract("scattering", wrong)
