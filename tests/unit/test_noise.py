"""The noise: its bits, which are pinned for good, and its law.

The statistical tests have fixed seeds: they pass always or never. ``P_VALUE`` is what a fresh seed
would fail by chance; there are about forty of them in this file, so 4e-5 for the whole file.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.sampling import noise
from foredraft.sampling.noise import Stream, gumbel, position_keys, units, units_torch
from tests.tiny import seed_for

P_VALUE = 1e-6
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# (seed, stream, position, index) -> v. A text can be made again only while these stay as they are.
PINNED = {
    (0, 0, 0, 0): "0x1.1c13ade1c7e5cp-3",
    (0, 0, 0, 1): "0x1.f1344acd6b045p-1",
    (0, 0, 1, 0): "0x1.7880ff10a4b74p-3",
    (1, 0, 0, 0): "0x1.631405e8db1b1p-1",
    (0, 1, 0, 0): "0x1.0157d005583c3p-1",
    (42, 0, 17, 49151): "0x1.a975192e32088p-4",
    (2**63 - 1, 4, 2**31, 2**20): "0x1.64a99cfc69e77p-1",
    (7, 2, 131071, 3): "0x1.1cdea065d0c28p-4",
    (123456789, 3, 5, 11): "0x1.05307e533fd00p-9",
}


def mix64_of_ints(x: int) -> int:
    """The finaliser of SplitMix64 on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unit_of_ints(seed: int, stream: int, position: int, index: int) -> Fraction:
    """The specification, exact: an odd multiple of 2**-53."""
    key = mix64_of_ints((seed + GOLDEN * (stream + 1)) & MASK)
    key = mix64_of_ints((key + GOLDEN * (position + 1)) & MASK)
    bits = mix64_of_ints((key + GOLDEN * (index + 1)) & MASK) >> 12
    return Fraction(2 * bits + 1, 1 << 53)


