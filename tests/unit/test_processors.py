"""Processed logits: the fast cut against the sorted one, a plain one, and Transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.params import SamplingParams
from foredraft.sampling.processors import RowParams, cuts, cuts_by_sorting, probs
from tests.tiny import row_params

TEMPERATURES = (1e-5, 1e-4, 0.01, 0.3, 1.0, 2.0, 100.0, 1e6, 1e38, 1e300)
TOP_KS = (0, 1, 2, 3, 5, 10, 50, 200, 1_000_000)
TOP_PS = (1.0, 1 - 1e-9, 0.999999, 0.9, 0.5, 0.1, 1e-3, 1e-30)
MIN_PS = (0.0, 1e-300, 1e-9, 1e-3, 0.05, 0.5, 1.0)
SIGMAS = (0.0, 0.7, 1.3, 3.1, 1000.0)
TYPICAL_PS = (1.0, 0.9, 0.5, 0.1, 1e-3)


def some_logits(kind: str, num_rows: int, vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    shape = (num_rows, vocab_size)
    if kind == "normal":
        return rng.normal(0, 3, shape)
    if kind == "ties":
        return rng.integers(-4, 5, shape) / 2.0
    if kind == "equal":
        return np.repeat(rng.normal(0, 5, (num_rows, 1)), vocab_size, axis=1)
    if kind == "masked":
        logits = rng.normal(0, 3, shape)
        logits[rng.random(shape) < 0.7] = -np.inf
        logits[:, rng.integers(vocab_size)] = 0.5
        return logits
    if kind == "huge":
        return rng.choice([-6e4, 6e4, 0.0, 59999.0, -1.0], shape) + rng.normal(0, 1, shape)
    if kind == "widest":
        return rng.choice([-3e38, 3e38, 0.0, 1.0], shape)
    if kind == "peaked":
        logits = rng.normal(0, 0.01, shape)
        logits[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = 30.0
        return logits
    if kind == "bfloat16":
        rounded = torch.from_numpy(rng.normal(0, 3, shape)).to(torch.bfloat16)
        return rounded.double().numpy()
    raise ValueError(kind)


KINDS = ("normal", "ties", "equal", "masked", "huge", "widest", "peaked", "bfloat16")


def random_params(num_rows: int, rng: np.random.Generator) -> RowParams:
    """Each filter is off in a third of the rows, so that each is often alone."""
    is_off = rng.random((5, num_rows)) < 1 / 3
    return RowParams(
        rng.choice([0.0, *TEMPERATURES], num_rows),
        np.where(is_off[0], 0, rng.choice(TOP_KS, num_rows)).astype(np.int64),
        np.where(is_off[1], 1.0, rng.choice(TOP_PS, num_rows)),
        np.where(is_off[2], 0.0, rng.choice(MIN_PS, num_rows)),
        np.where(is_off[3], 0.0, rng.choice(SIGMAS, num_rows)),
        np.where(is_off[4], 1.0, rng.choice(TYPICAL_PS, num_rows)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fast_cut_is_the_sorted_one(kind: str) -> None:
    """Thousands of rows of every kind; bit for bit."""
    rng = np.random.default_rng(KINDS.index(kind))
    for vocab_size in (1, 2, 3, 7, 64, 301):
        logits = torch.from_numpy(some_logits(kind, 200, vocab_size, rng).astype(np.float32))
        params = random_params(200, rng)
        fast, slow = cuts(logits, params).numpy(), cuts_by_sorting(logits, params).numpy()
        np.testing.assert_array_equal(fast, slow)
        kept = logits.numpy() >= fast[:, None]
        assert (kept & (logits.numpy() > -np.inf)).any(axis=1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_fast_cut_is_the_sorted_one_in_a_large_vocabulary(kind: str) -> None:
    """Rows long enough for the short cuts of the fast form, which small ones never take."""
    rng = np.random.default_rng(100 + KINDS.index(kind))
    for vocab_size, num_rows in ((700, 40), (5_000, 40), (50_000, 6), (70_001, 8), (150_000, 3)):
        logits = torch.from_numpy(some_logits(kind, num_rows, vocab_size, rng).astype(np.float32))
        if kind == "normal":  # a far-out logit, as heads give now and then
            logits[::3, int(rng.integers(vocab_size))] = -1e4
        params = random_params(num_rows, rng)
        fast, slow = cuts(logits, params).numpy(), cuts_by_sorting(logits, params).numpy()
        np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("share_masked", [0.0, 0.4])
def test_many_ties_are_not_sorted(share_masked: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all logits of a long row tie, nothing is left to sort, and time is that of a scan."""
    rng = np.random.default_rng(5)
    num_rows, vocab_size = 12, 152_000
    line = np.full((num_rows, vocab_size), 1.5, dtype=np.float32)
    line[rng.random(line.shape) < share_masked] = -np.inf
    line[6:, ::2] = 0.25
    logits = torch.from_numpy(line)
    for params in (
        row_params(top_k=40, num=num_rows),
        row_params(top_k=120_000, num=num_rows),
        row_params(top_p=0.9, num=num_rows),
        row_params(top_k=50_000, top_p=0.5, min_p=0.1, num=num_rows),
    ):
        fast, slow = cuts(logits, params).numpy(), cuts_by_sorting(logits, params).numpy()
        np.testing.assert_array_equal(fast, slow)
    # What is sorted is never longer than the handful that the bound names.
    longest = []

    def recording(row: np.ndarray, members: np.ndarray) -> np.ndarray:
        longest.append(len(members))
        return members[np.argsort(-row[members], kind="mergesort")]

    from foredraft.sampling import processors

    for name in ("_descending", "_finite_span", "_bucket", "_reaches", "_boundary"):
        function = getattr(processors, name)
        monkeypatch.setattr(processors, name, getattr(function, "py_func", function))
    monkeypatch.setattr(processors, "_descending", recording)
    small = line[:, :3000]
    for row in (small[0], small[6]):
        everyone = np.arange(row.size)
        processors._boundary(row, everyone, np.ones(row.size), 700.0)
    assert max(longest, default=0) <= processors._SORT_BELOW


