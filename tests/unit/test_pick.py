"""The target's own token: fast against slow, and its law.

Statistical tests have fixed seeds: they pass always or never. ``P_VALUE`` is what a fresh seed
would fail by chance; there are about forty checks in this file, so 4e-5 for the whole file.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.sampling.noise import gumbel
from foredraft.sampling.pick import _pick_torch, pick, pick_slowly
from foredraft.sampling.processors import RowParams, probs
from tests.tiny import row_params, seed_for

P_VALUE = 1e-6
TEMPERATURES = (0.0, 1e-6, 1e-5, 0.01, 0.3, 1.0, 2.0, 100.0)


def some_logits(num_rows: int, vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of every kind in turn: spread, tied, equal, masked, huge, peaked, one with -0.0."""
    logits = rng.normal(0, 3, (num_rows, vocab_size))
    for row in range(num_rows):
        kind = row % 7
        if kind == 1:
            logits[row] = rng.integers(-3, 4, vocab_size)
        elif kind == 2:
            logits[row] = rng.normal()
        elif kind == 3:
            logits[row, rng.random(vocab_size) < 0.8] = -np.inf
            logits[row, rng.integers(vocab_size)] = 1.0
        elif kind == 4:
            logits[row] = rng.choice([-6e4, 6e4, 59999.5], vocab_size)
        elif kind == 5:
            logits[row, rng.integers(vocab_size)] = 25.0
        elif kind == 6:
            logits[row] = rng.choice([-0.0, 0.0], vocab_size)
    return logits.astype(np.float32)


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def some_params(num_rows: int, rng: np.random.Generator, is_filtered: bool) -> RowParams:
    temperature = rng.choice(TEMPERATURES, num_rows)
    temperature[temperature < 1e-5] = 0.0  # as RowParams.of does
    params = row_params(num=num_rows)
    if is_filtered:
        params = RowParams(
            temperature,
            rng.choice([0, 1, 5, 50], num_rows).astype(np.int64),
            rng.choice([1.0, 0.9, 0.2], num_rows),
            rng.choice([0.0, 0.01, 0.5], num_rows),
            rng.choice([0.0, 1.0, 3.0], num_rows),
            rng.choice([1.0, 0.9, 0.3], num_rows),
        )
    return dataclasses.replace(params, temperature=temperature)


@pytest.mark.parametrize("is_filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [(1, 70), (2, 700), (3, 700), (9, 700), (160, 280), (2000, 140), (49_152, 14), (150_001, 7)],
)
def test_fast_pick_is_the_slow_one(vocab_size: int, num_rows: int, is_filtered: bool) -> None:
    """The screened race, the whole noise vector, and the torch form that other devices run."""
    rng = np.random.default_rng(vocab_size + is_filtered)
    logits = some_logits(num_rows, vocab_size, rng)
    params = some_params(num_rows, rng, is_filtered)
    seeds = rng.integers(0, 2**63, num_rows)
    positions = rng.integers(1, 1 << 17, num_rows)
    slow = pick_slowly(logits, params, seeds, positions)
    fast = pick(torch.from_numpy(logits), params, seeds, positions)
    with threads(2):  # the larger of these batches go to the parallel kernels
        in_parallel = pick(torch.from_numpy(logits), params, seeds, positions)
    by_torch = _pick_torch(torch.from_numpy(logits), params, seeds, positions)
    for picks in (fast, in_parallel, by_torch):
        assert picks.is_finite.all()
        np.testing.assert_array_equal(picks.token_ids, slow)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
def test_cuda_picks_the_same() -> None:
    rng = np.random.default_rng(1)
    logits = some_logits(140, 5000, rng)
    params = some_params(140, rng, False)
    seeds, positions = rng.integers(0, 2**63, 140), rng.integers(1, 1 << 17, 140)
    picks = pick(torch.from_numpy(logits).cuda(), params, seeds, positions)
    np.testing.assert_array_equal(picks.token_ids, pick_slowly(logits, params, seeds, positions))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [5.0, 5.0, 5.0]])
    for params in (row_params(0.0, num=4), row_params(0.0, top_k=1, top_p=0.1, num=4)):
        for form in (pick, _pick_torch):
            picks = form(logits, params, np.zeros(4, np.int64), np.arange(4))
            assert picks.token_ids.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_do_not_touch_each_other(num_threads: int) -> None:
    """Order, neighbours and batch size do not matter, with and without the parallel kernels."""
    with threads(num_threads):
        check_rows_alone()


