"""The compiled loops: the numbers of numpy and of the slow way, in every variant, and not used when they are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from compiling import FLAGS, LESS, PACKAGE, QUICK, STRICT, build, changed, lacking, needs_compiler
from evenhand.errors import UnsupportedModelError
from evenhand.mechanism import noise_native, random_streams
from evenhand.mechanism.add_noise import SMALL_CHUNK, Ahead, release, release_parts
from evenhand.mechanism.noise_native import BLOCK, Loops
from evenhand.mechanism.random_streams import Stream

STREAM = Stream.insecure(5, 0)


def words(blocks: int) -> np.ndarray:
    return np.frombuffer(os.urandom(8 * BLOCK * blocks), np.uint64).copy()


def has_vaes() -> bool:
    """Whether this processor encrypts four counters at a time, so that this part of the loops runs here at all."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and {"vaes", "avx512bw"} <= set(info.read_text().split())


needs_vaes = pytest.mark.skipif(not has_vaes(), reason="the processor has no VAES, so these loops never run here")


@needs_compiler
def test_the_installation_built_the_loops_and_they_are_right() -> None:
    """`pip install` compiles where it can, so that nobody pays for a slow way without knowing."""
    assert noise_native.loops() is not None


@needs_compiler
def test_flags_are_those_of_the_build() -> None:
    text = (PACKAGE.parents[1] / "hatch_build.py").read_text()
    assert all(f'"{flag}"' in text for flag in FLAGS)


@needs_compiler
@pytest.mark.parametrize("less", LESS.values(), ids=LESS.keys())
def test_every_variant_gives_the_normals_of_numpy(less: tuple[str, ...]) -> None:
    loops, given = Loops(lacking("mechanism/noise.c", less)), words(200)
    assert noise_native.check_loops(loops)
    made, expected = np.empty(len(given)), noise_native.reference(given)
    loops.normals(given.ctypes.data, made.ctypes.data, 200)
    np.testing.assert_allclose(made, expected, rtol=0, atol=4e-15)
    assert stats.kstest(made, "norm").pvalue > 1e-6
    loops.normals(given.ctypes.data, given.ctypes.data, 200)  # in the same memory
    assert np.array_equal(given.view(np.float64), made)


@needs_compiler
@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("radius * cosine", "radius * cosine * 0.999"),
        ("radius * sine", "radius * cosine"),
        ("sqrt(-2.0 * log)", "sqrt(-1.9 * log)"),
        ("(q & 2) << 62", "(q & 0) << 62"),
        (">> 11", ">> 40 << 29"),
        ("normals[i] * alpha", "normals[0] * alpha"),
        ("rint(whole + normals[i] * alpha)", "whole"),
        ("while (ends[part] <= place) part++;", "while (ends[part] <= place) part++, place++;"),
        ("odd += !(fabs(whole) <= DBL_MAX);", "odd += 1;"),
        ("from.words + (block - first)", "from.words"),
        ("double whole = rint((double)total[i] * inverse);", "double whole = (double)total[i] * inverse;"),
        ("rint(whole + normals[i] * alpha)", "(whole + normals[i] * alpha)"),
        ("odd += !(fabs(whole) <= DBL_MAX);", ""),
        ("normals[i] * alpha", "(count > 1022 ? 0 : normals[i]) * alpha"),
        ("    int64_t odd = 0, part = 0;", "    int64_t odd = 0, part = 0; if (first) alpha = 0;"),
        ("EVEN(12, 32)", "EVEN(12, 33)"),
        ("ODD(13)", "keys[13] = keys[11]"),
        ("(uint64_t)block / 2, made", "(uint64_t)block, made"),
        ("(uint64_t)block / 2, made", "0, made"),
        ("bits from = {NULL, keys, step,", "bits from = {NULL, keys, step & 0xffff,"),
        ("int round = 1;", "int round = 2;"),
        pytest.param("p + 3, s, p + 2, s", "p + 2, s, p + 2, s", marks=needs_vaes),
        ("__atomic_fetch_add(&t->next, SHARE,", "__atomic_fetch_add(&t->next, 2 * SHARE,"),
        ("team(work, &all, threads, 0);", ";"),
        ("__atomic_fetch_add(&t->odd, odd, __ATOMIC_RELAXED);", ""),
        ("bits from = {NULL, keys, step,", "bits from = {NULL, keys, step & 0x01ffffffffffffff,"),
        ("bits from = {NULL, keys, step,", "bits from = {NULL, keys, step & 0xff00ffffffffffff,"),
        (
            "block_normals(from.words == NULL ? made",
            "if (part) memset(made, 1, 99); block_normals(from.words == NULL ? made",
        ),
        ("(uint64_t)(first + b) * (BLOCK / 2)", "(uint32_t)((first + b) * (BLOCK / 2))"),
    ],
)
def test_loops_that_compute_something_else_are_not_used(what: str, instead: str, tmp_path: Path) -> None:
    assert not noise_native.check_loops(Loops(build(tmp_path, changed("mechanism/noise.c", (what, instead)), *QUICK)))


def test_without_the_file_there_are_no_loops(tmp_path: Path) -> None:
    assert noise_native.loops.__wrapped__(tmp_path) is None
    (tmp_path / "_noise.so").write_bytes(b"no library")
    assert noise_native.loops.__wrapped__(tmp_path) is None


NO_AES = 'return __builtin_cpu_supports("aes") != 0'
KEYED = {
    "as built": (),
    "without vaes": (('__builtin_cpu_supports("vaes")', "0"),),
    "without aes": ((NO_AES, "return 0"),),
}