def plain_kept(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, bool]:
    """Kept tokens by the words of ``SamplingParams``, in float64; and whether rounding may decide.

    Temperature, then top-k, then top-p over the mass that top-k kept, then min-p; ties stay.
    """
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / temperature
    likelihood = np.exp(scaled)
    kept = np.ones(len(logits), dtype=bool)
    is_close = False
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        total = likelihood[kept].sum()
        for value in np.unique(logits[kept])[::-1]:
            before = likelihood[kept & (logits > value)].sum() / total
            is_close |= abs(before - top_p) < 1e-5
            if not before < top_p:
                kept &= logits > value
                break
    if min_p > 0:
        is_close |= bool((np.abs(likelihood - min_p) < 1e-9 * min_p).any()) and min_p < 1
        kept &= likelihood >= min_p
    return kept, is_close


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "masked", "huge", "peaked"])
def test_kept_tokens_are_those_of_a_plain_form(kind: str) -> None:
    rng = np.random.default_rng(10 + KINDS.index(kind))
    num_close = num_filtered = 0
    for _ in range(400):
        vocab_size = int(rng.integers(1, 40))
        logits = some_logits(kind, 1, vocab_size, rng).astype(np.float32)
        options = (
            float(rng.choice([0.01, 0.3, 1.0, 2.0, 100.0])),
            int(rng.choice(TOP_KS)),
            float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-3])),
            float(rng.choice([0.0, 1e-3, 0.05, 0.5, 1.0])),
        )
        kept, is_close = plain_kept(logits[0].astype(np.float64), *options)
        if is_close:
            num_close += 1
            continue
        params = row_params(*options)
        cut = cuts(torch.from_numpy(logits), params).numpy()
        np.testing.assert_array_equal(logits[0] >= cut[0], kept)
        law = probs(torch.from_numpy(logits), params).numpy()[0]
        expected = np.where(kept, np.exp((logits[0] - logits.max()) / np.float64(options[0])), 0.0)
        np.testing.assert_allclose(law, expected / expected.sum(), rtol=1e-5, atol=1e-7)
        num_filtered += not kept.all()
    assert num_close < 40
    assert num_filtered > 100 or kind in ("equal", "peaked")


