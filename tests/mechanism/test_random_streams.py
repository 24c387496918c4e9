from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from evenhand.mechanism import add_noise
from evenhand.mechanism.add_noise import Ahead
from evenhand.mechanism.random_streams import Stream

STREAM = Stream.insecure(seed=7, segment=0)


def test_normals_are_standard_normal() -> None:
    values = STREAM.normals("gradient", step=0, count=200_000)
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(values.mean()) < 5 / np.sqrt(values.size)
    assert stats.chi2.sf((values**2).sum(), values.size) > 1e-6
    assert stats.chi2.cdf((values**2).sum(), values.size) > 1e-6


def test_the_two_halves_of_a_box_muller_pair_are_uncorrelated() -> None:
    values = STREAM.normals("gradient", step=1, count=200_000).reshape(-1, 2)
    for left, right in ((values[:, 0], values[:, 1]), (values[:, 0] ** 2, values[:, 1] ** 2)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(values.shape[0])


@pytest.mark.parametrize("offset", [0, 1, 2, 7])
def test_an_offset_addresses_the_same_numbers(offset: int) -> None:
    whole = STREAM.normals("gradient", step=3, count=20)
    assert np.array_equal(STREAM.normals("gradient", step=3, count=5, offset=offset), whole[offset : offset + 5])


def test_domains_steps_and_keys_do_not_share_numbers() -> None:
    other = Stream.insecure(seed=7, segment=1)
    seen = {
        tuple(STREAM.uniforms("sampling", 0, 4)),
        tuple(STREAM.uniforms("gradient", 0, 4)),
        tuple(STREAM.uniforms("queries", 0, 4)),
        tuple(STREAM.uniforms("sampling", 1, 4)),
        tuple(other.uniforms("sampling", 0, 4)),
    }
    assert len(seen) == 5


def test_uniforms_have_53_bits() -> None:
    values = STREAM.uniforms("sampling", 0, 100_000)
    scaled = values * 2.0**53
    assert np.array_equal(scaled, np.rint(scaled))
    assert (scaled % 2 == 1).mean() == pytest.approx(0.5, abs=0.02)
    assert stats.kstest(values, "uniform").pvalue > 1e-6
    assert values.min() >= 0
    assert values.max() < 1


def test_fresh_keys_never_repeat_and_stay_secret() -> None:
    streams = [Stream.fresh() for _ in range(200)]
    assert len({stream.fingerprint for stream in streams}) == 200
    assert streams[0].key.hex() not in repr(streams[0])


@pytest.mark.parametrize("spare", [True, False])
def test_working_ahead_gives_the_numbers_of_the_stream_beside_small_requests(
    spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question of few numbers, asked while the other thread makes those of the next step, must not touch them."""
    monkeypatch.setattr(add_noise, "_spare", lambda: spare)
    ahead, count = Ahead(STREAM), 60_000
    for step in range(12):
        small = ahead.normals("queries", step, 7, 3).copy()
        large = ahead.normals("gradient", step, count).copy()
        assert np.array_equal(small, STREAM.normals("queries", step, 7, 3))
        assert np.array_equal(large, STREAM.normals("gradient", step, count))


@pytest.mark.parametrize("count", [1, 2, 7, 4096])
def test_words_are_the_key_stream_of_aes_in_counter_mode(count: int) -> None:
    stream = Stream.insecure(3, 1)
    for domain, step in (("sampling", 0), ("sampling", 1 << 33), ("checks", 5)):
        first = stream.counter(domain, step).to_bytes(8, "big") + bytes(8)
        encryptor = Cipher(algorithms.AES(stream.key), modes.CTR(first)).encryptor()
        expected = np.frombuffer(encryptor.update(bytes(16 * -(-count // 2))), dtype="<u8")[:count]
        assert np.array_equal(stream.words(domain, step, count), expected)
