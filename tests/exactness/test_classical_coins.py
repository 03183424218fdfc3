"""The fast classical rules decide as the reference does, coin for coin, and never break.

Random drafts of every shape, many of them impossible or degenerate, are verified by both with the
same coins: path and token must be equal. Together with ``test_classical_rules.py``, where the law
of the reference is enumerated, this makes the fast rules exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.verify.block import block
from foredraft.verify.coins import Coins
from foredraft.verify.reference import (
    CoinChooser,
    block_reference,
    inverse_cdf_reference,
    rejection_reference,
    traversal_reference,
)
from foredraft.verify.rejection import rejection
from foredraft.verify.residual import draw_token
from foredraft.verify.traversal import traversal

NUM_INSTANCES = 5000
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Instance:
    """What a rule takes, for one request in one step."""

    token_ids: np.ndarray
    parents: np.ndarray
    target_probs: Any
    draft_probs: Any
    dist_ids: np.ndarray | None
    coins: Coins
    with_replacement: bool

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.token_ids,
            self.parents,
            self.target_probs,
            self.draft_probs,
            self.dist_ids,
        )


Verdict = tuple[tuple[int, ...], int]


def run_rejection(case: Instance) -> Verdict:
    return rejection(*case.arguments(), case.coins, with_replacement=case.with_replacement)


def run_traversal(case: Instance) -> Verdict:
    return traversal(*case.arguments(), case.coins, with_replacement=case.with_replacement)


def run_block(case: Instance) -> Verdict:
    return block(*case.arguments(), case.coins)


def slow_rejection(case: Instance) -> Verdict:
    chooser = CoinChooser(case.coins)
    return rejection_reference(*case.arguments(), chooser, with_replacement=case.with_replacement)


def slow_traversal(case: Instance) -> Verdict:
    chooser = CoinChooser(case.coins)
    return traversal_reference(*case.arguments(), chooser, with_replacement=case.with_replacement)


def slow_block(case: Instance) -> Verdict:
    return block_reference(*case.arguments(), CoinChooser(case.coins))


RULES = {
    "rejection": (run_rejection, slow_rejection),
    "block": (run_block, slow_block),
    "traversal": (run_traversal, slow_traversal),
}
EVERY_RULE = pytest.mark.parametrize(
    ("name", "fast", "slow"), [(name, *pair) for name, pair in RULES.items()], ids=RULES
)

# -------------------------------------------------------------------------------------- instances


def random_law(rng: np.random.Generator, vocab_size: int, like: np.ndarray | None) -> np.ndarray:
    kind = rng.integers(9)
    if kind == 0:
        return np.eye(vocab_size)[rng.integers(vocab_size)]
    if kind == 1 and like is not None:  # the same law
        return like.copy()
    if kind == 2 and like is not None and (like == 0).any():  # disjoint supports
        law = (like == 0).astype(float)
        return law / law.sum()
    logits = rng.normal(size=vocab_size) * rng.choice([0.3, 1.5, 5.0])
    if kind == 3:  # temperature near 0
        logits /= 0.01
    weights = np.exp(logits - logits.max())
    if kind >= 6:  # zeros
        weights *= rng.random(vocab_size) < 0.5
        if not weights.any():
            weights[rng.integers(vocab_size)] = 1.0
    if kind == 5 and like is not None:  # close to the other law
        weights = like + 1e-3 * weights / weights.sum()
    return weights / weights.sum()


def random_coins(rng: np.random.Generator, num_rows: int) -> Coins:
    accept = rng.random(num_rows)
    if rng.random() < 0.1:
        accept[rng.random(num_rows) < 0.5] = rng.choice([0.0, JUST_BELOW_ONE])
    recover, bonus = rng.random(2)
    if rng.random() < 0.1:
        recover, bonus = rng.choice([0.0, JUST_BELOW_ONE], size=2)
    return Coins(accept=accept, recover=float(recover), bonus=float(bonus))


def random_instance(rng: np.random.Generator, is_chain: bool) -> Instance:
    vocab_size = int(rng.integers(2, 8))
    num_nodes = int(rng.integers(0, 10))
    with_replacement = bool(rng.random() < 0.5) and not is_chain
    chosen_rate = rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])
    span = rng.choice([1, 2, 10])  # how far back a parent may lie: deep to wide
    target_probs = [random_law(rng, vocab_size, None)]
    draft_probs: list[np.ndarray] = []
    dists: dict[int, int] = {}
    left: dict[int, np.ndarray] = {}
    token_ids, parents, dist_ids = [], [], []
    for node in range(1, num_nodes + 1):
        parent = node - 1 if is_chain else int(rng.integers(max(0, node - span), node))
        if rng.random() < chosen_rate:
            dist_id, token = -1, int(rng.integers(vocab_size))
        else:
            if parent not in dists or rng.random() < 0.1:
                dists[parent] = len(draft_probs)
                draft_probs.append(random_law(rng, vocab_size, target_probs[parent]))
                left[dists[parent]] = draft_probs[-1].copy()
            dist_id = dists[parent]
            law = left[dist_id]
            if law.sum() > 0 and rng.random() < 0.95:
                token = int(rng.choice(vocab_size, p=law / law.sum()))
            else:  # padding, or a token that was not drawn from this law
                token = int(rng.integers(vocab_size))
            if not with_replacement:
                law[token] = 0.0
        token_ids.append(token)
        parents.append(parent)
        dist_ids.append(dist_id)
        target_probs.append(random_law(rng, vocab_size, None))
    if rng.random() < 0.2 and draft_probs:  # the target equals a draft law somewhere
        drawn = [k for k in range(num_nodes) if dist_ids[k] >= 0]
        k = drawn[int(rng.integers(len(drawn)))] if drawn else None
        if k is not None:
            target_probs[parents[k]] = draft_probs[dist_ids[k]].copy()
    return Instance(
        np.array(token_ids, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(target_probs),
        np.array(draft_probs) if draft_probs else None,
        np.array(dist_ids, dtype=np.int64),
        random_coins(rng, num_nodes + 1),
        with_replacement,
    )


def as_tables(case: Instance, convert: Callable[[np.ndarray], Any]) -> Instance:
    draft_probs = None if case.draft_probs is None else convert(case.draft_probs)
    return replace(case, target_probs=convert(case.target_probs), draft_probs=draft_probs)


@EVERY_RULE
def test_equals_the_reference(name: str, fast: Any, slow: Any) -> None:
    rng = np.random.default_rng(1)
    lengths = []
    for number in range(NUM_INSTANCES):
        case = random_instance(rng, is_chain=name == "block" or number % 4 == 0)
        verdict = fast(case)
        assert verdict == slow(case), number
        lengths.append(len(verdict[0]))
    assert np.bincount(lengths, minlength=5)[:5].min() > 20  # paths of every length were seen


@EVERY_RULE
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_reference_on_tensors(
    name: str, fast: Any, slow: Any, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(2)
    for number in range(600):
        case = random_instance(rng, is_chain=name == "block")
        case = as_tables(case, lambda table: torch.from_numpy(table).to(dtype))
        case.token_ids.flags.writeable = case.parents.flags.writeable = False
        before = case.target_probs.clone()
        assert fast(case) == slow(as_tables(case, lambda table: table.double().numpy())), number
        assert torch.equal(case.target_probs, before)


@EVERY_RULE
def test_equals_the_reference_on_float32_arrays(name: str, fast: Any, slow: Any) -> None:
    rng = np.random.default_rng(3)
    for number in range(600):
        case = random_instance(rng, is_chain=name == "block")
        case = as_tables(case, lambda table: table.astype(np.float32))
        before = case.target_probs.copy()
        assert fast(case) == slow(case), number
        assert np.array_equal(case.target_probs, before)


def test_block_is_traversal_on_a_chain_coin_for_coin() -> None:
    rng = np.random.default_rng(4)
    for number in range(2000):
        case = random_instance(rng, is_chain=True)
        assert run_block(case) == run_traversal(case), number


@EVERY_RULE
def test_no_draft_probs_means_all_chosen(name: str, fast: Any, slow: Any) -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        case = random_instance(rng, is_chain=name == "block")
        chosen = replace(case, draft_probs=None, dist_ids=np.full(len(case.token_ids), -1))
        assert fast(replace(chosen, dist_ids=None)) == fast(chosen) == slow(chosen)


# ----------------------------------------------------------------------------- plain expectations

TARGET = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
DRAFT = np.array([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])


def coins(accept: list[float], recover: float = 0.5, bonus: float = 0.5) -> Coins:
    return Coins(accept=np.array([0.0, *accept]), recover=recover, bonus=bonus)


def chain(token_ids: list[int], uniforms: Coins) -> Instance:
    num = len(token_ids)
    ids = np.array(token_ids, dtype=np.int64)
    return Instance(ids, np.arange(num), TARGET, DRAFT, np.arange(num), uniforms, False)


def test_rejection_by_hand() -> None:
    # Token 2 at the root: target 0.2, draft 0.5, so accepted below 0.4; the residual is
    # (0.25, 0.05, 0) / 0.3, token 0 below 5/6. Token 0 next: 0.1 / 0.5, accepted below 0.2.
    assert run_rejection(chain([2, 0], coins([0.41, 0.0], recover=0.83))) == ((), 0)
    assert run_rejection(chain([2, 0], coins([0.41, 0.0], recover=0.84))) == ((), 1)
    assert run_rejection(chain([2, 0], coins([0.39, 0.21], recover=0.53))) == ((1,), 1)
    assert run_rejection(chain([2, 0], coins([0.39, 0.19], bonus=0.41))) == ((1, 2), 2)


def test_block_and_traversal_by_hand() -> None:
    # Token 2: weight 0.4. The residual below it is (0, 0, 0): 0.4 * target < draft but for token 1,
    # 0.24 < 0.25; so its prefix is never accepted when the next token fails. Token 0: weight 0.08.
    for rule in (run_block, run_traversal):
        assert rule(chain([2, 0], coins([0.0, 0.079], bonus=0.3))) == ((1, 2), 1)
        assert rule(chain([2, 0], coins([0.0, 0.081], recover=0.9))) == ((), 1)
    # Token 0: weight 1, which makes the prefix certain: a coin near 1 accepts it.
    for rule in (run_block, run_traversal):
        verdict = rule(chain([0, 0], coins([JUST_BELOW_ONE, 0.3], recover=0.0)))
        assert verdict == ((1,), 1)  # the residual (0.1, 0.6, 0.3) - (0.5, 0.25, 0.25)


def test_plain_decoding_draws_the_bonus_from_the_target() -> None:
    nothing = np.empty(0, dtype=np.int64)
    case = Instance(nothing, nothing, TARGET[:1], None, nothing, coins([], 0.0, 0.6), False)
    for rule in (run_rejection, run_block, run_traversal):
        assert rule(case) == ((), 1)


def test_greedy_target_accepts_its_argmax_only() -> None:
    target = np.eye(3)[[2, 0, 1]]
    for token_ids, verdict in (([2, 0], ((1, 2), 1)), ([2, 1], ((1,), 0)), ([1, 0], ((), 2))):
        case = replace(chain(token_ids, coins([0.999, 0.999])), target_probs=target)
        for rule in (run_rejection, run_block, run_traversal):
            assert rule(case) == verdict


@pytest.mark.parametrize("rule", [run_rejection, run_traversal])
def test_siblings_beyond_the_support_are_passed_over(rule: Callable[[Instance], Verdict]) -> None:
    """Two tokens have mass, five children came: the last three were never drawn."""
    parents, dist_ids = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
    target = np.tile([0.1, 0.2, 0.7], (6, 1))
    draft = np.array([[0.5, 0.5, 0.0]])
    uniforms = coins([0.9, 0.9, 0.0, 0.0, 0.0], recover=0.0)
    case = Instance(np.array([0, 1, 2, 2, 0]), parents, target, draft, dist_ids, uniforms, False)
    with np.errstate(all="raise"):
        assert rule(case) == ((), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": np.array([0, 2])}, "node 2 has parent 2"),
        ({"parents": np.array([0])}, "2 tokens came with 1 parents"),
        ({"token_ids": np.array([0, 3])}, "token id 3"),
        ({"dist_ids": np.array([0, 2])}, "dist id 2"),
        ({"draft_probs": None}, "dist id 0"),
        ({"target_probs": TARGET[:2]}, "2 rows of target_probs"),
        ({"draft_probs": DRAFT[:, :2]}, "2 columns"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = replace(chain([0, 1], coins([0.5, 0.5])), **change)
    rules = (
        (run_rejection, run_traversal)
        if "parents" in change
        else (
            run_rejection,
            run_traversal,
            run_block,
        )
    )
    for rule in rules:
        with pytest.raises(ValueError, match=message):
            rule(case)


def test_block_refuses_a_tree() -> None:
    case = replace(chain([0, 1], coins([0.5, 0.5])), parents=np.array([0, 0]))
    with pytest.raises(ValueError, match=r"parents \[0, 0\]; allowed is a chain"):
        run_block(case)


# ------------------------------------------------------------------------------------- inverse CDF

UNIFORMS = st.one_of(
    st.floats(0.0, 1.0, exclude_max=True),
    st.sampled_from([0.0, 5e-324, 0.5, 1.0 - 2.0**-32, JUST_BELOW_ONE]),
)
MASSES = st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([5e-324, 1e-300, 1e-17]))
LAWS = st.lists(MASSES, min_size=1, max_size=12).filter(lambda law: sum(law) > 0.0)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(law=LAWS, uniform=UNIFORMS)
def test_draw_is_the_inverse_cdf(law: list[float], uniform: float) -> None:
    token = draw_token(np.array(law), uniform)
    assert law[token] > 0.0
    assert token == inverse_cdf_reference(law, uniform)
    assert token == draw_token(torch.tensor(law, dtype=torch.float64), uniform)
    threshold = uniform * math.fsum(law)
    slack = 1e-12 * math.fsum(law)
    assert math.fsum(law[:token]) <= threshold + slack
    assert math.fsum(law[: token + 1]) >= threshold - slack


@settings(deadline=None, max_examples=100, derandomize=True)
@given(law=LAWS, uniforms=st.tuples(UNIFORMS, UNIFORMS))
def test_draw_rises_with_the_uniform(law: list[float], uniforms: tuple[float, float]) -> None:
    low, high = sorted(uniforms)
    assert draw_token(np.array(law), low) <= draw_token(np.array(law), high)


@pytest.mark.parametrize("convert", [np.array, lambda law: torch.tensor(law, dtype=torch.float64)])
def test_draw_near_one_does_not_leave_the_support(convert: Callable[[list[float]], Any]) -> None:
    for size in (3, 1000, 50_001):
        law = [0.0] + [1.0 / size] * size + [0.0] * 5
        assert draw_token(convert(law), JUST_BELOW_ONE) == size
        assert draw_token(convert(law), 1.0) == size  # outside the domain, and still harmless
        assert draw_token(convert(law), 0.0) == 1


@pytest.mark.parametrize("law", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_draw_refuses_a_law_without_a_sum(law: list[float], convert: Any) -> None:
    with pytest.raises(ValueError, match="a law to draw from sums to"):
        draw_token(convert(law), 0.5)


# --------------------------------------------------------------------------------------- never NaN


@st.composite
def extreme_instances(draw: st.DrawFn) -> Instance:
    """Any tree over 4 tokens, with laws that underflow, vanish or (draft only) are not numbers."""
    masses = st.sampled_from([0.0, 0.0, 1.0, 0.5, 1e-8, 1e-30, 1e-160, 1e-310, 5e-324])
    num_nodes = draw(st.integers(0, 6))
    is_chain = draw(st.booleans())

    def law(broken: bool) -> list[float]:
        row = np.array(draw(st.lists(masses, min_size=4, max_size=4)))
        if not row.sum() > 0.0:
            row[draw(st.integers(0, 3))] = 1.0
        row = row / row.sum()
        if broken and draw(st.integers(0, 5)) == 0:
            row[draw(st.integers(0, 3))] = draw(st.sampled_from([math.nan, 0.0, 1.0]))
        return row.tolist()

    parents = [k if is_chain else draw(st.integers(0, k)) for k in range(num_nodes)]
    token_ids = [draw(st.integers(0, 3)) for _ in range(num_nodes)]
    # Mostly one law for the children of a parent.
    dist_ids = [draw(st.sampled_from([parent, parent, -1, 0])) for parent in parents]
    dtype = draw(st.sampled_from([np.float64, np.float32]))
    return Instance(
        np.array(token_ids, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array([law(False) for _ in range(num_nodes + 1)], dtype=dtype),
        np.array([law(True) for _ in range(max(1, num_nodes))], dtype=dtype),
        np.array(dist_ids, dtype=np.int64),
        Coins(
            accept=np.array([draw(UNIFORMS) for _ in range(num_nodes + 1)]),
            recover=draw(UNIFORMS),
            bonus=draw(UNIFORMS),
        ),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=600, derandomize=True)
@given(case=extreme_instances())
def test_never_nan_and_never_an_impossible_token(case: Instance) -> None:
    is_chain = case.parents.tolist() == list(range(len(case.parents)))
    rules = [run_rejection, run_traversal, *([run_block] if is_chain else [])]
    tensors = as_tables(case, torch.from_numpy)
    for rule in rules:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            path, token = rule(case)
        assert rule(tensors) == (path, token)
        row = 0
        for node in path:
            assert case.parents[node - 1] == row
            assert case.target_probs[row][case.token_ids[node - 1]] > 0.0
            row = node
        assert case.target_probs[row][token] > 0.0