def test_kept_tokens_are_those_of_transformers() -> None:
    """Where no two logits are equal, ties do not matter, and the filters' order is the same."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = np.random.default_rng(77)
    num_checked = 0
    for number in range(1500):
        vocab_size = int(rng.integers(2, 200))
        logits = rng.normal(0, 3, (1, vocab_size)).astype(np.float32)
        assert len(np.unique(logits)) == vocab_size
        temperature = float(rng.choice([0.3, 1.0, 2.0, 10.0]))
        top_k = int(rng.choice([0, 1, 2, 5, 20, 500]))
        top_p = float(rng.choice([1.0, 0.95, 0.7, 0.3, 0.01]))
        min_p = float(rng.choice([0.0, 0.01, 0.1, 0.6, 1.0]))
        _, is_close = plain_kept(logits[0].astype(np.float64), temperature, top_k, top_p, min_p)
        if is_close or (number % 3 and min_p == 1.0):
            continue
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            # Theirs compares rounded probabilities: 1 itself may fall below 1 times itself.
            warpers.append(MinPLogitsWarper(min_p if min_p < 1 else 1 - 1e-6))
        theirs = warpers(None, torch.from_numpy(logits))
        ours = probs(torch.from_numpy(logits), row_params(temperature, top_k, top_p, min_p))
        assert ((ours > 0) == torch.isfinite(theirs)).all()
        torch.testing.assert_close(ours, torch.softmax(theirs.float(), -1), rtol=2e-5, atol=1e-7)
        num_checked += 1
    assert num_checked > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_probs_are_laws(kind: str) -> None:
    rng = np.random.default_rng(20 + KINDS.index(kind))
    logits = torch.from_numpy(some_logits(kind, 300, 23, rng).astype(np.float32))
    params = random_params(300, rng)
    before = logits.clone()
    law = probs(logits, params)
    assert torch.equal(logits, before)
    assert law.dtype == torch.float32 and law.shape == logits.shape
    assert torch.isfinite(law).all() and (law >= 0).all()
    torch.testing.assert_close(law.double().sum(-1), torch.ones(300, dtype=torch.float64))
    is_greedy = params.temperature == 0
    assert is_greedy.any()
    first = np.argmax(logits.numpy(), axis=1)  # numpy's argmax is the first of equal ones
    for row in np.nonzero(is_greedy)[0]:
        assert law[row, first[row]] == 1 and law[row].sum() == 1
    assert (cuts(logits, params).numpy()[is_greedy] == -np.inf).all()


def test_ties_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (row_params(top_k=2), row_params(top_p=0.5), row_params(min_p=0.3)):
        kept = (probs(logits, params)[0] > 0).tolist()
        assert kept == [True, True, True, True, False]


def test_rows_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(some_logits("normal", 40, 31, rng).astype(np.float32))
    params = random_params(40, rng)
    together, law = cuts(logits, params), probs(logits, params)
    for row in range(40):
        alone = params.rows(np.array([row]))
        assert cuts(logits[row : row + 1], alone)[0] == together[row]
        assert torch.equal(probs(logits[row : row + 1], alone)[0], law[row])


def test_top_p_is_over_the_mass_that_top_k_kept() -> None:
    """Of 0.4, 0.3, 0.2, 0.1, top-k 2 keeps 0.4 and 0.3, whose shares are 4/7 and 3/7."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = {
        top_p: int((probs(logits, row_params(top_k=2, top_p=top_p)) > 0).sum())
        for top_p in (0.5, 0.57, 0.58, 0.7)
    }
    assert kept == {0.5: 1, 0.57: 1, 0.58: 2, 0.7: 2}