@needs_compiler
@pytest.mark.parametrize("less", KEYED.values(), ids=KEYED.keys())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_way_to_make_the_bits_gives_the_same_release(
    less: tuple[tuple[str, str], ...], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's own AES, narrow or wide, and OpenSSL's; the threads of torch change nothing."""
    loops = Loops(build(tmp_path, changed("mechanism/noise.c", *less), *STRICT))
    assert noise_native.check_loops(loops)
    assert loops.encrypts is (not less or less[0][0] != NO_AES)
    monkeypatch.setattr(noise_native, "loops", lambda: loops)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    totals = [torch.randn(100_001), torch.randn(3), torch.randn(40, 1024)]
    found = torch.cat(
        [part.reshape(-1) for part in release_parts(totals, 0.7, 2.0**-20, Ahead(STREAM), 2**40 + 5, 3.0)]
    )
    flat = torch.cat([total.reshape(-1) for total in totals])
    assert torch.equal(found, release(flat, 0.7, 2.0**-20, STREAM, "gradient", 2**40 + 5, divisor=3.0).float())


@needs_compiler
def test_threads_of_torch_are_found_where_torch_has_them() -> None:
    """Otherwise noise would be made by one thread only, without anybody noticing."""
    if (Path(torch.__file__).parent / "lib" / "libgomp.so.1").exists():
        assert noise_native.team() is not None


def test_a_key_of_another_size_is_refused() -> None:
    loops = noise_native.loops()
    if loops is None:
        pytest.skip("no compiled loops")
    with pytest.raises(ValueError, match="32 bytes"):
        loops.encrypted(b"short", 0, noise_native.Parts([1], [1], [0]), 1.0, 1.0, 1.0)


def test_both_ways_to_make_normals_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds give the same run with and without a compiler, but for the last bits."""
    quick = STREAM.normals("gradient", 3, 50_000).copy()
    monkeypatch.setattr(random_streams.noise_native, "loops", lambda: None)
    np.testing.assert_allclose(STREAM.normals("gradient", 3, 50_000), quick, rtol=0, atol=4e-15)


SHAPES = ((3, 5), (1,), (0, 4), (SMALL_CHUNK + 17,), (7, 1100), ())


@pytest.mark.parametrize("way", ["compiled", "python"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_parts_leave_like_one_row(
    way: str, dtype: torch.dtype, lean: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "python":
        monkeypatch.setattr(noise_native, "loops", lambda: None)
    totals = [10 * torch.randn(shape).to(dtype) for shape in SHAPES]
    totals[0] = totals[0].t()  # not in the order of its memory
    before = [total.clone() for total in totals]
    found = release_parts(totals, 1.7, 2.0**-12, Ahead(STREAM), 9, 60.5, lean, own)
    flat = torch.cat([total.reshape(-1) for total in before])
    expected = release(flat, 1.7, 2.0**-12, STREAM, "gradient", 9, divisor=60.5).to(dtype)
    assert torch.equal(torch.cat([part.reshape(-1) for part in found]), expected)
    assert own or all(torch.equal(total, old) for total, old in zip(totals, before, strict=True))
    assert [part.shape for part in found] == [total.shape for total in totals]


@pytest.mark.parametrize("way", ["compiled", "python"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1023, SMALL_CHUNK + 3])
def test_a_sum_that_is_not_finite_does_not_leave(
    way: str, bad: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "python":
        monkeypatch.setattr(noise_native, "loops", lambda: None)
    total = torch.zeros(SMALL_CHUNK + 5)
    total[place] = bad
    with pytest.raises(UnsupportedModelError, match="not finite: nothing was released"):
        release_parts([torch.zeros(3), total], 1.0, 2.0**-20, Ahead(Stream.fresh()), 0, 1.0)


@pytest.mark.parametrize("own", [True, False])
def test_two_parts_in_the_same_memory_get_noise_of_their_own(own: bool) -> None:
    """Two parameters may have one and the same gradient, such as an LSTM's two biases."""
    total = torch.zeros(2000)
    first, second = release_parts([total, total], 1.0, 2.0**-20, Ahead(Stream.fresh()), 0, 1.0, in_place=own)
    assert not torch.equal(first, second)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.15
    assert float(first.std()) == pytest.approx(1.0, rel=0.15)
    assert not total.any()


def test_sums_are_written_over_only_where_each_has_memory_of_its_own() -> None:
    if noise_native.loops() is None:
        pytest.skip("no compiled loops")

    def inside(parts: list[torch.Tensor]) -> list[bool]:
        found = release_parts(parts, 1.0, 2.0**-20, Ahead(Stream.fresh()), 0, 1.0, in_place=True)
        return [out.data_ptr() == part.data_ptr() for out, part in zip(found, parts, strict=True)]

    table = torch.zeros(2, 300)
    assert inside([torch.zeros(300), torch.zeros(7)]) == [True, True]
    assert inside([table[0], torch.zeros(300)]) == [False, False]
    assert inside([table, table.t()]) == [True, False]  # the second is copied before anything is written
    assert inside([table, table.view(600)]) == [False, False]


def test_what_leaves_lies_on_the_grid() -> None:
    found = release_parts([torch.randn(5000)], 0.3, 2.0**-10, Ahead(Stream.fresh()), 0, 1.0)[0] * 2.0**10
    assert torch.equal(found, found.round())