def check_rows_alone() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(some_logits(140, 700, rng))
    assert logits.numel() >= 1 << 16
    for kind in ("whole", "filtered", "greedy"):
        params = some_params(140, rng, kind == "filtered")
        if kind == "greedy":
            params = row_params(0.0, num=140)
        seeds, positions = rng.integers(0, 2**63, 140), rng.integers(1, 1000, 140)
        together = pick(logits, params, seeds, positions).token_ids
        order = rng.permutation(140)
        shuffled = pick(
            logits[torch.from_numpy(order)], params.rows(order), seeds[order], positions[order]
        )
        np.testing.assert_array_equal(shuffled.token_ids, together[order])
        for row in range(140):
            one = slice(row, row + 1)
            alone = pick(logits[one], params.rows(one), seeds[one], positions[one])
            assert alone.token_ids[0] == together[row]


BAD = {
    "nan": lambda row: row.__setitem__(3, np.nan),
    "first nan": lambda row: row.__setitem__(0, np.nan),
    "last nan": lambda row: row.__setitem__(-1, np.nan),
    "inf": lambda row: row.__setitem__(3, np.inf),
    "first inf": lambda row: row.__setitem__(0, np.inf),
    "inf and nan": lambda row: row.__setitem__(slice(2, 4), [np.inf, np.nan]),
    "all nan": lambda row: row.fill(np.nan),
    "all -inf": lambda row: row.fill(-np.inf),
    "all inf": lambda row: row.fill(np.inf),
}


@pytest.mark.parametrize("form", [pick, _pick_torch], ids=["fast", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, "mixed"])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("bad", BAD)
def test_bad_rows_are_marked_and_others_are_not_touched(
    bad: str, top_k: int, temperature: float | str, form: Callable
) -> None:
    rng = np.random.default_rng(0)
    good = rng.normal(size=(8, 7)).astype(np.float32)
    good[6, :3] = -np.inf  # masked tokens are no fault
    temperatures = np.array([0, 1.0] * 4) if temperature == "mixed" else np.full(8, temperature)
    filters = row_params(top_k=top_k, num=8)
    params = dataclasses.replace(filters, temperature=temperatures.astype(float))
    seeds, positions = np.arange(8), np.arange(8) + 100
    expected = form(torch.from_numpy(good), params, seeds, positions)
    assert expected.is_finite.all()
    mixed = good.copy()
    for row in (0, 3, 7):
        BAD[bad](mixed[row])
    picks = form(torch.from_numpy(mixed), params, seeds, positions)
    assert picks.is_finite.tolist() == [False, True, True, False, True, True, True, False]
    np.testing.assert_array_equal(
        picks.token_ids[picks.is_finite], expected.token_ids[picks.is_finite]
    )


def test_masked_tokens_are_never_picked() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4000, 12)).astype(np.float32)
    logits[:, ::2] = -np.inf
    for temperature in (0.0, 1.0, 1e6, 1e300):
        params = row_params(temperature, top_k=9, num=4000)
        picks = pick(torch.from_numpy(logits), params, np.arange(4000), np.arange(4000))
        assert picks.is_finite.all() and (picks.token_ids % 2 == 1).all()


@pytest.mark.parametrize("behind", [0.001, 0.3, 1.0, 4.0, 5.99, 6.0, 20.0, 33.0, 35.9])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_screen_lets_every_winner_through(behind: float, temperature: float) -> None:
    """A token far behind, with noise made to be just enough, or just not.

    The leader's noise is what it is; the other token's seed is found so that its ``v`` lies on
    either side of where it takes the lead.
    """
    position, token_id, num_checked = 9, 2, [0, 0]
    for number in range(40):
        # Aim at noise of `behind` and a little more or less; which side it falls on is computed.
        v = -math.expm1(-math.exp(-behind * (1 + (number - 20) * 0.002)))
        seed = seed_for(int(v * 2**52), position, token_id)
        noise = gumbel(seed, np.array([position]), np.arange(3))[0]
        logits = np.array([[0.0, -1e30, -temperature * (behind - noise[0])]], dtype=np.float32)
        params = row_params(temperature)
        seeds, positions = np.array([seed]), np.array([position])
        slow = pick_slowly(logits, params, seeds, positions)[0]
        fast = pick(torch.from_numpy(logits), params, seeds, positions).token_ids[0]
        assert fast == slow
        num_checked[int(slow == token_id)] += 1
    assert min(num_checked) > 5 or behind < 0.1