def test_temperature_comes_before_the_filters() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    assert int((probs(logits, row_params(1.0, min_p=0.4)) > 0).sum()) == 2
    assert int((probs(logits, row_params(0.5, min_p=0.4)) > 0).sum()) == 1  # 0.25 of the first
    assert int((probs(logits, row_params(1.0, top_p=0.62)) > 0).sum()) == 2
    assert int((probs(logits, row_params(0.5, top_p=0.62)) > 0).sum()) == 1


def test_row_params_of_requests() -> None:
    params = RowParams.of(
        [
            SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1),
            SamplingParams(temperature=1e-6, top_k=4),
            SamplingParams(temperature=2, top_k=2**70),
        ],
        np.array([2, 0, 1]),
    )
    assert params.temperature.tolist() == [0.7, 0.7, 2.0]
    assert params.top_k.tolist()[:2] == [3, 3] and params.top_k[2] > 10**9
    assert params.top_p.tolist() == [0.5, 0.5, 1.0]
    assert params.min_p.tolist() == [0.1, 0.1, 0.0]
    greedy = RowParams.of([SamplingParams(temperature=9.9e-6)], np.array([1]))
    assert greedy.temperature.tolist() == [0.0]  # below 1e-5 counts as 0
    assert RowParams.of([SamplingParams(temperature=1e-5)], np.array([1])).temperature[0] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
def test_cuda_keeps_the_same_tokens() -> None:
    rng = np.random.default_rng(4)
    for kind in ("normal", "ties", "masked"):
        logits = torch.from_numpy(some_logits(kind, 100, 50, rng).astype(np.float32))
        params = random_params(100, rng)
        on_device = cuts(logits.cuda(), params).cpu()
        assert (on_device == cuts(logits, params)).float().mean() > 0.97  # but for the last bit


def test_typical_and_sigma_by_their_words() -> None:
    """On rows without equal logits: Transformers' typical-p, and a plain count of deviations."""
    from transformers import TypicalLogitsWarper

    rng = np.random.default_rng(78)
    num_filtered = num_close = 0
    for _ in range(600):
        vocab_size = int(rng.integers(2, 200))
        logits = torch.from_numpy(rng.normal(0, 3, (1, vocab_size)).astype(np.float32))
        temperature = float(rng.choice([0.3, 1.0, 2.0]))
        sigma = float(rng.choice([0.0, 0.7, 1.3, 3.1]))
        typical = float(rng.choice([1.0, 0.95, 0.6, 0.2]))
        params = row_params(temperature, top_n_sigma=sigma, typical_p=typical)
        law = probs(logits, params)[0].numpy()
        row = logits[0].double().numpy()
        scaled = row / temperature
        if sigma:
            scaled[row < row.max() - sigma * row.std()] = -np.inf
        scores = torch.from_numpy(scaled[None])
        if typical < 1:
            scores = TypicalLogitsWarper(mass=typical)(None, scores)
        expected = torch.softmax(scores, dim=-1)[0].numpy()
        if not np.array_equal(law > 0, expected > 1e-45):
            num_close += 1  # a distance or a mass at the very edge
            continue
        np.testing.assert_allclose(law, expected, rtol=1e-5, atol=1e-7)
        num_filtered += bool((law == 0).any())
    assert num_close <= 3
    assert num_filtered > 300


def test_typical_keeps_ties_whatever_their_order() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]])
    params = row_params(typical_p=0.2)
    kept = probs(logits, params)[0] > 0
    for order in ([3, 2, 1, 0, 4], [4, 1, 0, 3, 2]):
        again = probs(logits[:, order], params)[0] > 0
        assert torch.equal(kept[order], again)
    assert len(set(kept[1:4].tolist())) == 1
