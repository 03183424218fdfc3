"""The fast classical rules, driven by real uniforms: chi-square on the joint of three tokens.

Seeds are fixed, so a test passes always or never; the threshold is what a fresh seed would do: a
right rule fails one test in ten thousand (``P_VALUE``), a wrong one must be far beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from foredraft.verify.block import block
from foredraft.verify.coins import Coins
from foredraft.verify.reference import outcomes
from foredraft.verify.rejection import rejection
from foredraft.verify.residual import draw_token
from foredraft.verify.traversal import traversal
from tests.exactness import enumeration, mutants
from tests.exactness.enumeration import (
    Draft,
    Drafter,
    Prefix,
    Rule,
    Tables,
    block_rule,
    exact_law,
    make_tables,
    rejection_rule,
    target_law,
    traversal_rule,
)

NUM_DRAWS = 100_000
NUM_MUTANT_DRAWS = 20_000
P_VALUE = 1e-4
CAUGHT = 1e-12

FastRule = Callable[..., tuple[tuple[int, ...], int]]


@dataclass(frozen=True)
class ReadyDraft:
    """One possible draft as the arrays that a fast rule takes."""

    draft: Draft
    arguments: tuple[np.ndarray, ...]
    num_rows: int


def possible_drafts(tables: Tables, drafter: Drafter) -> tuple[list[ReadyDraft], np.ndarray]:
    """Every draft the drafter can make, with its probability."""
    drafts, weights = [], []
    for draft, weight in outcomes(lambda chooser: drafter(tables, chooser)):
        arguments = (
            np.array(draft.token_ids, dtype=np.int64),
            np.array(draft.parents, dtype=np.int64),
            np.array(draft.target_probs),
            np.array(draft.draft_probs).reshape(-1, enumeration.VOCAB_SIZE),
            np.array(draft.dist_ids, dtype=np.int64),
        )
        drafts.append(ReadyDraft(draft, arguments, len(draft.texts)))
        weights.append(weight)
    return drafts, np.array(weights) / sum(weights)


def sampled_lengths_and_texts(
    tables: Tables, drafter: Drafter, rule: FastRule, seed: int, num_draws: int
) -> tuple[np.ndarray, dict[Prefix, int]]:
    """Draft at random and verify, many times: how many tokens came out, and which."""
    rng = np.random.default_rng(seed)
    drafts, weights = possible_drafts(tables, drafter)
    options = {} if rule is block else {"with_replacement": drafts[0].draft.with_replacement}
    accept = rng.random((num_draws, max(ready.num_rows for ready in drafts)))
    others = rng.random((num_draws, 2)).tolist()
    lengths = np.empty(num_draws)
    emitted: dict[Prefix, int] = {}
    for number, which in enumerate(rng.choice(len(drafts), size=num_draws, p=weights).tolist()):
        ready = drafts[which]
        recover, bonus = others[number]
        path, token = rule(*ready.arguments, Coins(accept[number], recover, bonus), **options)
        text = (*ready.draft.texts[path[-1] if path else 0], token)
        lengths[number] = len(text)
        emitted[text] = emitted.get(text, 0) + 1
    return lengths, continued(tables, emitted, rng)


def continued(
    tables: Tables, emitted: dict[Prefix, int], rng: np.random.Generator
) -> dict[Prefix, int]:
    """Let every text go on from the target to the full length."""
    counts: dict[Prefix, int] = {}
    pending = list(emitted.items())
    while pending:
        text, count = pending.pop()
        if len(text) >= tables.length:
            counts[text] = counts.get(text, 0) + count
        elif count:
            split = rng.multinomial(count, tables.target[text]).tolist()
            pending.extend(((*text, token), part) for token, part in enumerate(split))
    return counts


def p_value(counts: dict[Prefix, int], law: dict[Prefix, float]) -> float:
    """Chi-square of counts against a law; cells that expect fewer than 5 are put together."""
    num = sum(counts.values())
    assert all(law.get(text, 0.0) > 0.0 for text, count in counts.items() if count)
    observed, expected = [], []
    rest_observed, rest_expected = 0.0, 0.0
    for text, probability in law.items():
        if num * probability >= 5:
            observed.append(counts.get(text, 0))
            expected.append(num * probability)
        else:
            rest_observed += counts.get(text, 0)
            rest_expected += num * probability
    if rest_expected > 0:
        observed.append(rest_observed)
        expected.append(rest_expected)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(observed) - 1))


@pytest.mark.parametrize(
    ("drafter", "fast", "slow"),
    [
        (enumeration.sampled_chain, rejection, rejection_rule),
        (enumeration.sampled_tree, rejection, rejection_rule),
        (enumeration.sampled_tree_with_replacement, rejection, rejection_rule),
        (enumeration.chosen_between, rejection, rejection_rule),
        (enumeration.sampled_chain, block, block_rule),
        (enumeration.sampled_tree, traversal, traversal_rule),
        (enumeration.chosen_between, traversal, traversal_rule),
    ],
    ids=lambda value: getattr(value, "__name__", "drafter"),
)
def test_joint_of_three_tokens(drafter: Drafter, fast: FastRule, slow: Rule) -> None:
    tables = make_tables(3, 3, "independent")
    lengths, counts = sampled_lengths_and_texts(tables, drafter, fast, 7, NUM_DRAWS)
    assert p_value(counts, target_law(tables)) > P_VALUE
    # The mean number of tokens is the enumerated one, within 4.5 standard errors (rate 7e-6).
    expected = exact_law(tables, drafter, slow).expected_tokens
    assert abs(lengths.mean() - expected) < 4.5 * lengths.std() / math.sqrt(NUM_DRAWS)


@pytest.mark.parametrize(
    ("drafter", "fast"),
    [
        (mutants.argmax_as_if_drawn, block),
        (mutants.reorder_siblings, rejection),
        (mutants.recorded_with_replacement, traversal),
    ],
    ids=lambda value: value.__name__,
)
def test_chi_square_catches_the_mutant(drafter: Drafter, fast: FastRule) -> None:
    tables = make_tables(3, 3, "independent")
    _, counts = sampled_lengths_and_texts(tables, drafter, fast, 7, NUM_MUTANT_DRAWS)
    assert p_value(counts, target_law(tables)) < CAUGHT


# ----------------------------------------------------------------------------- independent streams

TARGET = np.array([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]])
DRAFT = np.array([[0.5, 0.3, 0.2]])


def first_token_p_value(shared: str, num_draws: int) -> float:
    """Draft one token and verify it, with some of the four streams shared."""
    rng = np.random.default_rng(11)
    counts = dict.fromkeys([(0,), (1,), (2,)], 0)
    parents, dist_ids = np.array([0]), np.array([0])
    for drafting, accept, recover, bonus in rng.random((num_draws, 4)).tolist():
        token_ids = np.array([draw_token(DRAFT[0], drafting)])
        coins = Coins(
            accept=np.array([0.0, drafting if shared == "draft and accept" else accept]),
            recover={"draft and recover": drafting, "accept and recover": accept}.get(
                shared, recover
            ),
            bonus=bonus,
        )
        path, token = rejection(token_ids, parents, TARGET, DRAFT, dist_ids, coins)
        counts[(int(token_ids[0]) if path else token,)] += 1
    return p_value(counts, {(token,): float(TARGET[0][token]) for token in range(3)})


def test_independent_streams_keep_the_law() -> None:
    assert first_token_p_value("none", NUM_DRAWS) > P_VALUE


@pytest.mark.parametrize("shared", ["draft and recover", "draft and accept", "accept and recover"])
def test_chi_square_catches_shared_streams(shared: str) -> None:
    assert first_token_p_value(shared, NUM_MUTANT_DRAWS) < CAUGHT


@pytest.mark.parametrize("is_shared", [False, True])
def test_gumbel_noise_must_not_draw_both_draft_and_residual(is_shared: bool) -> None:
    """The noise that made a rejected token win the draft's race tells on the residual's race."""
    rng = np.random.default_rng(13)
    draft_noise, own_noise = rng.gumbel(size=(2, NUM_DRAWS, 3))
    drafted = np.argmax(np.log(DRAFT[0]) + draft_noise, axis=1)
    is_accepted = rng.random(NUM_DRAWS) * DRAFT[0][drafted] < TARGET[0][drafted]
    residual = np.maximum(TARGET[0] - DRAFT[0], 1e-300)
    noise = draft_noise if is_shared else own_noise
    recovered = np.argmax(np.log(residual) + noise, axis=1)
    emitted = np.where(is_accepted, drafted, recovered)
    counts = {(token,): int((emitted == token).sum()) for token in range(3)}
    value = p_value(counts, {(token,): float(TARGET[0][token]) for token in range(3)})
    assert value < CAUGHT if is_shared else value > P_VALUE