def test_the_strongest_noise_wins_from_furthest_behind() -> None:
    """v = 2**-53 gives 36.74: a token 36 behind the leader wins, one 38 behind does not."""
    seed = seed_for(0, 4, 1)
    own = gumbel(seed, np.array([4]), np.array([0]))[0, 0]
    for distance, winner in ((36.0, 1), (36.7, 1), (36.8, 0), (38.0, 0)):
        logits = np.array([[0.0, own - distance]], dtype=np.float32)
        picks = pick(torch.from_numpy(logits), row_params(), np.array([seed]), np.array([4]))
        slow = pick_slowly(logits, row_params(), np.array([seed]), np.array([4]))
        assert picks.token_ids[0] == slow[0] == winner


# -------------------------------------------------------------------------------------------- law

Picker = Callable[[np.ndarray, RowParams, np.ndarray, np.ndarray], np.ndarray]


def fast(
    logits: np.ndarray, params: RowParams, seeds: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    return pick(torch.from_numpy(logits), params, seeds, positions).token_ids


def picks_of(
    logits: np.ndarray,
    num: int,
    over: str,
    picker: Picker = fast,
    seed: int = 3,
    **options: float,
) -> np.ndarray:
    """``num`` picks of one row of logits, over positions or over seeds."""
    rows = np.ascontiguousarray(np.broadcast_to(logits.astype(np.float32), (num, len(logits))))
    places = np.arange(num)
    same = np.full(num, seed)
    seeds, positions = (same, places) if over == "positions" else (seed + places, same)
    return picker(rows, row_params(num=num, **options), seeds, positions)


def p_value(picks: np.ndarray, law: np.ndarray) -> float:
    """Chi-square; tokens of probability zero must not occur."""
    counts = np.bincount(picks, minlength=len(law))
    assert counts[law == 0].sum() == 0
    law = law.astype(np.float64)
    expected = law / law.sum() * len(picks)
    is_large = expected >= 5
    observed = [*counts[is_large], counts[~is_large].sum()]
    wanted = [*expected[is_large], expected[~is_large].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted).pvalue)