def mix64_of_arrays(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def units_of_arrays(
    seed: int, stream: int, positions: np.ndarray, indices: np.ndarray
) -> np.ndarray:
    """The noise in plain numpy, whole arrays at once."""
    golden = np.uint64(GOLDEN)
    with np.errstate(over="ignore"):
        key = mix64_of_arrays(np.array([seed], dtype=np.uint64) + golden * np.uint64(stream + 1))
        keys = mix64_of_arrays(key + golden * (positions.astype(np.uint64) + np.uint64(1)))
        steps = golden * (indices.astype(np.uint64) + np.uint64(1))
        bits = mix64_of_arrays(keys[:, None] + steps[None]) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def some_arguments(num: int = 200) -> list[tuple[int, Stream, int, int]]:
    rng = np.random.default_rng(3)
    seeds = [0, 1, 2**31, 2**53 - 1, 2**62 + 1, 2**63 - 1]
    seeds += [int(s) for s in rng.integers(0, 2**63, num)]
    out = []
    for number, seed in enumerate(seeds):
        position = int(rng.integers(0, 2 ** int(rng.integers(1, 32))))
        index = int(rng.integers(0, 2 ** int(rng.integers(1, 31))))
        out.append((seed, Stream(number % len(Stream)), position, index))
    return out


# ------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(("arguments", "expected"), PINNED.items(), ids=str)
def test_pinned(arguments: tuple[int, int, int, int], expected: str) -> None:
    seed, stream, position, index = arguments
    v = units(seed, Stream(stream), np.array([position]), np.array([index]))
    assert v[0, 0].hex() == expected
    assert Fraction(float.fromhex(expected)) == unit_of_ints(*arguments)


def test_streams_keep_their_numbers() -> None:
    """They are part of the key: renumbering would change every classical text."""
    assert {stream.name: int(stream) for stream in Stream} == {
        "PICK": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RECOVER": 3,
        "BONUS": 4,
    }


def test_every_twin_gives_the_specified_bits() -> None:
    for seed, stream, position, index in some_arguments():
        positions, indices = np.array([position]), np.array([index])
        expected = unit_of_ints(seed, int(stream), position, index)
        assert Fraction(units(seed, stream, positions, indices)[0, 0]) == expected
        assert Fraction(units_of_arrays(seed, int(stream), positions, indices)[0, 0]) == expected
        keys = position_keys(np.array([seed]), positions, stream)
        by_torch = units_torch(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(indices))
        assert Fraction(by_torch[0, 0].item()) == expected


def test_twins_agree_on_whole_arrays() -> None:
    rng = np.random.default_rng(0)
    indices = np.arange(3001)
    for stream in Stream:
        seed = int(rng.integers(0, 2**63))
        positions = rng.integers(0, 2**20, 17)
        fast = units(seed, stream, positions, indices)
        assert fast.shape == (17, 3001) and fast.dtype == np.float64
        np.testing.assert_array_equal(fast, units_of_arrays(seed, int(stream), positions, indices))
        keys = position_keys(np.full(17, seed), positions, stream).view(np.int64)
        by_torch = units_torch(torch.from_numpy(keys), torch.from_numpy(indices))
        np.testing.assert_array_equal(fast, by_torch.numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
def test_cuda_gives_the_same_bits() -> None:
    keys = position_keys(np.arange(64) * 12345, np.arange(64), Stream.PICK).view(np.int64)
    tokens = torch.arange(50_000)
    on_host = units_torch(torch.from_numpy(keys), tokens)
    on_device = units_torch(torch.from_numpy(keys).cuda(), tokens.cuda())
    assert torch.equal(on_host, on_device.cpu())


def test_order_and_neighbours_do_not_matter() -> None:
    """A token's noise is a function of its own position and id, however many are asked for."""
    positions, indices = np.arange(5, 25), np.arange(100)
    whole = units(9, Stream.PICK, positions, indices)
    np.testing.assert_array_equal(
        units(9, Stream.PICK, positions[::-2], indices[::-3]), whole[::-2, ::-3]
    )
    some = np.array([7, 7, 99, 0])
    np.testing.assert_array_equal(units(9, Stream.PICK, positions, some), whole[:, some])


def test_positions_have_keys_of_their_own() -> None:
    """No key repeats over streams, neighbouring seeds and positions."""
    positions = np.tile(np.arange(2000), 20)
    seeds = np.repeat(np.arange(20), 2000)
    keys = np.concatenate([position_keys(seeds, positions, stream) for stream in Stream])
    assert len(np.unique(keys)) == len(keys) == 5 * 20 * 2000


# ------------------------------------------------------------------------------ the ends of (0, 1)


@pytest.mark.parametrize(("bits", "v"), [(0, 2.0**-53), ((1 << 52) - 1, 1 - 2.0**-53)])
def test_the_ends_are_never_reached(bits: int, v: float) -> None:
    """Neither 0 nor 1 can come out, so noise is always finite; rounding at the ends is exact."""
    for position, token_id in ((0, 0), (77, 149_999), (131_071, 5)):
        seed = seed_for(bits, position, token_id)
        positions, tokens = np.array([position]), np.array([token_id])
        assert units(seed, Stream.PICK, positions, tokens)[0, 0] == v
        keys = position_keys(np.array([seed]), positions).view(np.int64)
        by_torch = units_torch(torch.from_numpy(keys), torch.from_numpy(tokens))
        assert by_torch[0, 0].item() == v
        assert np.isfinite(gumbel(seed, positions, tokens)).all()


def test_gumbel_is_exact_at_both_ends() -> None:
    """-log(-log(1 - v)) to a few units in the last place, for the smallest and the largest v."""
    for bits in (0, 1, 2, 3, 1000, 1 << 20, 1 << 40, 1 << 51, (1 << 52) - 2, (1 << 52) - 1):
        v = Fraction(2 * bits + 1, 1 << 53)
        seed = seed_for(bits, 3, 8)
        value = gumbel(seed, np.array([3]), np.array([8]))[0, 0]
        # -log(1 - v) as v + v**2/2 + ... for small v; from 1 - v, exact in a float, for others.
        small = v + v * v / 2 + v * v * v / 3 + v**4 / 4
        exponential = float(small) if v < Fraction(1, 2**14) else -math.log1p(-float(v))
        assert value == pytest.approx(-math.log(exponential), rel=4e-15, abs=4e-15)


def test_gumbel_is_that_of_the_picks_unless_another_stream_is_asked_for() -> None:
    positions, tokens = np.arange(10), np.arange(10)
    of_picks = -np.log(-np.log1p(-units(4, Stream.PICK, positions, tokens)))
    np.testing.assert_array_equal(gumbel(4, positions, tokens), of_picks)
    of_drafts = -np.log(-np.log1p(-units(4, Stream.DRAFT, positions, tokens)))
    np.testing.assert_array_equal(gumbel(4, positions, tokens, Stream.DRAFT), of_drafts)


# -------------------------------------------------------------------------------------------- law


def draws(seed: int = 20, stream: Stream = Stream.PICK) -> np.ndarray:
    """A million: 1000 positions by 1000 tokens."""
    return units(seed, stream, np.arange(1000), np.arange(1000))


@pytest.mark.parametrize("stream", Stream)
def test_uniform(stream: Stream) -> None:
    v = draws(5, stream).ravel()
    assert stats.kstest(v, "uniform").pvalue > P_VALUE
    assert stats.chisquare(np.bincount((v * 1000).astype(int), minlength=1000)).pvalue > P_VALUE


def test_uniform_in_every_bit() -> None:
    """Each of the 52 bits is set half of the time, and the grid is the odd multiples of 2**-53."""
    bits = np.ldexp(draws(6).ravel(), 53).astype(np.int64)
    assert (bits & 1 == 1).all()
    bits >>= 1
    for place in range(52):
        num_set = int(((bits >> place) & 1).sum())
        # 6 standard deviations: 2e-9 a bit.
        assert abs(num_set - 500_000) < 6 * 500, place


def test_uniform_near_zero() -> None:
    """Small exponentials decide the race: they have their law, and all their digits."""
    v = np.concatenate([draws(seed).ravel() for seed in (70, 71, 72, 73)])
    for bound in (1e-2, 1e-3, 1e-4, 1e-5):
        inside = v[v < bound]
        expected = len(v) * bound
        assert 2 * stats.poisson.cdf(len(inside), expected) > P_VALUE
        assert 2 * stats.poisson.sf(len(inside) - 1, expected) > P_VALUE
        assert stats.kstest(inside / bound, "uniform").pvalue > P_VALUE
        assert len(np.unique(inside)) == len(inside)


def test_gumbel_law() -> None:
    noise_values = gumbel(8, np.arange(500), np.arange(1000)).ravel()
    assert stats.kstest(noise_values, "gumbel_r").pvalue > P_VALUE


def assert_independent(one: np.ndarray, other: np.ndarray, num_bins: int = 16) -> None:
    """Chi-square of the joint over a grid, and the correlation, of two uniform samples."""
    cells = (one * num_bins).astype(int) * num_bins + (other * num_bins).astype(int)
    counts = np.bincount(cells.ravel(), minlength=num_bins * num_bins)
    assert stats.chisquare(counts).pvalue > P_VALUE
    correlation = float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
    assert abs(correlation) < 5 / math.sqrt(one.size)  # 6e-7


def test_tokens_are_independent() -> None:
    v = draws(31)
    for distance in (1, 2, 64):
        assert_independent(v[:, :-distance], v[:, distance:])


def test_positions_are_independent() -> None:
    v = draws(32)
    for distance in (1, 2, 64):
        assert_independent(v[:-distance], v[distance:])
    assert_independent(v[:-1, 1:], v[1:, :-1])  # this token here, the one before it there
    assert_independent(v, v.T)


@pytest.mark.parametrize("distance", [1, 2, 3, 1 << 16, 1 << 32, 1 << 62])
def test_seeds_are_independent(distance: int) -> None:
    assert_independent(draws(33), draws(33 + distance))


def test_streams_are_independent() -> None:
    of = {stream: draws(34, stream) for stream in Stream}
    for one in Stream:
        for other in Stream:
            if one < other:
                assert_independent(of[one], of[other])


def test_independence_test_can_fail() -> None:
    """A key that adds where it should mix: a token's noise turns up again at the next position."""

    def weak(seed: int, position: int) -> np.ndarray:
        index = np.arange(position, position + 1000)
        return units(seed, Stream.PICK, np.array([0]), index)[0]

    v = np.stack([weak(1, position) for position in range(300)])
    assert stats.kstest(v[0], "uniform").pvalue > P_VALUE  # a row by itself looks right
    with pytest.raises(AssertionError):
        assert_independent(v[:-1, 1:], v[1:, :-1])


def test_module_names_its_grid() -> None:
    """What ``pick`` relies on: no noise is above 53 * log(2)."""
    assert -math.log(-math.log1p(-(0.5 * noise._TO_UNIT))) <= 53 * math.log(2)