LAWS = [
    ({"temperature": 1.0}, "positions"),
    ({"temperature": 1.0}, "seeds"),
    ({"temperature": 0.3}, "positions"),
    ({"temperature": 2.0}, "seeds"),
    ({"temperature": 100.0}, "positions"),
    ({"temperature": 0.01}, "seeds"),
    ({"temperature": 1.0, "top_k": 5}, "positions"),
    ({"temperature": 1.5, "top_p": 0.8}, "seeds"),
    ({"temperature": 0.8, "min_p": 0.1}, "positions"),
    ({"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02}, "positions"),
]


@pytest.mark.parametrize(("options", "over"), LAWS, ids=str)
def test_law_of_a_pick(options: dict[str, float], over: str) -> None:
    rng = np.random.default_rng(17)
    logits = rng.normal(0, 2, 30)
    logits[4] = logits[9]
    law = probs(torch.from_numpy(logits[None].astype(np.float32)), row_params(**options))[0]
    assert p_value(picks_of(logits, 100_000, over, **options), law.numpy()) > P_VALUE


def test_law_test_can_fail() -> None:
    """A law 2 percent off in one of eight tokens is caught with as many draws."""
    logits = np.random.default_rng(1).normal(0, 1, 8)
    law = np.exp(logits) / np.exp(logits).sum()
    picks = picks_of(logits, 100_000, "positions", temperature=1.0)
    assert p_value(picks, law) > P_VALUE
    shifted = law.copy()
    shifted[[0, 1]] += [0.02, -0.02]
    assert p_value(picks, shifted) < P_VALUE
    wrong = picks_of(logits, 100_000, "positions", temperature=1.05)
    assert p_value(wrong, law) < P_VALUE


@pytest.mark.parametrize("rare", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_rare_token(rare: float, over: str) -> None:
    num = 1_000_000
    logits = np.log(np.array([rare, 0.7 - rare, 0.3]))
    hits = int((picks_of(logits, num, over, seed=12, temperature=1.0) == 0).sum())
    test = stats.binomtest(hits, num, float(np.exp(np.float32(logits[0]))))
    assert test.pvalue > P_VALUE, hits


TAIL = 4096


def tail_p_value(picker: Picker, mass: float, num: int = 30_000) -> float:
    """How often does one of 4096 equally unlikely tokens win? Together they have ``mass``."""
    logits = np.full(1 + TAIL, math.log(mass / TAIL), dtype=np.float32)
    logits[0] = math.log1p(-mass)
    rows = np.ascontiguousarray(np.broadcast_to(logits, (num // 10, 1 + TAIL)))
    params = row_params(num=len(rows))
    hits = 0
    for part in range(10):
        places = np.arange(len(rows)) + part * len(rows)
        hits += int((picker(rows, params, np.full(len(rows), 5), places) > 0).sum())
    return float(stats.binomtest(hits, num, mass).pvalue)


@pytest.mark.parametrize("mass", [1e-2, 1e-3, 4e-6])
def test_rare_tokens_in_a_long_tail(mass: float) -> None:
    """Many tokens of probability 2e-6 down to 1e-9: only the finest of the noise decides."""
    assert tail_p_value(fast, mass) > P_VALUE


def float32_race(
    logits: np.ndarray, params: RowParams, seeds: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """A mutant: exponentials as -log(1 - u) of 24-bit uniforms, as ``torch.rand`` makes them."""
    rng = np.random.default_rng(int(positions[0]))
    u = rng.random(logits.shape, dtype=np.float32)
    with np.errstate(divide="ignore"):
        noise = -np.log(-np.log(np.float32(1) - u))
    return np.argmax(logits + noise, axis=1)


def test_rare_token_test_catches_coarse_noise() -> None:
    """24 bits: a uniform of exactly 0 lets any token win, 1 in 17 million times each."""
    assert tail_p_value(float32_race, 4e-6) < P_VALUE


def coarse_race(
    logits: np.ndarray, params: RowParams, seeds: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """A mutant: ``v`` from 16 bits, half a step off zero, so that nothing is ever infinite."""
    rng = np.random.default_rng(int(positions[0]))
    v = (rng.integers(0, 1 << 16, logits.shape, dtype=np.uint16) + 0.5) * 2.0**-16
    return np.argmax(logits - np.log(-np.log1p(-v)), axis=1)


def test_rare_token_test_catches_a_coarse_grid() -> None:
    assert tail_p_value(coarse_race, 1e-2, 10_000) < P_VALUE


def test_consecutive_picks_are_independent() -> None:
    """Joint law of the picks at neighbouring positions, and of the same position's two seeds."""
    logits = np.log(np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03]))
    law = np.exp(logits.astype(np.float32).astype(np.float64))
    joint = np.outer(law, law).ravel()
    picks = picks_of(logits, 200_001, "positions", seed=40, temperature=1.0)
    for distance in (1, 2, 5):
        assert p_value(picks[:-distance] * 6 + picks[distance:], joint) > P_VALUE
    for seed in (41, 40 + (1 << 32)):
        other = picks_of(logits, 200_001, "positions", seed=seed, temperature=1.0)
        assert p_value(picks * 6 + other, joint) > P_VALUE
    assert p_value(picks[:-1] * 6 + picks[:-1], joint) < P_VALUE  # the test can fail


def test_noise_follows_the_absolute_position() -> None:
    """The pick at a position is the same in whatever row it stands; other positions differ."""
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32)
    rows = torch.from_numpy(np.tile(logits, (50, 1)))
    positions = np.arange(50) + 7
    picks = pick(rows, row_params(num=50), np.full(50, 3), positions).token_ids
    assert len(set(picks.tolist())) > 10
    again = pick(rows, row_params(num=50), np.full(50, 3), positions[::-1].copy()).token_ids
    np.testing.assert_array_equal(again, picks[::-1])


def test_threads_stay_as_they_were_chosen() -> None:
    """Picking in parallel starts numba's threads, which must not change how many PyTorch uses."""
    program = """
import os
import numpy as np, torch
from foredraft.sampling.pick import pick
from foredraft.sampling.processors import RowParams
logits, zeros = torch.randn(4, 50_000), np.zeros(4)
for num_threads in (1, 1 + os.cpu_count(), 2, 1, 3):
    torch.set_num_threads(num_threads)
    for temperature in (0.0, 1.0):
        ones = zeros + 1
        params = RowParams(ones * temperature, zeros.astype(np.int64), ones, zeros, zeros, ones)
        pick(logits, params, np.arange(4), np.arange(4))
        assert torch.get_num_threads() == num_threads, torch.get_num_threads()
print("the same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "the same", done.stderr[-2000:]
